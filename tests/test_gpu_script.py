"""The script that measures a GPU, in its small form on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipelines.small import ROOT, wait_for


def read_rows(out: Path) -> dict[str, dict]:
    """Return what was written of each part of the script; a last line may be cut."""
    path = out / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["part"]: row for row in rows}


@pytest.mark.release
def test_a_cut_leaves_the_results_of_what_was_finished(tmp_path):
    """The script is killed once the first step has been measured."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(tmp_path)]
    command += ["--small", "--parts", "ceilings,steps,discover"]
    process = subprocess.Popen(command, cwd=ROOT)
    wait_for(lambda: "steps" in read_rows(tmp_path) or process.poll() is not None)
    process.kill()
    process.wait()
    found = read_rows(tmp_path)
    assert found["ceilings"]["matmul_tflops"] > 0
    assert found["steps"]["images_per_s"] > 0
