"""Two ranks of torchrun, without Ray: killed, resumed, finished, and what it says of
other wishes.
"""

import json
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
    wait_for,
)
from tests.processes import running
from uno.data.files import Storage
from uno.runs.checkpoint import checkpoint_steps


def torchrun(log: Path, *argv: str) -> subprocess.Popen:
    """``torchrun -m pipelines ARGV`` with two ranks and one thread each; its output
    goes to ``log``.
    """
    words = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "pipelines",
        *argv,
    ]
    with open(log, "w") as file:
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
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
    folder, output = tmp_path, Storage(str(tmp_path / "run"))
    command = ["discover", *LONG, "--output", output.root]
    first = torchrun(folder / "first.log", *command)
    wait_for(
        lambda: bool(checkpoint_steps(output, "discover")) or first.poll() is not None
    )
    ranks = [pid for pid, process in running().items() if process.parent == first.pid]
    (victim,) = [pid for pid in ranks if is_rank(pid, "1")]
    os.kill(victim, signal.SIGKILL)
    assert first.wait() != 0
    (line,) = ours(folder / "first.log")
    assert line.startswith("uno: rank 0 of 2 lost another (") and line.endswith(
        "the same command resumes"
    )
    (killed,) = checkpoint_steps(output, "discover")[-1:]
    second = torchrun(folder / "second.log", *command)
    wait_for(
        lambda: (
            checkpoint_steps(output, "discover")[-1] > killed
            or second.poll() is not None
        )
    )
    second.terminate()
    assert second.wait() != 0
    (line,) = ours(folder / "second.log")
    stopped = checkpoint_steps(output, "discover")[-1]
    assert (
        line == f"uno: stopped at discover step {stopped} of 240; resume with the same"
        " command"
    )
    assert torchrun(folder / "third.log", *command).wait() == 0
    assert f"resuming at discover step {stopped}" in (folder / "third.log").read_text()
    run = folder / "run"
    files = {path.name for path in run.iterdir()}
    assert files >= {"predictions", "report.html", "model", "tensorboard"}
    assert not {"lock.json", "ray", "STOP"} & files
    lines = Storage(str(run)).read("metrics.jsonl").splitlines()
    assert all(
        0 < line["rank_ms_min"] <= line["rank_ms_median"] <= line["rank_ms_max"]
        for line in map(json.loads, lines)
    )
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
    process = torchrun(
        tmp_path / "log",
        "discover",
        *SMALL,
        "--workers",
        "3",
        "--output",
        str(tmp_path / "run"),
    )
    assert process.wait() != 0
    assert ours(tmp_path / "log") == [
        "uno: error: --workers 3, but torchrun has started 2 ranks; leave --workers out"
    ]
    assert not (tmp_path / "run").exists()


def test_the_slurm_script_starts_what_torchrun_and_ray_understand(tmp_path):
    """With Slurm's commands stood in for. Kills: flags that torchrun or uno do not
    have, as many ranks as nodes, options of the user's lost, a script that ends because
    it reads only the first of many nodes.
    """
    for name, body in (
        ("scontrol", "echo node-a; seq 100000"),
        ("srun", 'printf "%s\\n" "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    facts = {
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }
    options = ["--data", "parquet:/data/my set", "--output", "/shared/run"]

    def started(launcher: str) -> list[str]:
        facts["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        env = os.environ | facts | {"SLURM_JOB_ID": "7", "LAUNCHER": launcher}
        script = ["bash", str(ROOT / "examples/slurm.sbatch"), *options]
        return subprocess.run(
            script, env=env, check=True, capture_output=True, text=True
        ).stdout.splitlines()

    program, *words = started("torchrun")
    found = run.parse_args(words)
    assert (program, found.nnodes, found.nproc_per_node) == ("torchrun", "2", "4")
    assert found.rdzv_endpoint == "node-a:6379"
    assert (found.module, found.training_script) == (True, "pipelines")
    assert found.training_script_args == ["discover", *options]
    words = started("ray")
    at = words.index("--")
    assert words[:at] == [
        "ray",
        "symmetric-run",
        "--address",
        "node-a:6379",
        "--min-nodes",
        "2",
    ]
    assert words[at + 1 :] == [
        "python",
        "-m",
        "pipelines",
        "discover",
        "--workers",
        "8",
        *options,
    ]
    parse(words[at + 5 :], DISCOVER)


def test_the_skypilot_file_starts_what_torchrun_understands(tmp_path):
    """With torchrun stood in for. Kills: flags that torchrun or uno do not have, the
    first node's rank on all.
    """
    task = yaml.safe_load((ROOT / "examples/skypilot.yaml").read_text())
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    sky = {
        "NODE_IPS": "10.0.0.1\n10.0.0.2",
        "NUM_NODES": "2",
        "NODE_RANK": "1",
        "NUM_GPUS_PER_NODE": "4",
    }
    env = os.environ | {f"SKYPILOT_{name}": value for name, value in sky.items()}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUTPUT": "s3://bucket/run"}
    words = subprocess.run(
        ["bash", "-c", task["run"]], env=env, check=True, capture_output=True, text=True
    )
    found = run.parse_args(words.stdout.splitlines())
    assert (found.nnodes, found.nproc_per_node, found.node_rank, found.master_addr) == (
        "2",
        "4",
        1,
        "10.0.0.1",
    )
    assert (found.module, found.training_script) == (True, "pipelines")
    assert found.training_script_args[0] == "discover"
    assert (
        parse(found.training_script_args[1:], DISCOVER).config.output
        == "s3://bucket/run"
    )
