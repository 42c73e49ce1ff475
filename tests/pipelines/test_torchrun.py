"""Two ranks of torchrun, without Ray: killed, resumed, finished, and what it says of
other wishes.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from torch.distributed import run

from pipelines.commands import DISCOVER
from pipelines.options import parse
from tests.pipelines.small import (
    LONG,
    ROOT,
    SMALL,
    assert_as_undisturbed,
    newest_step,
    wait_for,
)
from tests.processes import running
from uno.data.files import Storage
from uno.runs.journal import read_journal


def torchrun(log: Path, *argv: str) -> subprocess.Popen:
    """``torchrun -m pipelines ARGV`` with two ranks and one thread each; its output
    goes to ``log``.
    """
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pipelines"]
    with open(log, "w") as file:
        return subprocess.Popen(
            [sys.executable, *words, *argv],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def ours(log: Path) -> list[str]:
    """Lines in which a process of ours said how it ended."""
    return [line for line in log.read_text().splitlines() if line.startswith("uno: ")]


@pytest.mark.ray
@pytest.mark.slow
def test_a_rank_is_killed_and_the_same_command_finishes(two, tmp_path):
    """A rank is killed, then torchrun is told to stop, then the same command finishes:
    weights, lines and results are those of two workers of Ray, to the bit.
    """
    run, output = tmp_path / "run", Storage(str(tmp_path / "run"))
    command = ["discover", *LONG, "--output", output.root]

    first = torchrun(tmp_path / "first.log", *command)
    wait_for(lambda: newest_step(output) > 0 or first.poll() is not None)
    (victim,) = [
        pid
        for pid, process in running().items()
        if process.parent == first.pid and is_rank(pid, "1")
    ]
    os.kill(victim, signal.SIGKILL)
    assert first.wait() != 0
    (line,) = ours(tmp_path / "first.log")
    assert line.startswith("uno: rank 0 of 2 lost another (")
    assert line.endswith("the same command resumes")
    killed = newest_step(output)
    second = torchrun(tmp_path / "second.log", *command)
    wait_for(lambda: newest_step(output) > killed or second.poll() is not None)
    second.terminate()
    assert second.wait() != 0
    stopped = newest_step(output)
    assert ours(tmp_path / "second.log") == [
        f"uno: stopped at discover step {stopped} of 240; resume with the same command"
    ]
    assert torchrun(tmp_path / "third.log", *command).wait() == 0
    text = (tmp_path / "third.log").read_text()
    assert f"resuming at discover step {stopped}" in text
    files = {path.name for path in run.iterdir()}
    assert files >= {"predictions", "report.html", "model", "tensorboard"}
    assert not {"lock.json", "ray", "STOP"} & files
    for line in read_journal(output, "metrics.jsonl"):
        assert 0 < line["rank_ms_min"] <= line["rank_ms_median"] <= line["rank_ms_max"]
    assert_as_undisturbed(run, two)
    assert (run / "metrics.json").read_bytes() == (two / "metrics.json").read_bytes()


def is_rank(pid: int, rank: str) -> bool:
    return f"RANK={rank}" in Path(f"/proc/{pid}/environ").read_text().split("\0")


@pytest.mark.ray  # several processes
@pytest.mark.release
def test_other_wishes_are_one_line(tmp_path):
    """From rank 0 alone. Kills: a rank that waits for ever for one that refused, a
    line from each of them.
    """
    words = ["discover", *SMALL, "--workers", "3", "--output", str(tmp_path / "run")]
    assert torchrun(tmp_path / "log", *words).wait() != 0
    assert ours(tmp_path / "log") == [
        "uno: error: --workers 3, but torchrun has started 2 ranks; leave --workers out"
    ]
    assert not (tmp_path / "run").exists()


PRINT_ARGUMENTS = 'printf "%s\\n" "$@"'


def printed(folder: Path, programs: dict[str, str], command: list, **env: str):
    """The lines that a command prints for which ``programs`` are scripts that stand in
    for those of a cluster.
    """
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    env = os.environ | env | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def slurm_starts(folder: Path, launcher: str, options: list[str]) -> list[str]:
    """The command that the script for Slurm starts with srun on two nodes."""
    return printed(
        folder,
        {"scontrol": "echo node-a; seq 100000", "srun": PRINT_ARGUMENTS},
        ["bash", str(ROOT / "examples/slurm.sbatch"), *options],
        SLURM_JOB_NODELIST="node-[a-b]",
        SLURM_JOB_NUM_NODES="2",
        SLURM_GPUS_ON_NODE="4",
        SLURM_JOB_ID="7",
        LAUNCHER=launcher,
    )


OPTIONS = ["--data", "parquet:/data/my set", "--output", "/shared/run"]


def test_the_slurm_script_starts_what_torchrun_understands(tmp_path):
    """Kills: flags that torchrun does not have, as many ranks as nodes, options of the
    user's lost, a script that ends because it reads only the first of many nodes.
    """
    program, *words = slurm_starts(tmp_path, "torchrun", OPTIONS)
    found = run.parse_args(words)
    assert (program, found.nnodes, found.nproc_per_node) == ("torchrun", "2", "4")
    assert found.rdzv_endpoint == "node-a:6379"
    assert (found.module, found.training_script) == (True, "pipelines")
    assert found.training_script_args == ["discover", *OPTIONS]


def test_the_slurm_script_starts_ray_on_all_nodes(tmp_path):
    """Kills: fewer workers than GPUs, flags that uno does not have."""
    words = " ".join(slurm_starts(tmp_path, "ray", OPTIONS))
    ray = "ray symmetric-run --address node-a:6379 --min-nodes 2 --"
    uno = "python -m pipelines discover --workers 8"
    assert words == f"{ray} {uno} {' '.join(OPTIONS)}"
    parse(["--workers", "8", *OPTIONS], DISCOVER)


def test_the_skypilot_file_starts_what_torchrun_understands(tmp_path):
    """Kills: flags that torchrun or uno do not have, the first node's rank on all."""
    task = yaml.safe_load((ROOT / "examples/skypilot.yaml").read_text())
    words = printed(
        tmp_path,
        {"torchrun": PRINT_ARGUMENTS},
        ["bash", "-c", task["run"]],
        SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
        SKYPILOT_NUM_NODES="2",
        SKYPILOT_NODE_RANK="1",
        SKYPILOT_NUM_GPUS_PER_NODE="4",
        OUTPUT="s3://bucket/run",
    )
    found = run.parse_args(words)
    place = found.nnodes, found.nproc_per_node, found.node_rank, found.master_addr
    assert place == ("2", "4", 1, "10.0.0.1")
    assert (found.module, found.training_script) == (True, "pipelines")
    command, *options = found.training_script_args
    assert command == "discover"
    assert parse(options, DISCOVER).config.output == "s3://bucket/run"
