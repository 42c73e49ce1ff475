"""Run a trained model over a source on Ray.

Batches and files are the same as with the threads of one process, so the results are,
too. :mod:`pipelines.partitions` runs the work.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from pipelines import ray_env
from pipelines.partitions import WriterPool, map_through_model
from pipelines.ray_data import bytes_of, decode_block, pixel_column, shared_tensor
from uno.config import Config
from uno.data.images import Images, InMemory, from_columns, to_columns
from uno.data.rows import Rows
from uno.model import features_of
from uno.results.infer import Decode, build_classifier
from uno.results.predictions import (
    InputSpec,
    PredictionWriter,
    Summary,
    classify,
    decode_chunk,
    split_chunks,
)
from uno.runs.hardware import at_speed
from uno.runtime import Plan, choose_runtime

log = logging.getLogger(__name__)


def predict_on_ray(
    ray: Any,
    config: Config,
    files: Mapping[str, bytes],
    writer: PredictionWriter,
    on_progress: Callable[[int, int], None],
) -> Summary:
    """Classify the rows that are missing in a set of predictions, on Ray.

    Args:
        ray: The connected module.
        config: The configuration of the run.
        files: The files of the model, by name.
        writer: The predictions. Parts that are stored already are not computed again.
        on_progress: Takes the number of finished rows and of all rows.

    Returns:
        The summary of all predictions, after they are joined to one table.
    """
    how = InputSpec.of(build_classifier(files), writer.part_rows)
    reader = writer.data.images.reader()
    decode = partial(
        decode_part, reader=None if reader is None else ray.put(reader), how=how
    )
    parts = map(writer.rows_of, writer.missing)
    blocks = (make_block(writer.data, np.array(part)) for part in parts)
    vectors = config.model.takes_vectors
    plan = None if vectors else choose_runtime(config, torch.device("cpu"))
    loaded = ray.put(dict(files)), writer.embedding, plan
    pool = WriterPool(writer.storage, writer.part_writer.write, writer.part_rows)
    for table in map_through_model(
        ray,
        config,
        blocks,
        decode,
        Scorer,
        loaded,
        how.chunk_rows,
        3 * how.size**2,
        pool,
    ):
        for number in table["number"].to_pylist():
            writer.stored(number)
        on_progress(writer.num_done, writer.num_rows)
    return writer.finish()


def encode_on_ray(
    config: Config,
    files: Mapping[str, bytes],
    images: Images,
    here: Decode,
    batches: Iterable[np.ndarray],
) -> Iterator[tuple[np.ndarray, Tensor, Sequence[str | None]]]:
    """Compute features on Ray workers, as :data:`uno.results.infer.Decode`.

    If workers are lost, or if they can read no image because the files are on this
    machine, a warning says so and this machine computes everything.

    Args:
        config: The configuration of the run.
        files: The files of the model, by name.
        images: The images of all rows.
        here: Computes the features on this machine.
        batches: Batches of row numbers, int64 (b,).

    Returns:
        For each batch its row numbers, the features float32 (b, D), and for each row
        the reason why it has none, or None.
    """
    rows, size = list(batches), build_classifier(files).size
    ends = np.cumsum([len(some) for some in rows])
    blocks = (
        pa.table({"row": np.arange(end - len(some), end), **to_columns(images, some)})
        for end, some in zip(ends, rows, strict=True)
    )
    decode = partial(
        decode_block,
        side=size,
        images=images.reader(),
        interpolation=config.data.interpolation,
    )
    with ray_env.connect() as ray, suppress(ray.exceptions.RayError):
        loaded = (ray.put(dict(files)),)
        most = max(map(len, rows))
        sizes = most, 3 * size**2
        tables = map_through_model(
            ray, config, blocks, decode, FeatureModel, loaded, *sizes
        )
        found = pa.concat_tables(tables)
        reasons, width = found["reason"].to_pylist(), found["features"].type.byte_width
        if None in reasons:
            values = bytes_of(found["features"], width).view(np.float32).copy()
            features = torch.from_numpy(values).split([len(some) for some in rows])
            return (
                (some, own, reasons[end - len(some) : end])
                for some, own, end in zip(rows, features, ends, strict=True)
            )
    log.warning(
        "workers were lost or can read no image: this machine computes the features"
    )
    return here(rows)


def make_block(data: Rows, rows: np.ndarray) -> pa.Table:
    """Return a partition as the table that is sent to a task.

    Args:
        data: All rows that are predicted.
        rows: The numbers of the rows of the partition, int64 (n,).
    """
    return pa.table(
        {"row": rows, "id": data.ids_of(rows), **to_columns(data.images, rows)}
    )


def decode_part(block: pa.Table, reader: Any, how: InputSpec) -> Iterator[pa.Table]:
    """Decode the rows of a :func:`make_block`, in a task.

    Args:
        block: The table.
        reader: The reference to what reads images by row number; None if the block
            has the images themselves.
        how: The size and the chunks that the model needs.

    Yields:
        Tables of some rows, with a column ``pixels``.
    """
    import ray

    torch.set_num_threads(1)
    images: Images
    if reader is None:
        images = InMemory(from_columns(block, None))
    else:
        images = ray.get(reader).take(block["number"].to_numpy())
    ids, first = block["id"].combine_chunks(), block["row"][0].as_py()
    for chunk in split_chunks(ids, images, first, how):
        facts, pixels = decode_chunk(chunk, how, 1)
        yield facts.append_column("pixels", pixel_column(pixels.flatten(1).numpy()))


class Scorer:
    """The model of an actor that classifies rows.

    Args:
        device: The device of the model.
        threads: The number of threads.
        files: The reference to the files of the model.
        embedding: Whether to return the embeddings, too.
        plan: How the encoder is computed on a CPU; None for PyTorch.
    """

    def __init__(
        self, device: str, threads: int, files: Any, embedding: bool, plan: Plan | None
    ) -> None:
        import ray

        torch.set_num_threads(threads)
        self._model, self._embedding = (
            build_classifier(ray.get(files), device),
            embedding,
        )
        if plan is not None and self._model.device.type == "cpu":
            self._model.module.encoder = at_speed(
                self._model.module.encoder, plan, threads
            )

    def __call__(self, block: pa.Table) -> pa.Table:
        """Return the model's predictions for a block of decoded rows."""
        size = self._model.size
        pixels = shared_tensor(bytes_of(block["pixels"], 3 * size**2)).view(
            -1, 3, size, size
        )
        return pa.concat_tables(
            classify(self._model, block.drop_columns("pixels"), pixels, self._embedding)
        )


class FeatureModel:
    """The model of an actor that computes features of the encoder.

    Args:
        device: The device of the model.
        threads: The number of threads.
        files: The reference to the files of the model.
    """

    def __init__(self, device: str, threads: int, files: Any) -> None:
        import ray

        torch.set_num_threads(threads)
        self._model = build_classifier(ray.get(files), device)

    def __call__(self, block: pa.Table) -> pa.Table:
        """Compute the features of a block of :func:`~pipelines.ray_data.decode_block`.

        Returns:
            A table with the columns ``reason`` and ``features`` (bytes of float32,
            zeros for rows that cannot be read).
        """
        size, module = self._model.size, self._model.module
        pixels = shared_tensor(bytes_of(block["pixels"], 3 * size**2))
        ok = torch.from_numpy(block["reason"].is_null().to_numpy().copy())
        features = torch.zeros(len(block), int(module.encoder.num_features))  # type: ignore[arg-type]
        if ok.any():
            images = pixels.view(-1, 3, size, size)[ok]
            features[ok] = features_of(module, images, self._model.config).cpu()
        return pa.table(
            {
                "reason": block["reason"],
                "features": pixel_column(features.numpy().view(np.uint8)),
            }
        )
