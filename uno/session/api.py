"""The Python interface: ``uno.discover``, ``uno.load`` and ``Model.predict``.

``uno.discover`` does the same as the command of this name. ``Model.predict`` returns
its predictions and writes no file. Models have an HTML view for notebooks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cached_property, partial
from os import PathLike, fspath
from typing import Any, overload

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from torch import Tensor

from uno.config import VECTORS, Range
from uno.data.decode import BadImage, Decoding, decoded, ok_mask, to_rgb
from uno.data.embeddings import Vectors, given_vectors, require_kind
from uno.data.files import Storage, full_path, split
from uno.data.images import Image, Images
from uno.errors import ConfigError, StorageError, as_user_error
from uno.results import show
from uno.results.classes import OutputClass, prediction_labels
from uno.results.infer import NUMBERS, Classifier, load_classifier, score_rows
from uno.results.trust import verdict
from uno.runs import REPORT_FILE, directory
from uno.session.configure import configure, from_keywords
from uno.session.console import suppress_output
from uno.text import plural
from uno.threads import torch_threads

IMPORTING_PROCESS = os.getpid()  # a forked child has another number
STRICT = "train/novel/task_agnostic_strict/acc/best"
ImageLike = str | PathLike[str] | bytes | np.ndarray | PIL.Image.Image


@dataclass(frozen=True)
class Prediction:
    """The predicted class of one image, with its scores.

    Attributes:
        class_index: Index of the predicted class in ``Model.classes``, which may be a
            class that the user has dropped; None if the image could not be read.
        class_name: Name of that class, None if the image could not be read. All classes
            that the user has dropped have the name "rejected", or "rejected-1" and so
            on if another class is called so.
        kind: "known", "novel", or "rejected" for a class that the user has dropped;
            None if the image could not be read.
        probability: Probability of the predicted class, 0-1. This and the following
            numbers are NaN if the image could not be read.
        margin: Difference between the two highest probabilities, 0-1.
        entropy: Entropy of the class probabilities in nats.
        head_agreement: Share of the model's heads that predict this class, 0-1; NaN if
            it is not known which clusters of different heads are the same class.
        known_probability: Sum of the probabilities of the known classes, 0-1.
        reason: Why the image could not be read, None if it was read.
    """

    class_index: int | None
    class_name: str | None
    kind: str | None  # known | novel | rejected: it fell into a dropped class
    probability: float
    margin: float
    entropy: float
    head_agreement: float
    known_probability: float
    reason: str | None


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predicted classes of N images, with the scores of each.

    Every field is an array or a list of length N. An image that could not be read has
    the class index -1, None for the class name and the kind, NaN for every other
    number, and a reason. Indexing with a number gives a :class:`Prediction`, and with a
    slice the predictions of these images.

    Attributes:
        class_index: Index of the predicted class in ``Model.classes``, int64 (N,).
        class_name: Name of the predicted class, see :class:`Prediction`.
        kind: "known", "novel" or "rejected", see :class:`Prediction`.
        probability: Probability of the predicted class, float32 (N,), 0-1.
        margin: Difference between the two highest probabilities, float32 (N,), 0-1.
        entropy: Entropy of the class probabilities in nats, float32 (N,).
        head_agreement: Share of the model's heads that predict this class, float32
            (N,), 0-1; NaN if it is not known which clusters of different heads are the
            same class.
        known_probability: Sum of the probabilities of the known classes, float32 (N,),
            0-1.
        probabilities: Probability of each of the C classes in ``Model.classes``,
            float32 (N, C); 0 for a class that was merged into another one.
        embedding: Output of the encoder, D features of each image, float32 (N, D); for
            a model of vectors the vectors that were classified.
        reason: Why an image could not be read, None if it was read.
        path: Path or URI of an image. None if the image was not given as one, but as
            pixels, encoded bytes or a PIL image, and for vectors.
    """

    class_index: np.ndarray  # (N,) int64
    class_name: list[str | None]
    kind: list[str | None]
    probability: np.ndarray  # (N,) float32, as those that follow
    margin: np.ndarray
    entropy: np.ndarray  # nats
    head_agreement: np.ndarray
    known_probability: np.ndarray
    probabilities: np.ndarray  # (N, C)
    embedding: np.ndarray  # (N, D)
    reason: list[str | None]
    path: list[str | None]  # of an image that was given as one

    def __len__(self) -> int:
        return len(self.class_index)

    @overload
    def __getitem__(self, row: int) -> Prediction: ...
    @overload
    def __getitem__(self, row: slice) -> Predictions: ...
    def __getitem__(self, row: int | slice) -> Prediction | Predictions:
        if isinstance(row, slice):
            return Predictions(
                **{field.name: getattr(self, field.name)[row] for field in fields(self)}
            )
        index = int(self.class_index[row])
        return Prediction(
            class_index=None if index < 0 else index,
            class_name=self.class_name[row],
            kind=self.kind[row],
            **{name: float(getattr(self, name)[row]) for name in NUMBERS},
            reason=self.reason[row],
        )

    def __iter__(self) -> Iterator[Prediction]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {plural(len(self), 'image')}:"
            f" {show.format_counts(self.class_name)}>"
        )

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with one row for each image.

        The columns are all fields that have one value for each image, but neither
        ``probabilities`` nor ``embedding``.

        Raises:
            ConfigError: The package pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError:
            raise ConfigError(
                "to_pandas needs the package 'pandas': pip install pandas"
            ) from None
        names = ("path", "class_index", "class_name", "kind", *NUMBERS, "reason")
        return pandas.DataFrame({name: getattr(self, name) for name in names})


class Model:
    """A trained model, which classifies images or vectors.

    Args:
        classifier: The network with its classes, on the device that predicts.
        storage: The directory that it was loaded from.

    Attributes:
        run: The directory that the model was loaded from, a path or URI.
        classes: The output classes, in the order of their indices.
        size: Side of the square input images in pixels. A model of vectors does not use
            it.
        model_hash: Hash of the weights, the image transform and the temperature (the
            divisor of the cosines in the softmax). The names of the classes do not
            change it.
    """

    def __init__(self, classifier: Classifier, storage: Storage) -> None:
        self._classifier, self._storage = classifier, storage
        self.run: str = storage.uri
        self.classes: list[OutputClass] = classifier.classes
        self.size = classifier.size
        self.model_hash = classifier.model_hash

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.run!r}: {self._counts}>"

    @property
    def _counts(self) -> str:
        """The numbers of known and novel classes and the kind of input, as text.

        Examples are "5 known and 5 novel classes, images of 32 px" and "5 known and 1
        novel class, vectors of 384". Classes that were merged into another one or
        dropped are not counted.
        """
        kept = [c.kind for c in self.classes if c.into == c.index]
        known, novel = kept.count("known"), kept.count("novel")
        takes = self._classifier.config.model
        what = (
            f"vectors of {takes.encoder.partition(':')[2]}"
            if takes.takes_vectors
            else f"images of {self.size} px"
        )
        return (
            f"{known} known and {plural(novel, 'novel class', 'novel classes')}, {what}"
        )

    @cached_property
    def _members(self) -> dict[int, show.Members]:
        """For each class, the images of the run that are predicted as the class.

        The mapping goes from the index of a class to the number of these images and up
        to five with the highest probabilities, for the HTML view. An image is a path,
        encoded bytes or pixels; ``b""`` stands for one that cannot be shown. The
        predictions are those in the run directory, which are read at the first use. The
        mapping has at most 40 classes, and none without images. It is empty if there
        are no complete predictions, or they cannot be read.
        """
        try:
            return show.read_members(self._storage, self._classifier.config)
        except StorageError:  # the model works without the table
            return {}

    def _repr_html_(self) -> str:
        """Return the HTML view for a notebook, a table of the model's classes.

        The first 40 classes are shown, each with its name and kind, whether it was
        merged or dropped, and, if the run has predictions, the number of its images and
        up to five pictures. Above the table are the verdict on the run with its
        reasons, if the metrics have one; the numbers of classes and the kind of input;
        the directory; the path of the report, if there is one; and the strict accuracy
        of the novel training images, if the metrics have it. Image files are read for
        the pictures, and images that cannot be decoded are left out.

        Raises:
            StorageError: The file of an image or of the metrics cannot be read now.
        """
        facts = str(verdict(self.metrics) or "").splitlines()
        facts += [
            self._counts,
            f"run: {self.run}",
            f"report: {self.report}" if self.report else "",
        ]
        if (right := self.metrics.get(STRICT)) is not None:
            facts.append(
                f"novel training images in the right class: {right:.1%} (strict)"
            )
        title = f"uno.{type(self).__name__}"
        value_range = self._classifier.config.data.value_range
        return show.model_html(
            title, facts, self.classes, self._members, self.size, value_range
        )

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The run's ``metrics.json``: values by name, accuracies as fractions 0-1.

        A name is a path such as ``train/novel/task_aware/acc/best``. The file is read
        at the first use. The mapping is empty if there is no such file, because the
        model was loaded from a copy of ``model/`` or the run is not finished, or if the
        file is damaged.

        Raises:
            StorageError: The file exists, but cannot be read or is too large.
        """
        return directory.read_results(self._storage) or {}

    @property
    def report(self) -> str | None:
        """Path or URI of the run's HTML report, None if the run has no report."""
        return (
            self._storage.below(REPORT_FILE)
            if self._storage.exists(REPORT_FILE)
            else None
        )

    def predict(self, images: Sequence[ImageLike] | np.ndarray | Tensor) -> Predictions:
        """Classify images of any size, or vectors.

        Each image is turned upright, converted to RGB, cropped to its centered square,
        and resized to the attribute ``size`` of the model. If ``augment.large.size``,
        the side of the large views in training, is less than that, the model sees only
        a square of this side in the center. An image that cannot be read gets a reason
        instead of a class.

        Args:
            images: A list or column of images, where each image is a path, a URI,
                encoded bytes, a PIL image, or a uint8 array (H, W, 3) or (H, W).
                Alternatively one uint8 array (N, H, W, 3) or (N, H, W), or one uint8
                tensor (N, 3, H, W). A model of vectors takes numbers (N, D) instead, as
                an array, tensor, nested lists or column; with several views (N, V, D)
                the first one is classified. A row cannot be read if any of its views is
                a vector of zeros, or has a number that is not finite.

        Returns:
            The predictions, in the order of the images.

        Raises:
            ConfigError: The argument has another type or shape, vectors have another
                length than those of the training, or there are no vectors (an empty
                list of images is accepted). ConfigError is a ValueError.
            StorageError: The storage of an image cannot be reached now.
        """
        with _default_torch_settings(self._classifier.device):
            return self._predict(images)

    def _predict(self, images: Any) -> Predictions:
        """Check and classify the argument of :meth:`predict`, and return predictions.

        PyTorch's settings are not changed here; :meth:`predict` has set them before.

        Args:
            images: What the user has given to :meth:`predict`, not checked yet: a list
                or array of images, or of vectors for a model of vectors.

        Returns:
            The predictions, in the order of the images. An image that cannot be read
            has the class index -1, NaN for every number, and a reason.

        Raises:
            ConfigError: ``images`` has another type or shape, vectors have another
                length than those of the training, or there are no vectors.
            StorageError: The storage of an image cannot be reached now.
        """
        model, given = self._classifier, images
        how = Decoding.of(model.config.data)
        if model.config.model.takes_vectors:
            vectors = Vectors.of(given, "predict")
            require_kind(model.config.model, vectors)
            items: list[Image | BadImage] = [b""] * len(vectors)
            source: Images | Sequence[Image] = vectors
        else:
            items = _to_images(given, how.value_range)
            source = [b"" if isinstance(item, BadImage) else item for item in items]
        batches = np.split(
            np.arange(len(items)), range(model.batch_rows, len(items), model.batch_rows)
        )
        decode = partial(decoded, source, size=model.size, how=how)
        parts = list(score_rows(model, decode, batches))
        found = zip(
            items, (reason for _, some, _ in parts for reason in some), strict=True
        )
        reasons = [
            str(item) if isinstance(item, BadImage) else reason
            for item, reason in found
        ]
        scores = [some for *_, some in parts if some is not None]
        ok = ok_mask(reasons)

        def column(name: str, *width: int) -> np.ndarray:
            """Return one score of all N rows as an array.

            Unreadable rows have -1 for "class_index", and NaN for all other scores.

            Args:
                name: Name of the score, an attribute of each batch of scores.
                *width: The shape of the score of one row, nothing for a scalar.

            Returns:
                int64 (N,) for "class_index", otherwise float32 (N, *width).
            """
            full = np.full(
                (len(items), *width), -1 if name == "class_index" else np.float32("nan")
            )
            if scores:
                full[ok] = np.concatenate(
                    [getattr(some, name).numpy() for some in scores]
                )
            return full

        index = column("class_index")
        # the last is that of class -1
        names = [*prediction_labels(self.classes), (None, None)]
        width = int(model.module.encoder.num_features)  # type: ignore[arg-type]
        return Predictions(
            class_index=index,
            class_name=[names[i][0] for i in index.tolist()],
            reason=reasons,
            kind=[names[i][1] for i in index.tolist()],
            **{name: column(name) for name in NUMBERS},
            probabilities=column("probabilities", len(self.classes)),
            embedding=column("features", width),
            path=[item if isinstance(item, str) else None for item in items],
        )


def load(run: str | PathLike[str], device: str | torch.device = "cpu") -> Model:
    """Load the model of a finished run, to classify images with it.

    If the encoder or the method is the user's own code (``package.module:NAME``), the
    code is imported from this machine, and a logged warning names it.

    Args:
        run: Path or URI of the run directory, or of a copy of its ``model/`` folder.
        device: "cpu", "cuda" or a GPU such as "cuda:1", where the model predicts.

    Raises:
        StorageError: The directory has no trained model, or a damaged one.
        ConfigError: ``run`` is no path, ``device`` is neither a CPU nor a CUDA device
            that this machine has, the library of the encoder or the user's code of the
            encoder or the method is missing, or this code lies in the directory of the
            model.
    """
    if not isinstance(run, str | PathLike):
        raise ConfigError(f"load takes the path of a run, not {_describe_value(run)}")
    storage, place = Storage(fspath(run)), _checked_device(device)
    with _default_torch_settings(place):
        return Model(load_classifier(storage, place), storage)


def discover(
    *,
    embeddings: Any = None,
    labels: Any = None,
    ids: Any = None,
    overwrite: bool = False,
    quiet: bool = False,
    report: bool = False,
    **settings: Any,
) -> Model:
    """Train a model that finds the classes in unlabeled images, as ``uno discover`` does.

        uno.discover(
            labeled="photos/known", unlabeled="photos/new", num_novel=12,
            output="runs/photos",
        )
        uno.discover(data="digits", batch_size=128, objective={"epsilon": 0.1})
        uno.discover(embeddings=X, labels=y, num_novel=12, output="runs/vectors")
        uno.discover(config="mine.yaml", **{"discover.epochs": 20})

    The same call again resumes an interrupted run, or returns the model of the finished
    run. Ctrl-C in the main thread saves a checkpoint first. The run works in this
    process. With ``workers=N`` it trains on N workers of Ray instead, on this machine
    or on the cluster that the environment variable ``RAY_ADDRESS`` names.

    Args:
        embeddings: Vectors to train on instead of images: an array or tensor of numbers
            (N, D), or (N, V, D) with V views (differently augmented versions) of each
            of the N rows, D numbers each. They are stored beside the run in the file
            OUTPUT-vectors-HASH.parquet, where OUTPUT is the run directory. None if the
            settings name the data.
        labels: With embeddings, the class of each of the N rows, a name or a number. A
            row is unlabeled if its value is missing (None, NaN, pandas.NA), an empty
            text or a negative number. At least one row must have a label, so None is
            refused with embeddings, unless the setting ``data.labels`` names a file of
            labels. Without embeddings it must be None.
        ids: With embeddings, N different names of the rows. None names them "row-0",
            "row-1" and so on. Without embeddings it must be None.
        overwrite: Whether a run in the same directory is started over.
        quiet: Whether only warnings are printed.
        report: Whether the HTML report is written, also for a finished run that has
            none. ``uno report`` writes it later.
        **settings: The options of the command, with the same defaults and checks. A
            keyword is a short name (``num_novel``), a dotted name, or a section with a
            mapping of its settings. ``config`` is a YAML file, a mapping, or a list of
            them, where a later one wins. The other keywords win over ``config``, and
            both win over presets and defaults. ``num_novel`` is required, unless labels
            are hidden because known classes are declared: by ``known_classes``, a
            benchmark's preset, or the source itself. ``output`` is the run directory,
            by default ``runs/PRESET-seedSEED``, such as ``runs/vectors-seed0``.

    Returns:
        The model of the finished run, on the CPU.

    Raises:
        ConfigError: A setting or the data is wrong, ``labels`` or ``ids`` are given
            without embeddings, a package is missing, or the run directory holds another
            run or is in use by another command. ConfigError is a ValueError.
        NumericsError: Training met numbers that are not finite, again and again.
        StorageError: A file cannot be read or written.
        Interrupted: Training was stopped. The same call resumes.
    """  # noqa: E501
    if embeddings is None:
        if labels is not None or ids is not None:
            raise ConfigError("labels and ids go with embeddings")
        return _discover_source(settings, overwrite, quiet, report)
    stored = store_embeddings(settings, embeddings, labels, ids)
    return _discover_source(stored, overwrite, quiet, report)


def store_embeddings(
    settings: Mapping[str, Any], embeddings: Any, labels: Any, ids: Any
) -> dict[str, Any]:
    """Store embeddings beside the run that is trained on them.

    The file is OUTPUT-vectors-HASH.parquet, where OUTPUT is the run directory and HASH
    stands for the embeddings, labels and ids. So no call replaces the vectors of
    another run. If the file exists, it is not written again.

    Args:
        settings: The keywords of :func:`discover` that are settings of the run, such as
            ``num_novel`` and ``output``. They may not name other data.
        embeddings: An array or tensor of numbers (N, D), or (N, V, D) with V views of
            each row, D numbers each.
        labels: The class of each row (N,), a name or a number. A row is unlabeled if
            its value is missing (None, NaN), an empty text or a negative number. None
            means that no row has a label.
        ids: The name of each row (N,), all different; None for "row-0", "row-1" and so
            on.

    Returns:
        A copy of the settings, with ``data.source`` set to "vectors:FILE".

    Raises:
        ConfigError: The settings name data (``data`` or ``labeled``), a setting is
            unknown or refused, or the arguments have a wrong type or shape, or differ
            in their numbers of rows. Or no row has a label, and the setting
            ``data.labels`` names no file of labels. Nothing is written then.
        StorageError: The file cannot be written.
    """
    given = from_keywords(settings)
    if own := {"data.source", "data.labeled"} & given.keys():
        raise ConfigError(f"give either embeddings or {own.pop()}, not both")
    config = configure({**given, "data.source": f"{VECTORS}:"})
    vectors = given_vectors(embeddings, labels, ids)
    given_labels = vectors.columns.get("label")
    is_unlabeled = given_labels is None or given_labels.null_count == len(given_labels)
    if is_unlabeled and config.data.labels is None:
        raise ConfigError(
            "no embedding has a label; known classes need labels: pass labels=y with a"
            " class for some of the rows"
        )
    beside = f"{full_path(str(config.output))}-{VECTORS}"
    place = f"{beside}-{vectors.digest[:12]}.parquet"
    folder, name = split(place)
    if not Storage(folder).exists(name):
        vectors.store(place)
    return {**settings, "data.source": f"{VECTORS}:{place}"}


def _discover_source(
    settings: Mapping[str, Any], overwrite: bool, quiet: bool, report: bool
) -> Model:
    """Train a model on the data that the settings name, as ``uno discover`` does.

    The whole command runs: training, evaluation, predictions and files of the run. For
    a finished run nothing is trained again, unless ``overwrite``. PyTorch's number of
    threads and default settings are restored at the end.

    Args:
        settings: The keyword arguments of :func:`discover`, such as ``data`` and
            ``num_novel``.
        overwrite: Whether a run in the same directory is started over.
        quiet: Whether only warnings are printed.
        report: Whether the HTML report is written.

    Returns:
        The model of the finished run, on the CPU.

    Raises:
        UnoError: A setting or the data is wrong, a package is missing, or the run
            directory holds another run or is in use (ConfigError); training met numbers
            that are not finite (NumericsError); a file cannot be read or written or the
            disk is full (StorageError); or training was stopped (Interrupted).
    """
    from uno.session import pipeline  # loading a model does not need it

    given = from_keywords(settings)
    config, now = configure(given, choose_method=True), torch.get_num_threads()
    try:
        with (
            torch_threads(now),
            suppress_output(quiet),
            _default_torch_settings(torch.device("cpu")),
        ):
            pipeline.discover(config, given, overwrite, report=report)
    except Exception as error:
        if (meant := as_user_error(error)) is None:
            raise
        raise meant from error
    return load(str(config.output))


def _checked_device(name: Any) -> torch.device:
    """Return the device of a name such as "cpu", "cuda" or "cuda:1".

    Args:
        name: The name, or a ``torch.device``.

    Raises:
        ConfigError: The name is none of a CPU or CUDA device, or PyTorch sees no CUDA
            device of this number.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f'device must be "cpu" or "cuda", not {name!r}')
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f'PyTorch sees no CUDA device for device="{device}"; use device="cpu"'
        )
    return device


@contextmanager
def _default_torch_settings(device: torch.device) -> Iterator[None]:
    """Compute with PyTorch's default settings, whatever the caller has changed.

    Inside the block the default dtype is float32, the default device is the CPU, and
    autocast is off on ``device``. These settings are restored at the end. In a forked
    child of the process that imported this module, PyTorch is set to one thread for
    good, because OpenMP would wait forever for the threads of the parent.
    """
    if os.getpid() != IMPORTING_PROCESS:
        torch.set_num_threads(1)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        is_set = torch.get_default_device().type != "cpu"
        with (
            torch.device("cpu") if is_set else nullcontext(),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _to_images(images: Any, value_range: Range | None) -> list[Image | BadImage]:
    """Convert the images that :meth:`Model.predict` takes to a list of images.

    Args:
        images: A list or column of images, where each image is a path, a URI, encoded
            bytes, a PIL image, or a uint8 array (H, W, 3) or (H, W). Alternatively one
            uint8 array (N, H, W, 3) or (N, H, W), or one uint8 tensor (N, 3, H, W).
        value_range: The stored values (black, white) that become 0 and 255 in gray PIL
            images of more than 8 bits; None for 0 and 65,535.

    Returns:
        For each image a path, encoded bytes or a uint8 array (H, W, 3); a
        :class:`BadImage` with the reason for a PIL image that cannot be used, see
        :func:`_to_image`. Paths and bytes are not opened here. An empty list gives an
        empty list.

    Raises:
        ConfigError: ``images`` has another type or shape, such as a single image, a
            table, or a tensor of floats.
    """
    if isinstance(images, Tensor):
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            found = f"{images.dtype} {tuple(images.shape)}"
            raise ConfigError(
                f"a tensor of images must be uint8 (N, 3, H, W), not {found}"
            )
        images = images.cpu().permute(0, 2, 3, 1).numpy()
    is_single = isinstance(images, (str, bytes, PathLike, PIL.Image.Image)) or (
        isinstance(images, np.ndarray)
        and (images.ndim == 2 or images.shape[2:] == (3,))
    )
    is_table = isinstance(images, Mapping) or hasattr(images, "columns")
    is_scalar = getattr(images, "shape", None) == ()
    if is_single or is_table or is_scalar or not isinstance(images, Iterable):
        raise ConfigError(
            f"predict takes a list or column of images, not {_describe_value(images)};"
            " put a single image in a list, and give the column of a table that holds"
            ' the paths, such as table["path"]'
        )
    images = images.to_pylist() if hasattr(images, "to_pylist") else images
    return [_to_image(image, row, value_range) for row, image in enumerate(images)]


def _describe_value(value: Any) -> str:
    """Describe a value of a wrong type, for an error message.

    The text is the dtype and shape of a NumPy array, "None" for None, and otherwise the
    name of the type and, in quotes, the first 40 characters of ``str(value)``.
    """
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    return "None" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def _to_image(image: Any, row: int, value_range: Range | None) -> Image | BadImage:
    """Convert one image that a user gives.

    Args:
        image: A path, a URI, encoded bytes, a PIL image, or a uint8 array (H, W, 3) or
            (H, W).
        row: Its position in the list, from 0, for the error message.
        value_range: The stored values (black, white) that become 0 and 255 in gray PIL
            images of more than 8 bits; None for 0 and 65,535.

    Returns:
        A path or URI as text, and encoded bytes as they are. An array as a uint8 array
        (H, W, 3), in which a gray one has three equal channels. A PIL image as such an
        array, in RGB and turned as its EXIF data says. It becomes a :class:`BadImage`
        with the reason if its pixels cannot be decoded; or if ``value_range`` is None,
        and they are floating-point numbers or integers outside 0 to 65,535.

    Raises:
        ConfigError: The image has another type or shape, or an array is empty.
    """
    if isinstance(image, (str, bytes)):
        return str(image) if isinstance(image, str) else bytes(image)
    if isinstance(image, PathLike):
        return str(fspath(image))
    if isinstance(image, PIL.Image.Image):
        try:
            image = np.asarray(to_rgb(PIL.ImageOps.exif_transpose(image), value_range))
        # PIL opens a file lazily, so that a truncated one fails here with an OSError
        except (BadImage, OSError) as error:
            return BadImage(" ".join(str(error).split()))
    if (
        isinstance(image, np.ndarray)
        and image.dtype == np.uint8
        and image.ndim in (2, 3)
        and image.size
    ):
        image = np.repeat(image[..., None], 3, axis=2) if image.ndim == 2 else image
        if image.shape[2] == 3:
            return image
    takes = "paths, bytes, PIL images or uint8 arrays (H, W, 3) or (H, W)"
    raise ConfigError(f"image {row} is {_describe_value(image)}; images are {takes}")
