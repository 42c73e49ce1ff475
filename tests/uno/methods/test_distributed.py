"""Two workers take the steps of one, for every method in the registry: real processes, gloo."""

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.uno.methods.gloo_methods import main
from uno.methods import METHODS

ROOT = Path(__file__).parents[3]


@pytest.mark.ray
def test_two_workers_equal_one(tmp_path, one_thread):
    """Kills: pairs of a worker's own rows, the gradient of other workers' rows lost or counted twice, a queue
    or a memory that differs between workers, IIC's means per worker, a teacher's weights per worker.
    """
    (tmp_path / "one").mkdir()
    main(0, 1, tmp_path / "one")
    whole = safetensors.torch.load_file(tmp_path / "one" / "0.st")
    command = [sys.executable, "-m", "tests.uno.methods.gloo_methods"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(errors)
    shares = [safetensors.torch.load_file(tmp_path / f"{rank}.st") for rank in (0, 1)]
    assert {name.split("/")[0] for name in whole} == set(METHODS)
    for name, expected in whole.items():
        if name.endswith("/loss"):
            mean = (shares[0][name] + shares[1][name]) / 2
            torch.testing.assert_close(mean, expected, atol=1e-4, rtol=1e-4)
            continue
        for share in shares:
            torch.testing.assert_close(
                share[name], expected, atol=2e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
            )
        if "/extra/" in name:
            assert torch.equal(shares[0][name], shares[1][name]), name
