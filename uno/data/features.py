"""Compute the features of a frozen encoder once, and keep them in a cache of files.

Each image has features of its evaluation view. A training image also has features of V
random views. Together they are float32 (N, 1 + V, D), the evaluation view first, and
take the place of images in training.

A cache is a folder for one way of encoding: the encoder and its weights, the pixels
that it sees, the views, and the versions of the programs that compute. It serves runs
on any data and with any seed. It holds Parquet files in the format that ``uno embed``
writes. An image is found there by its id and by a text that changes if the image
changes, so a new or changed image is encoded and the others are read.

Features of a row do not depend on the rows beside it, except that on a GPU batches may
differ in size. Batches on a CPU have one size and are computed by one thread each, so
any number of threads, processes and workers gives the same bits.
"""

import hashlib
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uno.augment import augment_crops, eval_view
from uno.config import AugmentConfig, Config
from uno.crops import Cropper
from uno.data.columns import decimal, joined
from uno.data.decode import Decoding, decode_many, ok_mask, prefetch_map
from uno.data.embeddings import write_vectors
from uno.data.files import (
    FileEntry,
    Storage,
    is_transient,
    normalize_path,
    user_cache,
    with_remote_facts,
)
from uno.data.images import Image, Images
from uno.data.sampling import FEATURES, VIEW_SEED, augment_generator
from uno.data.splits import Task
from uno.encoders.build import code_of
from uno.encoders.runtimes import BATCH_SIZE, OPENVINO, Runtime
from uno.errors import ConfigError, StorageError, one_line
from uno.threads import torch_threads

VERSION = 6  # increased when features are computed or stored in another way
CHUNK_ROWS = 128  # rows that one thread or worker encodes at once
ROWS_AT_ONCE = 16  # rows of a chunk whose pixels are in memory
# images that pass the encoder at once: on CPUs 8 are 1.7 times as fast as 32
CPU_IMAGES, CUDA_IMAGES = BATCH_SIZE, 256
# A file is written when it would have so many bytes, or after so many seconds.
PART_BYTES, PART_SECONDS = 32 * 2**20, 10.0
READERS = 4  # files that are read at the same time
# Features are constant if their mean distance from their mean is less than this share
# of their mean norm, and huge if their mean norm is larger than the second number.
CONSTANT, HUGE = 1e-5, 1e6
ODD = {
    "zero": "the features of all images are zero",
    "constant": "the features of all images are the same",
    "huge": f"the features are larger than {HUGE:.0e}",
}

log = logging.getLogger(__name__)


class Chunk(NamedTuple):
    """The features of some rows of a data set, which were computed together.

    Attributes:
        rows: The numbers of the rows among all rows of the run, int64 (n,).
        features: float32 (n, 1 + V, D), D features of the evaluation view and of V
            random views of each row. They are zeros for rows that cannot be read and
            for the random views of test rows.
        reasons: For each row the reason why it cannot be read, or None.
    """

    rows: np.ndarray
    features: Tensor
    reasons: list[str | None]


Compute = Callable[[np.ndarray], Iterable[Chunk]]
"""Encodes the rows int64 (n,) of a task, in that order."""


class FeatureJob(NamedTuple):
    """The rows to encode by a frozen encoder, and how to encode them.

    Attributes:
        config: The configuration of the run.
        task: All rows of the run, with their images.
        encoder: The frozen encoder, in eval mode.
        facts: All that features depend on besides the image, as JSON values.
    """

    config: Config
    task: Task
    encoder: nn.Module
    facts: dict[str, Any]

    @property
    def num_views(self) -> int:
        """The number of views of a training row, 1 + V with V random views."""
        return 1 + self.config.augment.num_cached_views

    @property
    def num_features(self) -> int:
        """The number of features D that the encoder returns for a view."""
        return int(self.encoder.num_features)  # type: ignore[arg-type]

    @property
    def folder(self) -> str:
        """The path of the cache's folder below the cache directory.

        It is 'features/HASH', where HASH is the first 32 hex digits of the SHA-256 of
        :attr:`facts` as JSON with sorted keys.
        """
        text = json.dumps(self.facts, sort_keys=True)
        return f"features/{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def ids(self, rows: np.ndarray) -> list[str]:
        """Return the ids of some rows as texts, in the order of ``rows``.

        Args:
            rows: Row numbers among all rows of the run, int64 (n,).
        """
        return self.task.rows.ids.take(rows).to_pylist()

    def has_views(self, rows: np.ndarray) -> np.ndarray:
        """Return which rows have random views.

        A training row has them if V, the number of random views in the configuration,
        is not 0. A test row never has them.

        Args:
            rows: Row numbers among all rows of the run, int64 (n,).

        Returns:
            bool (n,).
        """
        return self.task.is_train[rows] & (self.num_views > 1)


def feature_job(config: Config, task: Task, encoder: nn.Module) -> FeatureJob:
    """Describe how the rows of a task are encoded by an encoder.

    The weights are hashed, which takes 0.1 s for 20 MB. Nothing is encoded.

    Args:
        config: The configuration of the run.
        task: The rows.
        encoder: The frozen encoder, in eval mode.

    Returns:
        The three arguments, and as ``facts`` a mapping with the keys of
        :func:`settings` and four more: "version" of the format of the cache; "weights",
        the SHA-256 of the encoder's ``state_dict`` (names, types, shapes and values) as
        hex digits; "packages", package -> version, for the packages that decode and
        encode images; and "code", Python module -> SHA-256 of its file, for an encoder
        of the user's own. For such an encoder "packages" also has the packages of its
        modules. For others "code" is empty.

    Raises:
        PackageNotFoundError: The configuration names OpenVINO as the runtime, and it is
            not installed.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        values = tensor.detach().cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy().tobytes())
    own = code_of(config.model.encoder, encoder)
    facts = settings(config) | {
        "version": VERSION,
        "weights": digest.hexdigest(),
        "packages": own.get("packages", {}) | _package_versions(config),
        "code": own.get("code", {}),
    }
    return FeatureJob(config, task, encoder, facts)


def _package_versions(config: Config) -> dict[str, str]:
    """Return the versions of the packages that decode and encode images, by name.

    The names are "pillow" and "torch"; "timm" or "torchvision" if the encoder comes
    from there; and "openvino" if the configuration names it as the runtime. The part of
    a version from '+' on, such as '+cpu', is removed.

    Args:
        config: The configuration, which names the library and runtime of the encoder.

    Raises:
        PackageNotFoundError: One of these packages is not installed.
    """
    library = config.model.encoder.partition(":")[0]
    names = {"torch", "pillow"} | {library} & {"timm", "torchvision"}
    names |= {config.compute.encoder_runtime} & {OPENVINO}
    return {name: version(name).partition("+")[0] for name in sorted(names)}


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that features depend on, as JSON values by name.

    Args:
        config: The configuration of the run.

    Returns:
        A mapping with five keys. "encoder" is the name of the encoder, "runtime" the
        name of its runtime, and "bf16" whether it computes in bfloat16. "views" is the
        whole augmentation of the random views, or only the size of a large view if
        there are no random views. "transform" is a list: the side of the stored squares
        in pixels, the mean and the standard deviation of the channels, the
        interpolation, and the range of stored values of images of more than 8 bits.
    """
    data = config.data
    if config.augment.num_cached_views:
        views = _random_view_settings(config).model_dump(mode="json")
    else:
        views = {"size": config.augment.large.size}  # the evaluation view depends on it
    return {
        "encoder": config.model.encoder,
        "views": views,
        "bf16": config.compute.precision == "bf16",
        "runtime": config.compute.encoder_runtime,
        "transform": [data.stored_size, data.mean, data.std, *Decoding.of(data)],
    }


def _random_view_settings(config: Config) -> AugmentConfig:
    """Return the augmentation of the V random views.

    It is the augmentation of the run, with V large views and no small views. V is
    ``augment.num_cached_views``.
    """
    large = config.augment.large.model_copy(
        update={"num_views": config.augment.num_cached_views}
    )
    small = config.augment.small.model_copy(update={"num_views": 0})
    return config.augment.model_copy(update={"large": large, "small": small})


def view_seeds(ids: Sequence[str]) -> np.ndarray:
    """Return the seeds with which the random views of rows are drawn.

    A seed depends only on the row's id, so the views of a row do not depend on the seed
    of the run.

    Args:
        ids: The ids of n rows.

    Returns:
        int64 (n,), not negative.
    """
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in ids)
    return np.array([int.from_bytes(digest) >> 1 for digest in digests], np.int64)


def encode_chunk(job: FeatureJob, encoder: nn.Module, rows: np.ndarray) -> Chunk:
    """Decode the images of some rows, and compute their features.

    Args:
        job: The rows to encode, and how.
        encoder: The encoder in eval mode on its device, or a :class:`Runtime` of it.
        rows: The numbers of the rows among all rows of the run, int64 (n,), at least
            one.

    Returns:
        The features of the rows on the CPU, in the order of ``rows``. A row whose image
        is missing or cannot be decoded has zeros and a reason.

    Raises:
        ConfigError: The encoder returns numbers that are not finite, a file that holds
            many images cannot be read, or a :class:`Runtime` cannot compute the encoder
            or gives other features than PyTorch.
        StorageError: A file of an image cannot be read now, but perhaps later.
    """
    images = job.task.rows.images.read_images(rows)
    seeds, has_views = view_seeds(job.ids(rows)), job.has_views(rows)
    features, reasons = list[Tensor](), list[str | None]()
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        pixels, viewed, why = decode_rows(
            job.config, seeds[some], images[some], has_views[some]
        )
        features.append(
            encode_rows(
                job.config,
                encoder,
                seeds[some],
                torch.from_numpy(pixels),
                viewed,
                ok_mask(why),
            )
        )
        reasons += why
    chunk = Chunk(rows, torch.cat(features), reasons)
    if not chunk.features.isfinite().all():
        raise not_finite(job.config)
    return chunk


def oddity(features: Tensor) -> str:
    """Return why features cannot distinguish images, in a word.

    Args:
        features: (N, D), finite numbers of at least one row.

    Returns:
        The first word that applies: 'zero' if all features are zero; 'huge' if the mean
        Euclidean norm of the rows is above :data:`HUGE` (1e6); 'constant' if the mean
        distance of the rows from their mean vector is less than :data:`CONSTANT` (1e-5)
        times the mean norm, as it is for a single row; '' for usable features.
    """
    exact = features.double()
    norm = float(exact.norm(dim=1).mean())
    if norm == 0 or norm > HUGE:
        return "zero" if norm == 0 else "huge"
    spread = float((exact - exact.mean(dim=0)).norm(dim=1).mean())
    return "constant" if spread < CONSTANT * norm else ""


def not_finite(config: Config) -> ConfigError:
    """Return the error to raise for features that are not finite.

    Its message names the encoder of the configuration.
    """
    return ConfigError(
        f"model.encoder {config.model.encoder} returns non-finite numbers"
    )


def decode_rows(
    config: Config, seeds: np.ndarray, images: Sequence[Image], has_views: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[str | None]]:
    """Decode the pixels of some rows that an encoder needs. Every image is read once.

    Args:
        config: The configuration of the run.
        seeds: The seeds of the random views of each row, int64 (n,), from
            :func:`view_seeds`.
        images: The images of the n rows.
        has_views: bool (n,), the rows that have random views.

    Returns:
        Three values. The first are the pixels of each row in one line, uint8 (n,
        bytes): the centered square of the image, resized to (3, T, T) with T =
        ``data.stored_size``, from which the evaluation view is cut; then the V crops of
        the random views (3, S, S) with S = ``augment.large.size``, without the other
        steps of the augmentation. Crops are black (0) for a row without random views,
        and so are all pixels of a row that cannot be read. The second is bool (n,), the
        rows that have random views and can be read. The third has for each row the
        reason why it cannot be read, or None.

    Raises:
        StorageError: A file of an image cannot be read now, but perhaps later.
    """
    data, cropper = config.data, _cropper(config)
    squares = np.zeros((len(images), 3, data.stored_size, data.stored_size), np.uint8)
    crops = np.zeros((len(images), cropper.row_bytes), np.uint8)
    reasons = np.full(len(images), None)
    if len(viewed := np.flatnonzero(has_views)):
        own, some = squares[viewed], [images[i] for i in viewed.tolist()]
        crops[viewed], reasons[viewed] = cropper.crop(
            seeds[viewed], np.zeros_like(viewed), some, own
        )
        squares[viewed] = own
    if len(plain := np.flatnonzero(~has_views)):
        decoded, reasons[plain] = decode_many(
            [images[i] for i in plain.tolist()], data.stored_size, 1, Decoding.of(data)
        )
        squares[plain] = decoded.numpy()
    pixels = np.concatenate([squares.reshape(len(images), -1), crops], axis=1)
    why = reasons.tolist()
    return pixels, has_views & ok_mask(why), why


@torch.inference_mode()
def encode_rows(
    config: Config,
    encoder: nn.Module,
    seeds: np.ndarray,
    pixels: Tensor,
    viewed: np.ndarray,
    ok: np.ndarray,
) -> Tensor:
    """Compute the features of rows from the pixels that :func:`decode_rows` returns.

    The evaluation view is the center of the square. The crops become random views by
    the other steps of the augmentation of large views (flip, affine map, changes of
    color and blur), with the random numbers of the row's seed. All views are normalized
    before they are encoded.

    Args:
        config: The configuration of the run.
        encoder: The encoder in eval mode on its device, or a :class:`Runtime` of it.
        seeds: The seeds of the random views of each row, int64 (n,), from
            :func:`view_seeds`.
        pixels: The pixels of each row, uint8 (n, bytes), on any device: the image as a
            square, then the crops of the random views.
        viewed: bool (n,), the rows that have crops of random views and could be read.
        ok: bool (n,), the rows that could be read.

    Returns:
        Features float32 (n, 1 + V, D) on the CPU: D features of the evaluation view and
        of each of V random views. They are zeros for rows that are not ``ok`` and for
        random views that a row does not have. Whether they are finite is not checked.

    Raises:
        ConfigError: A :class:`Runtime` cannot compute the encoder or gives other
            features than PyTorch.
    """
    tensors = (*encoder.parameters(), *encoder.buffers())
    device = tensors[0].device if tensors else torch.device("cpu")
    width = int(encoder.num_features)  # type: ignore[arg-type]
    num_views = config.augment.num_cached_views
    features = torch.zeros(len(pixels), 1 + num_views, width)
    features[:, 0] = _encode(config, encoder, _plain_views(config, pixels.to(device)))
    if viewed.any():
        chosen = torch.from_numpy(np.flatnonzero(viewed))
        crops = pixels[chosen, _square_bytes(config) :].to(device)
        views = [
            torch.cat(_random_views(config, int(seed), own))
            for seed, own in zip(seeds[viewed], crops.split(1), strict=True)
        ]  # a tensor (V, 3, S, S) for each row
        encoded = _encode(config, encoder, torch.cat(views))
        features[chosen, 1:] = encoded.unflatten(0, (len(views), num_views))
    features[~torch.from_numpy(ok)] = 0
    return features


def _random_views(config: Config, seed: int, crops: Tensor) -> list[Tensor]:
    """Make the V normalized random views of one row from its crops.

    The crops are flipped, mapped by an affine map, changed in color and blurred as the
    augmentation of large views says, and then normalized. With ``augment.weak`` the
    changes of color and the blur are left out. The seed decides the random numbers. V
    is the number of random views that the configuration asks for, and S the side of a
    large view in pixels.

    Args:
        config: The configuration of the run.
        seed: The seed of the row, from :func:`view_seeds`.
        crops: uint8 (1, bytes), the pixels of the random crops of the row, as the
            :class:`~uno.crops.Cropper` of this configuration has written them.

    Returns:
        V tensors float32 (1, 3, S, S), on the device of ``crops``.
    """
    return augment_crops(
        _cropper(config).split(crops),
        _random_view_settings(config),
        augment_generator(VIEW_SEED, FEATURES, seed),
        config.data.mean,
        config.data.std,
        torch.zeros(1, dtype=torch.int64),
        num_rows=1,
        side=config.data.stored_size,
    )


def row_bytes(config: Config) -> int:
    """Return how many bytes of pixels :func:`decode_rows` returns for a row.

    They are the image as a square and the crops of its V random views. The number is
    the same for rows without random views.
    """
    return _square_bytes(config) + _cropper(config).row_bytes


def _square_bytes(config: Config) -> int:
    """Return the number of bytes of an image decoded to a square, uint8 (3, S, S).

    S is ``data.stored_size``.
    """
    return 3 * config.data.stored_size**2


def _cropper(config: Config) -> Cropper:
    """Return the object that crops the random views of rows from their images.

    Its random numbers depend on a training step. The seed of a row is used as the step.
    """
    data = config.data
    return Cropper(
        VIEW_SEED,
        FEATURES,
        1,
        _random_view_settings(config),
        data.stored_size,
        Decoding.of(data),
    )


def _encode(config: Config, encoder: nn.Module, images: Tensor) -> Tensor:
    """Compute the features of normalized images in batches.

    On a CPU all batches have one size, 8 images: the last one is filled up with zeros,
    whose features are dropped. On a GPU a batch has at most 256 images. With
    ``compute.precision`` "bf16" the encoder runs under autocast to bfloat16.

    Args:
        config: The configuration of the run.
        encoder: The encoder in eval mode on its device, or a :class:`Runtime` of it,
            which divides the images and chooses the precision itself.
        images: float32 (B, 3, S, S), normalized, on the encoder's device.

    Returns:
        Features float32 (B, D) on the CPU.

    Raises:
        ConfigError: A :class:`Runtime` cannot compute the encoder or gives other
            features than PyTorch.
    """
    if isinstance(encoder, Runtime):
        return encoder(images)
    kind, size = images.device.type, CUDA_IMAGES
    filled = images
    if kind == "cpu":
        size = CPU_IMAGES
        filled = F.pad(images, (0, 0, 0, 0, 0, 0, 0, -len(images) % size))
    bf16 = config.compute.precision == "bf16"
    with torch.autocast(kind, torch.bfloat16, enabled=bf16):
        parts = [
            encoder(part.contiguous(memory_format=torch.channels_last)).float().cpu()
            for part in filled.split(size)
        ]
    return torch.cat(parts)[: len(images)]


def _plain_views(config: Config, pixels: Tensor) -> Tensor:
    """Make the evaluation view of each row: the center of its square, normalized.

    The center is cropped and not resized.

    Args:
        config: The configuration of the run.
        pixels: The pixels of each row, uint8 (n, bytes): the image as a square (3, T,
            T) with T = ``data.stored_size``, then crops that are not used here.

    Returns:
        float32 (n, 3, S, S) on the device of ``pixels``. S is :func:`side`, at most T.
    """
    data = config.data
    squares = pixels[:, : _square_bytes(config)].unflatten(
        1, (3, data.stored_size, data.stored_size)
    )
    return eval_view(squares, side(config), data.mean, data.std)


def side(config: Config) -> int:
    """Return the side S of the evaluation view in pixels.

    It is ``augment.large.size``, the side of a large view, or ``data.stored_size``, the
    side of the stored squares, if that is smaller.
    """
    return min(config.augment.large.size, config.data.stored_size)


def split_rows(rows: np.ndarray) -> list[np.ndarray]:
    """Split row numbers int64 (n,) into chunks of :data:`CHUNK_ROWS` (128), in order.

    The last chunk may be smaller. Without rows there is one empty chunk.
    """
    return np.split(rows, np.arange(CHUNK_ROWS, len(rows), CHUNK_ROWS))


def compute_local(
    job: FeatureJob, encoder: nn.Module, rows: np.ndarray, threads: int
) -> Iterator[Chunk]:
    """Encode rows by threads of this process, each of which encodes a chunk at a time.

    Each thread computes with one CPU thread of PyTorch, and so does the calling thread
    until the generator ends. Up to ``threads`` further chunks are computed while the
    caller uses one.

    Args:
        job: The rows of the run, and how they are encoded.
        encoder: The encoder in eval mode on its device, or a :class:`Runtime` of it.
        rows: The numbers of the rows to encode, int64 (n,), at least one.
        threads: Number of threads.

    Yields:
        The features of up to :data:`CHUNK_ROWS` consecutive entries of ``rows``, in
        order.

    Raises:
        ConfigError: The encoder returns numbers that are not finite, a file that holds
            many images cannot be read, or a :class:`Runtime` cannot compute the encoder
            or gives other features than PyTorch.
        StorageError: A file of an image cannot be read now, but perhaps later.
    """
    compute = partial(encode_chunk, job, encoder)
    with torch_threads(1):
        yield from prefetch_map(compute, split_rows(rows), threads, threads)


def image_versions(images: Images, rows: np.ndarray) -> pa.Array:
    """Return a text for each image, by which a changed image is noticed.

    It holds the stored size of the image in bytes (-1 if it is not known; in a Parquet
    file about the mean size in the row group), and the modification time in ns since
    1970 of its file, or of the file that images are stored together in. Times that are
    not known are looked up for images that are remote files of their own, with a
    request for each file. They stay -1 for such a file that is missing, and for images
    that are stored together. The version of a missing local file is '-1 0'.

    An image in memory has the time 0, and in place of the size a hash of its pixels
    with their shape, or of its encoded bytes. In a list of paths in memory, an image
    has a hash of its path, and the time of its file.

    Args:
        images: The images of all rows.
        rows: int64 (n,), numbers of rows.

    Returns:
        An Arrow array of n large strings: the size or hash, a space and the time, such
        as '1804 1719900000000000000'.

    Raises:
        ConfigError: Remote storage refuses a request or cannot be reached, or a file
            that holds many images cannot be read.
    """
    content = images.content_keys(rows)
    if not isinstance(content, pa.Array):
        hashes = (hashlib.blake2b(item, digest_size=16) for item in content)
        content = pa.array((found.hexdigest() for found in hashes), pa.large_string())
    times = images.times(rows)
    unknown = np.flatnonzero(times < 0)
    paths = images.paths(rows[unknown]) if len(unknown) else []
    has_path = np.array([bool(path) for path in paths], dtype=bool)
    files = [FileEntry(path, path, -1, -1) for path in paths if path]
    times[unknown[has_path]] = [file.time for file in with_remote_facts(files)]
    return joined(" ", content, decimal(times))


class _Index(NamedTuple):
    """Which images one file of a feature cache holds, and where.

    Attributes:
        keys: Arrow array (I,) of text: the id, version and number of views of each of I
            images, with a line break between them.
        first: The row of the file that has the first vector of each image, the one of
            its evaluation view, int64 (I,).
    """

    keys: Any
    first: np.ndarray


class FeatureCache:
    """The cached features of one way of encoding, in a cache directory.

    Images that cannot be read have no features in the cache, so each use tries to read
    them again. Making an object finds out the version of every image by
    :func:`image_versions`, which may take requests to remote storage.

    Args:
        storage: The cache directory. The cache is the folder ``job.folder`` in it.
        job: The rows whose features are read and written, and how they are computed.

    Raises:
        ConfigError: The version of an image cannot be found out.
    """

    def __init__(self, storage: Storage, job: FeatureJob) -> None:
        self._storage, self._job = storage, job
        rows = np.arange(len(job.task.rows))
        self._has_views = job.has_views(rows)
        self._columns = {
            "id": pa.array(job.ids(rows), pa.large_string()),
            "version": image_versions(job.task.rows.images, rows),
        }

    @property
    def path(self) -> str:
        """The path or URI of the cache's folder, a str that messages show."""
        return self._storage.below(self._job.folder)

    def read(self) -> tuple[Tensor, np.ndarray]:
        """Read the features of all N rows that the cache has.

        A row is found by its id, the version of its image (:func:`image_versions`) and
        its number of views. A file of features that is damaged or cannot be read is
        removed if possible, and a warning is logged. Its rows count as rows that the
        cache lacks.

        Returns:
            Features float32 (N, 1 + V, D), D features of the evaluation view and of V
            random views of each row; and the numbers int64 (n,) of the rows that the
            cache lacks, ascending. The features are zeros for these rows, and for the
            random views of test rows.

        Raises:
            StorageError: The cache directory cannot be listed, or the storage cannot be
                reached now.
        """
        job, num = self._job, len(self._has_views)
        features = torch.zeros(num, job.num_views, job.num_features)
        is_read = np.zeros(num, bool)
        with _naming_the_option():
            names = self._storage.list(job.folder)
        names = [name for name in names if name.endswith(".parquet")]
        with ThreadPoolExecutor(READERS) as pool:
            indexes = list(pool.map(self._read_index, names))
            empty = pa.array([], pa.large_string())
            keys = pa.chunked_array([empty, *(index.keys for index in indexes)])
            counts = decimal(np.where(self._has_views, job.num_views, 1))
            wanted = joined("\n", *self._columns.values(), counts)
            found = pa.compute.index_in(wanted, value_set=keys).fill_null(-1).to_numpy()
            # The rows in the order of the files, each file with its part of them.
            order = np.argsort(found, kind="stable")
            starts = np.cumsum([0, *(len(index.keys) for index in indexes)])
            bounds = np.searchsorted(found[order], starts)

            def copy(number: int) -> None:
                """Copy the features of one file into ``features``.

                The rows of the run that are found in the file are marked in
                ``is_read``. If the file is damaged or cannot be read, nothing is copied
                and marked.

                Args:
                    number: The index of the file in ``names``.
                """
                rows = order[bounds[number] : bounds[number + 1]]
                table = self._read_columns(names[number], ["embedding"])
                if table is None:
                    return
                values = table["embedding"].combine_chunks().flatten().to_numpy()
                values = values.reshape(len(table), job.num_features)
                first = indexes[number].first[found[rows] - starts[number]]
                features[rows, 0] = torch.from_numpy(values[first])
                viewed = self._has_views[rows]
                places = first[viewed, None] + np.arange(1, job.num_views)
                features[rows[viewed], 1:] = torch.from_numpy(values[places])
                is_read[rows] = True

            list(pool.map(copy, np.flatnonzero(np.diff(bounds)).tolist()))
        return features, np.flatnonzero(~is_read)

    def append(self, rows: np.ndarray, features: Tensor) -> None:
        """Write the features of some rows to a new file, which appears whole.

        Args:
            rows: int64 (n,), numbers of the rows. The caller leaves out rows that
                cannot be read.
            features: float32 (n, 1 + V, D), the evaluation view and V random views of
                each row. Of a row without random views, such as a test row, only the
                evaluation view is written.

        Raises:
            StorageError: The file cannot be written.
        """
        columns = {name: c.take(pa.array(rows)) for name, c in self._columns.items()}
        counts = np.where(self._has_views[rows], self._job.num_views, 1)
        name = f"{self._job.folder}/{uuid.uuid4().hex}.parquet"
        with _naming_the_option():
            write_vectors(self._storage.below(name), features, counts, columns)

    def write_facts(self) -> None:
        """Write ``facts.json``, for people who look at the folder of the cache.

        It holds the ``facts`` of the job (the settings, weights, packages and code that
        features depend on), and a note that the features can be deleted. The file is
        replaced if it exists. It is never read by this program.

        Raises:
            StorageError: The folder cannot be written.
        """
        note = "features of a frozen encoder; they can be deleted at any time"
        text = json.dumps({"note": note, **self._job.facts}, indent=1)
        with _naming_the_option():
            self._storage.write(f"{self._job.folder}/facts.json", text.encode())

    def _read_index(self, name: str) -> _Index:
        """Read which images a file of features holds, and where.

        The result has no images if the file is damaged or cannot be read. A warning is
        then logged, and the file is removed if possible.

        Args:
            name: The name of the file in the folder of the cache.

        Raises:
            StorageError: The storage cannot be reached now.
        """
        table = self._read_columns(name, ["id", "version", "view"])
        if table is None:
            return _Index(pa.array([], pa.large_string()), np.arange(0))
        first = np.flatnonzero(table["view"].to_numpy() == 0)
        counts = decimal(np.diff(first, append=len(table)))
        images = table.take(pa.array(first)).combine_chunks()
        keys = joined("\n", images["id"], images["version"], counts)
        return _Index(keys, first)

    def _read_columns(self, name: str, columns: list[str]) -> pa.Table | None:
        """Read columns of one file of features.

        Args:
            name: The name of the file in the folder of the cache.
            columns: The names of the columns.

        Returns:
            The table, or None if the file is damaged, is gone or cannot be read for
            another reason that lasts. A warning is then logged, and the file is removed
            if that is possible. A file is also damaged if it lacks one of ``columns``
            or "embedding", or if its vectors do not have D numbers.

        Raises:
            StorageError: The storage cannot be reached now.
        """
        path = f"{self._job.folder}/{name}"
        kind = pa.list_(pa.float32(), self._job.num_features)
        try:
            with self._storage.open(path) as stream:
                file = pq.ParquetFile(stream, page_checksum_verification=True)
                schema = file.schema_arrow
                lacks = {*columns, "embedding"} - {*schema.names}
                if lacks or schema.field("embedding").type != kind:
                    raise StorageError(f"its columns are {one_line(schema)}")
                return file.read(columns, use_threads=False)
        except StorageError as error:
            if is_transient(error):  # the file may be whole
                raise
            log.warning("recomputing a damaged file, %s/%s: %s", self.path, name, error)
            with suppress(StorageError):
                self._storage.delete(path)
            return None


@contextmanager
def _naming_the_option() -> Iterator[None]:
    """Add the option ``--compute.cache`` to the message of a StorageError.

    The user can store features elsewhere by this option.

    Raises:
        StorageError: The ``with`` block raises one. Its message is kept, and extended.
    """
    try:
        yield
    except StorageError as error:
        raise StorageError(
            f"{error}; --compute.cache DIRECTORY stores features elsewhere"
        ) from None


def cached_features(
    cache: FeatureCache,
    compute: Compute,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Tensor, list[str | None]]:
    """Return the features of all rows, from a cache or computed now.

    New features of readable rows are written to the cache after a chunk if there are 32
    MiB of them, or 10 s have passed since the last write or the start. They are also
    written at the end, and when ``compute`` raises an error, so that a later call
    encodes only the other rows. If the cache lacks any row, ``facts.json`` is written
    first, which says how features are computed (encoder, weights, views, versions).
    Rows that cannot be read are not cached: ``compute`` gets their numbers again in
    each call.

    Args:
        cache: The cache of the N rows.
        compute: Encodes the rows that the cache lacks. It is called once with their
            numbers, int64 (n,) in ascending order, and yields a :class:`Chunk` for some
            rows at a time. It is not called if the cache has all rows.
        on_progress: Called with two numbers: the rows that are done (with those of the
            cache), and all N rows. It is called before the first chunk and after each
            one, and not at all if the cache has all rows.

    Returns:
        Features float32 (N, 1 + V, D) with D numbers for each view: first the
        evaluation view, then V random views. And for each row the reason why it cannot
        be read, or None. The features are zeros for such rows, and for the random views
        of test rows.

    Raises:
        StorageError: The cache cannot be read or written.
        ConfigError: ``compute`` raises it, because the encoder returns numbers that are
            not finite. Other errors of ``compute`` are passed on, too.
    """
    features, missing = cache.read()
    reasons: list[str | None] = [None] * len(features)
    if not len(missing):
        return features, reasons
    cache.write_facts()  # shows before any work whether the directory is writable
    total, done = len(features), len(features) - len(missing)
    unsaved, saved_at = list[np.ndarray](), time.monotonic()
    most_rows = PART_BYTES // (4 * features[0].numel())
    on_progress(done, total)
    try:
        for chunk in compute(missing):
            features[chunk.rows] = chunk.features
            for row, reason in zip(chunk.rows.tolist(), chunk.reasons, strict=True):
                reasons[row] = reason
            unsaved.append(chunk.rows[ok_mask(chunk.reasons)])
            num_rows, seconds = sum(map(len, unsaved)), time.monotonic() - saved_at
            if num_rows >= most_rows or seconds > PART_SECONDS:
                _save(cache, features, unsaved)
                saved_at = time.monotonic()
            done += len(chunk.rows)
            on_progress(done, total)
    finally:
        _save(cache, features, unsaved)
    return features, reasons


def _save(cache: FeatureCache, features: Tensor, unsaved: list[np.ndarray]) -> None:
    """Write new features to the cache, if there are any, and empty the list of rows.

    Args:
        cache: The cache.
        features: The features of all rows, float32 (N, 1 + V, D): D features of the
            evaluation view and of each of V random views.
        unsaved: Numbers of the readable rows that are not in the cache yet, int64
            arrays. The list is emptied.

    Raises:
        StorageError: The file cannot be written.
    """
    rows = np.concatenate([*unsaved, np.arange(0)])
    unsaved.clear()
    if len(rows):
        cache.append(rows, features[torch.from_numpy(rows)])


def cache_directory(config: Config) -> str:
    """Return the path or URI of the directory in which features are kept.

    It is ``compute.cache``, or else the environment variable UNO_CACHE, or else the
    folder ``uno`` in XDG_CACHE_HOME, or in ``~/.cache`` if that is not set. An empty
    variable counts as not set. The directory is not created here.

    Args:
        config: The configuration of the run.
    """
    return normalize_path(config.compute.cache or user_cache())
