"""Features of a frozen encoder, computed once: of every image the evaluation view, of training rows V random
views besides. They take the place of images: float32 (N, 1 + V, D), the evaluation view first.

A cache serves every run with the same encoder, weights, views and data, whatever its seed. It is a folder
with a file for ``SHARD_ROWS`` rows, which proves its content and place: one that does not verify is computed
again. A row's features depend on nothing but its shard, and on a CPU every batch is computed by one thread,
and all have one size, so any number of threads, processes and workers gives the same bits. What computes them
(:mod:`uno.runtime`) and that size are stored beside them: a job that was killed continues with both.
At every start rows that have changed are looked for (:mod:`uno.data.snapshot`), and some encoded again.
"""

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from uno.augment import augment_crops, eval_view
from uno.config import AugmentConfig, Config, override
from uno.crops import Cropper
from uno.data import snapshot
from uno.data.decode import decode_many, ok_mask, prefetch_map
from uno.data.files import Storage, normalize_path, parse_json
from uno.data.images import Image, evenly_spaced
from uno.data.mapped import user_cache
from uno.data.output import seal, unseal
from uno.data.plan import FEATURES, augment_generator
from uno.data.splits import Task
from uno.encoder import code_of
from uno.errors import ConfigError, StorageError
from uno.runtime import TORCH, Plan, Runtime
from uno.text import plural

VERSION = 4  # of what is computed and how it is stored
SEED = 0  # of the views: not the run's, so that runs of all seeds share them
SHARD_ROWS = 128
ROWS_AT_ONCE = 16  # whose pixels are in memory
CPU_IMAGES, CUDA_IMAGES = 8, 256  # of a pass through the encoder; on CPUs 8 are 1.7 times as fast as 32
PLAN_FILE = "runtime.json"
PROBED_ROWS, PROBE_S = 8, 1.0  # that are encoded again: at least one, and no more after that time
CONSTANT, HUGE = 1e-5, 1e6  # mean distance from the mean over the mean norm, and that norm
ODD = {
    "zero": "the features of all images are zero", "constant": "the features of all images are the same",
    "huge": f"the features are larger than {HUGE:.0e}",
}  # fmt: skip
OF_SPREAD = 0.02  # of the distance of features from their mean, beyond which features of a row differ
NOISE = 2e-3  # of their norm: other devices, batches and threads
OF_BF16 = 3.0  # times the difference that bfloat16 makes

log = logging.getLogger(__name__)

Shard = tuple[Tensor, list[str | None]]
"""Features (n, 1 + V, D) of a shard's rows, and why a row has none."""
Zeros = Callable[[tuple[int, ...]], Tensor]
"""Where features of that shape are to be: in memory by default, or in a file that is mapped."""


class FeatureJob(NamedTuple):
    """The features of the rows of a task: what to compute, and under which name to keep it."""

    config: Config
    task: Task
    encoder: nn.Module
    key: str

    @property
    def num_features(self) -> int:
        """D."""
        return int(self.encoder.num_features)  # type: ignore[arg-type]

    @property
    def num_shards(self) -> int:
        """Shards of the task."""
        return -(-len(self.task.rows) // SHARD_ROWS)

    def rows(self, number: int) -> np.ndarray:
        """Row numbers of a shard, int64 (n,)."""
        first = number * SHARD_ROWS
        return np.arange(first, min(first + SHARD_ROWS, len(self.task.rows)))

    def load(self, number: int) -> tuple[list[Image], np.ndarray]:
        """The images of a shard as they are stored, and bool (n,): which are training rows."""
        rows = self.rows(number)
        return self.task.rows.images.read_images(rows), self.task.is_train[rows]


def feature_job(config: Config, task: Task, encoder: nn.Module) -> FeatureJob:
    """What the features of ``task`` under ``encoder`` depend on, hashed into a key; 0.1 s for 20 MB of it."""
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    facts = settings(config) | {
        "version": VERSION,
        "weights": digest.hexdigest(),
        "data": task.rows.fingerprint,
        **code_of(config.model.encoder, encoder),
    }
    if config.augment.num_cached_views:
        facts["training"] = hashlib.sha256(task.is_train.tobytes()).hexdigest()
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return FeatureJob(config, task, encoder, key)


def settings(config: Config) -> dict[str, Any]:
    """What features depend on besides the weights of the encoder and the data."""
    data, views = config.data, _views(config)
    return {
        "encoder": config.model.encoder,
        "views": views.model_dump(mode="json") if views.large.num_views else views.large.size,
        "bf16": config.compute.precision == "bf16",
        "transform": [data.stored_size, data.mean, data.std, data.interpolation],
    }  # fmt: skip


def _views(config: Config) -> AugmentConfig:
    """The cached views: those of the run's large kind."""
    large = config.augment.large.model_copy(update={"num_views": config.augment.num_cached_views})
    small = config.augment.small.model_copy(update={"num_views": 0})
    return config.augment.model_copy(update={"large": large, "small": small})


def compute_shard(
    config: Config, encoder: nn.Module, number: int, images: Sequence[Image], in_training: np.ndarray
) -> Shard:
    """Shard ``number`` of a job: features of its n ``images``, random views only of those ``in_training``
    (n,). ``encoder`` in eval mode, on any device. ConfigError: it returns non-finite numbers.
    """
    found, reasons = list[Tensor](), list[str | None]()
    for start in range(0, len(images), ROWS_AT_ONCE):
        own, first = slice(start, start + ROWS_AT_ONCE), number * SHARD_ROWS + start
        pixels, viewed, why = decode_rows(config, first, images[own], in_training[own])
        found.append(encode_rows(config, encoder, first, torch.from_numpy(pixels), viewed, ok_mask(why)))
        reasons += why
    joined = torch.cat(found)
    if not joined.isfinite().all():
        raise not_finite(config)
    return joined, reasons


def oddity(features: Tensor) -> str:
    """Why features (N, D) tell no images apart, a word of :data:`ODD`, or ""."""
    exact = features.double()
    norm = float(exact.norm(dim=1).mean())
    if norm == 0 or norm > HUGE:
        return "zero" if norm == 0 else "huge"
    spread = float((exact - exact.mean(dim=0)).norm(dim=1).mean())
    return "constant" if spread < CONSTANT * norm else ""


def not_finite(config: Config) -> ConfigError:
    """What is said of such features."""
    return ConfigError(f"model.encoder {config.model.encoder} returns non-finite numbers")


def decode_rows(
    config: Config, first: int, images: Sequence[Image], in_training: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[str | None]]:
    """What the encoder sees of rows from ``first`` on, all of one shard, n <= ROWS_AT_ONCE: uint8 (n,
    :func:`row_bytes`), the square and the crops of random views; which rows have these, bool (n,); and why a
    row has no features.
    """
    data, cropper, (number, start) = config.data, _cropper(config), divmod(first, SHARD_ROWS)
    squares, why = decode_many(images, data.stored_size, 1, data.interpolation)
    pixels = np.zeros((len(images), row_bytes(config)), np.uint8)
    viewed = in_training & ok_mask(why) & (config.augment.num_cached_views > 0)
    pixels[:, : _square_bytes(config)] = squares.flatten(1)
    if viewed.any():
        chosen = np.flatnonzero(viewed)
        some, steps = [images[i] for i in chosen.tolist()], np.full(len(chosen), number)
        pixels[chosen, _square_bytes(config) :], failed = cropper.crop(steps, start + chosen, some)
        for i, reason in zip(chosen.tolist(), failed, strict=True):  # read a second time
            why[i] = reason
    return pixels, viewed, why


@torch.inference_mode()
def encode_rows(
    config: Config, encoder: nn.Module, first: int, pixels: Tensor, viewed: np.ndarray, ok: np.ndarray
) -> Tensor:
    """Features (n, 1 + V, D) of the rows of :func:`decode_rows`, zeros of those that are not ``ok`` (n,)."""
    data, augment, cropper = config.data, _views(config), _cropper(config)
    device = next(encoder.parameters()).device
    plain = _encode(config, encoder, _plain_views(config, pixels.to(device)))
    features = plain.new_zeros(len(pixels), 1 + augment.large.num_views, plain.shape[1])
    features[:, 0] = plain
    if viewed.any():
        chosen, (number, start) = torch.from_numpy(np.flatnonzero(viewed)), divmod(first, SHARD_ROWS)
        crops, generator = pixels[chosen, _square_bytes(config) :], augment_generator(SEED, FEATURES, number)
        where = data.mean, data.std, start + chosen, SHARD_ROWS, data.stored_size
        views = augment_crops(cropper.split(crops.to(device)), augment, generator, *where)
        encoded = _encode(config, encoder, torch.cat(views)).unflatten(0, (len(views), -1))
        features[chosen, 1:] = encoded.transpose(0, 1)
    features[~torch.from_numpy(ok)] = 0
    return features


def row_bytes(config: Config) -> int:
    """Of the pixels of a row, its square and its crops."""
    return _square_bytes(config) + _cropper(config).row_bytes


def _square_bytes(config: Config) -> int:
    return 3 * config.data.stored_size**2


def _cropper(config: Config) -> Cropper:
    data = config.data
    return Cropper(SEED, FEATURES, SHARD_ROWS, _views(config), data.stored_size, data.interpolation)


def _encode(config: Config, encoder: nn.Module, images: Tensor) -> Tensor:
    """(B, 3, S, S) -> features (B, D) float32 on the CPU."""
    if isinstance(encoder, Runtime):
        return encoder(images)
    kind = images.device.type
    size, bf16 = CPU_IMAGES if kind == "cpu" else CUDA_IMAGES, config.compute.precision == "bf16"
    with torch.autocast(kind, torch.bfloat16, enabled=bf16):
        parts = [
            encoder(part.contiguous(memory_format=torch.channels_last)).float().cpu()
            for part in images.split(size)
        ]
    return torch.cat(parts)


def first_images(job: FeatureJob, number: int) -> Tensor:
    """What the encoder sees of the first rows of a shard, the evaluation view (B, 3, S, S), black squares of
    those that cannot be read.
    """
    config, rows = job.config, job.rows(number)[:ROWS_AT_ONCE]
    none = np.zeros(len(rows), bool)
    pixels, *_ = decode_rows(config, int(rows[0]), job.task.rows.images.read_images(rows), none)
    return _plain_views(config, torch.from_numpy(pixels))


def _plain_views(config: Config, pixels: Tensor) -> Tensor:
    """The evaluation view (n, 3, S, S) of the pixels of rows."""
    data, side = config.data, min(config.augment.large.size, config.data.stored_size)
    squares = pixels[:, : _square_bytes(config)].unflatten(1, (3, data.stored_size, data.stored_size))
    return eval_view(squares, side, data.mean, data.std)


def compute_local(
    job: FeatureJob, encoder: nn.Module, numbers: Sequence[int], threads: int
) -> Iterator[tuple[int, Shard]]:
    """The shards ``numbers``, in order, each by one of ``threads`` threads of this process."""

    def compute(number: int) -> tuple[int, Shard]:
        torch.set_num_threads(1)  # of this thread
        return number, compute_shard(job.config, encoder, number, *job.load(number))

    return prefetch_map(compute, numbers, threads, threads)


def pack_shard(key: str, number: int, shard: Shard) -> bytes:
    """Shard ``number`` of the job ``key`` as the content of a file."""
    features, reasons = shard
    return seal(shard_name(key, number), {"features": features}, {"reasons": json.dumps(reasons)})


def unpack_shard(key: str, number: int, data: bytes) -> Shard:
    """The shard of a file. ValueError or KeyError: it is damaged, or another one's."""
    tensors, facts = unseal(shard_name(key, number), data)
    return tensors["features"], json.loads(facts["reasons"])


class FeatureCache:
    """The files of one job in a cache directory."""

    def __init__(self, storage: Storage, job: FeatureJob) -> None:
        self._storage, self._job, self._folder = storage, job, f"features/{job.key}"

    @property
    def snapshot(self) -> tuple[Storage, str]:
        """Where that of the rows is."""
        return self._storage, f"{self._folder}/{snapshot.FILE}"

    @property
    def path(self) -> str:
        """Where they are."""
        return self._storage.below(self._folder)

    def read(self, zeros: Zeros = torch.zeros) -> tuple[Tensor, list[str | None], list[int]]:
        """Features (N, 1 + V, D), why a row has none, and the numbers of shards that are missing. A file that
        does not verify is removed.
        """
        job, num_rows = self._job, len(self._job.task.rows)
        width = 1 + job.config.augment.num_cached_views, job.num_features
        features, reasons = zeros((num_rows, *width)), [None] * num_rows  # type: Tensor, list[str | None]
        missing, damaged = set(range(job.num_shards)), list[str]()
        for number in sorted(self._stored() & missing):
            rows, name = job.rows(number), shard_name(job.key, number)
            try:
                shard, why = unpack_shard(job.key, number, self._storage.read(name))
                if shard.shape != (len(rows), *width):
                    raise ValueError(f"its shape is {tuple(shard.shape)}")
            except (StorageError, ValueError, KeyError) as error:
                damaged.append(f"{name}: {error}")
                with suppress(StorageError):
                    self._storage.delete(name)
                continue
            features[rows[0] : rows[-1] + 1], reasons[rows[0] : rows[-1] + 1] = shard, why
            missing.discard(number)
        if damaged:
            text = "recomputing %s in %s, the first is %s"
            log.warning(text, plural(len(damaged), "damaged file"), self.path, damaged[0])
        return features, reasons, sorted(missing)

    def plan(self) -> Plan | None:
        """How the features that are here were computed; None: there are none."""
        if not self._stored():
            return None
        try:
            found = parse_json(self._storage.read(f"{self._folder}/{PLAN_FILE}"))
            return Plan(str(found["runtime"]), int(found["batch_size"]), bool(found.get("bf16")))
        except (StorageError, ValueError, KeyError, TypeError):  # it is younger than the cache, or damaged
            return Plan(TORCH, CPU_IMAGES)

    def keep_plan(self, plan: Plan) -> None:
        """Say how features are computed from now on."""
        _write(self._storage, f"{self._folder}/{PLAN_FILE}", json.dumps(plan._asdict()).encode())

    def num_missing(self) -> int:
        """Rows of shards that have no file."""
        return sum(len(self._job.rows(number)) for number in {*range(self._job.num_shards)} - self._stored())

    def keep(self, shards: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        """``shards``, each once it is stored. StorageError: the directory cannot be written to."""
        for number, data in shards:
            write_shard(self._storage, self._job.key, number, data)
            yield number, data

    def discard(self, numbers: Iterable[int]) -> None:
        """Remove the files of these shards."""
        for number in numbers:
            self._storage.delete(shard_name(self._job.key, number))

    def _stored(self) -> set[int]:
        """Numbers of the shards that have a file."""
        with _naming_the_option():
            names = self._storage.list(self._folder)
        found = (re.fullmatch(r"([0-9]{6,})\.safetensors", name) for name in names)
        return {int(match[1]) for match in found if match is not None}

    def write_facts(self, weights: str) -> None:
        """``facts.json``, for people who look at the directory, and the snapshot of the rows."""
        config, task = self._job.config, self._job.task
        facts = {
            "source": task.rows.source, "rows": len(task.rows), "encoder": config.model.encoder,
            "weights": weights, "num_cached_views": config.augment.num_cached_views,
            "num_features": self._job.num_features,
            "note": "features of a frozen encoder; can be deleted at any time and are then recomputed",
        }  # fmt: skip
        _write(self._storage, f"{self._folder}/facts.json", json.dumps(facts, indent=1).encode())
        with _naming_the_option():
            snapshot.write(*self.snapshot, task.rows)


def write_shard(storage: Storage, key: str, number: int, data: bytes) -> None:
    """Keep shard ``number`` of a job in a cache directory, from any process."""
    _write(storage, shard_name(key, number), data)


def _write(storage: Storage, name: str, data: bytes) -> None:
    with _naming_the_option():
        try:
            storage.write(name, data)
        except StorageError:  # somebody has just emptied the cache
            storage.write(name, data)


def shard_name(key: str, number: int) -> str:
    """Name of a shard's file in a cache directory."""
    return f"features/{key}/{number:06}.safetensors"


@contextmanager
def _naming_the_option() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise StorageError(f"{error}; --compute.cache DIRECTORY stores features elsewhere") from None


def cached_features(
    cache: FeatureCache, job: FeatureJob, weights: str,
    compute: Callable[[Sequence[int]], Iterable[tuple[int, bytes]]],
    on_progress: Callable[[int, int], None] = lambda done, total: None, zeros: Zeros = torch.zeros,
) -> tuple[Tensor, list[str | None]]:  # fmt: skip
    """Features (N, 1 + V, D) of a job and why a row has none: what the cache lacks is computed and kept by
    ``compute``, file by file, so that a killed job resumes. StorageError: the cache cannot be written.
    """
    features, reasons, missing = cache.read(zeros)
    again = _stale(cache, job, features, reasons, missing)
    if again := again | _readable_again(job, reasons):
        cache.discard(again)
        missing = sorted({*missing, *again})
    if not missing:
        return features, reasons
    cache.write_facts(weights)  # before any work: is the directory writable?
    total, done = len(job.task.rows), len(job.task.rows) - sum(len(job.rows(i)) for i in missing)
    on_progress(done, total)
    for number, data in compute(missing):
        rows = job.rows(number)
        own = slice(rows[0], rows[-1] + 1)
        features[own], reasons[own] = unpack_shard(job.key, number, data)
        done += len(rows)
        on_progress(done, total)
    return features, reasons


def _stale(
    cache: FeatureCache, job: FeatureJob, features: Tensor, reasons: Sequence[str | None],
    missing: Sequence[int],
) -> set[int]:  # fmt: skip
    """Shards whose features are no longer those of the rows and the encoder of the job; a line says why."""
    stored, rows = {*range(job.num_shards)} - {*missing}, job.task.rows
    if not stored:
        return set()
    then, stale, why = snapshot.read(*cache.snapshot, rows), stored, "there is no snapshot of their images"
    if then is not None:
        found = snapshot.compare(rows, then)
        stale = set() if found.believed else stored & {*(found.suspects // SHARD_ROWS).tolist()}
        why = f"{plural(len(found.suspects), 'image')} written to since"
        if not stale and (row := _probe(job, features, reasons, stored)) is not None:
            stale, why = stored, f"{job.config.model.encoder} now gives others, of {rows.ids[row]} for one"
    if stale:
        num = sum(len(job.rows(number)) for number in stale)
        log.warning("features of %s images in %s are computed again: %s", f"{num:,}", cache.path, why)
    return stale


def _probe(job: FeatureJob, features: Tensor, reasons: Sequence[str | None], stored: set[int]) -> int | None:
    """A row of the ``stored`` shards whose evaluation view, encoded again, has other features, if any."""
    known = np.flatnonzero(ok_mask(reasons))
    known = known[np.isin(known // SHARD_ROWS, [*stored])]
    known = known[evenly_spaced(PROBED_ROWS, len(known))]
    plain, start = features[torch.from_numpy(known), 0], time.monotonic()
    spread = float((plain - plain.mean(dim=0)).norm(dim=1).mean()) if len(known) else 0.0
    for row, then in zip(known.tolist(), plain, strict=True):
        images, viewed = job.task.rows.images.read_images(np.array([row])), np.zeros(1, bool)
        pixels, _, why = decode_rows(job.config, row, images, viewed)
        seen = job.encoder, row, torch.from_numpy(pixels), viewed, ok_mask(why)
        now, noise = encode_rows(job.config, *seen)[0, 0], NOISE * float(then.norm())
        if job.config.compute.precision == "bf16":
            exact = encode_rows(override(job.config, {"compute.precision": "fp32"}), *seen)[0, 0]
            noise += OF_BF16 * float((now - exact).norm())
        if not float((now - then).norm()) <= max(OF_SPREAD * spread, noise):
            return row
        if time.monotonic() - start > PROBE_S:
            break
    return None


def _readable_again(job: FeatureJob, reasons: Sequence[str | None]) -> set[int]:
    """Shards with a row that could not be read when they were computed, and now can: a share was away."""
    data, bad = job.config.data, np.flatnonzero(~ok_mask(reasons))
    if not len(bad):
        return set()
    _, now = decode_many(job.task.rows.images.take(bad), data.stored_size, None, data.interpolation)
    return set((bad[ok_mask(now)] // SHARD_ROWS).tolist())


def cache_directory(config: Config) -> str:
    """Where features are kept: ``compute.cache``, $UNO_CACHE, or uno in the user's cache directory."""
    return normalize_path(config.compute.cache or user_cache())
