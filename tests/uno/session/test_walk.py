"""How far it is from what a user gives to the mathematics: an image to its loss, an option to Sinkhorn.

Counted are functions of ours in which one stands as the thing changes its form: those on the stack at each
of the moments that a test names, as a debugger with breakpoints there would show them.
"""

import sys
import threading
from pathlib import Path

import numpy as np
import PIL.Image
import torch

from pipelines import commands
from tests.uno.small_run import SMALL, small_config
from uno.data.files import Storage
from uno.runs import DISCOVER, PRETRAIN, run
from uno.session.data import open_sets, read_task
from uno.train import LocalWorker

ROOT = Path(__file__).parents[3]


class Stop(Exception):
    """The last moment has come."""


class Stacks:
    """The functions on the stack whenever one of ``moments`` is called, the last one once."""

    def __init__(self, *moments: str) -> None:
        self.seen: dict[tuple[str, str], None] = {}
        self.calls = dict.fromkeys(moments, 0)
        self._moments, self._outer = moments, {id(frame) for frame in frames(sys._getframe(1))}

    def note(self, frame, event, argument):
        """What sys.setprofile calls."""
        name = frame.f_code.co_qualname
        if event != "call" or name not in self._moments or not ours(frame):
            return
        self.calls[name] += 1
        for each in frames(frame):
            if id(each) not in self._outer and ours(each):
                self.seen[each.f_code.co_filename, each.f_code.co_qualname] = None
        if name == self._moments[-1]:
            raise Stop

    def watch(self, work):
        """Run ``work`` until the last moment."""
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            work()
        except Stop:
            pass
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        assert all(self.calls.values()), self.calls
        return len(self.seen), len({file for file, _ in self.seen})


def frames(frame):
    """A frame and all that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def ours(frame) -> bool:
    """Whether it is a function of the product, no comprehension."""
    path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname.rpartition(".")[2]
    return any(path.is_relative_to(ROOT / p) for p in ("uno", "pipelines")) and not name.startswith("<")


def test_from_a_folder_to_the_loss_one_reads_29_functions_in_13_files(tmp_path):
    """A name, bytes, a square, a row of a set and of a batch, views, cosines, targets, the loss; of a run
    without Ray. Kills: layers between a file and the paper's equations.
    """
    for i in range(40):
        path = tmp_path / "in" / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(np.full((8, 8, 3), 6 * i, np.uint8)).save(path)
    config = small_config(
        data__source=f"folder:{tmp_path / 'in'}", data__known_classes="a", data__num_novel=1,
        data__limit=None, data__loading="memory", train__batch_size=20, pretrain__epochs=0,
    )  # fmt: skip
    storage, worker = Storage(str(tmp_path / "run")), LocalWorker(torch.device("cpu"))

    def train():
        train = open_sets(config, read_task(config.data), storage).train
        for phase in (PRETRAIN, DISCOVER):
            run.run_phase(config, phase, train, worker, storage)

    moments = ("Files.of", "decode_many", "read_bytes", "decode", "train_set", "RowBlocks.__getitem__",
               "augment", "UnoModel.forward", "sinkhorn", "discovery_loss")  # fmt: skip
    stacks = Stacks(*moments)
    functions, files = stacks.watch(train)
    assert 15 <= functions <= 29 and files <= 13, "\n".join(f"{f[-40:]} {n}" for f, n in stacks.seen)


def test_from_the_command_line_to_sinkhorn_an_option_passes_12_functions_in_8_files(tmp_path):
    """From the command's own function: a word becomes a number, a part of the configuration, plain again.
    Kills: a setting that is taken apart and put together on its way.
    """
    values = {key: value for key, value in SMALL.items() if "epochs" not in key} | {
        "workers": 0, "device": "cpu", "compute.threads": 1, "pretrain.epochs": 0, "objective.epsilon": 0.07,
        "output": tmp_path / "run",
    }  # fmt: skip
    argv = [word for key, value in values.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    stacks = Stacks("parse", "override", "sinkhorn")
    functions, files = stacks.watch(lambda: commands.discover(["--preset", "digits", *argv]))
    assert 10 <= functions <= 12 and files <= 8, "\n".join(f"{f[-40:]} {n}" for f, n in stacks.seen)
    assert stacks.calls["override"] <= 2  # each a check of all fields; one for the views of pretraining
