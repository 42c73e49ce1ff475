"""Features of a frozen encoder, computed once: of every image the evaluation view, of
training rows V random views besides. They take the place of images: float32 (N, 1 + V,
D), the evaluation view first.

A cache serves every run with the same encoder, weights and data, whatever its seed. It
is a folder with a file for ``SHARD_ROWS`` rows, which proves its content and place: one
that does not verify is computed again. More random views, or those of another kind or
of other training rows, are in further files: a cache grows. A row's features depend on
nothing but its shard, a view's not on how many there are, and on a CPU every batch is
computed by one thread, and all have one size, so any number of threads, processes and
workers gives the same bits. Each runtime (:mod:`uno.runtime`) has a cache of its own.
At every start rows that
have changed are looked for (:mod:`uno.data.snapshot`), and some encoded again.
"""

import hashlib
import json
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from uno.data.files import Storage, normalize_path
from uno.data.images import Image, evenly_spaced
from uno.data.mapped import user_cache
from uno.data.output import seal, unseal
from uno.data.plan import FEATURES, augment_generator
from uno.data.splits import Task
from uno.encoder import code_of
from uno.errors import ConfigError, StorageError
from uno.runtime import BATCH_SIZE, Runtime
from uno.text import plural
from uno.threads import torch_threads

VERSION = 4  # of what is computed and how it is stored
SEED = 0  # of the views: not the run's, so that runs of all seeds share them
SHARD_ROWS = 128
ROWS_AT_ONCE = 16  # whose pixels are in memory
VIEWS_AT_ONCE = 6  # whose random numbers are drawn together
# of a pass through the encoder; on CPUs 8 are 1.7 times as fast as 32
CPU_IMAGES, CUDA_IMAGES = BATCH_SIZE, 256
# that are encoded again: at least one, and no more after that time
PROBED_ROWS, PROBE_S = 8, 1.0
# mean distance from the mean over the mean norm, and that norm
CONSTANT, HUGE = 1e-5, 1e6
ODD = {
    "zero": "the features of all images are zero",
    "constant": "the features of all images are the same",
    "huge": f"the features are larger than {HUGE:.0e}",
}
# of the distance of features from their mean, beyond which features of a row differ
OF_SPREAD = 0.02
NOISE = 2e-3  # of their norm: other devices, batches and threads
OF_BF16 = 3.0  # times the difference that bfloat16 makes

log = logging.getLogger(__name__)

Shard = tuple[Tensor, list[str | None]]
"""Features (n, 1 + V, D) of a shard's rows, or the last ones of these, and why a row
has none.
"""
Missing = Mapping[int, int]
"""Numbers of shards -> how many of their 1 + V views are there; the others are to be
computed.
"""
Zeros = Callable[[tuple[int, ...]], Tensor]
"""Where features of that shape are to be: in memory by default, or in a file that is
mapped.
"""


class FeatureJob(NamedTuple):
    """The features of the rows of a task: what to compute, and under which name to
    keep it.
    """

    config: Config
    task: Task
    encoder: nn.Module
    key: str
    views: str  # under which the random ones are: their kind and rows

    @property
    def num_views(self) -> int:
        """1 + V."""
        return 1 + self.config.augment.num_cached_views

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

    def name(self, number: int, have: int = 0) -> str:
        """Of the file of a shard with the views from ``have`` on."""
        return shard_name(self.key, Piece(number, self.views, have, self.num_views))

    def load(self, number: int) -> tuple[list[Image], np.ndarray]:
        """The images of a shard as they are stored, and bool (n,): which are
        training rows.
        """
        rows = self.rows(number)
        return self.task.rows.images.read_images(rows), self.task.is_train[rows]


def feature_job(config: Config, task: Task, encoder: nn.Module) -> FeatureJob:
    """What the features of ``task`` under ``encoder`` depend on, hashed into a key, and
    what the random views do besides; 0.1 s for 20 MB of it.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(
            tensor.detach()
            .cpu()
            .contiguous()
            .flatten()
            .view(torch.uint8)
            .numpy()
            .tobytes()
        )
    facts = settings(config) | {
        "views": config.augment.large.size,  # all that the evaluation view depends on
        "version": VERSION,
        "weights": digest.hexdigest(),
        "data": task.rows.fingerprint,
        **code_of(config.model.encoder, encoder),
    }
    views = ""
    if config.augment.num_cached_views:
        kind = settings(config)["views"]
        views = _hash(
            {
                "kind": kind,
                "training": hashlib.sha256(task.is_train.tobytes()).hexdigest(),
            }
        )[:16]
    return FeatureJob(config, task, encoder, _hash(facts)[:32], views)


def _hash(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def settings(config: Config) -> dict[str, Any]:
    """What features depend on besides the weights of the encoder, the data and the
    number of views.
    """
    data, views = config.data, _views(config).model_dump(mode="json")
    del views["num_cached_views"], views["large"]["num_views"]
    return {
        "encoder": config.model.encoder,
        "views": views,
        "bf16": config.compute.precision == "bf16",
        "runtime": config.compute.encoder_runtime,
        "transform": [data.stored_size, data.mean, data.std, data.interpolation],
    }


def _views(config: Config) -> AugmentConfig:
    """The cached views: those of the run's large kind."""
    large = config.augment.large.model_copy(
        update={"num_views": config.augment.num_cached_views}
    )
    small = config.augment.small.model_copy(update={"num_views": 0})
    return config.augment.model_copy(update={"large": large, "small": small})


def compute_shard(
    config: Config,
    encoder: nn.Module,
    number: int,
    images: Sequence[Image],
    in_training: np.ndarray,
    have: int = 0,
) -> Shard:
    """Shard ``number`` of a job: features of its n ``images``, all but the first
    ``have``, random views only of those ``in_training`` (n,). ``encoder`` in eval mode,
    on any device. ConfigError: it returns non-finite numbers.
    """
    found, reasons = list[Tensor](), list[str | None]()
    for start in range(0, len(images), ROWS_AT_ONCE):
        own, first = slice(start, start + ROWS_AT_ONCE), number * SHARD_ROWS + start
        pixels, viewed, why = decode_rows(config, first, images[own], in_training[own])
        some = torch.from_numpy(pixels), viewed, ok_mask(why), have
        found.append(encode_rows(config, encoder, first, *some))
        reasons += why
    joined = torch.cat(found)[:, have:]
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
    return ConfigError(
        f"model.encoder {config.model.encoder} returns non-finite numbers"
    )


def decode_rows(
    config: Config, first: int, images: Sequence[Image], in_training: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[str | None]]:
    """Decode what the encoder sees of some rows. Every image is read once.

    Args:
        config: The configuration of the run.
        first: The number of the first row. All rows are of one shard.
        images: The images of the n rows, at most ROWS_AT_ONCE.
        in_training: bool (n,), the rows that have random views.

    Returns:
        The pixels uint8 (n, :func:`row_bytes`): the square, then the crops of the
        random views; bool (n,), the rows that have crops; and for each row the reason
        why it has no features, or None.
    """
    data, cropper = config.data, _cropper(config)
    number, start = divmod(first, SHARD_ROWS)
    squares = np.zeros((len(images), 3, data.stored_size, data.stored_size), np.uint8)
    crops = np.zeros((len(images), cropper.row_bytes), np.uint8)
    why: list[str | None] = [None] * len(images)
    with_views = in_training & (config.augment.num_cached_views > 0)
    for rows in (np.flatnonzero(with_views), np.flatnonzero(~with_views)):
        if not len(rows):
            continue
        some = [images[row] for row in rows.tolist()]
        if with_views[rows[0]]:
            own, steps = squares[rows], np.full(len(rows), number)
            crops[rows], reasons = cropper.crop(steps, start + rows, some, own)
        else:
            how = data.stored_size, 1, data.interpolation
            decoded, reasons = decode_many(some, *how)
            own = decoded.numpy()
        squares[rows] = own
        for row, reason in zip(rows.tolist(), reasons, strict=True):
            why[row] = reason
    pixels = np.concatenate([squares.reshape(len(images), -1), crops], axis=1)
    return pixels, with_views & ok_mask(why), why


@torch.inference_mode()
def encode_rows(
    config: Config,
    encoder: nn.Module,
    first: int,
    pixels: Tensor,
    viewed: np.ndarray,
    ok: np.ndarray,
    have: int = 0,
) -> Tensor:
    """Features (n, 1 + V, D) of the rows of :func:`decode_rows`, zeros of those that
    are not ``ok`` (n,), and in the first ``have`` views.
    """
    data, augment, cropper = config.data, _views(config), _cropper(config)
    device = next(encoder.parameters()).device
    width = int(encoder.num_features)  # type: ignore[arg-type]
    features = torch.zeros(len(pixels), 1 + augment.large.num_views, width)
    if not have:
        features[:, 0] = _encode(
            config, encoder, _plain_views(config, pixels.to(device))
        )
    if viewed.any():
        chosen, (number, start) = (
            torch.from_numpy(np.flatnonzero(viewed)),
            divmod(first, SHARD_ROWS),
        )
        crops, generator = (
            pixels[chosen, _square_bytes(config) :],
            augment_generator(SEED, FEATURES, number),
        )
        where = (
            data.mean,
            data.std,
            start + chosen,
            SHARD_ROWS,
            data.stored_size,
            VIEWS_AT_ONCE,
        )
        views = augment_crops(
            cropper.split(crops.to(device)), augment, generator, *where
        )[max(have, 1) - 1 :]
        # a view's batches have no other's
        parts = views if device.type == "cpu" else [torch.cat(views)]
        encoded = torch.cat([_encode(config, encoder, part) for part in parts])
        features[chosen, max(have, 1) :] = encoded.unflatten(
            0, (len(views), -1)
        ).transpose(0, 1)
    features[~torch.from_numpy(ok)] = 0
    return features


def row_bytes(config: Config) -> int:
    """Of the pixels of a row, its square and its crops."""
    return _square_bytes(config) + _cropper(config).row_bytes


def _square_bytes(config: Config) -> int:
    return 3 * config.data.stored_size**2


def _cropper(config: Config) -> Cropper:
    data = config.data
    how = _views(config), data.stored_size, data.interpolation, VIEWS_AT_ONCE
    return Cropper(SEED, FEATURES, SHARD_ROWS, *how)


def _encode(config: Config, encoder: nn.Module, images: Tensor) -> Tensor:
    """(B, 3, S, S) -> features (B, D) float32 on the CPU."""
    if isinstance(encoder, Runtime):
        return encoder(images)
    kind = images.device.type
    size, bf16 = (
        CPU_IMAGES if kind == "cpu" else CUDA_IMAGES,
        config.compute.precision == "bf16",
    )
    with torch.autocast(kind, torch.bfloat16, enabled=bf16):
        parts = [
            encoder(part.contiguous(memory_format=torch.channels_last)).float().cpu()
            for part in images.split(size)
        ]
    return torch.cat(parts)


def first_images(job: FeatureJob, number: int) -> Tensor:
    """What the encoder sees of a shard's first rows (B, 3, S, S); unreadable ones
    are black.
    """
    config, rows = job.config, job.rows(number)[:ROWS_AT_ONCE]
    none = np.zeros(len(rows), bool)
    pixels, *_ = decode_rows(
        config, int(rows[0]), job.task.rows.images.read_images(rows), none
    )
    return _plain_views(config, torch.from_numpy(pixels))


def _plain_views(config: Config, pixels: Tensor) -> Tensor:
    """The evaluation view (n, 3, S, S) of the pixels of rows."""
    data = config.data
    squares = pixels[:, : _square_bytes(config)].unflatten(
        1, (3, data.stored_size, data.stored_size)
    )
    return eval_view(squares, side(config), data.mean, data.std)


def side(config: Config) -> int:
    """Of the evaluation view, in pixels."""
    return min(config.augment.large.size, config.data.stored_size)


def compute_local(
    job: FeatureJob, encoder: nn.Module, missing: Missing, threads: int
) -> Iterator[tuple[int, Shard]]:
    """What is ``missing`` of shards, in order, each by one of ``threads`` threads of
    this process.

    ``torch.set_num_threads`` also decides for all threads that begin later. So the
    calling thread sets it, and sets it back at the end.
    """

    def compute(number: int) -> tuple[int, Shard]:
        torch.set_num_threads(1)
        return number, compute_shard(
            job.config, encoder, number, *job.load(number), missing[number]
        )

    with torch_threads(1):
        yield from prefetch_map(compute, missing, threads, threads)


def pack_shard(name: str, shard: Shard) -> bytes:
    """A shard as the content of the file ``name``."""
    features, reasons = shard
    return seal(
        name, {"features": features.contiguous()}, {"reasons": json.dumps(reasons)}
    )


def unpack_shard(name: str, data: bytes) -> Shard:
    """The shard of the file ``name``. ValueError or KeyError: it is damaged, or
    another one's.
    """
    tensors, facts = unseal(name, data)
    return tensors["features"], json.loads(facts["reasons"])


class Piece(NamedTuple):
    """Views ``first`` to ``stop`` of a shard, 0 the evaluation view, in a file;
    ``views``: their kind.
    """

    number: int
    views: str = ""
    first: int = 0
    stop: int = 1


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

    def read(
        self, zeros: Zeros = torch.zeros
    ) -> tuple[Tensor, list[str | None], dict[int, int]]:
        """Features (N, 1 + V, D), why a row has none, and how many of its 1 + V views
        each shard has. A file that does not verify is removed.
        """
        job, num_rows, stored = self._job, len(self._job.task.rows), self._stored()
        features = zeros((num_rows, job.num_views, job.num_features))
        reasons: list[str | None] = [None] * num_rows
        have, damaged = dict[int, int](), list[str]()
        for number in range(job.num_shards):
            rows, pieces, done = job.rows(number), stored[number], 0
            while (piece := self._next(pieces, done)) is not None:
                pieces.remove(piece)
                name, stop = shard_name(job.key, piece), self._stop(piece)
                try:
                    shard, why = unpack_shard(name, self._storage.read(name))
                    if shard.shape != (
                        len(rows),
                        piece.stop - piece.first,
                        job.num_features,
                    ):
                        raise ValueError(f"its shape is {tuple(shard.shape)}")
                except (StorageError, ValueError, KeyError) as error:
                    damaged.append(f"{name}: {error}")
                    with suppress(StorageError):
                        self._storage.delete(name)
                    continue
                own = slice(rows[0], rows[-1] + 1)
                features[own, done:stop] = shard[
                    :, done - piece.first : stop - piece.first
                ]
                reasons[own], done = _joined(reasons[own], why), stop
            have[number] = done
            if not done:  # what is left is of images that nobody compares
                self._delete(pieces)
        if damaged:
            text = "recomputing %s in %s, the first is %s"
            log.warning(
                text, plural(len(damaged), "damaged file"), self.path, damaged[0]
            )
        return features, reasons, have

    def _stop(self, piece: Piece) -> int:
        """Up to which view a piece has those of the job."""
        return min(
            piece.stop, self._job.num_views if piece.views == self._job.views else 1
        )

    def _next(self, pieces: Iterable[Piece], done: int) -> Piece | None:
        """The one with the most of the job's views after the first ``done``; of
        these the smallest.
        """
        useful = [piece for piece in pieces if piece.first <= done < self._stop(piece)]
        return max(
            useful, key=lambda piece: (self._stop(piece), -piece.stop), default=None
        )

    def num_missing(self) -> float:
        """Rows that have no file, those of which some views are missing in part."""
        job, stored, rows = self._job, self._stored(), 0.0
        for number in range(job.num_shards):
            done = 0
            while (piece := self._next(stored[number], done)) is not None:
                done = self._stop(piece)
            rows += len(job.rows(number)) * (1 - done / job.num_views)
        return rows

    def keep(
        self, shards: Iterable[tuple[int, Shard]], missing: Missing
    ) -> Iterator[tuple[int, Shard]]:
        """``shards``, each once it is stored. StorageError: the directory cannot be
        written to.
        """
        for number, shard in shards:
            name = self._job.name(number, missing[number])
            write_shard(self._storage, name, pack_shard(name, shard))
            yield number, shard

    def discard(self, numbers: Iterable[int]) -> None:
        """Remove all files of these shards, of other views too."""
        stored = self._stored()
        for number in numbers:
            self._delete(stored[number])

    def _delete(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._storage.delete(shard_name(self._job.key, piece))

    def _stored(self) -> dict[int, list[Piece]]:
        """The files of every shard by its number, of any views."""
        with _naming_the_option():
            names = self._storage.list(self._folder)
        found = defaultdict[int, list[Piece]](list)
        for name in names:
            if match := re.fullmatch(
                r"([0-9]{6,})(?:-([0-9a-f]{16})-([0-9]+)-([0-9]+))?\.safetensors", name
            ):
                number, views, first, stop = match.groups()
                piece = (
                    Piece(int(number), views, int(first), int(stop))
                    if views
                    else Piece(int(number))
                )
                found[piece.number].append(piece)
        return found

    def write_facts(self, weights: str) -> None:
        """``facts.json``, for people who look at the directory, and the snapshot of
        the rows.
        """
        config, task = self._job.config, self._job.task
        facts = {
            "source": task.rows.source,
            "rows": len(task.rows),
            "encoder": config.model.encoder,
            "weights": weights,
            "num_cached_views": config.augment.num_cached_views,
            "num_features": self._job.num_features,
            "note": (
                "features of a frozen encoder; can be deleted at any time and are then"
                " recomputed"
            ),
        }
        write_shard(
            self._storage,
            f"{self._folder}/facts.json",
            json.dumps(facts, indent=1).encode(),
        )
        with _naming_the_option():
            snapshot.write(*self.snapshot, task.rows)


def write_shard(storage: Storage, name: str, data: bytes) -> None:
    """Write a file of a job to a cache directory, from any process.

    Storage decides which errors are retried. In addition, a file is written again if
    another process has removed its folder during the write.

    Args:
        storage: The cache directory.
        name: Path of the file below it.
        data: Content of the file.

    Raises:
        StorageError: The file cannot be written. The line names ``--compute.cache``.
    """
    with _naming_the_option():
        try:
            storage.write(name, data)
        except StorageError:
            if not storage.is_local or storage.exists(os.path.dirname(name)):
                raise
            storage.write(name, data)


def shard_name(key: str, piece: Piece) -> str:
    """Name of a file in a cache directory."""
    number, views, first, stop = piece
    return f"features/{key}/{number:06}{f'-{views}-{first}-{stop}' if views else ''}.safetensors"  # noqa: E501


def _joined(
    reasons: Sequence[str | None], more: Sequence[str | None]
) -> list[str | None]:
    return [one or other for one, other in zip(reasons, more, strict=True)]


@contextmanager
def _naming_the_option() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise StorageError(
            f"{error}; --compute.cache DIRECTORY stores features elsewhere"
        ) from None


def cached_features(
    cache: FeatureCache,
    job: FeatureJob,
    weights: str,
    compute: Callable[[Missing], Iterable[tuple[int, Shard]]],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    zeros: Zeros = torch.zeros,
) -> tuple[Tensor, list[str | None]]:
    """Features (N, 1 + V, D) of a job and why a row has none: what the cache lacks is
    computed and kept by ``compute``, file by file, so that a killed job resumes.
    StorageError: the cache cannot be written.
    """
    features, reasons, have = cache.read(zeros)
    again = _stale(
        cache, job, features, reasons, {number for number in have if have[number]}
    )
    if again := again | _readable_again(job, reasons):
        cache.discard(again)
        have |= dict.fromkeys(again, 0)
    missing = {number: done for number, done in have.items() if done < job.num_views}
    if not missing:
        return features, reasons
    cache.write_facts(weights)  # before any work: is the directory writable?
    total, done = (
        len(job.task.rows),
        len(job.task.rows) - sum(len(job.rows(i)) for i in missing),
    )
    on_progress(done, total)
    for number, (shard, why) in compute(missing):
        rows = job.rows(number)
        own = slice(rows[0], rows[-1] + 1)
        features[own, missing[number] :] = shard
        reasons[own] = _joined(reasons[own], why) if missing[number] else why
        done += len(rows)
        on_progress(done, total)
    return features, reasons


def _stale(
    cache: FeatureCache,
    job: FeatureJob,
    features: Tensor,
    reasons: Sequence[str | None],
    stored: set[int],
) -> set[int]:
    """The ``stored`` shards whose features are not those of the job any more; a line
    says why.
    """
    rows = job.task.rows
    if not stored:
        return set()
    then, stale, why = (
        snapshot.read(*cache.snapshot, rows),
        stored,
        "there is no snapshot of their images",
    )
    if then is not None:
        found = snapshot.compare(rows, then)
        stale = (
            set()
            if found.believed
            else stored & {*(found.suspects // SHARD_ROWS).tolist()}
        )
        why = f"{plural(len(found.suspects), 'image')} written to since"
        if not stale and (row := _probe(job, features, reasons, stored)) is not None:
            stale, why = (
                stored,
                (
                    f"{job.config.model.encoder} now gives others, of {rows.ids[row]}"
                    " for one"
                ),
            )
    if stale:
        num = sum(len(job.rows(number)) for number in stale)
        log.warning(
            "features of %s images in %s are computed again: %s",
            f"{num:,}",
            cache.path,
            why,
        )
    return stale


def _probe(
    job: FeatureJob, features: Tensor, reasons: Sequence[str | None], stored: set[int]
) -> int | None:
    """A row of the ``stored`` shards whose evaluation view, encoded again, has other
    features, if any.
    """
    known = np.flatnonzero(ok_mask(reasons))
    known = known[np.isin(known // SHARD_ROWS, [*stored])]
    known = known[evenly_spaced(PROBED_ROWS, len(known))]
    plain, start = features[torch.from_numpy(known), 0], time.monotonic()
    spread = (
        float((plain - plain.mean(dim=0)).norm(dim=1).mean()) if len(known) else 0.0
    )
    for row, then in zip(known.tolist(), plain, strict=True):
        images, viewed = (
            job.task.rows.images.read_images(np.array([row])),
            np.zeros(1, bool),
        )
        pixels, _, why = decode_rows(job.config, row, images, viewed)
        seen = job.encoder, row, torch.from_numpy(pixels), viewed, ok_mask(why)
        now, noise = encode_rows(job.config, *seen)[0, 0], NOISE * float(then.norm())
        if job.config.compute.precision == "bf16":
            exact = encode_rows(
                override(job.config, {"compute.precision": "fp32"}), *seen
            )[0, 0]
            noise += OF_BF16 * float((now - exact).norm())
        if not float((now - then).norm()) <= max(OF_SPREAD * spread, noise):
            return row
        if time.monotonic() - start > PROBE_S:
            break
    return None


def _readable_again(job: FeatureJob, reasons: Sequence[str | None]) -> set[int]:
    """Shards with a row that could not be read when they were computed, and now can:
    a share was away.
    """
    data, bad = job.config.data, np.flatnonzero(~ok_mask(reasons))
    if not len(bad):
        return set()
    _, now = decode_many(
        job.task.rows.images.take(bad), data.stored_size, None, data.interpolation
    )
    return set((bad[ok_mask(now)] // SHARD_ROWS).tolist())


def cache_directory(config: Config) -> str:
    """Where features are kept: ``compute.cache``, $UNO_CACHE, or uno in the user's
    cache directory.
    """
    return normalize_path(config.compute.cache or user_cache())
