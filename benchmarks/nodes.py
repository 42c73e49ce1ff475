"""What happens when a node dies in a run, and when storage refuses for a while?

    python -m benchmarks.nodes CASE                    # one JSON row; two minutes on two cores
    python -m benchmarks.nodes CASE --code DIR         # of the program in another checkout
    python -m benchmarks.nodes all --output DIR        # every case into DIR/result.json
    python -m benchmarks.nodes raylets --nodes 16      # as many raylets, of which one is killed

Two raylets (network namespaces where allowed), two workers, one a node; kill -9 of the
second node's raylet after step 96 of 240 on the digits. ``room``: the node that is
left has CPUs for both workers, ``tight``: for them and Ray Data only if shares shrink,
``none``: not for them until another node comes, 70 s after the loss. Ray waits 2 s for
the place of a group in place of 60 (25), so that the old program's twelve tries are
seen. ``storage``: an S3 server on this machine answers 503 for ten seconds.
``raylets``: a head without CPUs and nodes of two logical CPUs and 100 MiB of object
store (``ray.cluster_utils``), a worker on each; gloo, one thread a rank, 24 steps of
discovery on the digits; one raylet is killed after the first checkpoint.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import environment
from tests.pipelines.raylets import STORE_BYTES, Command, two_nodes
from tests.pipelines.small import LONG, ROOT, SMALL, wait_for
from uno.data.files import Storage
from uno.runs import DISCOVER
from uno.runs.checkpoint import checkpoint_steps
from uno.runs.journal import read_journal

JOIN_S, LIMIT_S, REFUSES_S = 70.0, 150.0, 10.0
LOST_AT_STEP = 96
# progress, and what Ray says of its nodes
SHOWN = ("discover ", "predict ", "\x1b", "\t", "    [")
ONE_CPU = ("--compute.cpus-per-worker", "1")
TIMES, RAYLETS_S = "UNO_BENCHMARK_TIMES", 900.0
MANY_STEPS = (
    "--train.batch-size",
    "64",
    "--discover.epochs",
    "24",
    "--train.max-steps",
    "24",
    "--train.checkpoint-every-epochs",
    "2",
    "--compute.placement_strategy",
    "SPREAD",
)


class Case(NamedTuple):
    """CPUs of the two nodes, how images come, and whether another node comes."""

    cpus: tuple[int, int]
    ingest: str
    options: tuple[str, ...] = ()
    joins: bool = False


CASES = {
    "resident-room": Case((4, 3), "memory"),
    "resident-tight": Case((2, 2), "memory", ONE_CPU, True),
    "resident-none": Case((1, 3), "memory", ONE_CPU, True),
    "streaming-room": Case((4, 3), "streaming"),
    "streaming-tight": Case((2, 2), "streaming"),
    "streaming-none": Case((1, 3), "streaming", ONE_CPU, True),
}


def lose_a_node(case: Case, code: Path) -> dict[str, Any]:
    """Seconds from the loss to the first checkpoint after it and to the end
    (-9: it had none after 150 s), the longest time without any line on the console, and
    what was said, each with its second.
    """
    with (
        tempfile.TemporaryDirectory() as name,
        two_nodes(_made(Path(name) / "unused"), case.cpus) as nodes,
    ):
        folder, storage = Path(name), Storage(f"{name}/run")
        own = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "2"}
        argv = [
            "pipelines",
            "discover",
            *LONG,
            "--workers",
            "2",
            "--compute.placement_strategy",
            "SPREAD",
            "--data.loading",
            case.ingest,
            *case.options,
            "--output",
            storage.root,
        ]
        command = Command(
            argv, {**nodes.env, **own, "PYTHONPATH": str(code)}, folder / "log", code
        )
        while command.code is None and _saved_step(storage) < LOST_AT_STEP:
            time.sleep(0.2)
        saved = _saved_step(storage)
        nodes.lose()
        lost, before = time.monotonic(), len(command.lines)
        trains = None
        last_line, silent, seen, joined = lost, 0.0, before, not case.joins
        said = list[tuple[float, str]]()
        while command.code is None and (now := time.monotonic()) < lost + LIMIT_S:
            silent = max(silent, now - last_line)
            if len(lines := command.lines) > seen:
                said += [
                    (round(now - lost, 1), line)
                    for line in lines[seen:]
                    if not line.startswith(SHOWN)
                ]
                last_line, seen = now, len(lines)
            if trains is None and _saved_step(storage) > saved:
                trains = round(now - lost, 1)
            if not joined and now - lost > JOIN_S:
                nodes.join(2)
                joined = True
            time.sleep(0.2)
        ended = round(time.monotonic() - lost, 1) if command.code is not None else None
        return {
            "exit_code": command.end(0),
            "trains_again_s": trains,
            "ended_s": ended,
            "joins_s": JOIN_S if case.joins else None,
            "longest_silence_s": round(silent, 1),
            "waiting_lines": sum("waiting for" in line for _, line in said),
            "internal": any("internal" in line for line in command.lines[before:]),
            "said": [[at, line.replace(name, "DIR")] for at, line in said[:8]],
        }


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _saved_step(storage: Storage) -> int:
    """Return the step of the newest checkpoint of discovery, 0 without one."""
    return max(checkpoint_steps(storage, DISCOVER), default=0)


def refuse(code: Path) -> dict[str, Any]:
    """What a look for a file makes of a store that answers 503 for a while, and 200
    then.
    """
    start = time.monotonic()

    class Store(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(503 if time.monotonic() < start + REFUSES_S else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    where = f"s3://a:b@bucket/x?endpoint_override=http://127.0.0.1:{server.server_port}&region=us-east-1"
    look = (
        "import sys; from uno.data.files import Storage;"
        " print(Storage(sys.argv[1]).exists('run'))"
    )
    env = {**os.environ, "PYTHONPATH": str(code), "AWS_EC2_METADATA_DISABLED": "true"}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", look, where],
        env=env,
        cwd=code,
        capture_output=True,
        text=True,
    )
    spent = round(time.monotonic() - start, 1)
    server.shutdown()
    last = (
        (done.stderr if done.returncode else done.stdout)
        .splitlines()[-1]
        .replace(str(server.server_port), "PORT")
    )
    return {"exit_code": done.returncode, "ended_s": spent, "last_line": last}


def noting() -> None:
    """In every process of a worker: each rank notes, in a file of its own, when a vote,
    the write of a checkpoint and its barrier began and ended.
    """
    import torch.distributed as dist

    from uno import train
    from uno.runs.lock import ClaimedStorage
    from uno.session.ranks import GroupWorker

    def noted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            found = function(*args, **kwargs)
            counts = kind != "write" or args[1].startswith("checkpoints/")
            if counts and dist.is_initialized():
                line = json.dumps([dist.get_rank(), kind, began, time.monotonic()])
                with open(Path(os.environ[TIMES], f"{os.getpid()}.times"), "a") as file:
                    file.write(f"{line}\n")
            return found

        return call

    vote = noted("vote", GroupWorker.should_stop)
    GroupWorker.should_stop = vote  # type: ignore[method-assign]
    ClaimedStorage.write = noted("write", ClaimedStorage.write)  # type: ignore[method-assign]
    train.collectives.barrier = noted("barrier", train.collectives.barrier)


def lose_a_raylet(num: int) -> dict[str, Any]:
    """Measure a run on ``num`` raylets, of which one is killed.

    Returns the seconds from the command to the first line of the journal; of a vote and
    of a checkpoint's barrier (see :func:`together`) and of its write, median and most;
    and from the loss to what the command says of it, to the next checkpoint and to the
    end.
    """
    from ray.cluster_utils import Cluster

    from pipelines import ray_env

    with tempfile.TemporaryDirectory(prefix="uno-", dir="/tmp") as name:
        own = {
            "RAY_TMPDIR": name,
            ray_env.AUTH_MODE: "disabled",
            "RAY_health_check_period_ms": "1000",
        }
        os.environ |= {**ray_env.ENVIRONMENT, **own, "PYTHONPATH": str(ROOT)}
        folder, storage = Path(name), Storage(f"{name}/run")
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES},
        )
        try:
            nodes = [
                cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
                for _ in range(num)
            ]
            setup = {
                "env_vars": {TIMES: name},
                "worker_process_setup_hook": "benchmarks.nodes.noting",
            }
            env = {
                **os.environ,
                "RAY_ADDRESS": cluster.address,
                "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": setup}),
            }
            argv = [
                "pipelines",
                "discover",
                *SMALL,
                *MANY_STEPS,
                *ONE_CPU,
                "--workers",
                str(num),
                "--output",
                storage.root,
            ]
            begin = time.monotonic()
            command = Command(argv, env, folder / "log")

            def after(reached: Callable[[], Any]) -> float:
                wait_for(lambda: command.says("") and bool(reached()), RAYLETS_S)
                return time.monotonic()

            steps = after(lambda: read_journal(storage))
            lost = after(lambda: checkpoint_steps(storage, DISCOVER))
            saved = checkpoint_steps(storage, DISCOVER)[-1]
            cluster.remove_node(nodes[-1], allow_graceful=False)
            dies = after(lambda: command.count("new ones resume"))
            trains = after(lambda: _saved_step(storage) > saved)
            code = command.end(RAYLETS_S)
            ended = time.monotonic()
            found = [
                json.loads(line)
                for file in folder.glob("*.times")
                for line in file.open()
            ]
        finally:
            cluster.shutdown()
    rows = {
        "workers": num,
        "exit_code": code,
        "first_line_s": steps - begin,
        "lost_at_step": saved,
        "loss_known_s": dies - lost,
        "trains_again_s": trains - lost,
        "ended_s": ended - lost,
    }
    for kind in ("vote", "barrier", "write"):
        seconds = together(found, kind, 1 if kind == "write" else num)
        median, most = statistics.median(seconds), max(seconds)
        rows |= {f"{kind}s": len(seconds), f"{kind}_s": median, f"{kind}_most_s": most}
    return {key: round(value, 3) for key, value in rows.items()}


def together(
    found: list[tuple[int, str, float, float]], kind: str, num: int
) -> list[float]:
    """Of each time that all ``num`` ranks did that: seconds from the last that began to
    the last that ended. What a group had not finished when it was lost is left out.
    """
    times = sorted((began, ended) for _, what, began, ended in found if what == kind)
    seconds, group = list[float](), list[tuple[float, float]]()
    for began, ended in times:
        # nobody leaves before all are there
        if group and began > min(end for _, end in group):
            group = []
        group.append((began, ended))
        if len(group) == num:
            seconds.append(max(end for _, end in group) - began)
            group = []
    return seconds


def main() -> None:
    """Print a row a case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("case", choices=[*CASES, "storage", "raylets", "all"])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--code", type=Path, default=ROOT)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rows = []
    for name in [*CASES, "storage"] if given.case == "all" else [given.case]:
        if name == "raylets":
            row = lose_a_raylet(given.nodes)
        else:
            row = (
                refuse(given.code)
                if name == "storage"
                else lose_a_node(CASES[name], given.code)
            )
        rows.append({"case": name, **row})
        print(json.dumps(rows[-1]), flush=True)
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
        found = {
            "command": " ".join(["python -m benchmarks.nodes", given.case]),
            "rows": rows,
        }
        (given.output / "result.json").write_text(
            json.dumps(found | environment(), indent=1)
        )


if __name__ == "__main__":
    main()
