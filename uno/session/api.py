"""The Python interface: ``uno.discover(...)`` and ``uno.load(run)`` give a model, ``model.predict(images)``
its predictions. It mirrors the commands, and shows itself in a notebook.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from os import PathLike, fspath
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from torch import Tensor

from uno.config import VECTORS
from uno.data.decode import BadImage, decoded, ok_mask, to_rgb
from uno.data.files import Storage, full_path
from uno.data.images import Image, Images
from uno.data.vectors import Vectors, require_kind, store_vectors
from uno.errors import ConfigError, StorageError, as_user_error
from uno.results import show
from uno.results.classes import OutputClass
from uno.results.infer import NUMBERS, Classifier, load_classifier, score_rows
from uno.results.trust import verdict
from uno.runs import REPORT_FILE, directory
from uno.session.console import suppress_output
from uno.session.place import Place
from uno.session.settings import configured, from_keywords

STRICT = "train/novel/task_agnostic_strict/acc/best"
ImageLike = str | PathLike[str] | bytes | np.ndarray | PIL.Image.Image


@dataclass(frozen=True)
class Prediction:
    """The class of one image; without one where the image could not be read, ``reason`` says why."""

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
    """The classes of N images; fields are those of ``uno predict``, as arrays of length N.

    A row that could not be read has class -1, no name, NaN for every number, and a reason.
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

    def __getitem__(self, row: int) -> Prediction:
        index = int(self.class_index[row])
        return Prediction(
            class_index=None if index < 0 else index, class_name=self.class_name[row], kind=self.kind[row],
            **{name: float(getattr(self, name)[row]) for name in NUMBERS}, reason=self.reason[row],
        )  # fmt: skip

    def __iter__(self) -> Iterator[Prediction]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self):,} images: {show.counted(self.class_name)}>"

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame``, one row an image, without the arrays. ConfigError: pandas is missing."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise ConfigError("to_pandas needs the package 'pandas': pip install pandas") from None
        names = ("path", "class_index", "class_name", "kind", *NUMBERS, "reason")
        return pandas.DataFrame({name: getattr(self, name) for name in names})

    def _repr_html_(self) -> str:
        rows = [
            (path or f"image {i}", one.class_name, one.kind, one.probability, one.head_agreement, one.reason)
            for i, (path, one, _) in enumerate(zip(self.path, self, self.first, strict=False))
        ]
        title, facts = f"{len(self):,} images", [show.counted(self.class_name)]
        return show.predictions_html(title, facts, self.first, rows, len(self) - len(rows))


class Model:
    """A trained model. ``classes`` are its outputs, in order; ``size`` the side of its images in pixels;
    ``run`` the directory, a path or URI, that it came from.
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
        return f"{known} known and {novel} novel classes, {what}"

    @cached_property
    def _members(self) -> dict[int, show.Members]:
        try:
            return show.members(self._storage, self._classifier.config)
        except StorageError:  # a damaged table: a model is no worse for it
            return {}

    def _repr_html_(self) -> str:
        facts = str(verdict(self.metrics) or "").splitlines()
        facts += [self._counts, f"run: {self.run}", f"report: {self.report}" if self.report else ""]
        if (right := self.metrics.get(STRICT)) is not None:
            facts.append(f"novel training rows put into the right class: {right:.1%} (strict)")
        title = f"uno.{type(self).__name__}"
        return show.model_html(title, facts, self.classes, self._members, self.size)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The run's ``metrics.json``, fractions by path, e.g. ``train/novel/task_aware/acc/best``; empty for
        a copy of ``model/``.
        """
        return directory.read_results(self._storage) or {}

    @property
    def report(self) -> str | None:
        """Where the run's HTML report is, if it has one."""
        return self._storage.path(REPORT_FILE) if self._storage.exists(REPORT_FILE) else None

    def predict(self, images: Sequence[ImageLike] | np.ndarray | Tensor) -> Predictions:
        """Classify images of any size: a list of paths or URIs, encoded bytes, PIL images and uint8 arrays
        (H, W, 3) or (H, W); one uint8 array (N, H, W, 3); or one uint8 tensor (N, 3, H, W). They are made
        square as in training: shorter side resized to ``size``, centre crop. A model of vectors takes an
        array or tensor of numbers (N, D).

        Unreadable files are rows with a reason; ConfigError, a ValueError: something else was given.
        """
        model, given = self._classifier, images
        if model.config.model.takes_vectors:
            vectors = Vectors.of(given, "predict")
            require_kind(model.config.model, vectors)
            items: list[Image | BadImage] = [b""] * len(vectors)
            source: Images | Sequence[Image] = vectors
        else:
            items = _items(given)
            source = [b"" if isinstance(item, BadImage) else item for item in items]
        batches = np.split(np.arange(len(items)), range(model.batch_rows, len(items), model.batch_rows))
        how = model.config.data.interpolation
        decode = partial(decoded, source, size=model.size, interpolation=how)
        parts = list(score_rows(model, decode, batches))
        found = zip(items, (reason for _, some, _ in parts for reason in some), strict=True)
        reasons = [str(item) if isinstance(item, BadImage) else reason for item, reason in found]
        scores = [some for *_, some in parts if some is not None]
        ok = ok_mask(reasons)

        def column(name: str, *width: int) -> np.ndarray:
            full = np.full((len(items), *width), -1 if name == "class_index" else np.float32("nan"))
            if scores:
                full[ok] = np.concatenate([getattr(some, name).numpy() for some in scores])
            return full

        index = column("class_index")
        called = [self.classes[i].display_name if i >= 0 else (None, None) for i in index.tolist()]
        width = int(model.module.encoder.num_features)  # type: ignore[arg-type]
        return Predictions(
            class_index=index, class_name=[name for name, _ in called], reason=reasons,
            kind=[kind for _, kind in called], **{name: column(name) for name in NUMBERS},
            probabilities=column("probabilities", len(self.classes)), embedding=column("features", width),
            path=[item if isinstance(item, str) else None for item in items],
            first=[b"" if isinstance(item, BadImage) else item for item in items[: show.MAX_ROWS]],
        )  # fmt: skip


def load(run: str | PathLike[str], device: str = "cpu") -> Model:
    """The model of a finished run, by path or URI, or of a copy of its ``model/`` folder, on "cpu" or
    "cuda". StorageError: no trained model there, or a damaged one.
    """
    storage = Storage(fspath(run))
    return Model(load_classifier(storage, device), storage)


def discover(
    *, embeddings: Any = None, labels: Any = None, ids: Any = None, overwrite: bool = False,
    quiet: bool = False, **settings: Any,
) -> Model:  # fmt: skip
    """``uno discover`` from Python: find the classes in ``unlabeled``, given ``labeled`` images of others.

        uno.discover(labeled="photos/known", unlabeled="photos/new", num_novel=12, output="runs/photos")
        uno.discover(data="digits", batch_size=128, objective={"epsilon": 0.1})
        uno.discover(embeddings=X, labels=y, num_novel=12, output="runs/vectors")
        uno.discover(config="mine.yaml", **{"discover.epochs": 20})

    Every option of the command is a keyword, with its defaults, precedence and checks: short (``num_novel``),
    dotted, or in a mapping for its section; ``config`` is a YAML file, a mapping, or a list of them. The same
    call again resumes, or returns the model of the finished run; ``fresh`` starts over. ``quiet``: no bar and
    no lines but warnings. Ctrl-C (in the main thread) saves and raises Interrupted.

    ``embeddings``: an array or tensor of numbers (N, D), or (N, V, D) with V views of each row; ``labels``: N
    names or numbers of classes, None, NaN or a negative number for none; ``ids``: N names. They are kept
    beside the run, in OUTPUT-vectors.parquet.

    It works in this process: ``pipelines.api.discover`` takes the same settings and has workers.

    Where the command ends with a line it raises an UnoError: ConfigError (a ValueError), NumericsError,
    StorageError or Interrupted.
    """
    if embeddings is None:
        if labels is not None or ids is not None:
            raise ConfigError("labels and ids go with embeddings")
    else:
        settings = with_embeddings(settings, embeddings, labels, ids)
    return discover_at(None, settings, overwrite, quiet)


def with_embeddings(settings: Mapping[str, Any], embeddings: Any, labels: Any, ids: Any) -> dict[str, Any]:
    """``settings`` of a run on vectors that are in memory, stored beside it. ConfigError: they do not fit."""
    given = from_keywords(settings)
    if own := {"data.source", "data.labeled"} & given.keys():
        raise ConfigError(f"give either embeddings or {own.pop()}, not both")
    place = full_path(f"{configured({**given, 'data.source': f'{VECTORS}:'}).output}-vectors.parquet")
    store_vectors(place, embeddings, labels, ids)
    return {**settings, "data": f"{VECTORS}:{place}"}


def discover_at(elsewhere: Place | None, settings: Mapping[str, Any], overwrite: bool, quiet: bool) -> Model:
    """:func:`discover`, whose workers, if ``settings`` ask for some, are ``elsewhere``."""
    from uno.session import job  # it trains: to load a model takes less

    given = from_keywords(settings)
    config, threads = configured(given), torch.get_num_threads()
    try:
        with suppress_output(quiet):
            job.discover(config, given, overwrite, elsewhere=elsewhere)
    except Exception as error:
        if (meant := as_user_error(error)) is None:
            raise
        raise meant from error
    finally:
        torch.set_num_threads(threads)  # the caller's own work goes on as before
    return load(str(config.output))


def _items(images: Any) -> list[Image | BadImage]:
    """Every image as what ``decode_many`` takes, or why it has no pixels."""
    if isinstance(images, Tensor):
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            found = f"{images.dtype} {tuple(images.shape)}"
            raise ConfigError(f"a tensor of images must be uint8 (N, 3, H, W), not {found}")
        images = images.cpu().permute(0, 2, 3, 1).numpy()
    if isinstance(images, (str, bytes, PathLike, PIL.Image.Image)) or getattr(images, "ndim", 4) != 4:
        raise ConfigError("predict takes several images; put a single one in a list: predict([image])")
    return [_item(image, row) for row, image in enumerate(images)]


def _item(image: Any, row: int) -> Image | BadImage:
    if isinstance(image, (str, bytes)):
        return image
    if isinstance(image, PathLike):
        return str(fspath(image))
    if isinstance(image, PIL.Image.Image):
        try:
            image = np.asarray(to_rgb(PIL.ImageOps.exif_transpose(image)))
        except (BadImage, OSError) as error:  # OSError: a file opened lazily, and truncated
            return BadImage(" ".join(str(error).split()))
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim in (2, 3) and image.size:
        image = np.repeat(image[..., None], 3, axis=2) if image.ndim == 2 else image
        if image.shape[2] == 3:
            return image
    what = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
    takes = "paths, bytes, PIL images or uint8 arrays (H, W, 3) or (H, W)"
    raise ConfigError(f"image {row} is {what}; images are {takes}")
