"""The Python interface: ``uno.discover(...)`` and ``uno.load(run)`` give a model,
``model.predict(images)`` its predictions. It mirrors the commands, and shows itself in
a notebook.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from functools import cached_property, partial
from os import PathLike, fspath
from typing import Any, overload

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from torch import Tensor

from uno.config import VECTORS, Config, flatten, override
from uno.data.decode import BadImage, decoded, ok_mask, to_rgb
from uno.data.files import Storage, full_path, split
from uno.data.images import Image, Images
from uno.data.vectors import Vectors, given_vectors, require_kind
from uno.errors import ConfigError, StorageError, UnoError, as_user_error
from uno.results import show
from uno.results.classes import OutputClass, called
from uno.results.infer import NUMBERS, Classifier, load_classifier, score_rows
from uno.results.trust import verdict
from uno.runs import CONFIG_FILE, REPORT_FILE, directory
from uno.session.console import suppress_output
from uno.session.settings import completed, from_keywords
from uno.text import plural
from uno.threads import torch_threads

PROCESS = os.getpid()  # that imported this
STRICT = "train/novel/task_agnostic_strict/acc/best"
ImageLike = str | PathLike[str] | bytes | np.ndarray | PIL.Image.Image


@dataclass(frozen=True)
class Prediction:
    """The class of one image; without one where the image could not be read,
    ``reason`` says why.
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
    """The classes of N images; fields are those of ``uno predict``, as arrays of length
    N.

    A row that could not be read has class -1, no name, NaN for every number, and a
    reason.
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
    first: list[Image]  # the first images, for a notebook

    def __len__(self) -> int:
        return len(self.class_index)

    @overload
    def __getitem__(self, row: int) -> Prediction: ...
    @overload
    def __getitem__(self, row: slice) -> Predictions: ...
    def __getitem__(self, row: int | slice) -> Prediction | Predictions:
        if isinstance(row, slice):
            first: list[Image] = [*self.first, *[b""] * (len(self) - len(self.first))]
            values = {
                field.name: getattr(self, field.name)[row] for field in fields(self)
            }
            return Predictions(**{**values, "first": first[row][: show.MAX_ROWS]})
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
            f" {show.counted(self.class_name)}>"
        )

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame``, one row an image, without the arrays. ConfigError:
        pandas is missing.
        """
        try:
            import pandas
        except ModuleNotFoundError:
            raise ConfigError(
                "to_pandas needs the package 'pandas': pip install pandas"
            ) from None
        names = ("path", "class_index", "class_name", "kind", *NUMBERS, "reason")
        return pandas.DataFrame({name: getattr(self, name) for name in names})

    def _repr_html_(self) -> str:
        rows = [
            (
                path or f"image {i}",
                one.class_name,
                one.kind,
                one.probability,
                one.head_agreement,
                one.reason,
            )
            for i, (path, one, _) in enumerate(
                zip(self.path, self, self.first, strict=False)
            )
        ]
        title, facts = plural(len(self), "image"), [show.counted(self.class_name)]
        return show.predictions_html(
            title, facts, self.first, rows, len(self) - len(rows)
        )


class Model:
    """A trained model. ``classes`` are its outputs, in order; ``size`` the side of its
    images in pixels; ``run`` the directory, a path or URI, that it came from.
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
        try:
            return show.members(self._storage, self._classifier.config)
        except StorageError:  # a damaged table: a model is no worse for it
            return {}

    def _repr_html_(self) -> str:
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
        return show.model_html(title, facts, self.classes, self._members, self.size)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The run's ``metrics.json``, fractions by path, e.g.
        ``train/novel/task_aware/acc/best``; empty for a copy of ``model/``.
        """
        return directory.read_results(self._storage) or {}

    @property
    def report(self) -> str | None:
        """Where the run's HTML report is, if it has one."""
        return (
            self._storage.below(REPORT_FILE)
            if self._storage.exists(REPORT_FILE)
            else None
        )

    def predict(self, images: Sequence[ImageLike] | np.ndarray | Tensor) -> Predictions:
        """Classify images of any size: a list or column of paths or URIs, encoded
        bytes, PIL images and uint8 arrays (H, W, 3) or (H, W); one uint8 array (N, H,
        W, 3) or (N, H, W); or one uint8 tensor (N, 3, H, W). They are made square as in
        training: shorter side resized to ``size``, center crop. A model of vectors
        accepts an array or tensor of numbers (N, D).

        Unreadable files are rows with a reason; ConfigError, a ValueError: something
        else was given.
        """
        with _own_torch(self._classifier.device):
            return self._predict(images)

    def _predict(self, images: Any) -> Predictions:
        model, given = self._classifier, images
        if model.config.model.takes_vectors:
            vectors = Vectors.of(given, "predict")
            require_kind(model.config.model, vectors)
            items: list[Image | BadImage] = [b""] * len(vectors)
            source: Images | Sequence[Image] = vectors
        else:
            items = _items(given)
            source = [b"" if isinstance(item, BadImage) else item for item in items]
        batches = np.split(
            np.arange(len(items)), range(model.batch_rows, len(items), model.batch_rows)
        )
        how = model.config.data.interpolation
        decode = partial(decoded, source, size=model.size, interpolation=how)
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
            full = np.full(
                (len(items), *width), -1 if name == "class_index" else np.float32("nan")
            )
            if scores:
                full[ok] = np.concatenate(
                    [getattr(some, name).numpy() for some in scores]
                )
            return full

        index = column("class_index")
        names = [*called(self.classes), (None, None)]  # the last for class -1
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
            first=[
                b"" if isinstance(item, BadImage) else item
                for item in items[: show.MAX_ROWS]
            ],
        )


def load(run: str | PathLike[str], device: str | torch.device = "cpu") -> Model:
    """The model of a finished run, by path or URI, or of a copy of its ``model/``
    folder, on "cpu" or "cuda". StorageError: no trained model there, or a damaged one;
    ConfigError: no path, no such device.
    """
    if not isinstance(run, str | PathLike):
        raise ConfigError(f"load takes the path of a run, not {_kind(run)}")
    storage, place = Storage(fspath(run)), _device(device)
    with _own_torch(place):
        return Model(load_classifier(storage, place), storage)


def discover(
    *,
    embeddings: Any = None,
    labels: Any = None,
    ids: Any = None,
    overwrite: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Model:
    """``uno discover`` from Python: find the classes in ``unlabeled``, given
    ``labeled`` images of others.

        uno.discover(labeled="photos/known", unlabeled="photos/new", num_novel=12, output="runs/photos")
        uno.discover(data="digits", batch_size=128, objective={"epsilon": 0.1})
        uno.discover(embeddings=X, labels=y, num_novel=12, output="runs/vectors")
        uno.discover(config="mine.yaml", **{"discover.epochs": 20})

    Every option of the command is a keyword, with its defaults, precedence and checks:
    short (``num_novel``), dotted, or in a mapping for its section; ``config`` is a YAML
    file, a mapping, or a list of them. The same call again resumes, or returns the
    model of the finished run; ``overwrite`` starts over. ``quiet``: no bar and no lines
    but warnings. Ctrl-C (in the main thread) saves and raises Interrupted.

    ``embeddings``: an array or tensor of numbers (N, D), or (N, V, D) with V views of
    each row; ``labels``: N names or numbers of classes; a missing value (None, NaN,
    pandas.NA, null) or a negative number for none; ``ids``: N names. They are kept
    beside the run, in OUTPUT-vectors-HASH.parquet.

    It works in this process; ``workers=N`` trains on N workers of Ray, on this machine
    or on the cluster of ``RAY_ADDRESS``.

    Where the command ends with a line it raises an UnoError: ConfigError (a
    ValueError), NumericsError, StorageError or Interrupted.
    """  # noqa: E501
    if embeddings is None:
        if labels is not None or ids is not None:
            raise ConfigError("labels and ids go with embeddings")
        return _discover(settings, overwrite, quiet)
    stored = stored_embeddings(settings, embeddings, labels, ids, overwrite)
    with stored as on_file:
        return _discover(on_file, overwrite, quiet)


@contextmanager
def stored_embeddings(
    settings: Mapping[str, Any],
    embeddings: Any,
    labels: Any,
    ids: Any,
    overwrite: bool,
) -> Iterator[dict[str, Any]]:
    """Store embeddings beside the run that is trained on them.

    The name of the file contains a hash of its content, so that no call replaces the
    vectors of an earlier run. At the end a file that the run does not use is deleted:
    the new one if the run was refused, and the earlier one if it was started over.

    Args:
        settings: The keywords of :func:`discover`.
        embeddings: Numbers (N, D), or (N, V, D).
        labels: N classes, or None.
        ids: N names, or None.
        overwrite: Whether a run in the same directory is started over.

    Yields:
        The keywords of a run on the stored file.

    Raises:
        ConfigError: The arguments do not fit, or the directory holds a run on others.
    """
    given = from_keywords(settings)
    if own := {"data.source", "data.labeled"} & given.keys():
        raise ConfigError(f"give either embeddings or {own.pop()}, not both")
    config = override(Config(), completed({**given, "data.source": f"{VECTORS}:"}))
    vectors, output = given_vectors(embeddings, labels, ids), str(config.output)
    beside = f"{full_path(output)}-{VECTORS}"
    place, earlier = f"{beside}-{vectors.digest[:12]}.parquet", vectors_of(output)
    if earlier not in (None, place) and not overwrite:
        raise ConfigError(
            f"{output} was trained on other data: other embeddings, labels or ids;"
            " pass overwrite=True to start over, or another output"
        )
    folder, name = split(place)
    is_new = not Storage(folder).exists(name)
    if is_new:
        vectors.store(place)
    try:
        yield {**settings, "data": f"{VECTORS}:{place}"}
    finally:
        with suppress(UnoError):  # a damaged directory may refer to any of them
            now = vectors_of(output)
            if is_new and now != place:
                _delete(place)
            is_ours = re.fullmatch(
                rf"{re.escape(beside)}-\w{{12}}\.parquet", earlier or ""
            )
            if is_ours and earlier is not None and now != earlier:
                _delete(earlier)


def vectors_of(output: str) -> str | None:
    """Return the file of vectors that the run in a directory uses, or None.

    Raises:
        ConfigError: The directory holds a run whose configuration is damaged.
    """
    storage = Storage(output)
    if not storage.exists(CONFIG_FILE):
        return None
    source = flatten(directory.read_config_tree(storage)).get("data.source")
    kind, _, path = str(source).partition(":")
    return path if kind == VECTORS else None


def _delete(path: str) -> None:
    folder, name = split(path)
    Storage(folder).delete(name)


def _discover(settings: Mapping[str, Any], overwrite: bool, quiet: bool) -> Model:
    """Run :func:`discover` with the settings of a run, whose data is stored."""
    from uno.session import pipeline  # to load a model takes less

    given = from_keywords(settings)
    config, now = (
        override(Config(), completed(given, choose=True)),
        torch.get_num_threads(),
    )
    try:  # the caller's own work goes on with as many threads as before
        with (
            torch_threads(now),
            suppress_output(quiet),
            _own_torch(torch.device("cpu")),
        ):
            pipeline.discover(config, given, overwrite)
    except Exception as error:
        if (meant := as_user_error(error)) is None:
            raise
        raise meant from error
    return load(str(config.output))


def _device(name: Any) -> torch.device:
    """One that this machine has. ConfigError: it has not, or models do not run
    there.
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
def _own_torch(device: torch.device) -> Iterator[None]:
    """Numbers on ``device`` as anywhere, whatever the caller has set: default dtype and
    device, autocast. In a forked child, where OpenMP waits for ever for the threads of
    its parent, by one thread, as in the workers of PyTorch's loaders. ConfigError: a
    GPU in a forked child of a process that has used one.
    """
    if os.getpid() != PROCESS:
        if device.type == "cuda" and torch.cuda._is_in_bad_fork():
            raise ConfigError(
                "a forked process cannot use CUDA: start it by multiprocessing's"
                ' "spawn"'
            )
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


def _items(images: Any) -> list[Image | BadImage]:
    """Every image as what ``decode_many`` takes, or why it has no pixels."""
    if isinstance(images, Tensor):
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            found = f"{images.dtype} {tuple(images.shape)}"
            raise ConfigError(
                f"a tensor of images must be uint8 (N, 3, H, W), not {found}"
            )
        images = images.cpu().permute(0, 2, 3, 1).numpy()
    single = isinstance(images, np.ndarray) and (
        images.ndim == 2 or images.shape[2:] == (3,)
    )
    if isinstance(images, (str, bytes, PathLike, PIL.Image.Image)) or single:
        raise ConfigError(
            "predict takes several images; put a single one in a list: predict([image])"
        )
    if isinstance(images, Mapping) or hasattr(images, "columns"):
        raise ConfigError(
            "predict takes the column of a table that holds the paths, such as"
            ' table["path"]'
        )
    if not isinstance(images, Iterable) or getattr(images, "shape", None) == ():
        raise ConfigError(
            f"predict takes a list or column of images, not {_kind(images)}"
        )
    images = images.to_pylist() if hasattr(images, "to_pylist") else images
    return [_item(image, row) for row, image in enumerate(images)]


def _kind(value: Any) -> str:
    """Of which type something is that was given in the place of something else."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    return "None" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def _item(image: Any, row: int) -> Image | BadImage:
    if isinstance(image, (str, bytes)):
        return str(image) if isinstance(image, str) else bytes(image)
    if isinstance(image, PathLike):
        return str(fspath(image))
    if isinstance(image, PIL.Image.Image):
        try:
            image = np.asarray(to_rgb(PIL.ImageOps.exif_transpose(image)))
        # OSError: a file opened lazily, and truncated
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
    raise ConfigError(f"image {row} is {_kind(image)}; images are {takes}")
