"""Discover novel classes in a matrix of features, with a scikit-learn estimator.

:class:`NovelClassDiscovery` runs the default method for frozen features
(:mod:`uno.clustering.frozen`) in memory. It reads and writes no files, starts no
processes, and needs neither Ray nor a run directory.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, Self
from warnings import warn

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse
from scipy.special import softmax
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    TransformerMixin,
)
from sklearn.decomposition import TruncatedSVD
from sklearn.metrics import accuracy_score
from sklearn.utils import Tags, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_consistent_length,
    check_is_fitted,
    validate_data,
)
from torch import Tensor

from uno.clustering.frozen import (
    FeatureSpace,
    FrozenClusters,
    cluster_means,
    discover_clusters,
    fit_principal_space,
    fit_whitening,
)
from uno.clustering.num_classes import (
    MIN_KNOWN,
    MIN_NOVEL,
    calibration,
    estimate_num_classes,
    pairs_of_one_class,
)
from uno.data.images import evenly_spaced, with_every_class
from uno.expectation import expected_accuracy

UNLABELED = -1  # in y, besides NaN and None
MAX_SPARSE_DIRECTIONS = 256  # directions that TruncatedSVD keeps of a sparse matrix
TEMPERATURE = 0.1  # of the softmax of cosines: tau of the paper, Sec. 4.1
AUTO = "auto"  # number of novel classes that is estimated
SETTINGS = ("ncd", "gcd")
FLOATS = [np.float32, np.float64]  # other types become the first
MAX_CLUSTERED_ROWS = 20_000  # of each kind; all other rows join the nearest class


class NovelClassDiscovery(
    ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClassifierMixin, BaseEstimator
):
    """Find novel classes among unlabeled rows, and classify into all classes.

    Some rows have labels of known classes. The unlabeled rows hold novel classes, and
    in generalized category discovery also known ones. Features are whitened within the
    known classes, rows are averaged with their nearest neighbors, and k-means finds the
    clusters. Nothing is trained, so the features should come from a good encoder.

    Args:
        n_novel: Number of novel classes, at least 1, or ``"auto"`` for an estimate
            (:mod:`uno.clustering.num_classes`), which needs two known classes.
        setting: ``"gcd"``: unlabeled rows of ``fit`` can belong to known classes.
            ``"ncd"``: none of them does.
        random_state: Seed of all random choices, such as the starts of k-means. A
            ``RandomState`` advances in each call of ``fit``, and None gives another
            result in each call.

    Attributes:
        classes_: Labels (C,) of all classes: the known ones in ascending order, then
            the novel ones.
        novel_classes_: Labels (C_u,) of the novel classes. If labels are numbers, the
            next integers above them; otherwise ``"novel-1"``, ``"novel-2"``, ...
            Boolean labels become the numbers 0 and 1.
        labels_: Class (N,) of each row that was passed to ``fit``. Labeled rows have
            their label.
        expected_accuracy_: Expected share of right rows, 0-1: in ``"ncd"`` of the
            unlabeled rows, after the best matching of clusters to novel classes; in
            ``"gcd"`` of all unlabeled rows, after matching all classes. It is estimated
            from how far other clusterings agree (:mod:`uno.expectation`), and NaN if
            there are too few unlabeled rows to tell.
        expected_accuracy_interval_: Lower and upper end of the interval that holds nine
            tenths of such tasks; (NaN, NaN) if there are too few rows.
        n_novel_interval_: Lower and upper end of the interval of the estimate. If
            ``n_novel`` is a number, both ends are this number. (0, 0) if ``fit`` got no
            unlabeled row.
        similar_classes_: Pairs of novel classes that look like parts of one class, the
            most similar first: at most as many as ``n_novel`` is larger than the number
            of novel classes that :mod:`uno.clustering.num_classes` estimates. The list
            is empty if ``n_novel`` is ``"auto"``.
        mean_: Mean (D',) of the rows, or of an evenly spaced sample of them, after
            scaling to length one.
        directions_: Matrix (D', P) to coordinates in which known classes vary alike in
            all directions.
        prototypes_: Directions (C, P) of the classes' means in these coordinates. Rows
            of classes without any row are zero.
        svd_: The ``TruncatedSVD`` to D' dimensions if ``fit`` got a sparse matrix,
            otherwise None, and D' = D.
        n_features_in_: Number of features D.
        feature_names_in_: Names (D,) of the features, if ``X`` had names.

    Examples:
        >>> import numpy as np
        >>> from sklearn.datasets import load_digits
        >>> from uno import NovelClassDiscovery
        >>> X, digit = load_digits(return_X_y=True)
        >>> y = np.where(digit < 5, digit, -1)  # digits 5 to 9 are not labeled
        >>> model = NovelClassDiscovery(n_novel=5, setting="ncd").fit(X, y)
        >>> model.novel_classes_
        array([5, 6, 7, 8, 9])
    """

    def __init__(
        self, n_novel: int | str = 5, *, setting: str = "gcd", random_state: Any = 0
    ) -> None:
        self.n_novel = n_novel
        self.setting = setting
        self.random_state = random_state

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803
        """Find the novel classes, and store the result in the estimator's attributes.

        At most ``MAX_CLUSTERED_ROWS`` (20,000) labeled rows, evenly spaced after they
        are sorted by class, as many evenly spaced unlabeled ones, and a row of each
        known class that would have none are clustered. Then every unlabeled row gets
        the class of the prototype with the largest cosine: among all classes if
        ``setting`` is ``"gcd"``, among the novel ones if it is ``"ncd"``. With
        ``n_novel="auto"`` a warning is issued if the interval of the estimate reaches
        the largest number on which the estimate was calibrated.

        Args:
            X: Features (N, D): an array, a data frame, a column of N vectors, or a
                sparse matrix, which is reduced to at most ``MAX_SPARSE_DIRECTIONS``
                (256) dimensions first.
            y: Labels (N,) of any type that can be sorted. Unlabeled rows have -1
                (numbers, or ``"-1"`` in an array of strings), NaN, None, ``"<NA>"`` or
                an empty or blank string. Without any unlabeled row the result has the
                known classes alone, with a warning.

        Returns:
            The estimator itself.

        Raises:
            ValueError: A parameter is out of its range; ``X`` is not finite, has fewer
                than two rows, or has another number of rows than ``y``; ``y`` is None,
                is not one column, or holds values that are no classes, such as
                fractions; no row has a label; there are unlabeled rows, but not more
                than classes to find among them; or there are unlabeled rows,
                ``n_novel="auto"`` and only one known class.
        """
        self._check_parameters()
        labels, is_labeled = split_labels(y)
        X = validate_data(  # noqa: N806
            self,
            stack_vectors(X),
            accept_sparse="csr",
            dtype=FLOATS,
            ensure_min_samples=2,
        )
        check_consistent_length(X, labels)
        if not is_labeled.any():
            raise ValueError("y has no label: label some rows of the known classes")
        known, known_index = np.unique(labels[is_labeled], return_inverse=True)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        rows = self._fit_rows(X, seed)
        labeled, unlabeled = rows[is_labeled], rows[~is_labeled]
        class_of_row = torch.from_numpy(known_index.astype(np.int64))
        if len(unlabeled):
            result = self._discover(labeled, class_of_row, unlabeled, seed)
        else:
            warn("y has no unlabeled row, so no novel class was searched", stacklevel=2)
            result = fit_known_classes(labeled, class_of_row)
            self.n_novel_interval_ = (0, 0)
        self.mean_ = result.space.mean.numpy()
        self.directions_ = result.space.directions.numpy()
        self.prototypes_ = result.prototypes.numpy()
        self._n_features_out = self.directions_.shape[1]

        num_novel = len(self.prototypes_) - len(known)
        novel = name_novel_classes(known, num_novel)
        self.novel_classes_ = novel
        self.classes_ = np.concatenate([known, novel]) if num_novel else known
        names = novel.tolist()
        self.similar_classes_ = [
            (names[int(first)], names[int(second)])
            for first, second, _ in result.similar.tolist()
        ]
        expected = expected_accuracy(result.agreement.tolist(), self.setting)
        self.expected_accuracy_ = expected.mean if expected else np.nan
        self.expected_accuracy_interval_ = (
            (expected.low, expected.high) if expected else (np.nan, np.nan)
        )
        cosines = self._cosines(rows)
        if self.setting == "ncd":
            cosines[~is_labeled, : len(known)] = -np.inf
        self.labels_ = self.classes_[cosines.argmax(axis=1)]
        self.labels_[is_labeled] = known[known_index]
        return self

    def fit_predict(self, X: ArrayLike, y: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """Find the novel classes, and return the class of each row of ``X``.

        This calls :meth:`fit`, so the estimator is fitted afterwards.

        Args:
            X: Features (N, D): an array, a data frame, a column of N vectors, or a
                sparse matrix.
            y: Labels (N,). Unlabeled rows have -1 (numbers, or ``"-1"`` in an array of
                strings), NaN, None, ``"<NA>"`` or an empty or blank string.

        Returns:
            The classes (N,). Labeled rows keep their label. With the parameter
            ``setting="gcd"`` an unlabeled row gets a known or a novel class, with
            ``"ncd"`` a novel one. The novel classes are named in the type of the
            labels: the next integers above numbers, otherwise ``"novel-1"``,
            ``"novel-2"``, ... Without any unlabeled row the result has the labels
            alone, with a warning.

        Raises:
            ValueError: A parameter is out of its range; ``X`` or ``y`` cannot be used;
                no row has a label; there are unlabeled rows, but not more than classes
                to find among them; or there are unlabeled rows, ``n_novel="auto"`` and
                only one known class.
        """
        labels: NDArray[Any] = self.fit(X, y).labels_
        return labels

    def predict(self, X: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """Return the known or novel class of each row of features.

        The class is that of the prototype with the largest cosine. In both settings the
        prototypes of all known and novel classes take part, except for classes that got
        no row in :meth:`fit`.

        Args:
            X: Features (N, D), D as in :meth:`fit`.

        Returns:
            Classes (N,), labels as in ``classes_``.

        Raises:
            ValueError: :meth:`fit` was not called (``NotFittedError``), or the features
                differ in number or name from those of :meth:`fit` or are not finite.
        """
        cosines = self._cosines(self._check_rows(X))
        classes: NDArray[Any] = self.classes_[cosines.argmax(axis=1)]
        return classes

    def predict_proba(self, X: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """Return the probability of each class for each row of features.

        The cosines with the classes' prototypes are divided by ``TEMPERATURE`` (0.1),
        and the softmax of the quotients is returned. The probabilities rank rows by
        certainty; they are not calibrated.

        Args:
            X: Features (N, D), D as in :meth:`fit`.

        Returns:
            Probabilities (N, C) of the C known and novel classes, in the order of
            ``classes_``. A class that got no row in :meth:`fit` has probability 0.

        Raises:
            ValueError: :meth:`fit` was not called (``NotFittedError``), or the features
                differ in number or name from those of :meth:`fit` or are not finite.
        """
        cosines = self._cosines(self._check_rows(X))
        probabilities: NDArray[Any] = softmax(cosines / TEMPERATURE, axis=1)
        return probabilities

    def score(
        self,
        X: ArrayLike,  # noqa: N803
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
    ) -> float:
        """Return the share of labeled rows whose predicted class is their label.

        Rows count by their weights. Unlabeled rows are left out. So a search such as
        ``GridSearchCV`` can compare steps before this one by held-out rows of known
        classes, but it cannot choose ``n_novel``.

        Args:
            X: Features (N, D), D as in :meth:`fit`.
            y: Labels (N,). Unlabeled rows have -1 (or ``"-1"``), NaN, None, ``"<NA>"``
                or an empty or blank string, and do not count.
            sample_weight: Weights (N,) of the rows; None for equal weights.

        Returns:
            The accuracy, 0 to 1.

        Raises:
            ValueError: No row has a label; ``y`` is None, is not one column, or holds
                values that are no classes; ``X``, ``y`` and ``sample_weight`` differ in
                length; :meth:`fit` was not called (``NotFittedError``); or ``X``
                differs in its features from that of :meth:`fit` or is not finite.
        """
        labels, is_labeled = split_labels(y)
        check_consistent_length(X, labels, sample_weight)
        if not is_labeled.any():
            raise ValueError(
                "y has no label, so predictions cannot be compared with it"
            )
        weights = None if sample_weight is None else np.asarray(sample_weight)
        return float(
            accuracy_score(
                labels[is_labeled],
                self.predict(X)[is_labeled],
                sample_weight=None if weights is None else weights[is_labeled],
            )
        )

    def transform(self, X: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """Map features to the coordinates in which rows and classes are compared.

        Rows are scaled to length one, centered, projected to their leading principal
        directions, and whitened within the known classes. If :meth:`fit` got a sparse
        matrix, ``svd_`` reduces the features first. The coordinates are not scaled to
        length one; :meth:`predict` compares them by cosine. The estimator is not
        changed.

        Args:
            X: Features (N, D), D as in :meth:`fit`.

        Returns:
            Coordinates (N, P), where P is the number of principal directions. They are
            float64 if ``X`` is a float64 array or sparse matrix, otherwise float32.

        Raises:
            ValueError: :meth:`fit` was not called (``NotFittedError``), or the features
                differ in number or name from those of :meth:`fit` or are not finite.
        """
        rows = self._check_rows(X)
        coordinates: NDArray[Any] = self._space()(rows).numpy()
        kept = getattr(X, "dtype", None)  # of an array, which scikit-learn preserves
        return coordinates.astype(kept) if kept in FLOATS else coordinates

    def _check_parameters(self) -> None:
        """Check the parameters ``n_novel`` and ``setting``.

        Raises:
            ValueError: ``n_novel`` is neither an integer above 0 nor ``"auto"``, or
                ``setting`` is neither ``"ncd"`` nor ``"gcd"``.
        """
        number = self.n_novel
        is_count = isinstance(number, Integral) and not isinstance(number, bool)
        if number != AUTO and (not is_count or int(number) < 1):
            raise ValueError(
                f'n_novel must be a whole number above 0 or "auto", not {number!r}'
            )
        if self.setting not in SETTINGS:
            raise ValueError(f'setting must be "ncd" or "gcd", not {self.setting!r}')

    def _fit_rows(self, X: Any, seed: int) -> Tensor:  # noqa: N803
        """Convert the features of ``fit`` to dense rows; reduce a sparse matrix.

        If the features are a sparse matrix, a ``TruncatedSVD`` to at most
        ``MAX_SPARSE_DIRECTIONS`` dimensions is fitted to them and kept as ``svd_``.
        Otherwise ``svd_`` becomes None.

        Args:
            X: Features (N, D), an array or a sparse matrix, checked by scikit-learn.
            seed: Seed of the SVD.

        Returns:
            float32 (N, D'). D' is the number of dimensions of the SVD, or D for an
            array.
        """
        self.svd_ = None
        if issparse(X):
            num_directions = min(MAX_SPARSE_DIRECTIONS, X.shape[1] - 1, X.shape[0] - 1)
            self.svd_ = TruncatedSVD(max(num_directions, 1), random_state=seed).fit(X)
        return self._to_rows(X)

    def _to_rows(self, X: Any) -> Tensor:  # noqa: N803
        """Convert features to a float32 tensor, reduced by ``svd_`` if that is set.

        Args:
            X: Features (N, D) of ``fit`` or of a later call, an array or a sparse
                matrix, checked by scikit-learn.

        Returns:
            (N, D'), where D' is the number of dimensions of ``svd_``, or D without it.
        """
        dense = self.svd_.transform(X) if self.svd_ is not None else X
        if issparse(dense):
            dense = dense.toarray()
        # A read-only array, as joblib maps it, is copied: PyTorch warns about it.
        return torch.from_numpy(np.require(dense, np.float32, requirements=["C", "W"]))

    def _check_rows(self, X: Any) -> Tensor:  # noqa: N803
        """Check features (N, D) that are passed after ``fit``, and convert them.

        Returns:
            The tensor of :meth:`_to_rows`, float32: (N, D'), reduced by the SVD if
            ``fit`` got a sparse matrix.

        Raises:
            ValueError: ``fit`` was not called (``NotFittedError``), or the features
                differ in number or name from those of ``fit``, or are not finite.
        """
        check_is_fitted(self)
        X = validate_data(  # noqa: N806
            self, stack_vectors(X), accept_sparse="csr", dtype=FLOATS, reset=False
        )
        return self._to_rows(X)

    def _discover(
        self, labeled: Tensor, class_of_row: Tensor, unlabeled: Tensor, seed: int
    ) -> FrozenClusters:
        """Find the novel classes by clustering, and set ``n_novel_interval_``.

        ``n_novel_interval_`` becomes the lower and upper end of the estimate of the
        number of novel classes. If ``n_novel`` is a number, both ends are it. At most
        ``MAX_CLUSTERED_ROWS`` (20,000) labeled rows, evenly spaced after they are
        sorted by class, and as many evenly spaced unlabeled ones are used, and a row of
        each known class that would have none. A warning is issued if the interval of an
        estimate reaches the largest calibrated number.

        Args:
            labeled: Labeled rows (N_l, D') of any length; they are scaled to length one
                here. D' is the number of features, or of dimensions of the SVD of a
                sparse matrix.
            class_of_row: The known classes of the labeled rows, int64 (N_l,), 0 to C_l
                - 1.
            unlabeled: Unlabeled rows (N_u, D').
            seed: Seed of k-means.

        Returns:
            The clusters: the map to the space in which they were found, the prototypes
            of all classes, and how far other clusterings agree. ``similar`` has the
            pairs of novel classes that look like parts of one class; it is empty if the
            number of classes is estimated.

        Raises:
            ValueError: The unlabeled rows are not more than the classes to find among
                them (``n_novel``, or 2 if it is estimated; in "gcd" the known ones,
                too). Or the number of novel classes is to be estimated and fewer than
                ``MIN_KNOWN`` classes (2) are known.
        """
        gcd = self.setting == "gcd"
        num_known = int(class_of_row.max()) + 1
        smallest = MIN_NOVEL if self.n_novel == AUTO else int(self.n_novel)
        num_clusters = smallest + num_known * gcd
        if len(unlabeled) <= num_clusters:
            raise ValueError(
                f"y has {len(unlabeled)} unlabeled rows, which is not more than the"
                f" {num_clusters} classes to find among them; lower n_novel, or add"
                " unlabeled rows"
            )
        by_class = class_of_row.argsort(stable=True)
        labeled, class_of_row = labeled[by_class], class_of_row[by_class]
        even = evenly_spaced(MAX_CLUSTERED_ROWS, len(labeled))
        chosen = with_every_class(even, class_of_row.numpy())
        labeled, class_of_row = labeled[chosen], class_of_row[chosen]
        unlabeled = unlabeled[evenly_spaced(MAX_CLUSTERED_ROWS, len(unlabeled))]
        num_novel = low = high = smallest
        if self.n_novel == AUTO:
            if num_known < MIN_KNOWN:
                raise ValueError(
                    f'n_novel="auto" needs {MIN_KNOWN} known classes, not {num_known};'
                    " pass a number"
                )
            most = len(unlabeled) - num_known * gcd - 1
            estimate = estimate_num_classes(
                labeled, class_of_row, unlabeled, gcd, seed, most
            )
            num_novel, low, high = estimate.num_novel, estimate.low, estimate.high
            smallest, largest = calibration()["num_novel"]
            if high >= largest:
                warn(
                    f"the number of novel classes was calibrated on {smallest} to"
                    f" {largest} of them; it was mostly too low where there were more",
                    stacklevel=3,
                )
        self.n_novel_interval_ = (low, high)
        result = discover_clusters(
            labeled, class_of_row, unlabeled, num_novel, gcd, seed
        )
        if self.n_novel == AUTO:  # there are no more classes than the estimate
            return replace(result, similar=result.similar[:0])
        pairs = pairs_of_one_class(result, labeled, class_of_row, unlabeled, gcd, seed)
        return replace(result, similar=pairs)

    def _space(self) -> FeatureSpace:
        """Return the fitted map from rows to the coordinates of :meth:`transform`.

        The map takes rows (N, D'), which :meth:`_to_rows` returns: D' is the number of
        dimensions of the SVD if ``fit`` got a sparse matrix, otherwise the number of
        features D. The map scales the rows to length one, subtracts ``mean_`` and
        multiplies by ``directions_``, which gives coordinates (N, P).
        """
        return FeatureSpace(
            torch.from_numpy(self.mean_), torch.from_numpy(self.directions_)
        )

    def _cosines(self, rows: Tensor) -> NDArray[np.float32]:
        """Compute the cosines of rows with the prototypes of all C classes.

        Args:
            rows: Features float32 (N, D'), after the SVD if there is one.

        Returns:
            Cosines float32 (N, C). They are -inf for a class that got no row in
            ``fit``, unless no class has a row.
        """
        coordinates = F.normalize(self._space()(rows), dim=1)
        cosines: NDArray[np.float32] = coordinates.numpy() @ self.prototypes_.T
        is_empty = ~self.prototypes_.any(axis=1)
        if not is_empty.all():
            cosines[:, is_empty] = -np.inf
        return cosines


def stack_vectors(X: Any) -> Any:  # noqa: N803
    """Return a column of vectors of pandas or polars as a matrix (N, D).

    Args:
        X: A column of N vectors of length D, or a frame with this column alone.

    Returns:
        An array (N, D). A column of N numbers becomes an array (N,), and so does a
        frame whose only column has numbers of the type object. Any other object, such
        as an array or another frame, is returned as it is.

    Raises:
        ValueError: The vectors have different lengths, or a column of objects is empty.
    """
    if hasattr(X, "columns") and X.shape[1] == 1:
        only = X[X.columns[0]]
        values = only.to_numpy()  # of type Array in polars they have two dimensions
        X = only if values.dtype == object or values.ndim == 2 else X  # noqa: N806
    if hasattr(X, "to_numpy") and len(X.shape) == 1:
        column = X.to_numpy()
        return np.stack(column) if column.dtype == object else column
    return X


def split_labels(y: ArrayLike) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Tell labeled rows from unlabeled ones.

    A warning is issued if ``y`` has the shape (N, 1).

    Args:
        y: Labels (N,). Unlabeled rows have -1, ``"-1"``, NaN, None, ``"<NA>"`` or an
            empty or blank string.

    Returns:
        The labels (N,), which have no meaning for unlabeled rows; and a mask (N,) that
        is true for labeled rows. Labels of an array of objects become strings or
        numbers if any row is labeled, and booleans become 0 and 1.

    Raises:
        ValueError: ``y`` is None, is not one column, or holds values that are no
            classes, such as fractions or infinity.
    """
    if y is None:
        raise ValueError("fit requires y to be passed, but the target y is None")
    labels = column_or_1d(y, warn=True)
    if labels.dtype.kind in "iub":
        is_labeled = labels != UNLABELED
    elif labels.dtype.kind == "f":
        if np.isinf(labels).any():
            raise ValueError("y contains infinity, which is no class")
        is_labeled = ~np.isnan(labels) & (labels != UNLABELED)
    else:
        is_labeled = np.array([not is_unlabeled(label) for label in labels], dtype=bool)
    if labels.dtype.kind == "O" and is_labeled.any():
        labels = labels.copy()
        labels[~is_labeled] = labels[is_labeled][0]
        labels = np.array(labels.tolist())  # strings or numbers, not objects
    if labels.dtype.kind == "b":  # novel classes get the numbers from 2
        labels = labels.astype(np.int64)
    check_classification_targets(labels[is_labeled])
    return labels, is_labeled


def is_unlabeled(label: Any) -> bool:
    """Return whether a label of an array of objects or strings means "unlabeled".

    It does if it is None, NaN, the number -1, or as a text ``"-1"``, ``"<NA>"``
    (pandas), empty or blank. White space at the ends of the text does not count.
    """
    if label is None or str(label).strip() in ("", "-1", "<NA>"):
        return True
    # NaN is unequal to itself
    return isinstance(label, Real) and (label == UNLABELED or label != label)


def name_novel_classes(known: NDArray[Any], num_novel: int) -> NDArray[Any]:
    """Name novel classes in the type of the known ones.

    Args:
        known: Known classes (C_l,), in ascending order.
        num_novel: Number of novel classes C_u.

    Returns:
        The names (C_u,). If the known classes are numbers: the integers that follow the
        largest one, in the type of ``known`` or a wider one in which they fit.
        Otherwise the strings ``"novel-1"``, ``"novel-2"``, ... of
        which names of known classes are left out.
    """
    if known.dtype.kind in "iuf":
        first = int(np.floor(known[-1])) + 1
        numbers = np.arange(first, first + num_novel)
        if known.dtype.kind == "f":
            return numbers.astype(known.dtype)
        largest = np.min_scalar_type(first + num_novel)  # int8 ends at 127
        return numbers.astype(np.promote_types(known.dtype, largest))
    taken = {str(name) for name in known}
    names = (f"novel-{number}" for number in itertools.count(1))
    free = (name for name in names if name not in taken)
    return np.array(list(itertools.islice(free, num_novel)), dtype=object).astype(str)


def fit_known_classes(labeled: Tensor, class_of_row: Tensor) -> FrozenClusters:
    """Fit the feature space and the prototypes of the known classes alone.

    Args:
        labeled: Labeled rows (N, D) of any length; they are scaled to length one here.
        class_of_row: The classes of the rows, int64 (N,), 0 to C_l - 1.

    Returns:
        Clusters without a novel class: the whitened space, and the mean direction of
        each known class in it. The agreement and the similar pairs are empty.
    """
    principal = fit_principal_space(labeled)
    rows = principal(labeled)
    white = fit_whitening(rows, class_of_row)
    points = F.normalize(rows @ white, dim=1)
    return FrozenClusters(
        FeatureSpace(principal.mean, principal.directions @ white),
        cluster_means(points, class_of_row, int(class_of_row.max()) + 1),
        torch.empty(0),
        torch.empty(0, 3),
    )
