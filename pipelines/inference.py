"""Run a trained model over a source on Ray.

Batches and files are the same as with the threads of one process, so the results are,
too. :mod:`pipelines.partitions` runs the work.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pipelines.partitions import WriterPool, map_through_model
from pipelines.ray_data import bytes_of, pixel_column, shared_tensor
from uno.config import Config
from uno.data.images import Images, InMemory, from_columns, to_columns
from uno.data.rows import Rows
from uno.results.infer import build_classifier
from uno.results.predictions import (
    InputSpec,
    PredictionWriter,
    Summary,
    classify,
    decode_chunk,
    split_chunks,
)
from uno.runs.hardware import at_speed
from uno.runtime import Plan, plan_of


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
    plan = None if vectors else plan_of(config, torch.device("cpu"))
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
    """An actor of the pool, which loads the model once and classifies many blocks.

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
