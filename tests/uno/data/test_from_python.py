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


pandas = pytest.importorskip("pandas")
MASKED = np.ma.masked_array([1, 5, 2], [False, True, False])
FRAME = pandas.DataFrame({"names": NAMES, "numbers": NUMBERS})
NULLABLE = FRAME.convert_dtypes(dtype_backend="numpy_nullable")
ARROW = FRAME.convert_dtypes(dtype_backend="pyarrow")
NUMBER_IDS = {  # they have no missing value where they are ids
    "negative numbers": ([1, -1, 2], CLASSES),
    "a tensor": (torch.tensor([1, -1, 2]), CLASSES),
    "a list of tensors": ([*torch.tensor([1, -1, 2])], CLASSES),
}
COLUMNS = {
    # a column with a missing value in the middle, and its classes
    "a list": (NAMES, NAMES),
    "a list with NaN": ([1.0, float("nan"), 2.0], CLASSES),
    "an empty name": (["a", "", "b"], NAMES),
    "numpy float32": (np.array([1, np.nan, 2], np.float32), CLASSES),
    "numpy objects": (np.array(NAMES, object), NAMES),
    "numpy masked": (MASKED, CLASSES),
    "a list of masked": ([*MASKED], CLASSES),
    "numpy datetime": (np.array(["a", np.datetime64("NaT"), "b"], object), NAMES),
    "arrow names": (pa.array(NAMES), NAMES),
    "arrow dictionary": (pa.array(NAMES).dictionary_encode(), NAMES),
    "arrow chunks": (pa.chunked_array([NUMBERS]), CLASSES),
    "arrow truths": (pa.array(TRUTHS), ["True", None, "False"]),
    "arrow scalars": ([*pa.array(NAMES)], NAMES),
    "another library": (SimpleNamespace(to_list=lambda: NAMES), NAMES),
    "string": (pandas.Series(NAMES, dtype="string"), NAMES),
    "object": (pandas.Series(NAMES, dtype=object), NAMES),
    "category": (pandas.Series(NAMES, dtype="category"), NAMES),
    "object NA": (pandas.Series(["a", pandas.NA, "b"], dtype=object), NAMES),
    "object NaT": (pandas.Series(["a", pandas.NaT, "b"], dtype=object), NAMES),
    "array of NA": (np.array(["a", pandas.NA, "b"], object), NAMES),
    "list of NA": (["a", pandas.NA, "b"], NAMES),
    "extension array": (pandas.array(NAMES, dtype="string"), NAMES),
    "index": (pandas.Index(NAMES), NAMES),
    "float": (pandas.Series(NUMBERS, dtype=float), CLASSES),
    "Float64": (pandas.Series(NUMBERS, dtype="Float64"), CLASSES),
    "boolean": (pandas.Series(TRUTHS, dtype="boolean"), ["True", None, "False"]),
    "nullable names": (NULLABLE["names"], NAMES),
    "nullable numbers": (NULLABLE["numbers"], CLASSES),
    "names in arrow": (ARROW["names"], NAMES),
    "numbers in arrow": (ARROW["numbers"], CLASSES),
}


@pytest.mark.parametrize("name", [*NUMBER_IDS, *COLUMNS])
def test_missing_labels_of_every_kind_are_no_label(name):
    column, expected = (NUMBER_IDS | COLUMNS)[name]
    assert class_names(column) == expected


@pytest.mark.parametrize("name", COLUMNS)
def test_a_missing_id_is_refused_by_its_row(name):
    line = failure(distinct_ids, COLUMNS[name][0])
    assert "row 1 " in line and "leave ids out" in line


def test_repeated_ids_are_named_with_a_fix():
    why = failure(distinct_ids, ["a", "b", "b"])
    assert "'b'" in why and "leave ids out" in why and "(N, V, D)" in why
    assert distinct_ids(pa.array([3, 1, 2])) == ["3", "1", "2"]


@pytest.mark.parametrize(
    "given", ["abc", {"a": 1}, np.ones((3, 1)), 5, None, pa.table({"l": [1]})]
)
def test_what_is_no_column_is_refused(given):
    assert "column" in failure(class_names, given)


@pytest.fixture
def vectors():
    """Return float32 (6, 4)."""
    return np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def test_numbers_of_every_layout_are_the_same_vectors(vectors, tmp_path):
    """No warning of NumPy or PyTorch reaches the caller."""
    np.save(tmp_path / "v.npy", vectors)
    kinds = {
        "big-endian": vectors.astype(">f4"),
        "big-endian float64": vectors.astype(">f8"),
        "reversed": vectors[:, ::-1].copy()[:, ::-1],
        "column order": np.asfortranarray(vectors),
        "every second row": np.repeat(vectors, 2, axis=0)[::2],
        "read-only": np.frombuffer(vectors.tobytes(), np.float32).reshape(6, 4),
        "memory map": np.load(tmp_path / "v.npy", mmap_mode="r"),
        "nested lists": vectors.tolist(),
        "a list of arrays": [*vectors],
        "a list of tensors": [*torch.from_numpy(vectors)],
        "an array of arrays": pandas.Series([*vectors]).to_numpy(),
        "a column of arrays": pandas.Series([*vectors]),
        "a column of lists": pandas.Series(vectors.tolist()),
        "a table": pandas.DataFrame(vectors),
        "a nullable table": pandas.DataFrame(vectors).astype("Float32"),
        "arrow lists": pa.FixedSizeListArray.from_arrays(vectors.ravel(), 4),
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
        ([[10**400, 1]], ["too large"]),
        (np.array([np.ones(2), np.ones(3)], object), ["same shape", "np.stack"]),
        (np.array([np.ones(2), None], object), ["np.stack"]),
        (["a.jpg"], ["(N, D)", "U5"]),
        (np.ones((2, 2), bool), ["bool"]),
        (np.ones((2, 2), complex), ["complex"]),
        (np.ones(3), ["(3,)"]),
        (pandas.DataFrame({"x": [1, None], "y": 1}).astype("Int64"), ["to_numpy"]),
    ],
)
def test_what_is_no_vectors_is_refused_with_a_fix(given, facts):
    why = failure(float_vectors, given, "embeddings")
    assert "embeddings" in why and all(fact in why for fact in facts), why


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
