"""Choose which stored values become black and white in images of more than 8 bits.

Instruments store 10, 12 or 14 bits in files of 16 bits, or floating-point numbers of
any range. All images of a data set need the same range, because the brightness of one
image says something about its class.
"""

import numpy as np

from uno.config import Range
from uno.data.rows import Rows
from uno.text import plural

PERCENTILES = (0.1, 99.9)
"""Percentiles of the stored values that become black and white."""


def choose_value_range(rows: Rows) -> tuple[Range, str] | None:
    """Choose the range of stored values of a data set, by a sample of its images.

    A sample of up to 64 images, evenly spaced over all rows, is decoded at its first
    use, and the facts about them are kept in ``rows``. Only gray images of more than 8
    bits count. Of each of them up to about 32,000 stored values are used, evenly spaced
    over the image.

    Args:
        rows: The rows.

    Returns:
        Two values. The first is the pair (low, high) of the stored values that become
        black and white: the percentiles 0.1 and 99.9 of the sampled finite values of
        all these images together, rounded to 6 significant digits; high is low + 1 if
        they are equal. The second is a text that says how they were chosen, such as
        "percentiles 0.1 and 99.9 of 64 images". A single None if no readable image of
        the sample is gray with more than 8 bits and has finite values, as in a source
        of vectors.

    Raises:
        ConfigError: A file that holds many images cannot be read.
        StorageError: An image's file cannot be read now, but perhaps later.
    """
    facts = rows.image_sample.readable
    samples = [one.deep_values for one in facts if one.deep_values is not None]
    values = np.concatenate([*samples, np.empty(0)])
    if not len(values):
        return None
    low, high = (float(f"{value:.6g}") for value in np.percentile(values, PERCENTILES))
    lower, upper = PERCENTILES
    why = f"percentiles {lower} and {upper} of {plural(len(samples), 'image')}"
    return (low, high if low < high else low + 1), why
