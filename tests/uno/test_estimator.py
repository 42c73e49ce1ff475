"""The scikit-learn estimator, on data whose classes are known."""

import importlib
import itertools
import sys

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix
from sklearn.datasets import load_digits, make_blobs
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score
from sklearn.model_selection import GridSearchCV, KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from tests.forked import forked
from uno import NovelClassDiscovery

EXCEPTIONS = {"check_classifiers_classes": "uses the label -1, which is no class here"}


@pytest.fixture(scope="module")
def blobs() -> tuple[np.ndarray, np.ndarray]:
    """Six classes in 16 dimensions: features (180, 16) and true classes."""
    features, classes = make_blobs(180, 16, centers=6, cluster_std=0.5, random_state=0)
    return features.astype(np.float32), classes


def hide_from(classes: np.ndarray, first: int) -> np.ndarray:
    return np.where(classes < first, classes, -1)


@pytest.mark.filterwarnings("ignore:y has no unlabeled row")
def test_the_estimator_passes_the_checks_of_scikit_learn():
    results = check_estimator(
        NovelClassDiscovery(), expected_failed_checks=EXCEPTIONS, on_skip=None
    )
    failed = {result["check_name"] for result in results if result["status"] == "xfail"}
    assert failed == set(EXCEPTIONS)


def test_novel_digits_are_found_and_new_rows_get_old_and_new_classes():
    features, digit = load_digits(return_X_y=True)
    model = NovelClassDiscovery(n_novel=5, setting="ncd")
    model.fit(features, hide_from(digit, 5))
    assert model.classes_.tolist() == list(range(10))
    assert model.novel_classes_.tolist() == [5, 6, 7, 8, 9]
    novel = digit >= 5
    np.testing.assert_array_equal(model.labels_[~novel], digit[~novel])
    assert adjusted_rand_score(digit[novel], model.labels_[novel]) > 0.7
    assert adjusted_rand_score(digit, model.predict(features)) > 0.7
    low, high = model.expected_accuracy_interval_
    assert 0 < low <= model.expected_accuracy_ <= high <= 1


@pytest.mark.parametrize("setting", ["ncd", "gcd"])
def test_each_setting_finds_separate_classes(blobs, setting):
    features, classes = blobs
    labels = hide_from(classes, 3)
    if setting == "gcd":
        labels[::2] = -1  # half of the rows of known classes are unlabeled, too
    model = NovelClassDiscovery(3, setting=setting)
    found = model.fit_predict(features, labels)
    assert adjusted_rand_score(classes, found) == 1
    np.testing.assert_array_equal(found[classes < 3], classes[classes < 3])
    probabilities = model.predict_proba(features)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-5)
    best = model.classes_[probabilities.argmax(axis=1)]
    np.testing.assert_array_equal(best, model.predict(features))


def strings_with(missing: object, classes: np.ndarray) -> np.ndarray:
    names = np.array(["ant", "bee", "cat"], dtype=object)
    return np.array(
        [names[index] if index < 3 else missing for index in classes], dtype=object
    )


@pytest.mark.parametrize(
    "make_labels",
    [
        lambda classes: strings_with(None, classes),
        lambda classes: strings_with(np.nan, classes),
        lambda classes: strings_with(-1, classes),
        lambda classes: strings_with("-1", classes).astype(str),
        lambda classes: strings_with("", classes),
        lambda classes: pd.Series(strings_with(None, classes), dtype="string"),
        lambda classes: pd.Series(strings_with(None, classes), dtype="category"),
        lambda classes: strings_with(None, classes).tolist(),
    ],
    ids=["None", "NaN", "-1", "'-1'", "empty", "pandas", "category", "list"],
)
def test_every_kind_of_missing_string_is_unlabeled(blobs, make_labels):
    features, classes = blobs
    model = NovelClassDiscovery(3).fit(features, make_labels(classes))
    assert model.classes_.tolist() == [
        *("ant", "bee", "cat"),
        *("novel-1", "novel-2", "novel-3"),
    ]
    assert adjusted_rand_score(classes, model.labels_) == 1


@pytest.mark.parametrize(
    ("known", "labels_of_others", "expected"),
    [
        ([0.0, 1.0, 2.0], [np.nan], [0, 1, 2, 3, 4, 5]),
        ([0.0, 1.0, 2.0], [-1.0], [0, 1, 2, 3, 4, 5]),
        ([0.0, 1.0, 2.0], [None], [0, 1, 2, 3, 4, 5]),
        ([0.0, 1.0, 2.0], [pd.NA], [0, 1, 2, 3, 4, 5]),
        (np.array([0, 1, 2], object), [None, -1.0], [0, 1, 2, 3, 4, 5]),
        # the novel classes do not fit into the type of the known ones
        (np.array([124, 125, 126], np.int8), [-1], [*range(124, 130)]),
        (["ant", "novel-1", "cat"], [None], ["novel-2", "novel-3", "novel-4"]),
    ],
    ids=["NaN", "-1", "None", "NA", "objects", "int8", "taken name"],
)
def test_classes_of_labels(blobs, known, labels_of_others, expected):
    features, classes = blobs
    others = itertools.cycle(labels_of_others)
    labels = [known[c] if c < 3 else next(others) for c in classes]
    if isinstance(known, np.ndarray):
        labels = np.array(labels, known.dtype)
    model = NovelClassDiscovery(3).fit(features, labels)
    assert model.classes_.tolist()[-len(expected) :] == expected


@pytest.mark.parametrize(
    "convert",
    [
        lambda features: features.astype(np.float16),
        lambda features: features.astype(np.float64),
        pd.DataFrame,
        lambda features: pd.Series([*features]),
        lambda features: pd.DataFrame({"embedding": [*features]}),
        csr_matrix,
        lambda features: features.tolist(),
    ],
    ids=["float16", "float64", "pandas", "column", "frame", "sparse", "list"],
)
def test_every_kind_of_matrix_gives_the_classes(blobs, convert):
    features, classes = blobs
    given = convert(features)
    model = NovelClassDiscovery(3).fit(given, hide_from(classes, 3))
    assert adjusted_rand_score(classes, model.predict(given)) == 1


def test_a_pipeline_and_named_output_work(blobs):
    features, classes = blobs
    model = NovelClassDiscovery(3).set_output(transform="pandas")
    pipeline = make_pipeline(StandardScaler(), model)
    pipeline.fit(features, hide_from(classes, 3))
    assert adjusted_rand_score(classes, pipeline.predict(features)) == 1
    frame = pipeline.transform(features)
    assert frame.columns[0] == "novelclassdiscovery0"
    assert len(frame) == len(features)


def test_a_search_compares_steps_by_the_labeled_rows(blobs):
    features, classes = blobs
    labels = strings_with(None, classes)
    pipeline = make_pipeline(PCA(), NovelClassDiscovery(3))
    search = GridSearchCV(pipeline, {"pca__n_components": [1, 8]}, cv=KFold(2))
    search.fit(features, labels)
    assert search.best_params_ == {"pca__n_components": 8}
    assert search.best_score_ == 1
    with pytest.raises(ValueError, match="no label"):
        search.best_estimator_.score(features, np.full(len(features), None))


@pytest.mark.parametrize("setting", ["ncd", "gcd"])
def test_a_class_of_one_row_is_not_lost_among_many_rows(blobs, setting, monkeypatch):
    features, classes = blobs
    labels = hide_from(classes, 3)
    labels[np.flatnonzero(classes == 2)[1:]] = 0
    monkeypatch.setattr("uno.estimator.MAX_CLUSTERED_ROWS", 50)
    model = NovelClassDiscovery(3, setting=setting).fit(features, labels)
    assert model.classes_.tolist() == [0, 1, 2, 3, 4, 5]


def test_two_parts_of_one_class_are_named():
    features, classes = make_blobs(400, centers=8 * np.eye(4, 16), random_state=0)
    model = NovelClassDiscovery(3).fit(features, hide_from(classes, 2))
    assert len(model.novel_classes_) == 3
    assert set(model.similar_classes_[0]) <= set(model.novel_classes_)


def test_the_number_of_novel_classes_is_estimated(blobs):
    features, classes = blobs
    model = NovelClassDiscovery("auto").fit(features, hide_from(classes, 3))
    low, high = model.n_novel_interval_
    assert low <= 3 <= high
    assert low <= len(model.novel_classes_) <= high


def test_without_unlabeled_rows_the_known_classes_are_learned(blobs):
    features, classes = blobs
    with pytest.warns(UserWarning, match="no unlabeled row"):
        model = NovelClassDiscovery(3).fit(features, classes)
    assert len(model.novel_classes_) == 0
    assert np.isnan(model.expected_accuracy_)
    np.testing.assert_array_equal(model.predict(features), classes)


@pytest.mark.parametrize(
    "parameters, labels, message",
    [
        ({"n_novel": 0}, None, "n_novel"),
        ({"n_novel": 2.5}, None, "n_novel"),
        ({"n_novel": "many"}, None, "n_novel"),
        ({"n_novel": "auto"}, np.arange(180) // 90 - 1, "2 known classes"),
        ({"setting": "open"}, None, "setting"),
        ({}, np.full(180, -1), "no label"),
        ({}, np.full(180, np.inf), "infinity"),
        ({}, np.full(180, 0.5), "label type"),
        ({}, np.zeros(179, dtype=int), "inconsistent"),
        ({"n_novel": 400}, None, "unlabeled rows"),
    ],
)
def test_bad_input_gets_a_clear_error(blobs, parameters, labels, message):
    features, classes = blobs
    labels = hide_from(classes, 3) if labels is None else labels
    with pytest.raises(ValueError, match=message):
        NovelClassDiscovery(**parameters).fit(features, labels)


def test_booleans_are_the_classes_0_and_1(blobs):
    features, classes = blobs
    labels = np.array([bool(c) if c < 2 else None for c in classes], object)
    model = NovelClassDiscovery(4).fit(features, labels)
    assert model.classes_.tolist() == [0, 1, 2, 3, 4, 5]
    assert model.score(features[classes < 2], classes[classes < 2] == 1) == 1


def test_a_score_of_unequal_lengths_is_refused(blobs):
    features, classes = blobs
    model = NovelClassDiscovery(2).fit(features, hide_from(classes, 3))
    with pytest.raises(ValueError, match="inconsistent"):
        model.score(features, classes[:-1])
    with pytest.raises(ValueError, match="inconsistent"):
        model.score(features, classes, sample_weight=np.ones(7))


def test_the_estimator_imports_neither_ray_nor_a_compiler():
    def import_without_them():
        for name in [*sys.modules]:
            if name.partition(".")[0] == "uno":
                del sys.modules[name]
        # importing them raises
        sys.modules |= dict.fromkeys(("ray", "torch._dynamo", "torch._inductor"))
        assert importlib.import_module("uno").NovelClassDiscovery

    code, said = forked(import_without_them)
    assert code == 0, said
