"""Convert embeddings, labels and ids that a caller passes as Python objects.

Arrays, tensors, lists, and columns of pandas, polars and pyarrow are accepted. None of
these libraries but NumPy and PyTorch is imported here: a column is recognized by the
method that turns it into a list.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from uno.data.labels import encode_labels, is_missing
from uno.errors import ConfigError, one_line

# methods that return a list: of pyarrow, of polars, and of the other libraries
LIST_METHODS = ("to_pylist", "to_list", "tolist")


def float_vectors(given: Any, what: str) -> Tensor:
    """Convert numbers that a caller passes as vectors to a float32 tensor.

    None, NaN and the masked values of a NumPy array of numbers become NaN, and numbers
    that are too large for float32 become infinite. They are not refused here: the
    caller reports such rows as unusable. In arrays of objects, such as tables of
    several types, booleans and texts of numbers are converted, too.

    Args:
        given: Numbers (N, D), or (N, V, D) with V views of each row: an array, a
            tensor, nested lists, a table of D columns, or a column that holds N arrays
            (D,) or (V, D). Tables and columns may be of pandas, polars or pyarrow.
        what: The name of the argument, for messages.

    Returns:
        float32 (N, V, D) on the CPU, with V = 1 for numbers (N, D). The tensor may
        share its memory with ``given``.

    Raises:
        ConfigError: ``given`` is an array of something else than integers, floats and
            objects, such as booleans, text or complex numbers; or of objects that NumPy
            cannot convert, such as ``pandas.NA``. Or it has rows of different lengths
            or another number of dimensions, is empty (N, V or D is 0), or is a sparse
            matrix or tensor.
    """
    if hasattr(given, "toarray") and hasattr(given, "nnz"):  # scipy.sparse has both
        raise ConfigError(
            f"{what} are a sparse matrix, and dense numbers are needed; reduce its"
            " columns first: sklearn.decomposition.TruncatedSVD(256).fit_transform(X)"
        )
    if isinstance(given, Tensor):
        if given.layout != torch.strided:
            text = f"{what} are a tensor of the layout {given.layout}"
            raise ConfigError(f"{text}; pass X.to_dense()")
        given = given.detach().cpu()
        if given.is_floating_point():  # NumPy does not have all of these types
            given = given.float()
        given = given.numpy()
    array = _float_array(given, what)
    values = torch.from_numpy(array if array.flags.writeable else array.copy())
    if values.ndim not in (2, 3) or not values.numel():
        raise _not_vectors(what, values.dtype, values.shape)
    return (values if values.ndim == 3 else values[:, None]).float()


def _float_array(given: Any, what: str) -> np.ndarray:
    """Convert numbers to a float32 array that PyTorch can wrap.

    Args:
        given: The numbers: anything that ``np.asarray`` takes, or an array of objects
            that are vectors of equal length. Tensors and sparse matrices are converted
            before.
        what: The name of the argument, for the message.

    Returns:
        float32, in native byte order and contiguous memory. The array has the shape of
        ``given``, or (N, D) or (N, V, D) for N objects that are vectors or matrices.
        The number of dimensions is not checked. The masked values of an array of
        numbers are NaN, and numbers that are too large are infinite. It may share its
        memory with ``given``.

    Raises:
        ConfigError: ``given`` does not hold real numbers in rows of equal length.
    """
    if isinstance(given, np.ma.MaskedArray) and given.dtype.kind in "iuf":
        given = np.ma.filled(given.astype(np.float32), np.nan)
    try:
        array = np.asarray(given)
        if array.dtype == object:
            array = _stacked(array)
    except (TypeError, ValueError, OverflowError) as error:
        text = f"{what} must be numbers (N, D): {one_line(error)}"
        raise ConfigError(f"{text}{_fix(given)}") from None
    if array.dtype.kind not in "iuf":
        raise _not_vectors(what, array.dtype, array.shape)
    # A number that is too large becomes infinite, and its row is unusable.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, dtype=np.float32)


def _stacked(array: np.ndarray) -> np.ndarray:
    """Convert an array of objects to float32 numbers.

    Args:
        array: (N,), where each object is a vector (D,) or a matrix (V, D); or an array
            of any shape of Python's numbers, or of text that is a number. None is NaN.

    Returns:
        (N, D) or (N, V, D) for N vectors or matrices, otherwise the shape of ``array``.

    Raises:
        ValueError: The vectors have different lengths, or a text is no number.
        TypeError: Another object is no number.
        OverflowError: A whole number is too large even for float64.
    """
    if array.ndim != 1 or not len(array):
        return array.astype(np.float32)
    return np.stack([np.asarray(row, dtype=np.float32) for row in array])


def _fix(given: Any) -> str:
    """Return advice for a table or column that does not hold plain numbers.

    Args:
        given: The table or column, as a caller passes it.

    Returns:
        Text that ends an error message. For anything with the attribute ``columns``, it
        is the advice to pass its numbers alone. For text and bytes it is ''. For a
        column, for an array of one dimension, and for any other object without the
        attribute ``ndim``, such as a list, it is the advice to stack the vectors. It is
        '' for an array of another number of dimensions.
    """
    if hasattr(given, "columns"):
        return (
            '; pass the numbers alone: df[columns].to_numpy("float32",'
            " na_value=numpy.nan)"
        )
    is_column = getattr(given, "ndim", 1) == 1 and not isinstance(given, str | bytes)
    return '; stack vectors of one length: np.stack(df["embedding"])' * is_column


def _not_vectors(what: str, dtype: Any, shape: Iterable[int]) -> ConfigError:
    """Return the error to raise for values that are not vectors.

    Args:
        what: The name of the argument.
        dtype: The type of the values.
        shape: Their shape.
    """
    found = f"{dtype} {tuple(shape)}"
    text = f"{what} must be numbers (N, D) or (N, V, D), not {found}"
    return ConfigError(text)


def class_names(labels: Any) -> list[str | None]:
    """Return the class of each row, and None for a row without a label.

    A label is a name, a whole number or a boolean. None, NaN, a blank text, a negative
    whole number, a masked value, and the missing value of pandas, polars or pyarrow
    stand for no label. If every label is a number or the text of one, text is read as a
    number, so "1.0" and 1 are one class.

    Args:
        labels: A list, array, tensor or column of N labels.

    Returns:
        A list of N entries in the order of the rows. Each is a name, such as 'cat', '3'
        for the number 3 and 'True' for True; or None.

    Raises:
        ConfigError: ``labels`` is no list or column, or holds a fraction (also as text
            that is read as a number), an infinite number, or something that is neither
            text nor a number nor a boolean.
    """
    return encode_labels("labels", values_of(labels, "labels")).to_pylist()


def distinct_ids(ids: Any) -> list[str]:
    """Return the id of each row as text, and check that no two are equal.

    Args:
        ids: A list, array, tensor or column of N ids. A value that is no text, such as
            a number, becomes its text.

    Returns:
        N different texts, in the order of ``ids``.

    Raises:
        ConfigError: ``ids`` is no list or column, an id is missing (None, NaN, blank
            text or the missing value of another library), or two are equal as text.
    """
    names = list[str]()
    for row, name in enumerate(values_of(ids, "ids")):
        if is_missing(name):
            text = f"ids: row {row} has no id, but {one_line(repr(name))}"
            raise ConfigError(f"{text}; give every row an id, or leave ids out")
        names.append(str(name))
    name, count = Counter(names).most_common(1)[0] if names else ("", 1)
    if count > 1:
        text = f"ids must be unique, and {one_line(repr(name))} is there {count} times"
        fix = "leave ids out to number the rows, or pass views of one row as"
        raise ConfigError(f"{text}; {fix} embeddings (N, V, D)")
    return names


def values_of(given: Any, what: str) -> list[Any]:
    """Return a list or column of scalars as a list of Python objects.

    Scalars of NumPy, PyTorch and pyarrow are converted. Other items of any type, also
    missing values, are returned as they are, and are not checked. The result may be
    empty.

    Args:
        given: A list or another iterable, an array or tensor (N,), or a column of
            another library.
        what: The name of the argument, for messages.

    Raises:
        ConfigError: ``given`` is a table (anything with the attribute ``columns``), a
            mapping, a text, a scalar or another object that is not iterable, or an
            array with another number of dimensions than one.
    """
    if hasattr(given, "columns") or isinstance(given, Mapping):
        kind = type(given).__name__
        raise ConfigError(f'{what} must be one column, not {kind}; pass df["{what}"]')
    shape = tuple(getattr(given, "shape", (0,)))
    if isinstance(given, str | bytes) or len(shape) != 1:
        found = f"the shape {shape}" if shape else type(given).__name__
        raise ConfigError(f"{what} must be a list or column of N values, not {found}")
    for method in LIST_METHODS:
        if hasattr(given, method):
            return [_plain(value) for value in getattr(given, method)()]
    if not isinstance(given, Iterable):
        kind = type(given).__name__
        raise ConfigError(f"{what} must be a list or column of N values, not {kind}")
    return [_plain(value) for value in given]


def _plain(value: Any) -> Any:
    """Convert a scalar of NumPy, PyTorch or pyarrow to a Python object.

    Other values are returned unchanged.
    """
    if hasattr(value, "as_py"):
        return value.as_py()
    if isinstance(value, np.generic | Tensor) and value.ndim == 0:
        return value.item()
    return value
