"""Convert the labels of rows to names of classes, by one rule for all sources.

Every source passes its labels to :func:`encode_labels`, or to :func:`encode_column` if
they are an Arrow column, so that the same table gives the same classes in every format.
"""

import math
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from uno.data.columns import make_labels
from uno.data.files import valid_text
from uno.errors import ConfigError, one_line

NUMBER = re.compile(r"([+-]?)([0-9]+)(?:\.([0-9]*))?")  # sign, whole part, fraction


def encode_labels(
    source: str,
    values: Iterable[Any],
    declared: Sequence[str] = (),
    name_row: Callable[[int], str] = "row {}".format,
) -> pa.DictionaryArray:
    """Return the class of every row of a source, by one rule for all sources.

    - None, NaN, ``pandas.NA`` and blank text are no label.
    - Text is the name of a class, with any spaces around it. Booleans are the classes
      ``True`` and ``False``.
    - Whole numbers are classes: 0 and 0.0 are both ``0``. A negative whole number is no
      label.
    - Other numbers are refused.
    - Text is read as numbers if every label of the source is a number or the text of
      one: pandas writes whole numbers with gaps to a CSV file as ``0.0`` and ``1.0``.
      Only a sign and zeros after a point are then removed: ``01`` is the class ``01``.

    Args:
        source: The source, as error messages name it.
        values: The label of each of N rows, as its reader found it. A scalar of NumPy
            or PyTorch counts as its Python value.
        declared: Names of the classes 0, 1, ... if the source's metadata has them. They
            replace labels that are numbers, not labels that are text.
        name_row: Returns how error messages name a row, given its number.

    Returns:
        The labels, a dictionary array (N,) with the names of the classes in the order
        of their first rows, and null for a row without a label.

    Raises:
        ConfigError: A label is a fraction (also as text that is read as a number),
            infinite, or neither text nor a number nor a boolean; or it is a number, and
            not text, that has no name in ``declared``, although names are declared. The
            message names the first row that has it.
    """
    distinct: list[Any] = []
    code_of: dict[tuple[type, Hashable], int] = {}

    def encode(value: Any) -> int:
        """Return the position of a label in the list ``distinct``, -1 if it is missing.

        A label that is not in the list yet is appended to it. Equal values of different
        types, such as 1 and 1.0, have different positions. A NumPy scalar, or another
        array without dimensions, is converted to a Python value first.
        """
        if getattr(value, "shape", None) == () and not is_missing(value):
            value = value.item()
        if is_missing(value):
            return -1
        is_plain = isinstance(value, str) or _is_number(value)
        key = type(value), value if is_plain else repr(value)
        if key not in code_of:
            code_of[key] = len(distinct)
            distinct.append(value)
        return code_of[key]

    codes = np.fromiter(map(encode, values), np.int32)
    indices = pa.array(codes, mask=codes < 0)
    return _to_labels(source, distinct, indices, declared, name_row)


def encode_column(
    source: str, column: Any, declared: Sequence[str] = (), name: str = "label"
) -> pa.DictionaryArray:
    """Return the class of every row of an Arrow column of labels.

    Text, booleans and whole numbers are classes, by the rule of :func:`encode_labels`:
    0 and 0.0 are both ``0``; text is read as numbers if every label is the text of one;
    and null, NaN, blank text or a negative whole number is no label. A column of
    Arrow's type null has no label in any row.

    Args:
        source: The source, as error messages name it.
        column: An Arrow chunked array of N labels, such as a column of a table. Its
            values may be dictionary encoded.
        declared: Names of the classes 0, 1, ... if the source's metadata has them. They
            replace labels that are numbers, not labels that are text. Empty if there
            are none; the class of 0 is then named ``0``.
        name: The name of the column, as error messages have it.

    Returns:
        The labels, a dictionary array (N,) with the names of the classes in the order
        of their first rows, and null for a row without a label.

    Raises:
        ConfigError: The type of the column (of its values, if it is a dictionary) is
            none of text (``string`` or ``large_string``), whole, floating-point or
            decimal number, boolean and null; or :func:`encode_labels` would refuse one
            of its labels, such as a fraction.
    """
    kind = column.type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    is_number = is_number or pa.types.is_decimal(kind)
    if not (
        is_text or is_number or pa.types.is_boolean(kind) or pa.types.is_null(kind)
    ):
        fix = "cast it to text or whole numbers"
        raise ConfigError(
            f"{source}: column {name} must hold names or numbers, not {column.type};"
            f" {fix}"
        )
    kind = pa.float64() if pa.types.is_float16(kind) else kind
    coded = column.cast(kind).combine_chunks().dictionary_encode()
    distinct = coded.dictionary.to_pylist()
    return _to_labels(source, distinct, coded.indices, declared, "row {}".format)


def _to_labels(
    source: str,
    distinct: Sequence[Any],
    indices: pa.Int32Array,
    declared: Sequence[str],
    name_row: Callable[[int], str],
) -> pa.DictionaryArray:
    """Make the labels of a source from its distinct values.

    Args:
        source: The source, as error messages name it.
        distinct: The distinct values of the labels. Text is the name of a class, True
            and False are classes of these names, and whole numbers are classes: 0 and
            0.0 are both ``0``. If all values are numbers or the text of numbers, text
            is read as a number. A missing value or a negative whole number is no label.
        indices: The position in ``distinct`` of each row's label, an Arrow array (N,);
            null if the row has no label.
        declared: The names of the classes 0, 1, ..., which replace labels that are
            numbers, but not text. Empty if the source declares none; the name of class
            0 is then ``0``.
        name_row: Returns how error messages name a row, given its number.

    Returns:
        The labels, a dictionary array (N,) with null for a row without a label. The
        classes are in the order of ``distinct``. Values that name the same class, such
        as 0 and 0.0, are joined.

    Raises:
        ConfigError: A value is a fraction (also as text that is read as a number),
            infinite, or neither text nor a number nor a boolean; or it is a number, and
            not text, that has no name in ``declared``, although names are declared. The
            message names the first row that has it.
    """
    given = [value for value in distinct if not is_missing(value)]
    reads_text = all(
        _is_number(value) or (isinstance(value, str) and NUMBER.fullmatch(value))
        for value in given
    )
    names = []
    for code, value in enumerate(distinct):
        try:
            names.append(_class_name(value, declared, reads_text))
        except ValueError as error:
            row = name_row(indices.index(code).as_py())
            raise ConfigError(f"{source}: {row}: label {error}") from None
    classes = make_labels(names)
    return pa.DictionaryArray.from_arrays(
        classes.indices.take(indices), classes.dictionary
    )


def _class_name(value: Any, declared: Sequence[str], reads_text: bool) -> str | None:
    """Return the name of the class that one label stands for.

    Args:
        value: The label.
        declared: Names of the classes 0, 1, ..., empty if the source declares none.
        reads_text: Whether text such as ``"1.0"`` is read as a number.

    Returns:
        Text as valid Unicode; if it is read as a number, its digits without a sign and
        without zeros after a point. "True" or "False" for a boolean. For a whole
        number its name in ``declared``, or its digits if none are declared. None if the
        value is missing or a negative whole number, also as text that is read as one.

    Raises:
        ValueError: The value is a fraction (also as text that is read as a number),
            infinite, or of another type than text, number and boolean; or it is a
            number (not text) that is too large for ``declared``.
    """
    shown = one_line(repr(value))
    cast = (
        """is not a whole number: cast whole numbers with df["label"].astype("Int64"), """  # noqa: E501
        f"or write names such as 'class {one_line(value)}'"
    )
    if is_missing(value):
        return None
    if isinstance(value, str):
        parts = NUMBER.fullmatch(value) if reads_text else None
        if parts is None:
            return valid_text(value)
        sign, whole, fraction = parts.groups()
        if fraction and fraction.strip("0"):
            raise ValueError(f"{shown} {cast}")
        return None if sign == "-" and whole.strip("0") else whole
    if isinstance(value, bool):
        return str(value)
    if not _is_number(value):
        raise ValueError(
            f"{shown} is neither a name nor a whole number; write one of them"
        )
    if not (math.isfinite(value) and int(value) == value):
        raise ValueError(f"{shown} {cast}")
    if value < 0:
        return None
    if declared and value >= len(declared):
        raise ValueError(
            f"{shown} has no name among the {len(declared)} of the metadata; add it"
            " there"
        )
    return declared[int(value)] if declared else str(int(value))


def is_missing(value: Any) -> bool:
    """Return whether a value in a column means that the row has no label, or no id.

    This holds for None, NaN, NaT, ``pandas.NA``, a masked value of NumPy, and empty or
    blank text. It does not hold for 0 and False.
    """
    if value is None or isinstance(value, str):
        return not (value and value.strip())
    differs = value != value
    if isinstance(differs, bool | np.bool_):
        return bool(differs)
    # pandas.NA and numpy.ma.masked answer comparisons with themselves
    return differs is value


def _is_number(value: Any) -> bool:
    """Return whether a value is an int, a float or a Decimal, but not a bool."""
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def require_distinct(source: str, *labels: pa.DictionaryArray | None) -> None:
    """Refuse classes that are almost certainly one class with two spellings.

    Two names are spellings of one class if they differ only by white space around them,
    or by a point and zeros at the end of a name of digits, as ``1`` and ``1.0`` do.
    Names that differ in capitals are different classes.

    Args:
        source: The source, as error messages name it.
        *labels: Columns of labels, whose names of classes are all compared with each
            other, also names that no row has. None is skipped.

    Raises:
        ConfigError: There are two such classes.
    """
    seen: dict[str, str] = {}
    for name in chain.from_iterable(
        some.dictionary.to_pylist() for some in labels if some is not None
    ):
        spelling = re.sub(r"(?<=^\d)(\d*)\.0+$", r"\1", name.strip())
        other = seen.setdefault(spelling, name)
        if other != name:
            pair = f"{one_line(repr(other))} and {one_line(repr(name))}"
            raise ConfigError(
                f"{source}: {pair} differ only in spelling: write them alike, or"
                " rename one"
            )
