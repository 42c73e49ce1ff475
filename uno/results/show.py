"""HTML views of a model and of predictions, for notebooks.

They are tables with small pictures. All text is escaped, nothing is loaded from the
network, and a page has at most :data:`MAX_BYTES`.
"""

import base64
import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute
from numpy.typing import NDArray
from PIL import Image as Pillow

from uno.config import Config, override
from uno.data.decode import decode_many, ok_mask
from uno.data.files import Storage, is_uri
from uno.data.images import Image
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.errors import UnoError
from uno.results import predictions
from uno.results.classes import OutputClass, edits_of
from uno.text import plural, visible

MAX_BYTES = 300_000
NUM_PICTURES = 5  # pictures of a class
MAX_CLASSES, MAX_ROWS = 60, 20  # rows of a table
MANY_ROWS = 20_000  # rows of a data set above which images in tables are not read
# sides in pixels and JPEG qualities, tried in order; with the last, all pictures fit
SIZES = ((48, 80), (48, 50), (32, 60), (24, 40))
# side in pixels up to which a PNG is smaller than a JPEG; pixels stay sharp then
SMALL = 16
CELL = "text-align:left;vertical-align:middle;padding:2px 12px 2px 0"


class Members(NamedTuple):
    """The images that were predicted as one class.

    Attributes:
        rows: The number of these images.
        images: The images with the highest probabilities, at most ``NUM_PICTURES``. An
            image that cannot be shown is ``b""``.
    """

    rows: int
    images: list[Image]


def encode(images: NDArray[np.uint8], columns: int, quality: int) -> str:
    """Encode images as one picture, a data URI.

    Args:
        images: Images uint8 (N, 3, S, S).
        columns: The number of images in a row of the picture.
        quality: The JPEG quality, 1-95. Images with sides up to ``SMALL`` become PNG.
    """
    num, _, side, _ = images.shape
    filled = np.pad(images, [(0, -num % columns), (0, 0), (0, 0), (0, 0)]).reshape(
        -1, columns, 3, side, side
    )
    pixels = filled.transpose(0, 3, 1, 4, 2).reshape(-1, columns * side, 3)
    gray = bool((pixels == pixels[..., :1]).all())
    picture = Pillow.fromarray(pixels[..., 0] if gray else pixels)
    return data_uri(
        picture, "png" if side <= SMALL else "jpeg", optimize=True, quality=quality
    )


def data_uri(picture: Pillow.Image, kind: str, **options: Any) -> str:
    """Encode a picture as a data URI.

    Args:
        picture: The picture.
        kind: The format, such as "png" or "jpeg".
        options: Options of Pillow for this format.
    """
    buffer = BytesIO()
    picture.save(buffer, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def members(storage: Storage, config: Config) -> dict[int, Members]:
    """Return the images of a run that were predicted as each class.

    Images are left out if they are remote, or lie in tables with more than
    ``MANY_ROWS`` rows, or if the data can no longer be read or has changed.

    Args:
        storage: The directory with ``predictions.parquet``.
        config: The configuration of the run, which names the data.

    Returns:
        The images by class index, for at most ``MAX_CLASSES`` classes; empty if there
        are no predictions.
    """
    table = predictions.read_columns(storage, ("class_index", "probability", "uri"))
    if table is None:
        return {}
    table = table.append_column("row", [np.arange(len(table))])
    table = table.filter(pyarrow.compute.field("class_index") >= 0)
    index, row = (table[name].to_numpy() for name in ("class_index", "row"))
    order = np.lexsort((-table["probability"].to_numpy(), index))
    starts = np.flatnonzero(np.diff(index[order], prepend=-1))
    groups = np.split(order, starts[1:])[:MAX_CLASSES] if len(order) else []
    chosen = (
        np.concatenate([group[:NUM_PICTURES] for group in groups]) if groups else order
    )
    uris = table["uri"].take(chosen).to_pylist()
    images: list[Image] = [b""] * len(chosen)
    if None not in uris:
        images = [b"" if is_uri(uri) else uri for uri in uris]
    elif len(table) <= MANY_ROWS:
        with suppress(UnoError, OSError):
            lazy = override(config, {"data.download": False}).data
            rows, made_from = (
                make_task(read_rows(lazy), lazy).rows,
                predictions.read_identity(storage),
            )
            if made_from is not None and made_from["data"] == rows.fingerprint:
                pictures = rows.images.pictures()
                images = (
                    images if pictures is None else pictures.read_images(row[chosen])
                )
    found, at = {}, 0
    for group in groups:
        num = len(group[:NUM_PICTURES])
        found[int(index[group[0]])] = Members(len(group), images[at : at + num])
        at += num
    return found


def model_html(
    title: str,
    facts: Sequence[str],
    classes: Sequence[OutputClass],
    found: Mapping[int, Members],
    side: int,
) -> str:
    """Return a table of the classes of a model as HTML.

    A row has pictures, the name, the kind, the number of images, and "merged into NAME"
    or "dropped" if the user decided so.

    Args:
        title: The title of the table.
        facts: Lines of text below the title.
        classes: The output classes. The first ``MAX_CLASSES`` are shown.
        found: The images of each class, by index.
        side: The largest side of the pictures in pixels.
    """
    some = classes[:MAX_CLASSES]
    strips = _strips(
        [found[c.index].images if c.index in found else [] for c in some], side
    )
    rows = []
    fate_of = {c.index: fate for c, fate in edits_of(classes)}
    for c, picture in zip(some, strips, strict=True):
        number = (
            f"{found[c.index].rows:,}" if c.index in found else "0" if found else "–"  # noqa: RUF001
        )
        rows.append(
            [
                picture,
                f"<b>{_text(c.name)}</b>",
                c.kind,
                number,
                _text(fate_of.get(c.index, "")),
            ]
        )
    more = len(classes) - len(some)
    end = plural(more, "more class", "more classes") if more else ""
    return _page(title, facts, ["", "class", "kind", "images", ""], rows, end)


def predictions_html(
    title: str,
    facts: Sequence[str],
    images: Sequence[Image],
    rows: Sequence[Sequence[Any]],
    more: int,
) -> str:
    """Return a table of the first predictions as HTML.

    Args:
        title: The title of the table.
        facts: Lines of text below the title.
        images: The image of each row.
        rows: For each row the path of the image, the class, its kind, the probability,
            the share of heads that agree, and the reason if the image could not be
            read. Floats are shown in percent.
        more: The number of predictions that are not shown.
    """
    pictures = _strips([[image] for image in images], SIZES[0][0])
    cells = [
        [picture, *map(_text, words)]
        for picture, words in zip(pictures, rows, strict=True)
    ]
    heads = ["", "image", "class", "kind", "probability", "heads agree", ""]
    return _page(title, facts, heads, cells, plural(more, "more image") if more else "")


def counted(names: Iterable[str | None] | Mapping[str | None, int]) -> str:
    """Format the most frequent names with their counts: ``cat (7), novel-1 (5)``.

    At most eight names are shown. None is shown as "unreadable".

    Args:
        names: Names, or the count of each name.
    """
    found = Counter(names).most_common()
    shown = (
        ("unreadable" if name is None else visible(name, 40), n)
        for name, n in found[:8]
    )
    return ", ".join(f"{name} ({n:,})" for name, n in shown) + (
        ", ..." if len(found) > 8 else ""
    )


def _strips(groups: Sequence[Sequence[Image]], side: int) -> list[str]:
    """Return an HTML image for each group of images, with its images side by side.

    All pictures become coarser if there are many, so that a page has at most
    ``MAX_BYTES``.

    Args:
        groups: Groups of images. Images that cannot be read are left out.
        side: The largest side of an image in pixels.

    Returns:
        An ``<img>`` with a data URI for each group; "" if none of its images can be
        read.
    """
    flat = [image for group in groups for image in group]
    side = min(
        side,
        SIZES[0][0],
        *(max(i.shape[:2]) for i in flat if isinstance(i, np.ndarray)),
    )
    pixels, reasons = decode_many(flat, side)
    ok, ends = ok_mask(reasons), np.cumsum([len(group) for group in groups])
    for small, quality in SIZES:
        shown = pixels.numpy()
        if small < side:
            shown = decode_many([image.transpose(1, 2, 0) for image in shown], small)[
                0
            ].numpy()
        parts = [
            shown[start:end][ok[start:end]]
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        uris = [encode(part, len(part), quality) if len(part) else "" for part in parts]
        if sum(map(len, uris)) <= MAX_BYTES * 0.8:
            break
    style = "height:48px;max-width:none;image-rendering:" + (
        "pixelated" if side <= SMALL else "auto"
    )
    return [f'<img src="{uri}" alt="" style="{style}">' if uri else "" for uri in uris]


def _page(
    title: str,
    facts: Sequence[str],
    heads: Sequence[str],
    rows: Sequence[Any],
    more: str,
) -> str:
    """Return a table with a title as HTML.

    Args:
        title: The title, as text.
        facts: Lines below the title, as text. Empty ones are left out.
        heads: The heads of the columns, as text.
        rows: The cells of each row, as HTML.
        more: A line below the table, as text.
    """
    head = "".join(f'<th style="{CELL}">{_text(name)}</th>' for name in heads)
    body = "".join(
        "<tr>" + "".join(f'<td style="{CELL}">{cell}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    lines = "".join(f"<div>{_text(fact)}</div>" for fact in facts if fact)
    return (
        "<div"
        f' style="font-size:13px;overflow-x:auto"><div><b>{_text(title)}</b></div>{lines}'  # noqa: E501
        "<table"
        f' style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'  # noqa: E501
        f"<div>{_text(more)}</div></div>"
    )


def _text(words: object) -> str:
    """Format the value of a cell as escaped HTML of at most 120 characters.

    A float is shown in percent, and None and NaN as "".
    """
    if words is None or words != words:  # NaN differs from itself
        return ""
    if isinstance(words, float):
        return f"{words:.0%}"
    return html.escape(visible(words, 120))
