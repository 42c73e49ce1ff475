"""Stream photographs on two raylets, a worker on each, and count where rows were cut.

    python -m tests.pipelines.two_nodes ROWS

prints one line of JSON: the rows of both workers, and the share of them that was cut on
the other worker's node. It is a program of its own because it starts a cluster with two
nodes on this machine.
"""

import io
import json
import os
import sys
import tempfile
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from PIL import Image
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipelines import ray_data, ray_env
from tests.pipelines.small import ROOT
from uno.config import override
from uno.data.files import Storage
from uno.data.images import InMemory
from uno.data.sampling import make_pretrain_plan
from uno.data.stream import CropJob, StreamedImages, StreamSet, crop_local
from uno.data.unreadable import BadRows
from uno.presets import preset

NUM_PHOTOGRAPHS, SIDES = 64, (500, 375)
CPUS = 3  # of each node


def main(num_rows: int) -> None:
    """Run a worker on each of two nodes, and print what :func:`stream_rows` found."""
    # With Ray's 15, anything else that the machine does slows down Ray alone.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "RAY_TMPDIR": folder,
            "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)),
        }
        os.environ |= ray_env.ENVIRONMENT | {ray_env.AUTH_MODE: "disabled"}
        size = {"num_cpus": CPUS, "object_store_memory": 400 * 2**20}
        cluster = Cluster(initialize_head=True, head_node_args=size)
        try:
            cluster.add_node(**size, wait=True)
            ray.init(address=cluster.address, logging_level="ERROR")
            nodes = sorted(node["NodeID"] for node in ray.nodes())
            paths = write_photographs(Path(folder) / "images")
            found = ray.get(
                [
                    worker_on(node).remote(paths, num_rows, folder, len(nodes))
                    for node in nodes
                ]
            )
        finally:
            ray.shutdown()
            cluster.shutdown()
    rows, elsewhere = (sum(counts) for counts in zip(*found, strict=True))
    print(json.dumps({"rows": rows, "share_elsewhere": elsewhere / rows}))


def worker_on(node: str) -> Any:
    """Return :func:`stream_rows` as a Ray task that runs on this node."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=1, scheduling_strategy=strategy)(stream_rows)


def stream_rows(
    paths: list[str], num_rows: int, folder: str, num_workers: int
) -> tuple[int, int]:
    """Cut rows as streamed training does: a few to start Ray's processes, then all.

    Returns:
        How many rows were cut, and how many of them on another node than this one.
    """
    here = ray.get_runtime_context().get_node_id()
    notes = Path(folder) / f"cut-{os.getpid()}"
    notes.mkdir()
    ray_data._crop = partial(crop_and_note, ray_data._crop, str(notes))  # type: ignore[assignment]
    config = override(preset("imagenet"), {"augment.small.num_views": 0})
    limits = ray_data.cropping_of(ray, num_workers, 1.0, 1)
    done = 0
    for rows in (num_rows // 4, num_rows):
        numbers = np.arange(rows) % len(paths)
        plan = make_pretrain_plan(0, 64, rows)
        bad = BadRows([], paths, 1.0, Storage(folder))
        labels, none = torch.zeros(rows, dtype=torch.int64), np.empty(0, np.int64)
        crop = partial(crop_local, threads=1)
        images = InMemory(paths).take(numbers)
        source = StreamedImages.of(config, images, bad)
        train = StreamSet(source, np.arange(rows), labels, none, 1, 1, crop)
        job = CropJob(config, train, plan, 0, 1, 0, plan.steps_per_epoch)
        on_ray = ray_data.crop_on_ray(ray, ray.put(images), limits)
        for note in notes.iterdir():
            note.unlink()
        done = sum(len(pixels) for pixels, _ in on_ray(job))
    cut = [json.loads(note.read_text()) for note in notes.iterdir()]
    assert sum(rows for _, rows in cut) == done, (cut, done)
    return done, sum(rows for node, rows in cut if node != here)


def crop_and_note(crop: Any, folder: str, block: Any, **how: Any) -> Any:
    """In a task of Ray Data: write down this node and the number of rows, then crop."""
    where = ray.get_runtime_context().get_node_id()
    (Path(folder) / uuid.uuid4().hex).write_text(json.dumps([where, len(block)]))
    yield from crop(block, **how)


def write_photographs(folder: Path) -> list[str]:
    """Write smooth colors with noise, as JPEG of the size of ImageNet's images."""
    folder.mkdir()
    paths = []
    for i in range(NUM_PHOTOGRAPHS):
        random = np.random.default_rng(i)
        small = Image.fromarray(
            random.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        ).resize(SIDES)
        noise = random.normal(0, 8, (*SIDES[::-1], 3))
        data = io.BytesIO()
        Image.fromarray((np.asarray(small) + noise).clip(0, 255).astype(np.uint8)).save(
            data, "JPEG", quality=90
        )
        paths.append(str(folder / f"{i}.jpg"))
        Path(paths[-1]).write_bytes(data.getvalue())
    return paths


if __name__ == "__main__":
    main(int(sys.argv[1]))
