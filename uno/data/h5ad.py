"""Read and write AnnData files (.h5ad): vectors of cells, and a table about the cells.

The layout is that of anndata's "On-disk format" for HDF5 files. h5py suffices for it:
it is small, and the newest anndata excludes versions of pandas that others need.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from uno.data import files as filesystem
from uno.data.array_files import COLUMNS, VectorFile, new_array
from uno.data.from_python import float_vectors
from uno.data.rows import ReadOptions
from uno.data.tables import check_names
from uno.errors import ConfigError, one_line

H5AD = ".h5ad"
USUAL_ARRAY = "X_pca"  # where scanpy stores principal components
MATRIX = "X"  # the array of genes, or of whatever was measured
PIECE_NUMBERS = 2**24  # numbers that are copied at once
# Errors that h5py raises for damaged files, and for files that it cannot read.
UNREADABLE = (
    OSError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    RuntimeError,
    pa.ArrowException,
)


def read_h5ad(path: str, options: ReadOptions) -> VectorFile:
    """Read an array of an .h5ad file as embeddings, and columns of its ``obs``.

    The id of a row is the value of the column of ``obs`` that ``options.columns`` names
    as "id", or else of the one that is called ``id``. Without such a column it is the
    name of the cell, the index of ``obs``. Without an option the array is ``X_pca`` of
    ``obsm``, else the only matrix of ``obsm``, dense or sparse. ``options.columns`` can
    name another array of ``obsm`` as "embedding", or ``X`` for the matrix ``X`` itself.
    The array that is read must be dense.

    Args:
        path: Path or URI of the file.
        options: How the source is read. Only two of its attributes are used:
            ``columns``, and ``images_only``. With ``images_only`` columns of labels and
            splits that ``columns`` names may be missing, and columns with almost a
            standard name are not refused. Labels and splits that are there are returned
            in any case.

    Returns:
        The vectors of the cells as float32 (N, D), in which NaN is kept; a note that
        names their array; the names of all columns of ``obs``; and the columns id,
        label, eval_label, split, path and text, as Arrow arrays by these names, without
        those that ``obs`` does not have. A column that ``options.columns`` names takes
        the place of the one with the standard name. The column "id" is always there.
        The column 'image' holds paths of images: it is returned as 'path', also if
        there is a column 'path', too. There are no reasons and no pictures.

    Raises:
        ConfigError: The file cannot be read or has the layout of an old anndata; an
            array or column that ``options.columns`` names is missing, or ``obsm`` has
            no matrix; a column such as ``Label`` would be ignored because of its
            spelling; several arrays could be meant; the array is sparse, is empty or
            holds no integers or floats; a member of the file that is needed is a link
            to data elsewhere; or two cells have one name and there is no column of ids.
        StorageError: The file for a large array of vectors cannot be made, for example
            because the disk is full.
        ModuleNotFoundError: h5py is not installed.
    """
    import h5py  # of the extra h5ad

    try:
        with filesystem.open_binary(path) as stream, h5py.File(stream, "r") as file:
            return _read_cells(path, file, options)
    except ConfigError:
        raise
    except UNREADABLE as error:
        raise ConfigError(
            f"{path} is no .h5ad file that can be read: {one_line(error)}; write it"
            " again with anndata's write_h5ad"
        ) from None


def _read_cells(path: str, file: Any, options: ReadOptions) -> VectorFile:
    """Read the embeddings, ids and columns of an opened .h5ad file.

    Args:
        path: Path of the file, for error messages.
        file: The file, opened by h5py.
        options: How the source is read.

    Returns:
        The result of :func:`read_h5ad`.

    Raises:
        ConfigError: The file has an old layout; an array or column that
            ``options.columns`` names is missing, or ``obsm`` has no matrix; a column
            such as ``Label`` would be ignored (which is not checked with
            ``images_only``); several arrays could be meant; the array is sparse, is
            empty or holds no integers or floats; or two cells have one name and there
            is no column of ids.
        KeyError: A member of the file is missing. Other errors of :data:`UNREADABLE`
            are raised for damaged files, and a ValueError for a member that is a link
            to data elsewhere: ``obs`` or a column that is read, ``obsm`` or any of its
            members.
        StorageError: The file for a large array of vectors cannot be made, for example
            because the disk is full.
    """
    obs = _open_member(file, "obs")
    if "column-order" not in obs.attrs or "__categories" in obs:
        raise ConfigError(
            f"{path} has the layout of an old anndata; read it with anndata and write"
            " it again with write_h5ad"
        )
    names, of_obs = options.columns, [str(name) for name in obs.attrs["column-order"]]
    obsm = _open_member(file, "obsm") if "obsm" in file else {}
    arrays = [name for name in obsm if _is_array(_open_member(obsm, name))]
    matrix = list[str]()
    with suppress(KeyError, ValueError):  # it is missing, or a link to data elsewhere
        if _is_array(_open_member(file, MATRIX)):
            matrix.append(MATRIX)
    check_names(path, [*of_obs, *arrays, *matrix], options)
    array = names.get("embedding") or _choose_array(path, arrays)
    if array not in (*arrays, *matrix):  # a column of obs
        has = ", ".join((*arrays, *matrix)) or "none"
        raise ConfigError(f"{path}: {array!r} is no array of vectors; it has {has}")
    parent = file if array in matrix else obsm
    values = _read_matrix(path, _open_member(parent, array))
    columns = {
        "path" if ours == "image" else ours: _read_column(_open_member(obs, theirs))
        for ours in (*COLUMNS, "image")
        if (theirs := names.get(ours, ours)) in of_obs and ours != "embedding"
    }
    if "id" not in columns:
        index = _read_column(_open_member(obs, str(obs.attrs["_index"])))
        columns["id"] = index
        counts = index.value_counts()
        is_repeated = pa.compute.greater(counts.field("counts"), 1)
        if pa.compute.any(is_repeated).as_py():
            name = counts.field("values").filter(is_repeated)[0].as_py()
            raise ConfigError(
                f"{path}: several cells have the name {one_line(repr(name))}; give each"
                " its own with adata.obs_names_make_unique()"
            )
    place = array if parent is file else f"obsm[{array!r}]"
    return VectorFile(values, columns, of_obs, (f"the vectors are {place}",))


def _choose_array(path: str, arrays: Sequence[str]) -> str:
    """Choose the array of ``obsm`` that holds the embeddings, if the user names none.

    Args:
        path: Path of the file, for error messages.
        arrays: Names of the matrices of ``obsm``, dense and sparse ones.

    Returns:
        ``X_pca`` if it is among them, else the only name.

    Raises:
        ConfigError: There is none, or there are several and ``X_pca`` is not among
            them.
    """
    if USUAL_ARRAY in arrays:
        return USUAL_ARRAY
    if len(arrays) == 1:
        return arrays[0]
    if arrays:
        raise ConfigError(
            f"{path}: obsm has {one_line(', '.join(arrays))}; say which array the"
            f" embeddings are: --data.columns embedding={arrays[0]}"
        )
    raise ConfigError(
        f"{path} has no array in obsm; reduce its genes with scanpy.pp.pca, or take"
        f" them as they are: --data.columns embedding={MATRIX}"
    )


def _open_member(group: Any, name: str) -> Any:
    """Return a dataset or group of an HDF5 group, if its data is in this file.

    Args:
        group: The group, or the file.
        name: The name of the member.

    Raises:
        KeyError: There is no such member, or ``name`` has a '/'.
        ValueError: The member is a soft or external link, a virtual dataset, or a
            dataset with external storage: its data may be in any file of the disk.
    """
    import h5py

    link = None if "/" in name else group.get(name, getlink=True)
    if link is None:
        raise KeyError(f"there is no {name!r} in {group.name}")
    is_here = isinstance(link, h5py.HardLink)
    node = group[name] if is_here else None
    if isinstance(node, h5py.Dataset):
        is_here = not node.external and not node.is_virtual
    if not is_here:
        raise ValueError(f"{name!r} in {group.name} is a link to data elsewhere")
    return node


def _is_array(node: Any) -> bool:
    """Return whether a dataset or group of HDF5 is a matrix, dense or sparse.

    A dense matrix is a dataset with two dimensions, of any type. A sparse matrix is a
    group with an encoding type that ends in "_matrix".
    """
    is_sparse = str(node.attrs.get("encoding-type", "")).endswith("_matrix")
    return is_sparse or len(getattr(node, "shape", ())) == 2


def _read_matrix(path: str, node: Any) -> np.ndarray:
    """Read a dense matrix of HDF5 as an array float32 (N, D).

    Args:
        path: Path of the file, for the error message.
        node: The dataset, or the group of a sparse matrix.

    Returns:
        An array in memory or, from 256 MiB on, in a mapped file without a name. NaN is
        kept.

    Raises:
        ConfigError: The node is a sparse matrix, is empty (N or D is 0), or does not
            hold integers or floats.
        StorageError: The mapped file cannot be made, for example because the disk is
            full.
    """
    if not hasattr(node, "shape"):
        raise ConfigError(
            f"{path}: {node.name} is a sparse matrix, and dense vectors are needed;"
            " reduce it with scanpy.pp.pca, which writes obsm['X_pca']"
        )
    float_vectors(node[:1], path)
    values = new_array(node.shape)
    rows = max(1, PIECE_NUMBERS // max(1, node.shape[1]))
    for start in range(0, len(values), rows):
        values[start : start + rows] = node[start : start + rows]
    return values


def _read_column(node: Any) -> Any:
    """Read a column of ``obs`` as an Arrow array (N,).

    The array has the type of the values. Codes of categories are replaced by the
    categories. Values that the column marks as missing are null. NaN in a plain dataset
    of numbers stays NaN.

    Args:
        node: A dataset of text, numbers or booleans; or a group with categories and
            their codes (negative for a missing value), or with nullable values and
            their mask (True for a missing value).

    Raises:
        KeyError: A member of a group is missing. h5py may raise other errors for
            damaged files, and a group of another kind is an AttributeError.
        ValueError: A member of a group is a link to data elsewhere.
    """
    import h5py

    kind = str(node.attrs.get("encoding-type", ""))
    if kind == "categorical":
        categories = _read_column(_open_member(node, "categories"))
        codes = _open_member(node, "codes")[:]
        return categories.take(pa.array(codes, mask=codes < 0))
    if kind.startswith("nullable"):
        values = _read_column(_open_member(node, "values"))
        is_missing = pa.array(_open_member(node, "mask")[:])
        return pa.compute.if_else(is_missing, pa.scalar(None, values.type), values)
    is_text = h5py.check_string_dtype(node.dtype) is not None
    return pa.array(node.asstr()[:] if is_text else node[:])


def format_h5ad(
    ids: Sequence[str], columns: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> bytes:
    """Return the content of an .h5ad file that anndata reads.

    Args:
        ids: The name of each of N cells, the index of ``obs``.
        columns: Name of a column of ``obs`` -> Arrow array (N,) of text (of the type
            ``string``), with null for a missing value; or of floats.
        arrays: Name of an array of ``obsm`` -> numbers (N, D).

    Returns:
        The bytes of the file, which has no matrix ``X`` and an empty table ``var``. A
        column of text becomes an unordered categorical column, in which null is a
        missing value, and null is NaN in a column of floats. An array keeps its type.

    Raises:
        ModuleNotFoundError: h5py is not installed.
    """
    import h5py  # of the extra h5ad

    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        for name, index, own in (("obs", ids, columns), ("var", [], {})):
            frame = _create_group(file, name, "dataframe", "0.2.0")
            frame.attrs["_index"] = "_index"
            order = np.array([*own], h5py.string_dtype())
            frame.attrs.create("column-order", order)
            _write_array(frame, "_index", [*index])
            for title, column in own.items():
                _write_column(frame, title, column)
        obsm = _create_group(file, "obsm", "dict", "0.1.0")
        for name, array in arrays.items():
            _write_array(obsm, name, array)
    return buffer.getvalue()


def _write_column(frame: Any, name: str, column: Any) -> None:
    """Write a column of a table to HDF5: text as categories, and numbers as they are.

    The categories are in the order in which they first appear. The attribute of the
    table that lists its columns is not changed.

    Args:
        frame: The h5py group of the table.
        name: The name of the column.
        column: An Arrow array (N,) of text (of the type ``string``) or of floats.
            Null is written as the code -1 in text, and as NaN in floats.
    """
    if not pa.types.is_string(column.type):
        _write_array(frame, name, column.to_numpy(zero_copy_only=False))
        return
    coded = column.dictionary_encode()
    group = _create_group(frame, name, "categorical", "0.2.0")
    group.attrs["ordered"] = False
    _write_array(group, "categories", coded.dictionary.to_pylist())
    _write_array(group, "codes", coded.indices.fill_null(-1).to_numpy())


def _write_array(group: Any, name: str, values: list[str] | np.ndarray) -> None:
    """Write an array of numbers, or a list of texts, to HDF5 as anndata does.

    Args:
        group: The group to write to.
        name: The name of the dataset.
        values: The numbers or texts.
    """
    import h5py

    is_text = isinstance(values, list)
    array = np.array(values, h5py.string_dtype()) if is_text else values
    node = group.create_dataset(name, data=array)
    kind = "string-array" if is_text else "array"
    node.attrs.update({"encoding-type": kind, "encoding-version": "0.2.0"})


def _create_group(parent: Any, name: str, kind: str, version: str) -> Any:
    """Create and return a group of HDF5 with anndata's attributes of its encoding.

    Args:
        parent: The group or file to write to.
        name: The name of the group.
        kind: The encoding, such as "dataframe".
        version: The version of the encoding, such as "0.2.0".
    """
    group = parent.create_group(name)
    group.attrs.update({"encoding-type": kind, "encoding-version": version})
    return group
