"""Choose which stored values become black and white in images of more than 8 bits.

Instruments store 10, 12 or 14 bits in files of 16 bits, or floating-point numbers whose
range no file declares. All images of a data set need the same range, because the
brightness of one image says something about its class.
"""

import numpy as np

from uno.config import Range
from uno.data.decode import BadImage, map_images, sample_values
from uno.data.images import evenly_spaced
from uno.data.rows import NUM_HEADERS, Rows
from uno.text import plural

PERCENTILES = (0.1, 99.9)
"""Percentiles of the stored values that become black and white."""


def choose_value_range(rows: Rows) -> tuple[Range, str] | None:
    """Choose the range of stored values of a data set.

    It is the range that the files declare, if all images of a sample declare the same
    one. Otherwise it is given by percentiles of the values of the sample.

    Args:
        rows: The rows.

    Returns:
        The values that become black and white, and how they were chosen; None if no
        image of the sample has more than 8 bits.
    """
    deep = [header for header in rows.headers.readable if header.is_deep]
    if not deep:
        return None
    declared = {header.declared_range for header in deep}
    (first, *others) = declared
    if first is not None and not others:
        return first, "the files declare it"
    sample = evenly_spaced(NUM_HEADERS, len(rows))
    found = map_images(rows.images, sample, sample_values)
    samples = [values for _, values in found if not isinstance(values, BadImage)]
    values = np.concatenate([*samples, np.empty(0)])
    if not len(values):
        return None
    low, high = (float(f"{value:.6g}") for value in np.percentile(values, PERCENTILES))
    lower, upper = PERCENTILES
    why = f"percentiles {lower} and {upper} of {plural(len(deep), 'image')}"
    return (low, high if low < high else low + 1), why
