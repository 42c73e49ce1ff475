"""The commands of docs/deploy for a cluster, from submission to the report, on one that is not there.

    python -m tests.rehearsal

Two machines are network namespaces (root; else nodes at one address). The head has no GPU; the GPUs of the
others are declared, and the CPU computes. S3 is moto, 5 ms away, by URIs with options. Tokens are on, and
each object store has 100 MiB. Prints a row for each command: what it was, how it ended, seconds.
"""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from benchmarks.storage import BUCKET, CREDENTIALS, store
from tests.pipelines.raylets import DASHBOARD, Raylets, head
from tests.pipelines.small import RAY, ROOT, SMALL, wait_for
from tests.pipelines.test_declared_gpus import SETUP
from uno.data.files import Storage, join

LATENCY_MS = 5.0
ON_GPUS = ["--workers", "2", "--device", "cuda"]


class Row(NamedTuple):
    """A command and how it ended."""

    command: str
    simulated: str
    code: int
    seconds: float
    said: str


class Rehearsal:
    """Commands that are submitted to a cluster; ``rows`` are those that have ended."""

    def __init__(self, raylets: Raylets, root: str, env: dict[str, str]) -> None:
        self.rows, self._raylets, self._root, self._env = list[Row](), raylets, root, env
        self._setup = {**SETUP, "env_vars": {**SETUP["env_vars"], "RAY_JOB_STOP_WAIT_TIME_S": "60"}}

    def uri(self, name: str) -> str:
        """In the bucket, with the options that lead there."""
        return join(self._root, name)

    def submit(self, simulated: str, *words: str) -> Row:
        """``ray job submit -- python -m pipelines WORDS``, waited for."""
        address = f"http://{self._raylets.host}:{DASHBOARD}"
        job = [
            RAY,
            "job",
            "submit",
            "--address",
            address,
            "--runtime-env-json",
            json.dumps(self._setup),
            "--",
        ]
        start = time.monotonic()
        done = subprocess.run([*job, sys.executable, "-m", "pipelines", *words], env=self._env, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=400)  # fmt: skip
        named = [word for word in words[:3] if not word.startswith("-") and "://" not in word]
        row = Row(
            " ".join(["uno", *named]), simulated, done.returncode, time.monotonic() - start, done.stdout
        )
        self.rows.append(row)
        return row

    def table(self) -> str:
        """Of all rows."""
        lines = ["| command | simulated | outcome |", "|---|---|---|"]
        ends = ["ok" if row.code == 0 else f"exit {row.code}" for row in self.rows]
        lines += [
            f"| `{row.command}` | {row.simulated} | {end}, {row.seconds:.0f} s |"
            for row, end in zip(self.rows, ends, strict=True)
        ]
        return "\n".join(lines)


@contextmanager
def simulated(folder: Path) -> Iterator[Rehearsal]:
    """The cluster, with a node of its own machine that does not see ``folder``, and an empty bucket."""
    env = {name: value for name, value in CREDENTIALS.items() if name != "AWS_REGION"}
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONPATH": str(ROOT)}
    with mock.patch.dict(os.environ, env), head(2) as raylets, store(LATENCY_MS, raylets.host) as (s3, _):
        options = (
            f"region=us-east-1&scheme=http&endpoint_override={s3['AWS_ENDPOINT_URL'].removeprefix('http://')}"
        )
        Storage(f"s3://{BUCKET}?{options}&allow_bucket_creation=true")._fs.create_dir(BUCKET)
        raylets.join(2, folder, gpus=1)
        raylets.join(2, gpus=1)
        wait_for(lambda: subprocess.run(
            [RAY, "job", "submit", "--address", f"http://{raylets.host}:{DASHBOARD}", "--", "true"],
            env=raylets.env, capture_output=True,
        ).returncode == 0)  # fmt: skip  # the agent that starts jobs comes after the list of them
        yield Rehearsal(raylets, f"s3://{BUCKET}?{options}", raylets.env)


def streamed(cluster: Rehearsal) -> None:
    """Packed, discovered as a stream, predicted, shown."""
    packed, run = cluster.uri("packed"), cluster.uri("run")
    cluster.submit("S3 by a URI with options", "data", "pack", "--data", "digits", "--output", packed)
    cluster.submit(
        "streamed from S3, declared GPUs, a head without one", "discover", *SMALL, *ON_GPUS, "--data",
        f"parquet:{packed}", "--known-classes", "first:5", "--data.loading", "streaming", "--output", run,
    )  # fmt: skip
    cluster.submit(
        "declared GPUs", "predict", run, *ON_GPUS, "--data", f"parquet:{packed}", "--output",
        cluster.uri("predictions"),
    )  # fmt: skip
    cluster.submit("S3 by a URI with options", "report", run)


def resident(cluster: Rehearsal) -> None:
    """Images in memory, and a finished run that is submitted again."""
    run = cluster.uri("memory")
    words = ["discover", *SMALL, *ON_GPUS, "--output", run]
    cluster.submit("resident, declared GPUs, a head without one", *words)
    cluster.submit("the same once more", *words)
    cluster.submit("metrics again", "evaluate", run, *ON_GPUS)


def main() -> int:
    """All of it; 1 where a command ended otherwise than it should."""
    with tempfile.TemporaryDirectory() as hidden, simulated(Path(hidden)) as cluster:
        try:
            streamed(cluster)
            resident(cluster)
        finally:
            print(cluster.table())
    for row in cluster.rows:
        if row.code:
            print(f"\n{row.command}:\n{row.said[-2000:]}")
    return int(any(row.code for row in cluster.rows))


if __name__ == "__main__":
    sys.exit(main())
