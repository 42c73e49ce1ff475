"""The script that measures a GPU, in its small form on the CPU."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def start(out, *words):
    """The script in a process of its own, which writes to ``out``."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), "--small"]
    return subprocess.Popen(
        [*command, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def rows_of(out):
    """Rows of whole lines."""
    path = out / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.mark.release
def test_a_cut_leaves_the_results_of_what_was_finished(tmp_path):
    """The script is killed once the first step has been measured."""
    process = start(tmp_path, "--parts", "ceilings,steps,discover")
    try:
        while not any(row["part"] == "steps" for row in rows_of(tmp_path)):
            assert process.poll() is None, process.stdout.read().decode()
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    found = {row["part"]: row for row in rows_of(tmp_path)}
    assert found["ceilings"]["matmul_tflops"] > 0
    assert found["steps"]["images_per_s"] > 0
    assert set(found["steps"]["parts_ms"]) == {
        "augmentation",
        "heads",
        "sinkhorn_and_loss",
        "optimizer",
    }


@pytest.mark.release
def test_it_ends_within_its_minutes_and_says_what_was_left_out(tmp_path):
    process = start(tmp_path, "--parts", "ceilings,steps", "--minutes", "0.01")
    output = process.communicate()[0].decode()
    assert process.returncode == 0, output
    skipped = [row["part"] for row in rows_of(tmp_path) if "skipped" in row]
    assert skipped == ["ceilings", "steps"]
    assert "images/s" in output  # the table
