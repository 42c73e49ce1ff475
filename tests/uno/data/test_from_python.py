"""Embeddings, labels and ids as Python objects: what is taken, and what is refused."""

import warnings
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse
import torch

from tests.uno.data.builders import failure
from uno.data.embeddings import given_vectors
from uno.data.from_python import class_names, distinct_ids, float_vectors

NAMES, NUMBERS, TRUTHS = ["a", None, "b"], [1, None, 2], [True, None, False]
CLASSES = ["1", None, "2"]


MASKED = np.ma.masked_array([1, 5, 2], [False, True, False])
COLUMNS = [
    # what it is, a column with a missing value in the middle, its classes
    ("a list", NAMES, NAMES),
    ("a list with NaN", [1.0, float("nan"), 2.0], CLASSES),
    ("negative numbers", [1, -1, 2], CLASSES),
    ("an empty name", ["a", "", "b"], NAMES),
    ("numpy float32", np.array([1, np.nan, 2], np.float32), CLASSES),
    ("numpy objects", np.array(NAMES, object), NAMES),
    ("numpy masked", MASKED, CLASSES),
    ("a list of masked", [*MASKED], CLASSES),
    ("numpy datetime", np.array(["a", np.datetime64("NaT"), "b"], object), NAMES),
    ("a tensor", torch.tensor([1, -1, 2]), CLASSES),
    ("a list of tensors", [*torch.tensor([1, -1, 2])], CLASSES),
    ("arrow names", pa.array(NAMES), NAMES),
    ("arrow dictionary", pa.array(NAMES).dictionary_encode(), NAMES),
    ("arrow chunks", pa.chunked_array([NUMBERS]), CLASSES),
    ("arrow truths", pa.array(TRUTHS), ["True", None, "False"]),
    ("arrow scalars", [*pa.array(NAMES)], NAMES),
    ("another library", SimpleNamespace(to_list=lambda: NAMES), NAMES),
]


def pandas_columns():
    """Return the same for every way in which pandas says that a value is missing."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"names": NAMES, "numbers": NUMBERS})
    nullable, arrow = (
        frame.convert_dtypes(dtype_backend=backend)
        for backend in ("numpy_nullable", "pyarrow")
    )
    return [
        ("string", pandas.Series(NAMES, dtype="string"), NAMES),
        ("object", pandas.Series(NAMES, dtype=object), NAMES),
        ("category", pandas.Series(NAMES, dtype="category"), NAMES),
        ("object NA", pandas.Series(["a", pandas.NA, "b"], dtype=object), NAMES),
        ("object NaT", pandas.Series(["a", pandas.NaT, "b"], dtype=object), NAMES),
        ("array of NA", np.array(["a", pandas.NA, "b"], object), NAMES),
        ("list of NA", ["a", pandas.NA, "b"], NAMES),
        ("extension array", pandas.array(NAMES, dtype="string"), NAMES),
        ("index", pandas.Index(NAMES), NAMES),
        ("float", pandas.Series(NUMBERS, dtype=float), CLASSES),
        ("Float64", pandas.Series(NUMBERS, dtype="Float64"), CLASSES),
        ("boolean", pandas.Series(TRUTHS, dtype="boolean"), ["True", None, "False"]),
        ("nullable names", nullable["names"], NAMES),
        ("nullable numbers", nullable["numbers"], CLASSES),
        ("arrow names", arrow["names"], NAMES),
        ("arrow numbers", arrow["numbers"], CLASSES),
    ]


def test_missing_labels_of_every_kind_are_no_label():
    for name, column, expected in [*COLUMNS, *pandas_columns()]:
        assert class_names(column) == expected, name


def test_a_missing_id_is_refused_by_its_row():
    for name, column, _ in [*COLUMNS, *pandas_columns()]:
        if name != "negative numbers" and "tensor" not in name:  # which are ids
            why = failure(distinct_ids, column) or ""
            assert "row 1 " in why and "leave ids out" in why, name


def test_repeated_ids_are_named_with_a_fix():
    why = failure(distinct_ids, ["a", "b", "b"]) or ""
    assert "'b'" in why and "leave ids out" in why and "(N, V, D)" in why
    assert distinct_ids(pa.array([3, 1, 2])) == ["3", "1", "2"]


@pytest.mark.parametrize(
    "given", ["abc", {"a": 1}, np.ones((3, 1)), 5, None, pa.table({"l": [1]})]
)
def test_what_is_no_column_is_refused(given):
    assert "column" in (failure(class_names, given) or "")


@pytest.mark.parametrize("label", [(), 0.5, b"a", ["a"]])
def test_labels_that_are_neither_names_nor_numbers_are_refused(label):
    assert "label" in (failure(class_names, ["a", label]) or "")


@pytest.fixture
def vectors():
    """Return float32 (6, 4)."""
    return np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def test_numbers_of_every_layout_are_the_same_vectors(vectors, tmp_path):
    """No warning of NumPy or PyTorch reaches the caller."""
    pandas = pytest.importorskip("pandas")
    np.save(tmp_path / "v.npy", vectors)
    read_only = vectors.copy()
    read_only.flags.writeable = False
    objects = np.empty(6, object)
    objects[:] = [*vectors]
    lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 4)
    kinds = {
        "big-endian": vectors.astype(">f4"),
        "big-endian float64": vectors.astype(">f8"),
        "reversed": vectors[:, ::-1].copy()[:, ::-1],
        "column order": np.asfortranarray(vectors),
        "every second row": np.repeat(vectors, 2, axis=0)[::2],
        "read-only": read_only,
        "memory map": np.load(tmp_path / "v.npy", mmap_mode="r"),
        "nested lists": vectors.tolist(),
        "a list of arrays": [*vectors],
        "a list of tensors": [*torch.from_numpy(vectors)],
        "an array of arrays": objects,
        "a column of arrays": pandas.Series([*vectors]),
        "a column of lists": pandas.Series(vectors.tolist()),
        "a table": pandas.DataFrame(vectors),
        "a nullable table": pandas.DataFrame(vectors).astype("Float32"),
        "arrow lists": lists,
        "a tensor with a gradient": torch.from_numpy(vectors).requires_grad_(),
        "views": vectors[:, None],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, given in kinds.items():
            found = float_vectors(given, "X")
            assert found.dtype == torch.float32 and found.shape == (6, 1, 4), name
            assert np.array_equal(found[:, 0].detach().numpy(), vectors), name
            found.add_(0)  # it may be written to


def test_masked_and_huge_numbers_make_a_row_unusable(vectors):
    is_second = np.arange(6)[:, None] == np.full(4, 1)
    masked = np.ma.masked_array(vectors, is_second)
    huge = vectors + 1e300 * is_second
    for given in (masked, huge):
        rows = float_vectors(given, "X").isfinite().all(dim=2)[:, 0].tolist()
        assert rows == [True, False, True, True, True, True]


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (scipy.sparse.random(6, 4, 0.5, format="csr"), ["sparse", "TruncatedSVD"]),
        (scipy.sparse.coo_array(np.eye(4)), ["sparse", "TruncatedSVD"]),
        (torch.eye(4).to_sparse(), ["to_dense"]),
        ([[1.0, 2.0], [1.0]], ["np.stack"]),
        (np.array([np.ones(2), np.ones(3)], object), ["same shape", "np.stack"]),
        (np.array([np.ones(2), None], object), ["np.stack"]),
        (["a.jpg"], ["(N, D)", "U5"]),
        (np.ones((2, 2), bool), ["bool"]),
        (np.ones((2, 2), complex), ["complex"]),
        (np.ones(3), ["(3,)"]),
    ],
)
def test_what_is_no_vectors_is_refused_with_a_fix(given, facts):
    why = failure(float_vectors, given, "embeddings") or ""
    assert "embeddings" in why and all(fact in why for fact in facts), why


def test_a_table_with_a_missing_number_is_refused_with_a_fix():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"x": [1, None], "y": [1, 2]}).astype("Int64")
    assert "to_numpy" in (failure(float_vectors, table, "embeddings") or "")


def test_the_digest_is_that_of_the_content(vectors):
    labels = ["a", None, "b", "a", None, "b"]
    first = given_vectors(vectors, labels)
    same = given_vectors(vectors.astype(">f8"), np.array(labels, object))
    assert same.digest == first.digest
    others = [
        given_vectors(-vectors, labels),
        given_vectors(vectors, labels[::-1]),
        given_vectors(vectors),
        given_vectors(vectors, labels, list("uvwxyz")),
        given_vectors(vectors[:, None].repeat(2, axis=1), labels),
        given_vectors(vectors.reshape(6, 2, 2), labels),
    ]
    assert len({first.digest, *(each.digest for each in others)}) == 7
