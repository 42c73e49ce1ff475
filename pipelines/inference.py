"""Running a trained model over a source on Ray, by :mod:`pipelines.partitions`: the
same batches and files as with the threads of this process, so the same results.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from pipelines.partitions import map_through_model
from pipelines.ray_data import bytes_of, pixel_column, shared_tensor
from uno.config import Config
from uno.data.images import InMemory, from_columns, to_columns
from uno.data.inputs import split_batches
from uno.data.rows import Partition
from uno.results.infer import build_classifier
from uno.results.predictions import (
    InputSpec,
    PredictionWriter,
    Summary,
    classify,
    decode_chunk,
    read_part,
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
    """Classify what ``writer`` lacks on actors that load the model's ``files``, and
    join it.
    """
    how, source = (
        InputSpec.of(build_classifier(files), writer.part_rows),
        writer.inputs.source,
    )
    decode = partial(
        decode_part, source=None if source is None else ray.put(source), how=how
    )
    rows = [writer.rows_of(number) for number in writer.missing]
    parts = zip(rows, writer.inputs.parts(map(np.asarray, rows)), strict=True)
    blocks = (part_block(own.start, part) for own, part in parts)
    vectors = config.model.takes_vectors
    plan = None if vectors else plan_of(config, torch.device("cpu"))
    loaded = ray.put(dict(files)), writer.embedding, plan
    write, sizes = (
        writer.part_writer.write,
        (writer.part_rows, how.chunk_rows, 3 * how.size**2),
    )
    stored = map_through_model(
        ray, config, writer.storage, blocks, decode, Scorer, loaded, write, *sizes
    )
    for number, _ in stored:
        writer.stored(number)
        on_progress(writer.num_done, writer.num_rows)
    return writer.finish()


def part_block(first: int, part: Partition) -> pa.Table:
    """A partition as it travels, its first row being ``first``."""
    rows = {"row": np.arange(first, first + len(part.rows))}
    if part.images is None:
        return pa.table({**rows, "number": part.rows})
    return pa.table(
        {**rows, "id": part.ids, **to_columns(part.images, np.arange(len(part.rows)))}
    )


def decode_part(block: pa.Table, source: Any, how: InputSpec) -> Iterator[pa.Table]:
    """A task: a :func:`part_block` -> its rows with ``pixels``, some at a time;
    ``source``: of numbers.
    """
    import ray

    torch.set_num_threads(1)
    source = None if source is None else ray.get(source)
    rows = block["row"].to_numpy()
    if "id" in block.column_names:
        here = source is None
        images = (
            InMemory(from_columns(block, None))
            if here
            else source.take(block["number"].to_numpy())
        )
        part, read = (
            Partition(rows, block["id"].combine_chunks(), images),
            split_batches,
        )
    else:
        part, read = Partition(block["number"].to_numpy()), source.read
    for chunk in read_part(read, part, int(rows[0]), how):
        facts, pixels = decode_chunk(chunk, how, 1)
        yield facts.append_column("pixels", pixel_column(pixels.flatten(1).numpy()))


class Scorer:
    """An actor of the pool: loads the model once, then classifies block after block."""

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
        """A decoded block -> what the model says of it."""
        size = self._model.size
        pixels = shared_tensor(bytes_of(block["pixels"], 3 * size**2)).view(
            -1, 3, size, size
        )
        return pa.concat_tables(
            classify(self._model, block.drop_columns("pixels"), pixels, self._embedding)
        )
