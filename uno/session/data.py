"""Open the data of a run: its rows, their images or features, and training sets."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from uno.config import Config, DataConfig
from uno.data import features
from uno.data.check import check_row_numbers, with_fitting_batch
from uno.data.decode import Decoding, decode_many, ok_mask
from uno.data.features import Chunk, FeatureCache, FeatureJob, feature_job
from uno.data.files import Storage
from uno.data.images import evenly_spaced
from uno.data.memory import assemble, eval_sets, keep_pixels
from uno.data.sources import read_rows
from uno.data.splits import Task, make_task
from uno.data.stream import EvalData, TrainData, streaming_eval_sets, streaming_set
from uno.data.unreadable import BAD_SAMPLES, check_bad, name_bad
from uno.encoders.runtimes import OPENVINO, Runtime, runtime_precision
from uno.errors import ConfigError, Interrupted
from uno.runs.hardware import local_device, num_threads
from uno.runs.run import frozen_encoder
from uno.session.console import announce_reading, count_items, print_line
from uno.session.resources import trains_on_features
from uno.text import plural

INTERVAL_S = 10.0  # seconds between two lines of progress
SAMPLE_ROWS = 4_000  # rows that must be distinguishable by their features

Show = Callable[[dict[str, Any]], None]
"""Shows or stores a line of metrics, see :meth:`Progress.__call__` for its names."""
Compute = Callable[[FeatureJob, nn.Module, np.ndarray], Iterable[Chunk]]
"""Encodes the rows int64 (n,) of a job with an encoder, in chunks and in order."""


def read_task(data: DataConfig) -> Task:
    """Read all rows of a data source, and divide them by class and split.

    Images are not decoded. If this takes more than ten seconds, a line is printed, and
    another one at the end.

    Args:
        data: The section ``data`` of the configuration, which names the source.

    Returns:
        The rows with the classes, and for each row whether it is labeled, unlabeled or
        a test row.

    Raises:
        ConfigError: The source cannot be read, or does not fit the settings, or
            ``num_novel`` is "auto".
    """
    with announce_reading():
        task = make_task(read_rows(data), data)
    return task


class Sets(NamedTuple):
    """The opened data of a run, for training and for evaluation.

    Attributes:
        train: The rows that training may see: their images or features, and the labels
            of labeled rows.
        truth: Opens the sets "train" and "test" with true classes, which only
            evaluation reads.
        task: All rows of the run, with the images that were kept in memory.
        ok: bool (N,), the rows that can be read; None if images are streamed.
    """

    train: TrainData
    truth: Callable[[], Mapping[str, EvalData]]
    task: Task
    ok: np.ndarray | None


def open_sets(
    config: Config,
    task: Task,
    storage: Storage,
    show: Show = lambda metrics: None,
    should_stop: Callable[[], bool] = lambda: False,
    keep: bool = True,
) -> Sets:
    """Open the data of a run for training and evaluation.

    With ``data.loading`` "streaming" no image is read here, and unreadable images are
    found during training. Otherwise all images are decoded into memory, or encoded by a
    frozen encoder, whose features are cached. Unreadable images are then left out, and
    a warning is printed.

    Args:
        config: The configuration of the run.
        task: All rows of the run. It is not changed.
        storage: The directory of the run.
        show: Shows the progress of computing features. It takes lines of metrics,
            values by name. By default no progress is shown.
        should_stop: Returns whether the user has asked to stop. It is only asked while
            features are computed.
        keep: Whether unreadable images that are found here are listed in the file
            ``bad_samples.jsonl`` of the run.

    Returns:
        The rows for training; a function that opens the rows for evaluation; the task,
        whose images hold the decoded pixels or the features of the evaluation view (the
        image without random augmentation); and which rows can be read. If images are
        streamed, the task is ``task`` itself, and the last value is None.

    Raises:
        ConfigError: Too many images cannot be read; a file that holds many images
            cannot be read; or the frozen encoder has no weights or unsuitable ones, or
            returns numbers that are not finite.
        StorageError: The storage of an image cannot be reached now; or the weights, the
            cache or the list of unreadable images cannot be read or written.
        Interrupted: ``should_stop`` returned True while features were computed.
    """
    if config.data.loading == "streaming":
        stream = streaming_set(config, task, storage)
        truth = partial(streaming_eval_sets, task, stream.source)
        return Sets(stream, truth, task, None)
    images, reasons = load_images(config, task, storage, show, should_stop)
    leave_out_unreadable(reasons, config, task, storage if keep else None)
    task, ok = keep_pixels(task, images, reasons), ok_mask(reasons)
    return Sets(
        assemble(task, images, ok), partial(eval_sets, task, images, ok), task, ok
    )


def config_for_readable_rows(
    config: Config, task: Task, ok: np.ndarray | None, batch_is_derived: bool
) -> Config:
    """Return the configuration with which a run trains on the rows that can be read.

    Unreadable images are known only after all images were decoded or encoded. A batch
    size that was derived from the data is then derived again, and a line is printed if
    it becomes smaller. If all rows can be read, or images are streamed, ``config`` is
    returned as it is.

    Args:
        config: The configuration of the run, checked for all rows.
        task: All rows of the run.
        ok: bool (N,), the rows that can be read; None if images are streamed.
        batch_is_derived: Whether the batch size was derived from the data and not set
            by the user.

    Raises:
        ConfigError: The remaining rows do not go with the configuration.
    """
    if ok is None or ok.all():
        return config
    fitting = with_fitting_batch(config, task, ok) if batch_is_derived else config
    size, left_out = (
        fitting.train.batch_size,
        plural(int((~ok).sum()), "unreadable image"),
    )
    if size != config.train.batch_size:
        print_line(f"batch size: {size}, because {left_out} left out")
    for problem in check_row_numbers(task, fitting, ok):
        if problem.level == "error":
            fix = "repair these images, or change the setting and pass --overwrite"
            raise ConfigError(f"{left_out} left out: {problem.message}; {fix}")
    return fitting


def load_images(
    config: Config,
    task: Task,
    storage: Storage,
    show: Show,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Tensor, list[str | None]]:
    """Decode all images of a run, or compute their features with a frozen encoder.

    Args:
        config: The configuration of the run. ``model.finetune`` is "none" for a frozen
            encoder.
        task: All N rows of the run.
        storage: The directory of the run, which may hold the encoder's weights.
        show: Shows the progress of computing features. It takes lines of metrics,
            values by name.
        should_stop: Returns whether the user has asked to stop. It is only asked while
            features are computed.

    Returns:
        Pixels uint8 (N, 3, S, S) of the images, S pixels high and wide; or, with a
        frozen encoder, D features float32 (N, 1 + V, D): first the evaluation view (the
        image without augmentation), then V random views, with V
        ``augment.num_cached_views``. Rows that cannot be read are zeros, and so are the
        random views of test rows. If the source holds vectors, they are the features,
        see :func:`load_features`. For each row the reason why it cannot be read, or
        None.

    Raises:
        ConfigError: A file that holds many images cannot be read; or the features
            cannot be computed, for example because the frozen encoder has no weights,
            see :func:`load_features`.
        StorageError: An image or the weights cannot be read, or the cache cannot be
            read or written.
        Interrupted: ``should_stop`` returned True while features were computed.
    """
    if trains_on_features(config):
        return load_features(config, task, storage, show, should_stop)
    size, how = config.data.stored_size, Decoding.of(config.data)
    return decode_many(task.rows.images, size, how=how)


def leave_out_unreadable(
    reasons: list[str | None],
    config: Config,
    task: Task,
    storage: Storage | None = None,
) -> None:
    """Warn that images that cannot be read are left out, and refuse too many of them.

    This function only prints and writes the list. ``task`` is not changed, and the
    caller leaves the rows out. Nothing happens if all images can be read; a list of an
    earlier call stays then.

    Args:
        reasons: For each row the reason why it cannot be read, or None.
        config: ``data.max_bad_fraction`` is the largest share of rows that is accepted.
        task: All rows.
        storage: The run directory, where rank 0 lists the images in
            ``bad_samples.jsonl``; None to write no list.

    Raises:
        ConfigError: The share of images that cannot be read is too large. The list is
            written before.
        StorageError: The list cannot be written.
    """
    limit = config.data.max_bad_fraction
    bad = check_bad(task.rows.ids, reasons, limit, storage, task.rows.images)
    if bad:
        first = f"the first: {name_bad(bad[0])}: {bad[0]['reason']}"
        where = f"see {storage.below(BAD_SAMPLES)}; " if storage else ""
        print_line(
            f"warning: {plural(len(bad), 'unreadable image')} left out; {where}{first}"
        )


def compute_local(
    job: FeatureJob, encoder: nn.Module, rows: np.ndarray
) -> Iterator[Chunk]:
    """Compute features of rows with a frozen encoder, in threads of this process.

    Args:
        job: The images to encode, and the configuration.
        encoder: The frozen encoder, or a :class:`~uno.encoders.runtimes.Runtime` of it.
            It is moved to the device of this process.
        rows: The numbers of the rows among all rows of the job, int64 (n,).

    Yields:
        Chunks with row numbers, features and the reasons why rows cannot be read, in
        the order of ``rows``.

    Raises:
        ConfigError: The encoder returns numbers that are not finite, a file that holds
            many images cannot be read, or the :class:`Runtime` cannot compute the
            encoder or gives other features than PyTorch.
        StorageError: The storage of an image cannot be reached now.
    """
    device, threads = local_device(job.config), num_threads(job.config)
    return features.compute_local(job, encoder.to(device), rows, threads)


def _faster_encoder(job: FeatureJob, encoder: nn.Module) -> nn.Module:
    """Return a frozen encoder in the form that ``compute.encoder_runtime`` names.

    On a GPU, or with the runtime "torch", the encoder itself is returned. On a CPU with
    the runtime "openvino" the result is a :class:`~uno.encoders.runtimes.Runtime`, a
    module that OpenVINO computes and that is compiled at its first call.

    Args:
        job: The images to encode, and the configuration.
        encoder: The frozen encoder.

    Raises:
        ConfigError: The runtime is "openvino", also on a GPU, and is not installed.
    """
    precision = runtime_precision(job.config, local_device(job.config))
    if precision is None:
        return encoder
    return Runtime(encoder, precision, num_threads(job.config))


def load_features(
    config: Config,
    task: Task,
    storage: Storage,
    show: Show,
    should_stop: Callable[[], bool] = lambda: False,
    compute: Compute = compute_local,
) -> tuple[Tensor, list[str | None]]:
    """Return the features that a frozen encoder gives to all rows.

    Features in the cache are read, and the others are computed and cached; a line is
    printed before any are computed. If the source holds vectors, they are the features,
    and nothing is computed. A warning is printed if the features do not distinguish the
    rows.

    Args:
        config: The configuration of the run.
        task: The rows.
        storage: The directory of the run, which may hold the encoder's weights.
        show: Shows the progress. It takes lines of metrics, values by name.
        should_stop: Returns whether the user has asked to stop. It is asked after each
            chunk of rows that was computed.
        compute: Encodes the rows that are not in the cache, see :data:`Compute`; by
            default in threads of this process.

    Returns:
        The features of the N rows, float32 (N, 1 + V, D): for each row first those of
        the evaluation view (the image without augmentation), then those of V random
        views, with V ``augment.num_cached_views``. They are zeros for rows that cannot
        be read, and for the random views of test rows. If the source holds vectors,
        these are the features, and V is the number of further views that it has; test
        rows keep theirs. And for each row the reason why it cannot be read, or None.

    Raises:
        ConfigError: ``model.weights`` is None, also for vectors; the weights do not fit
            the encoder; features are to be computed by OpenVINO, which is not installed
            or cannot compute the encoder; the encoder returns numbers that are not
            finite; or a file that holds many images cannot be read.
        StorageError: The weights or an image cannot be read, or the cache cannot be
            read or written.
        Interrupted: ``should_stop`` returned True. Features that were computed stay in
            the cache.
    """
    if config.model.weights is None:
        raise ConfigError(
            "model.finetune none needs --weights, the weights of the frozen encoder"
        )
    vectors = task.rows.vectors
    if vectors is not None:  # the source holds the features themselves
        _warn_if_indistinct(
            vectors[0], vectors[1], "nothing separates the rows; check the vectors"
        )
        return vectors
    encoder = frozen_encoder(config, storage)
    job = feature_job(config, task, encoder)
    cache = FeatureCache(Storage(features.cache_directory(config)), job)

    def computed(rows: np.ndarray) -> Iterator[Chunk]:
        """Compute features of the rows that the cache lacks, and print a line before.

        Args:
            rows: The numbers of these rows, int64 (n,).

        Yields:
            Chunks with row numbers, features and the reasons why rows cannot be read.

        Raises:
            Interrupted: The user has asked to stop. It is raised after a chunk was
                yielded.
        """
        cached = len(task.rows) - len(rows)
        have = f" ({cached:,} cached)" if cached else ""
        fast = _faster_encoder(job, encoder)
        how = f" by {OPENVINO}" if isinstance(fast, Runtime) else ""
        images = (
            f"{plural(len(rows), 'image')} through {config.model.encoder}{how}{have}"
        )
        print_line(f"features: {images}; cache: {cache.path}")
        for chunk in compute(job, fast, rows):
            yield chunk
            if should_stop():
                raise Interrupted("stopped; finished features are kept")

    progress = count_items(show, "features", INTERVAL_S)
    encoded, reasons = features.cached_features(cache, computed, progress)
    advice = f"{config.model.encoder} does not separate them; check its weights"
    _warn_if_indistinct(encoded, reasons, advice)
    return encoded, reasons


def _warn_if_indistinct(
    encoded: Tensor, reasons: Sequence[str | None], advice: str
) -> None:
    """Print a warning if features are all zero, all nearly the same, or huge.

    Nothing is printed if fewer than two rows are readable.

    Args:
        encoded: Features (N, 1 + V, D), the evaluation view of each row first. The
            evaluation views of at most 4,000 readable rows are examined.
        reasons: For each row the reason why it cannot be read, or None.
        advice: The end of the warning: what the user should check.
    """
    rows = np.flatnonzero(ok_mask(reasons))
    sample = encoded[torch.from_numpy(rows[evenly_spaced(SAMPLE_ROWS, len(rows))]), 0]
    if len(sample) > 1 and (problem := features.oddity(sample)):
        print_line(f"warning: {features.ODD[problem]}: {advice}")
