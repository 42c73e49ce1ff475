"""W workers give what one worker gives: real processes, gloo.

One of them is ``python -m tests.uno.test_distributed RANK WORLD_SIZE FOLDER``.
"""

import copy
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from sklearn.cluster import KMeans
from torch import Tensor, nn

from tests.uno.small_run import (
    CPU,
    StopAt,
    batches_of,
    copied_tensors,
    discovery_step,
    fresh_state,
    small_config,
    small_sets,
    step_of,
)
from uno import distributed
from uno.config import override
from uno.data.columns import make_ids
from uno.data.files import Storage
from uno.data.images import InMemory
from uno.data.unreadable import BadRows
from uno.errors import Interrupted
from uno.method import METHODS
from uno.model import build_network
from uno.results import baselines, evaluate
from uno.runs import run
from uno.runs.checkpoint import load_newest
from uno.steps import TrainState, trained_parameters
from uno.training import Phase, fit

ROOT = Path(__file__).parents[2]
CONFIG = small_config(train__batch_size=24)
OWN = {
    "plain": {"method": "uno"},
    "uno": {
        "objective__iic_weight": 0.5,
        "objective__iic_view_weight": 0.5,
        "objective__rkd_weight": 0.5,
        "objective__queue_size": 12,
    },
    "gcd": {"data__setting": "gcd", "objective__rkd_weight": 0.5},
    "last": {"model__finetune": "last_stage"},
    "vit": {
        "model__encoder": "tests.uno.toy_encoders:vit",
        "model__finetune": "last_stage",
        "model__encoder_lr_factor": 0.5,
    },
    "pim": {"method": "pim", "pim__steps": 20},
}
"""Options of a method that are not its defaults."""


STARTS = {
    "clustering": {},
    "pim": {"pim__steps": 20},
    "dtc": {},
    "openmix": {},
}
"""Methods that start from clusters, and their options."""


class GlooWorker(StopAt):
    """A worker among others."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(-1)
        self.rank, self.world_size = rank, world_size

    def wrap(self, model: nn.Module) -> nn.Module:
        return (
            nn.parallel.DistributedDataParallel(model) if self.world_size > 1 else model
        )


def seen_in(state: TrainState) -> dict[str, Tensor]:
    """Gradients, and what a checkpoint would hold but the sums over a worker's own
    rows.
    """
    parameters = trained_parameters(state.model).items()
    gradients = {f"grad/{name}": p.grad.clone() for name, p in parameters}
    return gradients | {
        f"state/{name}": tensor
        for name, tensor in copied_tensors(state).items()
        if "epoch" not in name and "window" not in name
    }


def nan_on_one_rank(worker: GlooWorker) -> dict[str, Tensor]:
    """The last rank's rows are not numbers: all ranks skip the step."""
    state, batch = (
        fresh_state(CONFIG, worker=worker),
        batches_of(CONFIG, worker=worker)(0),
    )
    before = copy.deepcopy([*state.model.encoder.parameters()])
    if worker.rank == worker.world_size - 1:
        batch = batch._replace(views=[view.fill_(float("nan")) for view in batch.views])
    discovery_step(state, batch, CONFIG, 0.1)
    pairs = zip(before, state.model.encoder.parameters(), strict=True)
    kept = all(torch.equal(a, b) for a, b in pairs)
    return {"skipped": state.skipped.clone(), "kept": torch.tensor(kept)}


def whole_phase(worker: GlooWorker, folder: Path) -> dict[str, Tensor]:
    """Two epochs, stopped in the middle of the second and resumed, against the same
    without a stop.
    """
    found, batches = {}, batches_of(CONFIG, worker=worker)
    phase = Phase(run.DISCOVER, CONFIG.discover, 8, 24, 16, discovery_step)
    for name, stops in (("clean", (-1,)), ("resumed", (11, -1))):
        storage = Storage(str(folder / name))
        for worker.step in stops:
            state = fresh_state(CONFIG, worker=worker)
            with suppress(Interrupted):
                fit(CONFIG, phase, state, batches, worker, storage)
        tensors = copied_tensors(state)
        found |= {f"{name}/{key}": value for key, value in tensors.items()}
        # what rank 0 stored is there for everyone as soon as fit returns
        found[f"{name}/stored"] = torch.tensor(load_newest(storage, run.DISCOVER).step)
    return found


def two_steps(name: str, worker: GlooWorker) -> dict[str, Tensor]:
    """Gradients and state after two steps of a method, with BatchNorm in eval mode."""
    config = small_config(train__batch_size=24, **OWN.get(name, {"method": name}))
    if hasattr(config.method_options, "rampup"):
        config = override(config, {f"{name}.rampup": 0.0})
    state = fresh_state(config, worker=worker)
    step, batches = step_of(config), batches_of(config, worker=worker)
    state.step = 9 if name == "ncl" else 0  # when its memories are full
    if config.objective.rkd_weight:
        state.teacher = build_network(config, 5, 0, 5).eval()
    state.model.eval()
    loss = step(state, batches(0), config, 0.02)
    first = {k: tensor for k, tensor in seen_in(state).items() if k.startswith("grad/")}
    step(state, batches(1), config, 0.02)
    seen = seen_in(state) | first | {"loss": loss}
    return seen | ({"head_losses": state.epoch_losses} if name == "plain" else {})


def unreadable(worker: GlooWorker, folder: Path) -> dict[str, Tensor]:
    """Rows that each worker knows of after they have told each other, of which the
    last told none.
    """
    names = make_ids(f"{i}.png" for i in range(20))
    bad = BadRows(
        names, InMemory([b"no image"] * 20), 1.0, Storage(str(folder / "bad"))
    )
    bad.sync()
    for row in (
        (3, *range(10, 10 + 2 * worker.rank))
        if worker.rank < worker.world_size - 1
        else ()
    ):
        bad.add(row, "unreadable")
    bad.sync()
    bad.add(5 + worker.rank, "later")
    bad.sync()
    distributed.barrier(CPU)
    listed = BadRows(names, InMemory([]), 1.0, Storage(str(folder / "bad")))
    return {"known": torch.tensor(bad.rows), "listed": torch.tensor(listed.rows)}


def shared_jobs(worker: GlooWorker) -> dict[str, Tensor]:
    """What five tasks return, of which the first lasts for three votes."""
    third_vote = threading.Event()
    vote = mock.Mock(wraps=distributed.all_reduce_sum_)

    def count_votes(tensor: Tensor) -> object:
        if vote.call_count == 3:
            third_vote.set()
        return mock.DEFAULT  # call the wrapped function

    def job(number: int) -> Tensor:
        assert number or worker.world_size == 1 or third_vote.wait(100)
        return torch.arange(number + 1) - 3

    vote.side_effect = count_votes
    with mock.patch.object(distributed, "all_reduce_sum_", vote):
        tasks = [distributed.RankTask(i + 1, partial(job, i)) for i in range(5)]
        found = distributed.run_tasks(tasks, CPU)
    shapes = {"none": torch.empty(0, 3), "some": torch.arange(6).view(2, 3).T}
    of_rank0 = distributed.compute_on_rank0(lambda: shapes, CPU)
    return {f"of_{i}": each for i, each in enumerate(found)} | of_rank0


def evaluated(worker: GlooWorker, setting: str, folder: Path) -> dict[str, Tensor]:
    """All metrics of a network as it begins."""
    config, (train, sets) = small_config(data__setting=setting), small_sets()
    model = build_network(config, 5, 5, 0).eval()
    with (
        mock.patch.object(evaluate, "load_trained", lambda *_: (model, 0)),
        mock.patch.object(baselines, "load_weights_"),
    ):
        values = evaluate.evaluate_run(
            config, Storage(str(folder)), train, sets, 10, worker
        )
    return {
        name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()
    }


def starts(worker: GlooWorker) -> dict[str, Tensor]:
    """What methods start from; rank 0 alone computes their clusterings."""
    found = dict[str, Tensor]()
    for name, options in STARTS.items():
        config = small_config(method=name, **options)
        spy = mock.patch.object(KMeans, "fit", autospec=True, side_effect=KMeans.fit)
        with spy as fit:
            seen = copied_tensors(fresh_state(config, worker=worker)).items()
        assert fit.called == (worker.rank == 0), name
        found |= {f"{name}/{key}": value for key, value in seen}
    return found


def main(rank: int, world_size: int, folder: Path) -> None:
    """Run everything and store the tensors."""
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group(
            "gloo", f"file://{folder}/store", rank=rank, world_size=world_size
        )
    assert distributed.rank_and_world() == (rank, world_size)
    worker = GlooWorker(rank, world_size)
    names = [*METHODS, *OWN] if world_size <= 2 else ["plain"]
    parts = {f"method/{name}": two_steps(name, worker) for name in dict.fromkeys(names)}
    parts |= {"jobs": shared_jobs(worker)}
    parts |= {"starts": starts(worker)} if world_size <= 2 else {}
    parts |= {
        f"metrics/{setting}": evaluated(worker, setting, folder)
        for setting in ("ncd", "gcd")
    }
    if world_size > 1:
        parts |= {"nan": nan_on_one_rank(worker), "phase": whole_phase(worker, folder)}
        parts |= {"bad": unreadable(worker, folder)}
    store(parts, folder / f"{rank}.st", world_size)


def store(parts: dict[str, dict[str, Tensor]], path: Path, world_size: int) -> None:
    """Write the tensors of all parts to a file, and leave the group."""
    seen = {
        f"{part}/{name}": tensor
        for part, some in parts.items()
        for name, tensor in some.items()
    }
    save_file({name: v.detach().contiguous().clone() for name, v in seen.items()}, path)
    if world_size > 1:
        dist.destroy_process_group()


PAIR = "[/third_party/gloo/gloo/transport/tcp/pair.cc:464] "
MISMATCH = (
    "op.preamble.length <= op.nbytes. 1000 vs 12. Received data size doesn't match"
)
LOST = [
    RuntimeError(f"{PAIR}Connection closed by peer [127.0.0.1]:55963"),
    RuntimeError(f"{PAIR}Read error [127.0.0.1]:31626: Connection reset by peer"),
    RuntimeError(f"{PAIR}Timed out waiting 3000ms for recv operation to complete"),
    RuntimeError("Gloo connectFullMesh failed with timed out connecting"),
    dist.DistNetworkError("failed to recv, got 0 bytes"),
    dist.DistStoreError("wait timeout after 600000ms, keys: /features"),
    dist.DistBackendError("NCCL error: remote process exited or there was a network"),
]
MISTAKES = [
    RuntimeError(f"[enforce fail at {PAIR.strip('[] ')}] {MISMATCH}"),
    RuntimeError("ProcessGroupGloo: invalid tensor type at index 0"),
    dist.DistBackendError("NCCL error: invalid usage, ncclInvalidUsage"),
    RuntimeError("result type Float can't be cast to the desired output type Bool"),
]


@pytest.mark.parametrize(
    ("error", "resumes"), [(e, True) for e in LOST] + [(e, False) for e in MISTAKES]
)
def test_only_a_lost_rank_lets_the_same_command_resume(error, resumes):
    """Shapes that differ between ranks would differ again, so they are an error."""
    end = Interrupted if resumes else type(error)
    try:
        with (
            pytest.raises(end) as caught,
            distributed.join_group(dist.HashStore(), CPU, 0, 1),
        ):
            raise error
    finally:
        dist.destroy_process_group()
    assert resumes or caught.value is error


def results(world_size: int, folder: Path) -> tuple[list[dict[str, Tensor]], ...]:
    """What one process stores, and each of ``world_size`` beside it."""
    (one := folder / "one").mkdir()
    (many := folder / "many").mkdir()
    command = [sys.executable, "-m", "tests.uno.test_distributed"]
    ranks = [
        [*command, str(rank), str(world_size), str(many)] for rank in range(world_size)
    ]
    processes = [
        subprocess.Popen(rank, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in ranks
    ]
    try:
        main(0, 1, one)
        errors = [process.communicate(timeout=800)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(errors)
    return [load_file(one / "0.st")], [
        load_file(many / f"{rank}.st") for rank in range(world_size)
    ]


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(2, marks=[pytest.mark.ray, pytest.mark.slow]),
        pytest.param(4, marks=pytest.mark.release),
    ],
)
def test_workers_equal_one_worker(tmp_path, world_size):
    """Pseudo-labels, loss, gradients and the step of the same global batch, with
    BatchNorm in eval mode; two workers take the steps of one for every method in the
    registry.

    Kills: Sinkhorn on a worker's own rows, rows of another rank, loss weights that
    depend on the worker, gradients summed, a NaN that only its own rank sees, head
    losses of rank 0 alone, a resume that differs, a checkpoint looked for before it is
    written; pairs of a worker's own rows, the gradient of others' rows lost or counted
    twice, a queue or a memory that differs between workers, IIC's means or a teacher's
    weights per worker; an unreadable row that a worker is not told, or of which it is
    told twice; a clustering that two workers make, that one waits for in a collective,
    or that another does not get; other metrics than those of one worker.
    """
    (whole,), shares = results(world_size, tmp_path)
    compared = whole.keys() & shares[0].keys()
    if world_size == 2:
        assert compared == whole.keys()
    for name in compared:
        expected, exact = whole[name], dict(atol=2e-5, rtol=1e-3)
        if name.endswith(("/loss", "head_losses")):
            mean = sum(share[name] for share in shares) / world_size
            torch.testing.assert_close(mean, expected, **exact)
            continue
        for share in shares:
            torch.testing.assert_close(
                share[name], expected, **exact, msg=f"{name}: {{}}".format
            )
            if "/extra/" in name or name.startswith(("metrics/", "starts/")):
                assert torch.equal(share[name], shares[0][name]), name
            if name.startswith("metrics/"):
                assert torch.equal(share[name], expected), name

    for share in shares:
        early = range(10, 10 + 2 * (world_size - 2))
        rows = [3, *range(5, 5 + world_size), *early]
        assert share["bad/known"].tolist() == share["bad/listed"].tolist() == rows
        assert (int(share["nan/skipped"]), bool(share["nan/kept"])) == (1, True)
        assert share["phase/clean/stored"] == share["phase/resumed/stored"] == 16
        assert torch.equal(
            share["phase/clean/head_losses"], shares[0]["phase/clean/head_losses"]
        )
        for name in share:
            if name.startswith("phase/clean/") and "running" not in name:
                other = share[name.replace("/clean/", "/resumed/")]
                if world_size == 2:  # a third of a sum does not come back to the bit
                    assert torch.equal(other, share[name]), name
                torch.testing.assert_close(other, share[name], atol=1e-5, rtol=1e-4)
                assert "/model/" not in name or torch.equal(
                    share[name], shares[0][name]
                ), name


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
