"""What does a run on S3 wait for, and from where do streamed rows come?

    python -m benchmarks.storage train --place s3       # digits, two workers: steps/s and requests a step
    python -m benchmarks.storage train --place disk
    python -m benchmarks.storage start                  # a table of 64 shards on S3: requests and seconds
    python -m benchmarks.storage nodes                  # two raylets: share of rows cut on the other one

``--code DIR`` measures the code of another checkout. S3 is moto
(``pip install -e .[dev]``) in a process of its own, which notes a request and waits 20
ms before it answers. Steps/s are the journal's, of both phases from their first line
on, with the checkpoints and all else between two lines. Each part prints one JSON row;
``--output DIR --name NAME`` adds it to the record there.
"""  # noqa: E501

from __future__ import annotations

import argparse
import io
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
LATENCY_MS = 20.0
BUCKET, BATCH = "bucket", 128
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "none",
    "AWS_SECRET_ACCESS_KEY": "none",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
KINDS = ("metrics.jsonl", "STOP", "lock.json", "checkpoints", ".ray")
SHARDS, GROUPS = 64, 4  # of the table, and row groups of each
PHOTOGRAPHS, SIDES = 64, (500, 375)


# ------------------------------------------------------------------------------------------------- the store  # noqa: E501
def serve(port: int, latency_ms: float, log: str, host: str = "127.0.0.1") -> None:
    """S3 on this machine until the process ends: every request is delayed, and noted in
    the file ``log`` with the bytes of its answer before it gets them.
    """
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept, as S3 keeps them

        def log(self, *args: Any) -> None:
            """Nothing on the console."""

    s3 = DomainDispatcherApplication(create_backend_app)
    with open(log, "a", buffering=1, encoding="utf-8") as notes:

        def application(environ: dict[str, Any], start_response: Any) -> Any:
            asked = (
                environ["REQUEST_METHOD"],
                environ["PATH_INFO"],
                environ.get("QUERY_STRING", ""),
            )
            moment = time.time()
            time.sleep(latency_ms / 1e3)

            def answer(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
                size = next(
                    (
                        int(value)
                        for name, value in headers
                        if name.lower() == "content-length"
                    ),
                    0,
                )
                notes.write(json.dumps([moment, *asked, size]) + "\n")
                return start_response(status, headers, *more)

            return s3(environ, answer)

        make_server(
            host, port, application, threaded=True, request_handler=Handler
        ).serve_forever()


@contextmanager
def store(
    latency_ms: float = LATENCY_MS, host: str = "127.0.0.1"
) -> Iterator[tuple[dict[str, str], Path]]:
    """An empty store: the environment that leads to it, and the file with its
    requests.
    """
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "requests"
        words = [
            "serve",
            "--port",
            str(port),
            "--host",
            host,
            "--latency-ms",
            str(latency_ms),
            "--log",
            str(log),
        ]
        process = subprocess.Popen([sys.executable, __file__, *words])
        try:
            while not _answers(host, port):
                if process.poll() is not None:
                    raise SystemExit("no S3 server: pip install -e .[dev]")
                time.sleep(0.05)
            url = f"http://{host}:{port}"
            yield (
                {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": url, "AWS_ENDPOINT_URL": url},
                log,
            )
        finally:
            process.terminate()
            process.wait()


def _answers(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def requests_of(log: Path) -> list[tuple[float, str, str]]:
    """(time, method, path) of every request, with the prefix of a listing as its
    path.
    """
    found = []
    for line in log.read_text().splitlines():
        moment, method, path, query, _ = json.loads(line)
        prefix = query.partition("prefix=")[2].partition("&")[0].replace("%2F", "/")
        found.append((moment, method, f"{path}/{prefix}" if prefix else path))
    return found


def bytes_read(log: Path) -> int:
    """Of the answers to all requests that read an object or a part of one."""
    lines = map(json.loads, log.read_text().splitlines())
    return sum(
        size for _, method, _, query, size in lines if method == "GET" and not query
    )


def make_bucket() -> None:
    import pyarrow.fs

    files, _ = pyarrow.fs.FileSystem.from_uri(
        f"s3://{BUCKET}/?allow_bucket_creation=true"
    )
    files.create_dir(BUCKET)


# -------------------------------------------------------------------------------------------------- training  # noqa: E501
def train(options: argparse.Namespace) -> dict[str, Any]:
    """A run of the digits preset with two workers, here or on S3."""
    with (
        tempfile.TemporaryDirectory() as folder,
        store(options.latency_ms) as (env, log),
    ):
        on_s3 = options.place == "s3"
        output = f"s3://{BUCKET}/run" if on_s3 else f"{folder}/run"
        os.environ.update(env)
        make_bucket()
        command = [
            sys.executable,
            "-m",
            "pipelines",
            "discover",
            "--preset",
            "digits",
            "--workers",
            "2",
            "--batch-size",
            str(BATCH),
            "--seed",
            "0",
            "--output",
            output,
        ]
        subprocess.run(
            command, check=True, env={**os.environ, **env}, stdout=sys.stderr
        )
        from uno.data.files import Storage

        text = Storage(output).read("metrics.jsonl").decode()
        asked = requests_of(log)
    seconds, steps = duration([json.loads(line) for line in text.splitlines()])
    row = {
        "steps": steps,
        "seconds": round(seconds, 3),
        "steps_per_s": round(steps / seconds, 2),
    }
    if not on_s3:
        return row
    journal = [
        moment
        for moment, method, path in asked
        if method == "PUT" and path.endswith(KINDS[0])
    ]
    saves = [
        moment for moment, method, path in asked if method == "PUT" and "/step_" in path
    ]
    during = [path for moment, _, path in asked if journal[0] <= moment <= saves[-1]]
    kinds = Counter(
        next((kind for kind in KINDS if kind in path), "other") for path in during
    )
    return row | {
        "requests": len(during),
        "requests_per_step": round(len(during) / steps, 3),
        "requests_by_kind": dict(kinds.most_common()),
    }


def duration(lines: list[dict[str, Any]]) -> tuple[float, int]:
    """Seconds and steps of both phases, without those before a phase's first line."""
    seconds, steps = 0.0, 0
    for phase in ("pretrain", "discover"):
        for before, line in pairwise(line for line in lines if line["phase"] == phase):
            steps += line["step"] - before["step"]
            seconds += (line["step"] - before["step"]) * BATCH / line["images_per_s"]
    return seconds, steps


# --------------------------------------------------------------------------------------------------- a start  # noqa: E501
def start(options: argparse.Namespace) -> dict[str, Any]:
    """Describe a table of many shards on S3, then fetch a window of its rows."""
    with store(options.latency_ms) as (env, log):
        os.environ.update(env)
        make_bucket()
        _write_shards(f"{BUCKET}/table")
        from uno.data.tables import read_parquet

        before, begin = len(requests_of(log)), time.monotonic()
        rows = read_parquet(f"s3://{BUCKET}/table")
        seconds, described = time.monotonic() - begin, len(requests_of(log))
        some = np.arange(0, len(rows), len(rows) // (2 * SHARDS))
        images: Any = rows.images
        begin = time.monotonic()
        assert len(images.read_images(some)) == len(some)
        fetching, read = time.monotonic() - begin, len(requests_of(log))
    groups = len(np.unique(images.groups(some)))
    return {
        "files": SHARDS,
        "rows": len(rows),
        "requests_per_file": round((described - before) / SHARDS, 2),
        "start_s": round(seconds, 2),
        "requests_per_row_group": round((read - described) / groups, 2),
        "row_group_ms": round(1e3 * fetching / groups, 1),
    }


def _write_shards(folder: str) -> None:
    import pyarrow as pa
    import pyarrow.fs
    import pyarrow.parquet

    files, _ = pyarrow.fs.FileSystem.from_uri(f"s3://{BUCKET}/?allow_delayed_open=true")
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    num = 8 * GROUPS
    for shard in range(SHARDS):
        random = np.random.default_rng(shard)
        pixels = [{"bytes": random.bytes(20_000), "path": None} for _ in range(num)]
        columns = {
            "id": [f"{shard}-{i}" for i in range(num)],
            "image": pa.array(pixels, image),
        }
        table = pa.table({**columns, "label": [f"c{i % 4}" for i in range(num)]})
        with files.open_output_stream(f"{folder}/train-{shard:05d}.parquet") as out:
            pyarrow.parquet.write_table(
                table, out, row_group_size=8, compression="none"
            )


# ----------------------------------------------------------------------------------------------- two raylets  # noqa: E501
def nodes(options: argparse.Namespace) -> dict[str, Any]:
    """A worker on each of two nodes streams photographs: who cut its rows, and how
    many a second.
    """
    import ray
    from ray.cluster_utils import Cluster

    # At Ray's 15, whatever else the machine does would take its time from Ray alone.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "RAY_TMPDIR": folder,
            "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)),
        }
        from pipelines import ray_env

        os.environ |= ray_env.ENVIRONMENT | {ray_env.AUTH_MODE: "disabled"}
        size = {"num_cpus": options.cpus, "object_store_memory": 400 * 2**20}
        cluster = Cluster(initialize_head=True, head_node_args=size)
        try:
            cluster.add_node(**size, wait=True)
            ray.init(address=cluster.address, logging_level="ERROR")
            names = sorted(node["NodeID"] for node in ray.nodes())
            paths = _photographs(Path(folder) / "images")
            workers = [_streamer(ray, name) for name in names]
            stream = [
                worker.remote(paths, options.rows, folder, 2) for worker in workers
            ]
            found = ray.get(stream)
        finally:
            ray.shutdown()
            cluster.shutdown()
    elsewhere = {worker: here["elsewhere"] for worker, here in enumerate(found)}
    rows = sum(here["rows"] for here in found)
    seconds = statistics.mean(here["seconds"] for here in found)
    return {
        "rows": rows,
        "share_elsewhere": round(sum(elsewhere.values()) / rows, 4),
        "rows_per_s": round(rows / seconds, 1),
        "seconds": [round(here["seconds"], 2) for here in found],
        "cpus_of_a_node": options.cpus,
    }


def _streamer(ray: Any, node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=1, scheduling_strategy=strategy)(stream_rows)


def stream_rows(
    paths: list[str], num_rows: int, folder: str, workers: int
) -> dict[str, float]:
    """On a worker: cut rows as streaming does, once to start the tasks' processes,
    then for the clock.
    """
    import ray
    import torch

    from pipelines import ray_data
    from uno.config import override
    from uno.data.decode import BadRows
    from uno.data.files import Storage
    from uno.data.images import InMemory
    from uno.data.plan import make_pretrain_plan
    from uno.data.stream import CropJob, StreamSet, crop_local, decode_here
    from uno.presets import preset

    here, cut = (
        ray.get_runtime_context().get_node_id(),
        Path(folder) / f"cut-{os.getpid()}",
    )
    cut.mkdir()
    ray_data._crop = partial(_noted, ray_data._crop, str(cut))  # type: ignore[assignment]
    config = override(preset("imagenet"), {"augment.small.num_views": 0})
    cpus, store = ray_data.execution_limits(ray.cluster_resources(), workers, 1.0)
    node, cpus = ray_data.preferred_node(ray.nodes(), here, cpus, 1, 1.0)
    found = {}
    for rows in (num_rows // 4, num_rows):
        numbers = np.arange(rows) % len(paths)
        plan, bad = (
            make_pretrain_plan(0, 64, rows),
            BadRows([], paths, 1.0, Storage(folder)),
        )
        labels, none = torch.zeros(rows, dtype=torch.int64), np.empty(0, np.int64)
        crop = partial(crop_local, threads=1)
        images = InMemory(paths).take(numbers)
        how = bad, crop, decode_here(config, images)
        train = StreamSet(images, np.arange(rows), labels, none, 1, 1, *how)
        job = CropJob(config, train, plan, 0, 1, 0, plan.steps_per_epoch)
        on_ray = ray_data.crop_on_ray(ray, ray.put(images), cpus, store, node)
        for note in cut.iterdir():
            note.unlink()
        begin = time.monotonic()
        done = sum(len(pixels) for pixels, _ in on_ray(job))
        found = {"rows": done, "seconds": time.monotonic() - begin}
    notes = [json.loads(note.read_text()) for note in cut.iterdir()]
    assert sum(rows for _, rows in notes) == done, (notes, done)
    return found | {"elsewhere": sum(rows for node, rows in notes if node != here)}


def _noted(crop: Any, folder: str, block: Any, **how: Any) -> Any:
    """In a task: cut, and leave where that was."""
    import uuid

    import ray

    where = ray.get_runtime_context().get_node_id()
    (Path(folder) / uuid.uuid4().hex).write_text(json.dumps([where, len(block)]))
    yield from crop(block, **how)


def _photographs(folder: Path) -> list[str]:
    """Smooth colors with noise, as JPEG of the size of ImageNet's."""
    from PIL import Image

    folder.mkdir()
    paths = []
    for i in range(PHOTOGRAPHS):
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


# ------------------------------------------------------------------------------------------------ everything  # noqa: E501
def elsewhere(options: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """This script by its path, with the packages of another checkout."""
    env = {**os.environ, "PYTHONPATH": options.code}
    command = [sys.executable, str(Path(__file__).absolute()), *words]
    done = subprocess.run(
        command, check=True, env=env, cwd=options.code, stdout=subprocess.PIPE
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parts = {"train": train, "start": start, "nodes": nodes}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=[*parts, "serve"])
    parser.add_argument("--place", choices=("s3", "disk"), default="s3")
    parser.add_argument(
        "--latency-ms", type=float, default=LATENCY_MS, help="added to each request"
    )
    parser.add_argument(
        "--rows", type=int, default=4096, help="of nodes: for each of two workers"
    )
    parser.add_argument("--cpus", type=int, default=3, help="of nodes: of each")
    parser.add_argument("--code", help="another checkout, whose packages are measured")
    parser.add_argument(
        "--output", help="the record's directory, to whose result.json the row is added"
    )
    parser.add_argument("--name", help="of the row there")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--log", help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "serve":
        serve(options.port, options.latency_ms, options.log, options.host)
        return 0
    words = [
        options.part,
        "--place",
        options.place,
        "--latency-ms",
        str(options.latency_ms),
    ]
    words += ["--rows", str(options.rows), "--cpus", str(options.cpus)]
    row = elsewhere(options, words) if options.code else parts[options.part](options)
    print(json.dumps(row), flush=True)
    if options.output:
        record(Path(options.output), options.name or options.part, row)
    return 0


def record(folder: Path, name: str, row: dict[str, Any]) -> None:
    """Add a row to those of that name."""
    from benchmarks.measure import environment

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "result.json"
    found = json.loads(file.read_text()) if file.exists() else {"rows": {}}
    found["command"] = (
        "python -m benchmarks.storage PART [--place s3|disk] [--code BEFORE] --output"
        " DIR --name NAME"
    )
    found |= environment()
    found["rows"].setdefault(name, []).append(row)
    file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
