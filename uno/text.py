"""Format text for people, and make names of files and classes safe and comparable."""

import unicodedata

from uno.errors import printable


def visible(name: object, limit: int = 300) -> str:
    """Return a name with unprintable characters escaped, at most ``limit`` characters.

    A name that is longer after escaping is cut off and ends in "…". The result is not
    escaped for HTML.

    Args:
        name: The name, or another object that is converted to text.
        limit: The largest number of characters of the result.
    """
    shown = printable(str(name)[: limit + 1])
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


def composed(name: str) -> str:
    """Return the composed Unicode form (NFC) of a name.

    Names that look the same become equal: macOS and Linux encode é differently.
    """
    return unicodedata.normalize("NFC", name)


def folded(name: str) -> str:
    """Return the case-folded composed form of a name, to compare names.

    It is equal for names that differ only in case or Unicode form. People, and some
    file systems, take such names for one.
    """
    return composed(composed(name).casefold())


def plural(number: float, one: str, many: str = "") -> str:
    """Return a number with its noun, such as ``1 image`` or ``2,000 images``.

    Args:
        number: The number.
        one: The noun in the singular.
        many: The noun in the plural; by default the singular with an s.
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
