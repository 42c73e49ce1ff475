"""The small run of ``tests.uno.small_run`` as a command line."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from pipelines import cli
from tests.processes import below, running
from tests.uno import small_run
from tests.uno.data import builders
from tests.uno.small_run import assert_same, lines
from uno.config import ModelConfig
from uno.data.files import Storage
from uno.data.memory import MemoryBatches
from uno.encoders.build import build_encoder
from uno.runs.checkpoint import checkpoint_steps, load_newest
from uno.steps import Batch

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).parent / "ray")
OPTIONS = [
    (f"--{key.replace('_', '-')}", str(value)) for key, value in small_run.SMALL.items()
]
SMALL = [
    "--preset",
    "digits",
    "--compute.threads",
    "1",
    *(word for pair in OPTIONS for word in pair),
]
# 240 steps of discovery: time enough to be killed
LONG = [*SMALL, "--discover.epochs", "40"]
# 72 steps of discovery
SHORT = [*SMALL, "--discover.epochs", "12"]
INTERVAL = 6  # steps between checkpoints


def lines_of(run: Path) -> list[dict[str, Any]]:
    """The journal without what depends on the clock."""
    return lines(Storage(str(run)))


def assert_same_weights(a: Path, b: Path) -> None:
    """The newest checkpoints of two runs agree in every bit of every tensor."""
    for phase in ("pretrain", "discover"):
        first, second = (load_newest(Storage(str(run)), phase) for run in (a, b))
        assert first is not None and second is not None and first.step == second.step
        assert_same(first.tensors, second.tensors)


def assert_as_undisturbed(run: Path, undisturbed: Path) -> None:
    """Assert that a disturbed run has the weights and metrics of an undisturbed one."""
    assert_same_weights(run, undisturbed)
    assert lines_of(run) == lines_of(undisturbed)


def newest_step(storage: Storage) -> int:
    """Return the step of the newest checkpoint of discovery, 0 if there is none."""
    return max(checkpoint_steps(storage, "discover"), default=0)


def signal_at(step: int, number: int) -> None:
    """Send this process a signal when it asks for the batch of that discovery step.

    The training loop of this process is patched for good: call this in a process of
    its own, or restore ``MemoryBatches.__call__`` afterwards.
    """
    usual, sent = MemoryBatches.__call__, []

    def batch(self: MemoryBatches, at: int) -> Batch:
        if at == step and self._plan.unlabeled_size and not sent:
            sent.append(at)
            os.kill(os.getpid(), number)
        return usual(self, at)

    MemoryBatches.__call__ = batch  # type: ignore[method-assign]


def refused(capsys: Any, code: int, *argv: Any) -> str:
    """The one line on stderr of a command that ends with that exit code."""
    capsys.readouterr()
    assert cli.main([str(word) for word in argv]) == code
    err: str = capsys.readouterr().err
    assert (
        err.startswith("uno: error: ") and err.count("\n") == 1 and err.endswith("\n")
    ), err
    assert "internal" not in err and "Traceback" not in err
    return err


def wait_for(
    condition: Callable[[], bool], seconds: float = 600, pause: float = 0.1
) -> None:
    """Return once it holds. The limit of ``seconds`` only ends a hang."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(pause)


@contextmanager
def ray_process_killed(name: str, when: Callable[[], bool]) -> Iterator[None]:
    """While the block runs, SIGKILL to a process of this process's Ray cluster.

    Args:
        name: Its title has this in it, such as ``ray::ImplicitFunc``.
        when: It is killed as soon as this holds.
    """

    def kill() -> None:
        wait_for(when)
        ours = below([os.getpid()], running()).items()
        os.kill(next(i for i, each in ours if name in each.words[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    yield
    killer.join()


def free_port() -> int:
    """Of 127.0.0.1."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def write_images(folder: Path, counts: dict[str, int], size: int = 8) -> Path:
    """PNG files of noise in one subfolder for each class."""
    names = [
        str(Path(name) / f"{i}.png") for name, num in counts.items() for i in range(num)
    ]
    builders.write_images(folder, names, size=size)
    return folder


def write_weights(path: Path, model: ModelConfig) -> None:
    """Write the weights of an encoder that has learned nothing."""
    save_file(build_encoder(model).state_dict(), path)


def uno(*argv: Any) -> None:
    """Run a command, which must succeed."""
    assert cli.main([str(word) for word in argv]) == 0


def vectors_of(num: int = 160, name: str = "c") -> tuple[np.ndarray, list[str | None]]:
    """Return vectors (N, 8) of four classes, and labels for half of two classes."""
    generator, truth = np.random.default_rng(0), np.arange(num) % 4
    centers = 4 * generator.normal(size=(4, 8))
    vectors = (centers[truth] + generator.normal(size=(num, 8))).astype(np.float32)
    labels = [
        f"{name}{c}" if c < 2 and i % 8 < 4 else None for i, c in enumerate(truth)
    ]
    return vectors, labels
