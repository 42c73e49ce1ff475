"""Read embeddings, labels and ids from files of arrays: .npy, .npz, .pt and .pth."""

from __future__ import annotations

import math
import os
import pickle
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from uno.data import files as filesystem
from uno.data.from_python import float_vectors
from uno.data.images import Images
from uno.data.rows import ReadOptions
from uno.data.tables import check_names
from uno.data.text_tables import read_csv
from uno.errors import ConfigError, StorageError, one_line
from uno.limits import MAX_NPZ_BYTES
from uno.text import plural

TORCH = (".pt", ".pth")
ARRAYS = (".npy", ".npz", *TORCH)
OF_NUMPY = (torch.float16, torch.float32, torch.float64)  # floats that NumPy has
# Errors that np.load and torch.load raise for damaged files, and for files that they
# cannot read. UnpicklingError is raised for Python objects, too.
UNREADABLE = (
    pickle.UnpicklingError,
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    EOFError,
    MemoryError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
TORCH_FIX = "save {'embedding': tensor, 'label': list of text} with torch.save"
COLUMNS = ("id", "embedding", "label", "eval_label", "split", "path", "text")
MAPPED_BYTES = 256 * 2**20  # arrays of this size or more are kept in a file


class VectorFile(NamedTuple):
    """The content of a file or folder with R vectors.

    Attributes:
        values: The vectors, float32 (R, D).
        columns: Standard column name (id, label, eval_label, split, path or text) ->
            Arrow column (R,). Only columns that the source has.
        names: The names of all columns that the source has, also of those that are not
            in ``columns``, for messages. The name of the vectors may be missing. For a
            folder of Parquet files they are the columns of the last file.
        notes: Lines for the user about how the source was read.
        reasons: Row number -> why the row has no vector. The numbers of such a row in
            ``values`` are zeros.
        pictures: The pictures of the rows, None if no column holds their bytes. Paths
            of pictures are in the column "path" instead.
    """

    values: np.ndarray
    columns: Mapping[str, Any]
    names: Sequence[str]
    notes: tuple[str, ...] = ()
    reasons: Mapping[int, str] = MappingProxyType({})
    pictures: Images | None = None


def read_array_file(path: str, options: ReadOptions) -> VectorFile:
    """Read the embeddings of a .npy, .npz, .pt or .pth file, and their columns.

    A column is another array or list of the file, or a column of the .csv file of the
    same name beside it, if there is one. Only the standard columns (id, label,
    eval_label, split, path, text and image) are returned. ``options.columns`` may give
    another name under which one of them is looked for.

    Args:
        path: Path or URI of the file.
        options: How the source is read. Its ``columns`` may also name the array of
            embeddings, as "embedding". Without it, that is the array called embedding,
            else the only array, else the only matrix.

    Returns:
        The embeddings as float32 (R, D) and the columns by standard name; ``names``
        lists all columns and arrays other than the embeddings. There are no notes,
        reasons and pictures. A local .npy file of float32 stays on the disk and is
        mapped. The column image is returned as the column 'path': it holds paths.

    Raises:
        ConfigError: The file cannot be read, does not hold numbers (R, D) with R and
            D above 0, or does not say which of several arrays are the embeddings; a
            column that ``options`` names is missing (with ``images_only`` columns of
            labels and splits may be missing), a column such as ``Label`` would be
            ignored because of its spelling, or a column does not have one text or
            number for each row; or the .csv file cannot be read, has another number of
            rows, or a column with the name of an array other than the embeddings.
        StorageError: A file for the float32 copy of a large array cannot be made, for
            example because the disk is full.
    """
    content = read_torch(path) if path.endswith(TORCH) else read_numpy(path)
    arrays = content if isinstance(content, dict) else {"array": content}
    name = _name_of_embeddings(path, arrays, options.columns)
    values = arrays[name]
    if values.ndim != 2:
        raise ConfigError(f"{path} must hold numbers (N, D), not {values.shape}")
    float_vectors(values[:1], path)
    if values.dtype != np.float32:
        given_values, values = values, new_array(values.shape)
        values[:] = given_values
    others = {other: array for other, array in arrays.items() if other != name}
    beside = f"{os.path.splitext(path)[0]}.csv"
    if filesystem.kind(beside) == "file":
        in_csv = _read_csv_beside(path, beside, len(values))
        if both := sorted(in_csv.keys() & others.keys()):
            raise ConfigError(
                f"{path} and {beside} both hold {both[0]}; remove one of them"
            )
        others |= in_csv
    check_names(path, [name, *others], options)
    columns = _standard_columns(path, others, len(values), options.columns)
    return VectorFile(values, columns, [*others])


def read_numpy(path: str) -> np.ndarray | dict[str, np.ndarray]:
    """Read a .npy or .npz file.

    A local .npy file stays on the disk and is mapped. Other files are read into memory.
    The size of a .npy file is not limited.

    Args:
        path: Path or URI of the file.

    Returns:
        The array of a .npy file, of any shape and type; or the arrays of a .npz file by
        name. What is written to a mapped array does not change the file.

    Raises:
        ConfigError: The file cannot be read, holds Python objects, or is a .npz file
            with more than ``MAX_NPZ_BYTES`` (8 GiB) after decompression.
    """
    try:
        if path.endswith(".npy") and os.path.isfile(path):
            # the array stays in the file, which is mapped
            mapped: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)
            return mapped
        with filesystem.open_binary(path) as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return loaded
            sizes = (member.file_size for member in loaded.zip.infolist())
            _require_small(path, sum(sizes))
            return {name: loaded[name] for name in loaded.files}
    except ConfigError:
        raise
    except UNREADABLE as error:
        reason = one_line(error)
        # NumPy's message advises to allow Python objects, which is not safe
        if "pickle" in reason or "bject" in reason:
            reason = (
                "it is damaged, or holds Python objects, which are not opened; save a"
                " list of vectors with np.stack, and names with .astype(str)"
            )
        if isinstance(error, zipfile.BadZipFile | zlib.error):
            reason += "; the file is damaged, save it again with np.savez"
        raise ConfigError(f"{path} holds no array that can be read: {reason}") from None


def read_torch(path: str) -> np.ndarray | dict[str, np.ndarray]:
    """Read a file that ``torch.save`` has written, without running code of the file.

    Args:
        path: Path or URI of the file.

    Returns:
        The only tensor or list; or the tensors and lists of a dictionary by name, in
        which other values and sparse tensors are left out. A tensor keeps its shape and
        its type, but floats that NumPy lacks, such as bfloat16, become float32. A list
        of n items becomes an array (n,) of Python objects.

    Raises:
        ConfigError: The file cannot be read, has more than ``MAX_NPZ_BYTES`` (8 GiB),
            holds Python objects of other kinds, or has no dense tensor and no list.
    """
    try:
        with filesystem.open_binary(path) as file:
            _require_small(path, file.seek(0, os.SEEK_END))
            file.seek(0)
            with warnings.catch_warnings(action="ignore"):  # about old formats
                content = torch.load(file, map_location="cpu", weights_only=True)
    except ConfigError:
        raise
    except UNREADABLE as error:
        reason = one_line(error)
        if isinstance(error, pickle.UnpicklingError):  # its message advises to run them
            reason = "it is damaged, or holds Python objects, which are not opened"
        raise ConfigError(
            f"{path} holds no tensor that can be read: {reason}; {TORCH_FIX}"
        ) from None
    is_named = isinstance(content, Mapping)
    arrays = dict[str, np.ndarray]()
    for name, value in (content if is_named else {"": content}).items():
        if isinstance(value, Tensor) and value.layout == torch.strided:
            value = value.detach()
            if value.is_floating_point() and value.dtype not in OF_NUMPY:
                value = value.float()  # bfloat16 and the types of 8 bits
            arrays[str(name)] = value.numpy()
        elif isinstance(value, list):
            # None makes it one column, also where the values are lists
            arrays[str(name)] = np.array([*value, None], object)[:-1]
    if not arrays:
        raise ConfigError(f"{path} holds no dense tensor; {TORCH_FIX}")
    return arrays if is_named else arrays[""]


def _require_small(path: str, num_bytes: int) -> None:
    """Refuse a file whose arrays take too much memory.

    Args:
        path: Path of the file, for the error message.
        num_bytes: The number of bytes of its arrays.

    Raises:
        ConfigError: ``num_bytes`` is more than ``MAX_NPZ_BYTES`` (8 GiB).
    """
    if num_bytes > MAX_NPZ_BYTES:
        raise ConfigError(
            f"{path}: its arrays have {num_bytes:,} bytes, more than {MAX_NPZ_BYTES:,}"
            " that are read into memory; save the embeddings as a .npy file with"
            " np.save, and the labels as a .csv file of the same name"
        )


def _standard_columns(
    path: str,
    arrays: Mapping[str, np.ndarray],
    num_rows: int,
    names: Mapping[str, str],
) -> dict[str, Any]:
    """Convert the arrays that are standard columns to Arrow columns.

    The standard columns are id, label, eval_label, split, path and text. The array that
    ``names`` gives for "image", or else the one that is called image, becomes the
    column 'path', and takes precedence over an array that is called path. Byte strings
    are decoded as UTF-8.

    Args:
        path: Path of the file, for the error message.
        arrays: The arrays by name, without the embeddings.
        num_rows: The number of rows.
        names: Standard name of a column, such as "label" -> the name of its array. A
            column that is not listed has its standard name.

    Returns:
        Standard column name -> Arrow array (num_rows,), without the columns for which
        there is no array. Arrays with other names are left out.

    Raises:
        ConfigError: A column does not have the shape (num_rows,), holds values that
            Arrow cannot store in one column, such as text mixed with numbers, or has
            byte strings that are not UTF-8.
    """
    columns = dict[str, Any]()
    for ours in (*COLUMNS, "image"):
        theirs = names.get(ours, ours)
        if theirs not in arrays or ours == "embedding":
            continue
        column = arrays[theirs]
        if column.shape != (num_rows,):
            raise ConfigError(
                f"{path}: array {theirs} has the shape {column.shape}, not"
                f" {(num_rows,)} as the rows of the embeddings"
            )
        try:
            if column.dtype.kind == "S":
                column = np.char.decode(column, "utf-8")
            columns["path" if ours == "image" else ours] = pa.array(column)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}: {theirs} holds neither text nor numbers: {one_line(error)}"
            ) from None
    return columns


def _name_of_embeddings(
    path: str, arrays: Mapping[str, np.ndarray], names: Mapping[str, str]
) -> str:
    """Return the name of the array of a file that holds the embeddings.

    If ``names`` gives a name for "embedding", it is the array of that name and no
    other. Else it is the array called 'embedding', else the only array (of any shape),
    else the only array of two dimensions among several.

    Args:
        path: Path of the file, for the error message.
        arrays: The arrays of the file by name.
        names: Standard name of a column, such as "embedding" -> its name there.

    Raises:
        ConfigError: There is no array of the name that ``names`` gives; or it gives
            none, and there is no array at all, or there are several without one called
            'embedding', of which none or more than one has two dimensions.
    """
    wanted = names.get("embedding", "embedding")
    if wanted in arrays:
        return wanted
    matrices = [name for name, array in arrays.items() if array.ndim == 2]
    candidates = matrices if len(arrays) > 1 else [*arrays]
    if "embedding" not in names and len(candidates) == 1:
        return candidates[0]
    shapes = [f"{name} {array.shape}" for name, array in arrays.items()]
    has = one_line(", ".join(shapes)) or "nothing"
    raise ConfigError(
        f"{path} holds {has}; say which array the embeddings are: "
        f"--data.columns embedding={matrices[0] if matrices else 'NAME'}"
    )


def _read_csv_beside(path: str, beside: str, num_rows: int) -> dict[str, np.ndarray]:
    """Read the columns of the .csv file beside an array file.

    Args:
        path: The array file, for the error message.
        beside: Path of the .csv file.
        num_rows: The number of rows of the array file. The .csv file must have as many,
            without its first line, which names the columns, and without empty lines.

    Returns:
        The columns by name, each an array of text (num_rows,). An empty cell is "", and
        a cell that is missing at the end of a line is None.

    Raises:
        ConfigError: The .csv file cannot be read or has another number of rows.
    """
    columns = read_csv(beside).columns
    num_lines = len(next(iter(columns.values()), []))
    if num_lines != num_rows:
        fix = '; an empty line is no row: write "" for no label'
        raise ConfigError(
            f"{beside} has {plural(num_lines, 'row')}, {path} has {num_rows:,}"
            f"{fix if len(columns) == 1 else ''}"
        )
    return {name: np.array(column, object) for name, column in columns.items()}


def new_array(shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of zeros, which is in memory or in a file.

    An array of :data:`MAPPED_BYTES` (256 MiB) or more is mapped to a new file in the
    directory of :func:`~uno.data.files.user_cache`, which is created if it is missing.
    If that is a URI or cannot be written, the file is in the directory for temporary
    files. It has no name, and disappears at the latest with the process.

    Args:
        shape: The shape of the array.

    Returns:
        A writable array float32 of this shape.

    Raises:
        StorageError: The file cannot be made, for example because the disk is full. An
            array in memory never raises it.
    """
    size = 4 * math.prod(shape)
    if size < MAPPED_BYTES:
        return np.zeros(shape, np.float32)
    folder = filesystem.user_cache()
    if not filesystem.is_uri(folder):
        with suppress(OSError):
            os.makedirs(folder, exist_ok=True)
    if not os.access(folder, os.W_OK):
        folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            filesystem.reserve_space(file, size)
            return np.memmap(file, np.float32, "r+", shape=shape)
    except OSError as error:
        raise StorageError(
            f"cannot store {size / 1e9:.1f} GB of vectors in {folder}: {error}"
        ) from None
