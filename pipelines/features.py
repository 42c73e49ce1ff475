"""Compute the features of images with a frozen encoder on the workers of Ray.

On CPUs they equal those of :func:`uno.session.data.compute_local` bit for bit.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import safetensors.torch
import torch

from pipelines.predict import map_through_model, threads_of_actor
from pipelines.ray_data import bytes_of, image_block, pixel_column, shared_tensor
from uno.config import Config
from uno.data import features
from uno.data.decode import prefetch_map
from uno.data.features import Chunk, FeatureJob
from uno.data.images import Images, from_columns
from uno.encoders.build import build_encoder
from uno.encoders.runtimes import Precision, Runtime

# The largest number of chunks of a task. A row group of Parquet has more rows than a
# chunk, so that a task of several chunks reads less.
TASK_CHUNKS = 8


def compute_on_ray(
    ray: Any,
    job: FeatureJob,
    encoder: torch.nn.Module,
    rows: np.ndarray,
    give_up: Callable[[], bool] = lambda: False,
) -> Iterator[Chunk]:
    """Encode rows on the workers of a cluster.

    If the cluster is too small, this waits for nodes.

    Args:
        ray: The module ``ray``, connected to a cluster.
        job: All rows of the run with their images, and how features are computed.
            ``rows`` selects which of these rows are encoded.
        encoder: The encoder in eval mode, or a :class:`~uno.encoders.runtimes.Runtime`
            of it.
        rows: int64 (n,), the row numbers of the images to encode.
        give_up: Returns whether to stop waiting for nodes.

    Yields:
        Up to 128 rows at a time, in the order of ``rows``: their row numbers; their
        features float32 (m, 1 + V, D), D numbers for the evaluation view (the image
        without augmentation) and for each of V random views; and for each row the
        reason why its image cannot be read, or None. On CPUs the features are equal,
        bit for bit, to those that one process computes.

    Raises:
        ConfigError: The encoder returns numbers that are not finite, or the cluster had
            no place for the workers in time.
        Interrupted: ``give_up`` returned True.
    """
    config = job.config
    precision, encoder = (
        (encoder.precision, encoder.encoder)
        if isinstance(encoder, Runtime)
        else (None, encoder)
    )
    state = {
        name: tensor.cpu().contiguous() for name, tensor in encoder.state_dict().items()
    }
    reader = job.task.rows.images.reader()
    decode = partial(decode_block, config=config, reader=reader)
    chunks = features.split_rows(rows)
    per_task = len(chunks) // (4 * config.compute.num_workers)
    task_rows = features.CHUNK_ROWS * max(1, min(TASK_CHUNKS, per_task))
    starts = range(0, len(rows), task_rows)
    blocks = (make_block(job, rows, start, start + task_rows) for start in starts)
    loaded = ray.put(safetensors.torch.save(state)), precision
    encoded = map_through_model(
        ray,
        config,
        blocks,
        decode,
        Featurizer,
        loaded,
        features.CHUNK_ROWS,
        features.row_bytes(config),
        give_up=give_up,
    )
    for chunk, results in zip(chunks, encoded, strict=True):
        yield unpack_chunk(job, chunk, results)


def make_block(job: FeatureJob, rows: np.ndarray, start: int, stop: int) -> pa.Table:
    """Return rows to encode as the Arrow table that is sent to a task.

    Args:
        job: All rows of the run with their images, and how features are computed.
        rows: int64 (n,), the row numbers of all images that are encoded.
        start: The position in ``rows`` of the first row of the table.
        stop: The position in ``rows`` after its last row. It may be larger than the
            number of rows; the table then ends with the last one.

    Returns:
        A table with a row for each image: ``row``, the position in ``rows``; ``seed``
        of the random views; ``has_views``, whether the image gets random views; and
        either ``number``, under which a reader finds the image, or ``image`` and
        ``shape``, its encoded bytes, pixels or path, see
        :func:`~uno.data.images.to_columns`.
    """
    own = rows[start:stop]
    return image_block(
        job.task.rows.images,
        own,
        row=np.arange(start, start + len(own)),
        seed=features.view_seeds(job.ids(own)),
        has_views=job.has_views(own),
    )


def decode_block(
    block: pa.Table, config: Config, reader: Images | None
) -> Iterator[pa.Table]:
    """Decode and crop the images of a table of :func:`make_block`, in a task.

    PyTorch uses one thread in this process from then on.

    Args:
        block: The table.
        config: The configuration of the run.
        reader: Reads the images by the column ``number``; None if the table has the
            images themselves.

    Yields:
        A table for each chunk of up to 128 rows: ``row`` and ``seed`` of the given
        table; ``viewed``, whether the image has crops of random views, and can be read;
        ``reason``, why the image cannot be read, or None; and ``pixels``, the uint8
        values of the resized square image for the evaluation view, then of the crops of
        all random views, zeros where there is none.
    """
    torch.set_num_threads(1)
    images, seeds = from_columns(block, reader), block["seed"].to_numpy()
    has_views, size = block["has_views"].to_numpy(), features.ROWS_AT_ONCE
    # The results are whole chunks, because the writer needs whole chunks.
    for chunk in range(0, len(block), features.CHUNK_ROWS):
        own = slice(chunk, chunk + features.CHUNK_ROWS)
        pieces = [
            slice(i, min(i + size, own.stop))
            for i in range(*own.indices(len(block))[:2], size)
        ]
        decoded = [
            features.decode_rows(config, seeds[p], images[p], has_views[p])
            for p in pieces
        ]
        pixels, viewed, why = zip(*decoded, strict=True)
        facts = {
            "row": block["row"][own],
            "seed": seeds[own],
            "viewed": np.concatenate(viewed),
        }
        reasons = pa.array(chain.from_iterable(why), pa.string())
        yield pa.table(
            {**facts, "reason": reasons, "pixels": pixel_column(np.concatenate(pixels))}
        )


class Featurizer:
    """A Ray actor that loads an encoder on its own node once, and encodes many rows.

    Args:
        config: The configuration of the run.
        resources: The resources of the actor (``CPU``, ``GPU``).
        weights: The reference to the weights as a safetensors file.
        precision: The precision in which OpenVINO computes the encoder on a CPU; None
            for PyTorch.
    """

    def __init__(
        self,
        config: Config,
        resources: dict[str, float],
        weights: Any,
        precision: Precision | None,
    ) -> None:
        import ray

        self._config, self._threads = config, threads_of_actor(config, resources)
        device = "cuda" if "GPU" in resources else "cpu"
        encoder = build_encoder(config.model)
        encoder.load_state_dict(safetensors.torch.load(ray.get(weights)))
        encoder = (
            encoder.eval()
            .requires_grad_(False)
            .to(device)
            .to(memory_format=torch.channels_last)
        )
        if precision is not None and device == "cpu":
            encoder = Runtime(encoder, precision, self._threads)
        self._encoder = encoder

    def __call__(self, block: pa.Table) -> pa.Table:
        """Encode the images of a table of :func:`decode_block`.

        Args:
            block: The table, with one or more whole chunks of rows.

        Returns:
            A table with the columns ``row`` and ``reason`` of the given table, and
            ``features``: bytes of float32, the features of the evaluation view of an
            image and then of its random views; zeros for an unreadable image and for
            random views that the image does not have.
        """
        config, seeds = self._config, block["seed"].to_numpy()
        viewed, ok = block["viewed"].to_numpy(), block["reason"].is_null().to_numpy()
        pixels = shared_tensor(bytes_of(block["pixels"], features.row_bytes(config)))

        def encode(start: int) -> torch.Tensor:
            """Encode the table's rows from ``start`` on, up to 16, in a thread."""
            torch.set_num_threads(1)  # for this thread only
            own = slice(start, start + features.ROWS_AT_ONCE)
            # Ray must not have divided the chunks.
            assert block["row"][start].as_py() % features.ROWS_AT_ONCE == 0
            return features.encode_rows(
                config, self._encoder, seeds[own], pixels[own], viewed[own], ok[own]
            )

        starts = range(0, len(block), features.ROWS_AT_ONCE)
        encoded = torch.cat(
            list(prefetch_map(encode, starts, self._threads, self._threads))
        )
        flat = encoded.flatten(1).numpy().view(np.uint8)
        facts = {name: block[name] for name in ("row", "reason")}
        return pa.table({**facts, "features": pixel_column(flat)})


def unpack_chunk(job: FeatureJob, rows: np.ndarray, results: pa.Table) -> Chunk:
    """Return a chunk of features from the table that a :class:`Featurizer` returns.

    Args:
        job: All rows of the run, and how features are computed.
        rows: int64 (n,), the row numbers of the images of the chunk.
        results: The table: for each of the n images, in the order of ``rows``,
            ``features`` (bytes of float32) and ``reason`` (why the image cannot be
            read, or None).

    Returns:
        The row numbers; the features, float32 (n, 1 + V, D): D numbers for the
        evaluation view and for each of V random views; and the reasons.

    Raises:
        ConfigError: The encoder returns numbers that are not finite.
    """
    column = results["features"]
    values = bytes_of(column, column.type.byte_width).view(np.float32).copy()
    if not np.isfinite(values).all():
        raise features.not_finite(job.config)
    encoded = torch.from_numpy(values).unflatten(1, (job.num_views, -1))
    return Chunk(rows, encoded, results["reason"].to_pylist())
