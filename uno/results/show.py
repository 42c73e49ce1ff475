"""Show the classes of a model and their images as an HTML table, for notebooks.

A row has small pictures. All text is escaped, nothing is loaded from the
network, and the numbers of rows and pictures are limited.
"""

import base64
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from numpy.typing import NDArray
from PIL import Image as Pillow

from uno.config import Config, Range, override
from uno.data.decode import Decoding, decode_many, ok_mask
from uno.data.files import Storage, is_uri
from uno.data.images import Image
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.errors import UnoError
from uno.results import predictions
from uno.results.classes import OutputClass, edits_of
from uno.text import plural, visible

NUM_PICTURES = 5  # pictures of a class
MAX_CLASSES = 40  # rows of a table
MANY_ROWS = 20_000  # rows of a data set above which images in tables are not read
SIDE, QUALITY = 48, 60  # pixels of a picture, and its JPEG quality
# side in pixels up to which a PNG is smaller than a JPEG; pixels stay sharp then
SMALL = 16


class Members(NamedTuple):
    """The images that were predicted as one class.

    Attributes:
        rows: The number of these images.
        images: The images with the highest probabilities, at most ``NUM_PICTURES`` (5):
            paths or URIs, encoded bytes, or pixels uint8 (H, W, 3). An image that
            cannot be shown is ``b""``.
    """

    rows: int
    images: list[Image]


def encode(images: NDArray[np.uint8], columns: int, quality: int) -> str:
    """Arrange images in a grid, and encode the grid as one picture, a data URI.

    The grid is filled row by row. If all pixels are gray, the picture has one channel.

    Args:
        images: N >= 1 images uint8 (N, 3, S, S) in RGB, with sides of S pixels.
        columns: The number of images in a row of the picture. Free places at the end
            are black.
        quality: The JPEG quality, 1-95. Images with sides up to ``SMALL`` (16) pixels
            become PNG, without loss.
    """
    num, _, side, _ = images.shape
    filled = np.pad(images, [(0, -num % columns), (0, 0), (0, 0), (0, 0)])
    grid = filled.reshape(-1, columns, 3, side, side).transpose(0, 3, 1, 4, 2)
    pixels = grid.reshape(-1, columns * side, 3)
    gray = bool((pixels == pixels[..., :1]).all())
    picture = Pillow.fromarray(pixels[..., 0] if gray else pixels)
    kind = "png" if side <= SMALL else "jpeg"
    return data_uri(picture, kind, optimize=True, quality=quality)


def data_uri(picture: Pillow.Image, kind: str, **options: Any) -> str:
    """Encode a picture as a data URI.

    Args:
        picture: The picture.
        kind: The format, such as "png" or "jpeg".
        **options: Options of Pillow for this format.
    """
    buffer = BytesIO()
    picture.save(buffer, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def read_members(storage: Storage, config: Config) -> dict[int, Members]:
    """Find for each class the run's images that were predicted as it, for HTML views.

    Local image files are named by their paths and not read. If one of the images has no
    file of its own, all are read from the data of the run. ``b""`` stands for an image
    that cannot be shown: it is a remote file; or images must be read from the data, and
    there are more than ``MANY_ROWS`` (20,000) readable rows, or the data can no longer
    be read, has changed or has no pictures. A data set that is missing here is not
    downloaded, but shards in remote storage are read.

    Args:
        storage: The run, or another directory above a folder ``predictions``.
        config: The configuration of the run, which names the data.

    Returns:
        By class index the number of images, and at most ``NUM_PICTURES`` (5) images,
        those with the highest probabilities first. Only classes with images are there,
        and of these the first ``MAX_CLASSES`` (40) by index. A dropped class has the
        images that were rejected because of it. Empty if there are no complete
        predictions.

    Raises:
        StorageError: A file of the predictions is missing or damaged.
    """
    table = predictions.read_columns(storage, ("class_index", "probability", "uri"))
    if table is None:
        return {}
    table = table.append_column("row", [np.arange(len(table))])
    table = table.filter(pyarrow.compute.field("class_index") >= 0)
    table = table.sort_by([("class_index", "ascending"), ("probability", "descending")])
    classes, starts, sizes = np.unique(
        table["class_index"], return_index=True, return_counts=True
    )
    # for each class the places of its most probable rows
    places = [
        np.arange(start, start + min(size, NUM_PICTURES))
        for start, size in zip(starts[:MAX_CLASSES], sizes, strict=False)
    ]
    best = table.take(np.concatenate([*places, np.arange(0)]))
    images = _images_of(storage, config, len(table), best)
    ends = np.cumsum([len(own) for own in places])
    return {
        int(index): Members(int(size), images[end - len(own) : end])
        for index, size, own, end in zip(classes, sizes, places, ends, strict=False)
    }


def _images_of(
    storage: Storage, config: Config, num_rows: int, best: pa.Table
) -> list[Image]:
    """Return the images of some predicted rows, ``b""`` for those that cannot be shown.

    If each row to show has its own file, the paths are returned, and ``b""`` for a URI.
    If any of them has none, all images come from the data of the run. In this case all
    are ``b""`` if ``num_rows`` is more than ``MANY_ROWS`` (20,000), the data cannot be
    read or has changed since the prediction, or it has no pictures.

    Args:
        storage: The run, or another directory above a folder ``predictions``.
        config: The configuration of the run, which names the data.
        num_rows: The number of all predicted rows that could be read.
        best: The rows to show, with the columns "row" (its number in the data) and
            "uri" (the path or URI of its image, or null).
    """
    uris = best["uri"].to_pylist()
    if None not in uris:
        return [b"" if is_uri(uri) else uri for uri in uris]
    if num_rows <= MANY_ROWS:
        with suppress(UnoError, OSError):
            data = override(config, {"data.download": False}).data
            rows = make_task(read_rows(data), data).rows
            made_from = predictions.read_identity(storage)
            pictures = rows.images.pictures()
            same = made_from is not None and made_from["data"] == rows.fingerprint
            if same and pictures is not None:
                return pictures.read_images(best["row"].to_numpy())
    return [b""] * len(uris)


def model_html(
    title: str,
    facts: Sequence[str],
    classes: Sequence[OutputClass],
    found: Mapping[int, Members],
    side: int,
    value_range: Range | None = None,
) -> str:
    """Return a table of the classes of a model as HTML.

    A row has pictures, the name, the kind, the number of images, and "merged into NAME"
    or "dropped" if the user decided so. Images in files are read here, and images that
    cannot be decoded are left out. A line below the table says how many classes are not
    shown.

    Args:
        title: The title of the table.
        facts: Lines of text below the title.
        classes: The output classes. The first ``MAX_CLASSES`` are shown.
        found: The images that were predicted as each class, by class index. If it is
            empty, the numbers of images are shown as dashes.
        side: The side of the square pictures in pixels. A number above 48, or above the
            longer side of any image that is given as pixels, is lowered to the smallest
            of these. HTML shows all pictures 48 pixels high.
        value_range: The stored values (black, white) that become 0 and 255 in gray
            images of more than 8 bits; None for 0 and 65,535.

    Raises:
        StorageError: The file of an image cannot be read now, but perhaps later.
    """
    shown = classes[:MAX_CLASSES]
    members = [found.get(c.index, Members(0, [])) for c in shown]
    images = (image for own in members for image in own.images)
    native = (max(i.shape[:2]) for i in images if isinstance(i, np.ndarray))
    side = min(side, SIDE, *native)
    fate_of = {c.index: fate for c, fate in edits_of(classes)}
    rows = [
        [c.name, c.kind, f"{own.rows:,}" if found else "–", fate_of.get(c.index, "")]  # noqa: RUF001
        for c, own in zip(shown, members, strict=True)
    ]
    more = len(classes) - len(shown)
    return _template().render(
        title=title,
        facts=facts,
        heads=["", "class", "kind", "images", ""],
        rows=list(zip(_encode_strips(members, side, value_range), rows, strict=True)),
        more=plural(more, "more class", "more classes") if more else "",
        is_sharp=side <= SMALL,
    )


def _encode_strips(
    members: Sequence[Members], side: int, value_range: Range | None
) -> list[str]:
    """Encode the images of each class as one picture, side by side.

    Image files are read, and each image is cropped to its centered square. Images that
    cannot be decoded are left out.

    Args:
        members: The images of each class.
        side: The side of an image in pixels.
        value_range: The stored values (black, white) that become 0 and 255 in gray
            images of more than 8 bits; None for 0 and 65,535.

    Returns:
        A data URI for each class; "" for a class without readable images.

    Raises:
        StorageError: The file of an image cannot be read now, but perhaps later.
    """
    images = [image for own in members for image in own.images]
    pixels, reasons = decode_many(images, side, how=Decoding(value_range=value_range))
    ok, start, uris = ok_mask(reasons), 0, list[str]()
    for own in members:
        strip = slice(start, start + len(own.images))
        start = strip.stop
        readable = pixels.numpy()[strip][ok[strip]]
        uris.append(encode(readable, len(readable), QUALITY) if len(readable) else "")
    return uris


def format_counts(names: Iterable[str | None] | Mapping[str | None, int]) -> str:
    """Format the most frequent names with their counts: ``cat (7), novel-1 (5)``.

    The most frequent name comes first. At most eight names are shown, and ", ..."
    stands for the others. A name has at most 40 characters: a longer one is cut off and
    ends in "…". Unprintable characters are escaped. The result is "" if there are no
    names.

    Args:
        names: Names, each as often as it occurs, or a mapping from each name to its
            count. The name None is shown as "unreadable".
    """
    counts = Counter(names).most_common()
    shown = [
        f"{'unreadable' if name is None else visible(name, 40)} ({num:,})"
        for name, num in counts[:8]
    ]
    return ", ".join(shown) + (", ..." if len(counts) > 8 else "")


@cache
def _template() -> Template:
    """Load the HTML template of tables once, and return it. It escapes all values."""
    environment = Environment(
        loader=PackageLoader("uno.results"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["text"] = _text
    return environment.get_template("table.html")


def _text(value: object) -> str:
    """Format the value of a cell as text of at most 120 printable characters.

    A longer text is cut off and ends in "…". Unprintable characters are escaped.
    """
    return visible(value, 120)
