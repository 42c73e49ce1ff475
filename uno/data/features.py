"""Compute the features of a frozen encoder once, and keep them in a cache.

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
from importlib.metadata import version
from itertools import chain
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
from uno.data.decode import decode_many, ok_mask, prefetch_map
from uno.data.files import FileEntry, Storage, normalize_path, with_remote_facts
from uno.data.images import Image, Images
from uno.data.mapped import user_cache
from uno.data.plan import FEATURES, VIEW_SEED, augment_generator
from uno.data.splits import Task
from uno.data.vectors import write_vectors
from uno.encoder import code_of
from uno.errors import ConfigError, StorageError
from uno.runtime import BATCH_SIZE, PACKAGES, Runtime
from uno.text import plural
from uno.threads import torch_threads

VERSION = 5  # increased when features are computed or stored in another way
CHUNK_ROWS = 128  # rows that one thread or worker encodes at once
ROWS_AT_ONCE = 16  # rows of a chunk whose pixels are in memory
# images that pass the encoder at once: on CPUs 8 are 1.7 times as fast as 32
CPU_IMAGES, CUDA_IMAGES = BATCH_SIZE, 256
# A file is written when it would have so many bytes, or after so many seconds.
PART_BYTES, PART_SECONDS = 32 * 2**20, 10.0
READERS = 4  # files that are read at the same time
INDEX = pa.schema(
    {
        "key": pa.large_string(),
        "part": pa.int64(),
        "first": pa.int64(),
        "reason": pa.large_string(),
    }
)
# Features are constant if their mean distance from their mean is less than this share
# of their mean norm, and huge if their mean norm is larger than the second number.
CONSTANT, HUGE = 1e-5, 1e6
ODD = {
    "zero": "the features of all images are zero",
    "constant": "the features of all images are the same",
    "huge": f"the features are larger than {HUGE:.0e}",
}

log = logging.getLogger(__name__)

Zeros = Callable[[tuple[int, ...]], Tensor]
"""Allocates float32 zeros of a shape, in memory or in a file that is mapped."""


class Chunk(NamedTuple):
    """Features of some rows of a task.

    Attributes:
        rows: int64 (n,), the numbers of the rows in the task.
        features: float32 (n, 1 + V, D), zeros for rows that cannot be read and for the
            random views of test rows.
        reasons: For each row the reason why it cannot be read, or None.
    """

    rows: np.ndarray
    features: Tensor
    reasons: list[str | None]


Compute = Callable[[np.ndarray], Iterable[Chunk]]
"""Encodes the rows int64 (n,) of a task, in that order."""


class FeatureJob(NamedTuple):
    """The images to encode, and how to encode them.

    Attributes:
        config: The configuration of the run.
        task: The rows.
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
        """The path of the cache below the cache directory.

        It ends in a hash of :attr:`facts`.
        """
        text = json.dumps(self.facts, sort_keys=True)
        return f"features/{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def ids(self, rows: np.ndarray) -> list[str]:
        """Return the ids of rows.

        Args:
            rows: int64 (n,), numbers of rows of the task.
        """
        return self.task.rows.ids.take(rows).to_pylist()

    def has_views(self, rows: np.ndarray) -> np.ndarray:
        """Return which rows have random views: training rows, if there are such views.

        Args:
            rows: int64 (n,), numbers of rows of the task.

        Returns:
            bool (n,).
        """
        return self.task.is_train[rows] & (self.num_views > 1)


def feature_job(config: Config, task: Task, encoder: nn.Module) -> FeatureJob:
    """Describe how the rows of a task are encoded by an encoder.

    The weights are hashed, which takes 0.1 s for 20 MB.

    Args:
        config: The configuration of the run.
        task: The rows.
        encoder: The frozen encoder, in eval mode.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        values = tensor.detach().cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy().tobytes())
    facts = settings(config) | {
        "version": VERSION,
        "weights": digest.hexdigest(),
        "packages": _versions(config),
        **code_of(config.model.encoder, encoder),
    }
    return FeatureJob(config, task, encoder, facts)


def _versions(config: Config) -> dict[str, str]:
    """Return the versions of the packages that decode and encode images, by name.

    The suffix that tells builds of PyTorch for CPUs from those for GPUs is removed.
    """
    library = config.model.encoder.partition(":")[0]
    names = {"torch", "pillow"} | {library} & {"timm", "torchvision"}
    names.update(PACKAGES.get(config.compute.encoder_runtime, ())[:1])
    return {name: version(name).partition("+")[0] for name in sorted(names)}


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that features depend on, as JSON values by name.

    They are the encoder, its runtime and precision, the views, and how images are
    resized and normalized.
    """
    data = config.data
    if config.augment.num_cached_views:
        views = _views(config).model_dump(mode="json")
    else:
        views = {"size": config.augment.large.size}  # the evaluation view depends on it
    return {
        "encoder": config.model.encoder,
        "views": views,
        "bf16": config.compute.precision == "bf16",
        "runtime": config.compute.encoder_runtime,
        "transform": [data.stored_size, data.mean, data.std, data.interpolation],
    }


def _views(config: Config) -> AugmentConfig:
    """Return the augmentation of the V random views.

    It is the augmentation of the run's large views, without small views.
    """
    large = config.augment.large.model_copy(
        update={"num_views": config.augment.num_cached_views}
    )
    small = config.augment.small.model_copy(update={"num_views": 0})
    return config.augment.model_copy(update={"large": large, "small": small})


def view_seeds(ids: Sequence[str]) -> np.ndarray:
    """Return the seeds with which the random views of rows are drawn.

    A seed depends only on the row's id, so runs of all seeds have the same views.

    Args:
        ids: The ids of n rows.

    Returns:
        int64 (n,), not negative.
    """
    digests = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in ids)
    return np.array([int.from_bytes(digest) >> 1 for digest in digests], np.int64)


def encode_chunk(job: FeatureJob, encoder: nn.Module, rows: np.ndarray) -> Chunk:
    """Decode and encode some rows.

    Args:
        job: The task to encode, and how.
        encoder: The encoder in eval mode on its device, or a :class:`Runtime` of it.
        rows: int64 (n,), numbers of rows of the task.

    Raises:
        ConfigError: The encoder returns numbers that are not finite.
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
    """Return why features cannot distinguish images.

    Args:
        features: (N, D).

    Returns:
        A key of :data:`ODD` ('zero', 'constant' or 'huge'), or '' for usable features.
    """
    exact = features.double()
    norm = float(exact.norm(dim=1).mean())
    if norm == 0 or norm > HUGE:
        return "zero" if norm == 0 else "huge"
    spread = float((exact - exact.mean(dim=0)).norm(dim=1).mean())
    return "constant" if spread < CONSTANT * norm else ""


def not_finite(config: Config) -> ConfigError:
    """Return the error to raise for features that are not finite."""
    return ConfigError(
        f"model.encoder {config.model.encoder} returns non-finite numbers"
    )


def decode_rows(
    config: Config, seeds: np.ndarray, images: Sequence[Image], has_views: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[str | None]]:
    """Decode the pixels that the encoder sees of some rows. Every image is read once.

    Args:
        config: The configuration of the run.
        seeds: int64 (n,), from :func:`view_seeds`.
        images: The images of the n rows.
        has_views: bool (n,), the rows that have random views.

    Returns:
        The pixels uint8 (n, :func:`row_bytes`): the square of the evaluation view, then
        the crops of the random views, black where there are none; bool (n,), the rows
        that have crops; and for each row the reason why it cannot be read, or None.
    """
    data, cropper = config.data, _cropper(config)
    squares = np.zeros((len(images), 3, data.stored_size, data.stored_size), np.uint8)
    crops = np.zeros((len(images), cropper.row_bytes), np.uint8)
    why: list[str | None] = [None] * len(images)
    for rows in (np.flatnonzero(has_views), np.flatnonzero(~has_views)):
        if not len(rows):
            continue
        some = [images[row] for row in rows.tolist()]
        if has_views[rows[0]]:
            own, position = squares[rows], np.zeros(len(rows), np.int64)
            crops[rows], reasons = cropper.crop(seeds[rows], position, some, own)
        else:
            how = data.stored_size, 1, data.interpolation
            decoded, reasons = decode_many(some, *how)
            own = decoded.numpy()
        squares[rows] = own
        for row, reason in zip(rows.tolist(), reasons, strict=True):
            why[row] = reason
    pixels = np.concatenate([squares.reshape(len(images), -1), crops], axis=1)
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
    """Encode the rows of :func:`decode_rows`.

    Args:
        config: The configuration of the run.
        encoder: The encoder in eval mode on its device, or a :class:`Runtime` of it.
        seeds: int64 (n,), from :func:`view_seeds`.
        pixels: uint8 (n, :func:`row_bytes`).
        viewed: bool (n,), the rows that have crops of random views.
        ok: bool (n,), the rows that could be read.

    Returns:
        Features float32 (n, 1 + V, D) on the CPU, zeros for rows that are not ``ok``
        and for random views that a row does not have.
    """
    device = next(encoder.parameters()).device
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
    """Return the V normalized random views of one row.

    Args:
        config: The configuration of the run.
        seed: The seed of the row, from :func:`view_seeds`.
        crops: uint8 (1, bytes), the crops of the row.

    Returns:
        V tensors (1, 3, S, S).
    """
    return augment_crops(
        _cropper(config).split(crops),
        _views(config),
        augment_generator(VIEW_SEED, FEATURES, seed),
        config.data.mean,
        config.data.std,
        torch.zeros(1, dtype=torch.int64),
        num_rows=1,
        side=config.data.stored_size,
    )


def row_bytes(config: Config) -> int:
    """Return the number of bytes of a row's pixels: its square and its crops."""
    return _square_bytes(config) + _cropper(config).row_bytes


def _square_bytes(config: Config) -> int:
    """Return the number of bytes of a row's stored square, uint8 (3, S, S)."""
    return 3 * config.data.stored_size**2


def _cropper(config: Config) -> Cropper:
    """Return the object that crops the random views of rows.

    Its random numbers depend on a training step. The seed of a row is used as the step.
    """
    data = config.data
    return Cropper(
        VIEW_SEED, FEATURES, 1, _views(config), data.stored_size, data.interpolation
    )


def _encode(config: Config, encoder: nn.Module, images: Tensor) -> Tensor:
    """Encode normalized images.

    On a CPU all batches have one size: the last one is filled up with black images.

    Args:
        config: The configuration of the run.
        encoder: The encoder in eval mode on its device, or a :class:`Runtime` of it.
        images: (B, 3, S, S), on the encoder's device.

    Returns:
        Features float32 (B, D) on the CPU.
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


def first_images(job: FeatureJob, rows: np.ndarray) -> Tensor:
    """Decode the evaluation views of the first rows, at most :data:`ROWS_AT_ONCE`.

    Images that cannot be read are black.

    Args:
        job: The task to encode, and how.
        rows: int64 (n,), numbers of rows of the task.

    Returns:
        Normalized images (B, 3, S, S).
    """
    rows = rows[:ROWS_AT_ONCE]
    none, images = np.zeros(len(rows), bool), job.task.rows.images.read_images(rows)
    pixels, *_ = decode_rows(job.config, np.zeros(len(rows), np.int64), images, none)
    return _plain_views(job.config, torch.from_numpy(pixels))


def _plain_views(config: Config, pixels: Tensor) -> Tensor:
    """Return the normalized evaluation views of rows.

    Args:
        config: The configuration of the run.
        pixels: uint8 (n, :func:`row_bytes`).

    Returns:
        (n, 3, S, S), on the device of ``pixels``.
    """
    data = config.data
    squares = pixels[:, : _square_bytes(config)].unflatten(
        1, (3, data.stored_size, data.stored_size)
    )
    return eval_view(squares, side(config), data.mean, data.std)


def side(config: Config) -> int:
    """Return the side S of the evaluation view in pixels."""
    return min(config.augment.large.size, config.data.stored_size)


def split_rows(rows: np.ndarray) -> list[np.ndarray]:
    """Split row numbers int64 (n,) into chunks of :data:`CHUNK_ROWS`, in order."""
    return np.split(rows, np.arange(CHUNK_ROWS, len(rows), CHUNK_ROWS))


def compute_local(
    job: FeatureJob, encoder: nn.Module, rows: np.ndarray, threads: int
) -> Iterator[Chunk]:
    """Encode rows by threads of this process, each of which encodes a chunk at a time.

    PyTorch's number of threads is 1 meanwhile, also for the calling thread. A thread
    takes over that number when it begins, so it is set before the threads start.

    Args:
        job: The task to encode, and how.
        encoder: The encoder in eval mode on its device, or a :class:`Runtime` of it.
        rows: int64 (n,), numbers of rows of the task.
        threads: Number of threads.

    Yields:
        The chunks, in order.

    Raises:
        ConfigError: The encoder returns numbers that are not finite.
    """

    def compute(rows: np.ndarray) -> Chunk:
        """Encode a chunk with one thread of PyTorch."""
        torch.set_num_threads(1)
        return encode_chunk(job, encoder, rows)

    with torch_threads(1):
        yield from prefetch_map(compute, split_rows(rows), threads, threads)


def image_versions(images: Images, rows: np.ndarray) -> pa.Array:
    """Return a text for each image that changes if the image changes.

    It holds the size and the modification time of the file, or of the file that images
    are stored together in. Remote files that were named one by one take a request each.
    Images in memory have no time; their pixels or bytes are hashed.

    Args:
        images: The images of all rows.
        rows: int64 (n,), numbers of rows.

    Returns:
        An Arrow array of n large strings.

    Raises:
        ConfigError: Remote storage refuses a request.
    """
    content = images.content_keys(rows)
    if not isinstance(content, pa.Array):
        hashes = (hashlib.blake2b(item, digest_size=16) for item in content)
        content = pa.array((found.hexdigest() for found in hashes), pa.large_string())
    times = images.times(rows)
    unknown = np.flatnonzero(times < 0)
    paths = images.paths(rows[unknown]) if len(unknown) else []
    named = [FileEntry(path, path, -1, -1) for path in paths if path]
    if len(named) == len(unknown) > 0:
        times[unknown] = [file.time for file in with_remote_facts(named)]
    return joined(" ", content, decimal(times))


class FeatureCache:
    """The cache for one way of encoding, in a cache directory.

    Args:
        storage: The cache directory.
        job: The task whose features are read and written, and how they are computed.
    """

    def __init__(self, storage: Storage, job: FeatureJob) -> None:
        self._storage, self._job = storage, job
        self._damaged = list[str]()
        rows = np.arange(len(job.task.rows))
        self._ids = pa.array(job.ids(rows), pa.large_string())
        self._versions = image_versions(job.task.rows.images, rows)
        self._counts = np.where(job.has_views(rows), job.num_views, 1)

    @property
    def path(self) -> str:
        """The path or URI of the folder, for messages."""
        return self._storage.below(self._job.folder)

    def missing_rows(self) -> np.ndarray:
        """Return the numbers of the rows that the cache does not have.

        A file that is damaged is removed, and a line is logged.

        Returns:
            int64 (n,), ascending.

        Raises:
            StorageError: The cache directory cannot be listed.
        """
        _, index = self._read_index()
        self._warn_of_damage()
        return np.flatnonzero(self._find_rows(index) < 0)

    def read(
        self, zeros: Zeros = torch.zeros
    ) -> tuple[Tensor, list[str | None], np.ndarray]:
        """Read the features of all rows that the cache has.

        A file that is damaged is removed, and a line is logged.

        Args:
            zeros: Allocates the features.

        Returns:
            Features float32 (N, 1 + V, D), zeros where there are none; for each row the
            reason why it cannot be read, or None; and the numbers int64 (n,) of the
            rows that are to be encoded, ascending. These include rows that could not be
            read before and now can.

        Raises:
            StorageError: The cache directory cannot be listed.
        """
        job, (names, index) = self._job, self._read_index()
        features = zeros((len(job.task.rows), job.num_views, job.num_features))
        found = self._find_rows(index)
        known = np.flatnonzero(found >= 0)
        own = index.take(pa.array(found[known]))
        part, first = own["part"].to_numpy(), own["first"].to_numpy()
        reasons: list[str | None] = [None] * len(found)
        for row, reason in zip(known.tolist(), own["reason"].to_pylist(), strict=True):
            reasons[row] = reason

        def read_part(at: np.ndarray) -> np.ndarray:
            """Copy the features of one file into ``features``.

            Args:
                at: int64 (m,), positions in ``known`` of the rows in the file.

            Returns:
                The numbers of these rows if the file is damaged, otherwise no number.
            """
            values = self._read_values(names[part[at[0]]])
            if values is None:
                return known[at]
            for count in np.unique(self._counts[known[at]]):
                some = at[self._counts[known[at]] == count]
                chosen = values[first[some][:, None] + np.arange(count)]
                features[known[some], :count] = torch.from_numpy(chosen)
            return np.arange(0)

        order = np.argsort(part, kind="stable")
        of_parts = np.split(order, np.flatnonzero(np.diff(part[order])) + 1)
        with ThreadPoolExecutor(READERS) as pool:
            lost = list(pool.map(read_part, of_parts if len(known) else []))
        for row in chain.from_iterable(lost):
            reasons[row] = None
        self._warn_of_damage()
        again = [np.flatnonzero(found < 0), *lost, self._readable_again(reasons)]
        return features, reasons, np.unique(np.concatenate(again))

    def append(
        self, rows: np.ndarray, features: Tensor, reasons: Sequence[str | None]
    ) -> None:
        """Write the features of some rows to a new file, which appears whole.

        Args:
            rows: int64 (n,), numbers of the rows.
            features: float32 (n, 1 + V, D).
            reasons: For each of the n rows the reason why it cannot be read, or None.

        Raises:
            StorageError: The file cannot be written.
        """
        columns = {
            "id": self._ids.take(pa.array(rows)),
            "version": self._versions.take(pa.array(rows)),
            "reason": pa.array(reasons, pa.large_string()),
        }
        name = f"{self._job.folder}/{uuid.uuid4().hex}.parquet"
        with _naming_the_option():
            path = self._storage.below(name)
            write_vectors(path, features, self._counts[rows], columns)

    def write_facts(self) -> None:
        """Write ``facts.json``, for people who look at the folder.

        Raises:
            StorageError: The folder cannot be written.
        """
        note = "features of a frozen encoder; they can be deleted at any time"
        text = json.dumps({"note": note, **self._job.facts}, indent=1)
        with _naming_the_option():
            self._storage.write(f"{self._job.folder}/facts.json", text.encode())

    def _read_index(self) -> tuple[list[str], pa.Table]:
        """Read which image is where in the files of the cache.

        Returns:
            The names of all files; and a table with the columns ``key`` (the image's
            id, version and number of views); ``part``, the position of the file's name;
            ``first``, the number of the image's first vector in the file; and
            ``reason``, null for an image that can be read. These images come first.

        Raises:
            StorageError: The cache directory cannot be listed.
        """
        with _naming_the_option():
            names = self._storage.list(self._job.folder)
        names = [name for name in names if name.endswith(".parquet")]
        with ThreadPoolExecutor(READERS) as pool:
            parts = list(pool.map(self._read_part_index, range(len(names)), names))
        index = pa.concat_tables([INDEX.empty_table(), *filter(None, parts)])
        is_bad = index["reason"].is_valid().to_numpy()
        return names, index.take(pa.array(np.argsort(is_bad, kind="stable")))

    def _read_part_index(self, part: int, name: str) -> pa.Table | None:
        """Return the rows of the index for one file, or None if it is damaged.

        Args:
            part: The position of the file among all files.
            name: The name of the file.
        """
        table = self._read_columns(name, ["id", "version", "view", "reason"])
        if table is None:
            return None
        first = np.flatnonzero(table["view"].to_numpy() == 0)
        counts = decimal(np.diff(first, append=len(table)))
        found = table.take(pa.array(first)).combine_chunks()
        key = joined("\n", found["id"], found["version"], counts)
        columns = [key, np.full(len(first), part), first, found["reason"]]
        return pa.table(columns, schema=INDEX)

    def _find_rows(self, index: pa.Table) -> np.ndarray:
        """Return the position of each row in the index, or -1.

        Args:
            index: The table of :meth:`_read_index`.

        Returns:
            int64 (N,). Of several entries for an image the first one is taken.
        """
        keys = joined("\n", self._ids, self._versions, decimal(self._counts))
        found = pa.compute.index_in(keys, value_set=index["key"])
        return found.fill_null(-1).to_numpy().astype(np.int64)

    def _read_values(self, name: str) -> np.ndarray | None:
        """Return the vectors float32 (R, D) of a file, or None if it is damaged."""
        table = self._read_columns(name, ["embedding"])
        if table is None:
            return None
        values = table["embedding"].combine_chunks().flatten().to_numpy()
        return values.reshape(len(table), self._job.num_features)

    def _read_columns(self, name: str, columns: list[str]) -> pa.Table | None:
        """Read columns of a file.

        Returns:
            The table, or None if the file is damaged, which is then removed. A file is
            also damaged if it lacks a column or its vectors do not have D numbers.
        """
        path, width = f"{self._job.folder}/{name}", self._job.num_features
        try:
            with self._storage.open(path) as stream:
                file = pq.ParquetFile(stream, page_checksum_verification=True)
                schema = file.schema_arrow
                if not {*columns, "embedding"} <= {*schema.names}:
                    raise StorageError(f"it has the columns {schema.names}")
                kind = schema.field("embedding").type
                if kind != pa.list_(pa.float32(), width):
                    raise StorageError(f"its vectors are {kind}, not {width} numbers")
                return file.read(columns, use_threads=False)
        except StorageError as error:
            self._damaged.append(f"{name}: {error}")
            with suppress(StorageError):
                self._storage.delete(path)
            return None

    def _warn_of_damage(self) -> None:
        """Log a line about the damaged files since the last call, if there were any."""
        if self._damaged:
            log.warning(
                "recomputing %s in %s, the first is %s",
                plural(len(self._damaged), "damaged file"),
                self.path,
                self._damaged[0],
            )
            self._damaged.clear()

    def _readable_again(self, reasons: Sequence[str | None]) -> np.ndarray:
        """Return the numbers of the rows that could not be read and now can.

        Their files have not changed, but their storage may have been unavailable.

        Args:
            reasons: For each of the N rows the reason why it could not be read, or
                None.

        Returns:
            int64 (n,), ascending.
        """
        data, bad = self._job.config.data, np.flatnonzero(~ok_mask(reasons))
        if not len(bad):
            return bad
        images = self._job.task.rows.images.take(bad)
        _, now = decode_many(images, data.stored_size, None, data.interpolation)
        return bad[ok_mask(now)]


@contextmanager
def _naming_the_option() -> Iterator[None]:
    """Add the option that stores features elsewhere to a StorageError of the block.

    Raises:
        StorageError: The ``with`` block raises one.
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
    zeros: Zeros = torch.zeros,
) -> tuple[Tensor, list[str | None]]:
    """Return features from a cache, and encode the rows that it lacks.

    Rows that were encoded are written to the cache every few seconds, also when the
    computation is stopped, so that it resumes later.

    Args:
        cache: The cache.
        compute: Encodes the rows that are missing.
        on_progress: Called with the number of rows that are done, and of all rows.
        zeros: Allocates the features.

    Returns:
        Features float32 (N, 1 + V, D), and for each row the reason why it cannot be
        read, or None.

    Raises:
        StorageError: The cache cannot be read or written.
    """
    features, reasons, missing = cache.read(zeros)
    if not len(missing):
        return features, reasons
    cache.write_facts()  # shows before any work whether the directory is writable
    total, unsaved, saved_at = len(features), list[Chunk](), time.monotonic()
    most_rows = PART_BYTES // (4 * features[0].numel())

    def save() -> None:
        """Write the chunks that are not in the cache yet, if any, to a new file."""
        nonlocal saved_at
        chunks, saved_at = [*unsaved], time.monotonic()
        unsaved.clear()
        if chunks:
            rows, values, why = zip(*chunks, strict=True)
            reasons_of_part = [*chain.from_iterable(why)]
            cache.append(np.concatenate(rows), torch.cat(values), reasons_of_part)

    done = total - len(missing)
    on_progress(done, total)
    try:
        for chunk in compute(missing):
            features[chunk.rows] = chunk.features
            for row, reason in zip(chunk.rows.tolist(), chunk.reasons, strict=True):
                reasons[row] = reason
            unsaved.append(chunk)
            num_rows = sum(len(chunk.rows) for chunk in unsaved)
            if num_rows >= most_rows or time.monotonic() - saved_at > PART_SECONDS:
                save()
            done += len(chunk.rows)
            on_progress(done, total)
    finally:
        save()
    return features, reasons


def cache_directory(config: Config) -> str:
    """Return the path or URI of the directory in which features are kept.

    It is ``compute.cache``, or else the environment variable UNO_CACHE, or else the
    folder ``uno`` in the user's cache directory.
    """
    return normalize_path(config.compute.cache or user_cache())
