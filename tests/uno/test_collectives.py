"""W workers give what one worker gives: real processes, gloo."""

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.uno.gloo_worker import main
from uno import collectives
from uno.methods import METHODS

ROOT = Path(__file__).parents[2]


def test_one_process_is_the_identity():
    """Kills: a copy, a reduction or a process group where there is one worker."""
    tensor = torch.rand(3, 4)
    assert collectives.world() == (0, 1)
    assert collectives.gather_rows(tensor, 0) is tensor
    assert collectives.own_rows(tensor, 1) is tensor
    assert collectives.sum_(tensor) is tensor
    collectives.barrier(torch.device("cpu"))


def results(world_size: int, folder: Path) -> list[dict[str, torch.Tensor]]:
    """What each process stored."""
    if world_size == 1:
        main(0, 1, folder)
    else:
        command = [sys.executable, "-m", "tests.uno.gloo_worker"]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(world_size), str(folder)],
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            errors = [process.communicate(timeout=200)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert not any(process.returncode for process in processes), "\n".join(errors)
    return [safetensors.torch.load_file(folder / f"{rank}.st") for rank in range(world_size)]


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(2, marks=pytest.mark.ray),
        pytest.param(4, marks=pytest.mark.ray),
        pytest.param(3, marks=pytest.mark.slow),
    ],
)
def test_workers_equal_one_worker(tmp_path, one_thread, world_size):
    """Pseudo-labels, loss, gradients and the step of the same global batch, with BatchNorm in eval mode.

    Kills: Sinkhorn on a worker's own rows, rows of another rank, a collective per view, head or family, loss
    weights that depend on the worker, gradients summed, a NaN that only its own rank sees, head losses of
    rank 0 alone, a resume that differs, a checkpoint looked for before it is written.
    """
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    (whole,) = results(1, tmp_path / "one")
    shares = results(world_size, tmp_path / "many")

    for name in ("step/novel_targets", "step/over_targets"):
        joined = torch.cat([share[name] for share in shares], dim=2)
        assert joined.shape == whole[name].shape
        torch.testing.assert_close(joined, whole[name], atol=1e-6, rtol=0)
    assert all(share["step/calls"].tolist() == [1, 1] for share in shares)  # one gather, nothing else

    mean_loss = sum(share["step/loss"] for share in shares) / world_size
    torch.testing.assert_close(mean_loss, whole["step/loss"], atol=1e-5, rtol=0)
    head_losses = sum(share["step/head_losses"] for share in shares) / world_size
    torch.testing.assert_close(head_losses, whole["step/head_losses"], atol=1e-5, rtol=0)
    for name, expected in whole.items():
        if name.startswith(("step/grad/", "step/state/")):
            for share in shares:
                torch.testing.assert_close(share[name], expected, atol=1e-5, rtol=1e-4)

    assert [(int(share["nan/skipped"]), bool(share["nan/kept"])) for share in shares] == [
        (1, True)
    ] * world_size
    if world_size == 2:
        check_methods(whole, shares)

    for share in shares:
        assert share["phase/clean/stored"] == share["phase/resumed/stored"] == 16
        assert torch.equal(share["phase/clean/head_losses"], shares[0]["phase/clean/head_losses"])
        for name in share:
            if name.startswith("phase/clean/") and "running" not in name:
                other = share[name.replace("/clean/", "/resumed/")]
                if world_size == 2:  # a third of a sum does not come back to the bit
                    assert torch.equal(other, share[name]), name
                torch.testing.assert_close(other, share[name], atol=1e-5, rtol=1e-4)
                if "/model/" in name:
                    assert torch.equal(share[name], shares[0][name]), name


def check_methods(whole: dict[str, torch.Tensor], shares: list[dict[str, torch.Tensor]]) -> None:
    """Two workers take the steps of one, for every method in the registry.

    Kills: pairs of a worker's own rows, the gradient of other workers' rows lost or counted twice, a queue or
    a memory that differs between workers, IIC's means per worker, a teacher's weights per worker.
    """
    names = [name for name in whole if name.startswith("method/")]
    assert {name.split("/")[1] for name in names} == set(METHODS)
    for name in names:
        if name.endswith("/loss"):
            mean = (shares[0][name] + shares[1][name]) / 2
            torch.testing.assert_close(mean, whole[name], atol=1e-4, rtol=1e-4)
            continue
        for share in shares:
            torch.testing.assert_close(
                share[name], whole[name], atol=2e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
            )
        if "/extra/" in name:
            assert torch.equal(shares[0][name], shares[1][name]), name
