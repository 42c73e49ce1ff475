"""Read CSV and JSONL files as columns of Python values.

A CSV file may be separated by commas, semicolons, tabs or ``|``. Its text is UTF-8,
or UTF-16 or UTF-32 with a byte order mark, as spreadsheets write it.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections import Counter
from typing import Any, NamedTuple

from uno.data import files as filesystem
from uno.errors import ConfigError, one_line
from uno.limits import MAX_ROWS, MAX_TABLE_BYTES

SEPARATORS = {",": "','", ";": "';'", "\t": "tabs", "|": "'|'"}
"""Each separator that is recognized, and its name in a note."""
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # first, because it begins with the mark of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class TextTable(NamedTuple):
    """The content of a CSV or JSONL file with N rows.

    Attributes:
        columns: Each column's name and its N values. A value that a row lacks is None;
            an empty cell of a CSV file is "".
        lines: The line of the file on which each of the N rows ends, from 1.
        notes: Lines for the user about how the file was read.
    """

    columns: dict[str, list[Any]]
    lines: list[int]
    notes: tuple[str, ...] = ()


def read_text_table(path: str) -> TextTable:
    """Read a table of text by its ending: JSON lines if it is .jsonl, else CSV.

    The ending is in any case of letters. A file with another ending than .jsonl, such
    as .tsv, is read as CSV.

    Args:
        path: Local path or URI of the file.

    Returns:
        The values of each column by its name, the line of the file on which each row
        ends, and notes for the user.

    Raises:
        ConfigError: The file cannot be read as such a table, see :func:`read_jsonl` and
            :func:`read_csv`.
    """
    is_jsonl = filesystem.split(path)[1].lower().endswith(".jsonl")
    return read_jsonl(path) if is_jsonl else read_csv(path)


def read_csv(path: str) -> TextTable:
    """Read a CSV file whose first line names the columns.

    Spaces at the beginning of a line and after a separator are ignored, and so are
    white space around names of columns and lines without any character. Of comma,
    semicolon, tab and ``|``, the separator is the first one that gives the first line
    that is not empty the most columns. A note names it if it is not the comma.

    Args:
        path: Local path or URI of the file.

    Returns:
        The table. All values are text; an empty cell is "". A row with fewer values
        than the first line has None in the last columns. A column without a name is
        called ""; of several ones only the last is kept. An empty file gives no columns
        and no rows.

    Raises:
        ConfigError: The file cannot be read, is too large or is not CSV, a row has more
            values than the first line, or two columns have the same name (but several
            may have none).
    """
    text = _read_text(path)
    first_line = next(filter(None, text.splitlines()), "")
    separator = _separator_of(first_line)
    reader = csv.reader(
        io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True
    )
    try:
        records = [(row, reader.line_num) for row in reader if row]
    except csv.Error as error:
        raise ConfigError(f"{path} is not CSV: {error}") from None
    fields = [] if not records else [name.strip() for name in records[0][0]]
    records = records[1:]
    for number, (row, line) in enumerate(records):
        if len(row) > len(fields):
            raise ConfigError(
                f"{path}: row {number} (line {line}) has more values than the "
                f"{len(fields)} columns; quote values that contain {separator!r}"
            )
    for name, count in Counter(filter(None, fields)).items():
        if count > 1:
            raise ConfigError(f"{path}: two columns are named {one_line(repr(name))}")
    columns = {
        name: [row[i] if i < len(row) else None for row, _ in records]
        for i, name in enumerate(fields)
    }
    notes = () if separator == "," else (f"separated by {SEPARATORS[separator]}",)
    return TextTable(columns, [line for _, line in records], notes)


def read_jsonl(path: str) -> TextTable:
    """Read a file with one JSON object on each line. Blank lines are ignored.

    Args:
        path: Local path or URI of the file.

    Returns:
        A table with all names of the objects as columns, in the order in which they
        first occur, and None where an object lacks one or has null. Values are as JSON
        has them, not only text. There are no notes. A file without objects gives no
        columns and no rows.

    Raises:
        ConfigError: The file cannot be read or is too large, a line is not a JSON
            object, or a line has an escape of half a surrogate pair.
    """
    records, lines = list[dict[str, Any]](), list[int]()
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = filesystem.parse_json(line)
            if "\\u" in line:  # half of a surrogate pair is no valid text
                json.dumps(record, ensure_ascii=False).encode()
        except ValueError as error:
            raise ConfigError(
                f"{path} line {number} is not JSON:"
                f" {one_line(error)}{_many_lines(line)}"
            ) from None
        if not isinstance(record, dict):
            raise ConfigError(
                f"{path} line {number} must be an object, not"
                f" {type(record).__name__}{_many_lines(line)}"
            )
        records.append(record)
        lines.append(number)
    names = dict.fromkeys(name for record in records for name in record)
    columns = {name: [record.get(name) for record in records] for name in names}
    return TextTable(columns, lines)


def _many_lines(line: str) -> str:
    """Return advice for a file that seems to be one JSON document of many lines.

    Args:
        line: A line of the file that is no JSON object.

    Returns:
        Text to end the error message with; '' unless the line begins a JSON list or is
        ``{`` alone.
    """
    if not line.lstrip().startswith("[") and line.strip() != "{":
        return ""
    return "; write one object a line (pandas: to_json(orient='records', lines=True))"


def _separator_of(header: str) -> str:
    """Return the separator that gives the first line of a CSV file the most columns.

    Of equal ones it is the first in :data:`SEPARATORS`.
    """

    def num_columns(separator: str) -> int:
        """Return the number of columns of the first line, 0 if that is no valid CSV.

        The number is 0 for an empty line, too.
        """
        try:
            return len(next(csv.reader([header], delimiter=separator), []))
        except csv.Error:  # reading the whole file raises it again
            return 0

    return max(SEPARATORS, key=num_columns)  # the first of equal ones


def _read_text(path: str) -> str:
    """Read the text of a file, which is UTF-8 unless a byte order mark says otherwise.

    The byte order mark is removed.

    Raises:
        ConfigError: The file cannot be read, has more than ``MAX_TABLE_BYTES`` bytes or
            ``MAX_ROWS`` line ends, is not text in this encoding, or has a zero
            character among its first 1000.
    """
    data = filesystem.read_whole(path, MAX_TABLE_BYTES)
    encoding = next(
        (name for mark, name in BYTE_ORDER_MARKS.items() if data.startswith(mark)),
        "utf-8",
    )
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        wrong = error.object  # without the byte order mark
        line = wrong.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"cannot read {path}: it is not {encoding.removesuffix('-sig').upper()}"
            f" (line {line}, byte 0x{wrong[error.start]:02x}), perhaps cp1252 or"
            " latin-1: in Excel save as 'CSV UTF-8', or convert it: iconv -f CP1252 -t"
            " UTF-8 OLD > NEW"
        ) from None
    if "\0" in text[:1000]:
        raise ConfigError(
            f"cannot read {path}: it holds zero bytes, as UTF-16 without a byte order "
            "mark does; save it as UTF-8"
        )
    if (num_lines := text.count("\n")) > MAX_ROWS:
        raise ConfigError(f"{path} has {num_lines:,} lines, more than {MAX_ROWS:,}")
    return text
