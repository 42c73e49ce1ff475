"""The chaos lane itself: what it would catch. The lane is `python -m tests.chaos`."""

import json
import subprocess
import sys
import time

import pytest

from tests import chaos
from tests.chaos import Command, differences, disturb, files_of
from tests.forked import forked
from tests.pipelines.small import ROOT

CARD = "<p>Accuracy 83.0 %</p><footer>2026-11-22 14:00 UTC, 12 s</footer>"
FILES = {
    "model/heads.safetensors": "weights",
    "checkpoints/discover/step_00000006.safetensors": "older",
    "checkpoints/discover/step_00000012.safetensors": "newest",
    "metrics.json": json.dumps({"task_aware/avg": 0.5, "seconds": 3.0}),
    "metrics.jsonl": '{"step": 1, "loss": 2.5, "step_ms": 9.0, "rank_ms_min": 9.0}\n',
    "report.html": CARD,
    "tensorboard/events": "of the clock",
}


def write(folder, changes):
    for name, text in (FILES | changes).items():
        if text is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return files_of(folder)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("model/heads.safetensors", "weight!", "differs"),
        ("model/heads.safetensors", None, "missing"),
        ("model/.heads.safetensors.0a1b2c3d", "half", "left over"),
        ("lock.json", "{}", "left over"),
        ("checkpoints/discover/step_00000012.safetensors", "another", "differs"),
        (
            "metrics.json",
            json.dumps({"task_aware/avg": 0.6, "seconds": 3.0}),
            "differs",
        ),
        ("metrics.jsonl", 2 * FILES["metrics.jsonl"], "differs"),
        ("report.html", CARD.replace("83.0", "82.0"), "differs"),
        ("metrics.json", json.dumps({"task_aware/avg": 0.5, "seconds": 4.0}), None),
        ("metrics.jsonl", FILES["metrics.jsonl"].replace("9.0", "8.0"), None),
        ("report.html", CARD.replace("14:00", "15:01").replace("12 s", "3 min"), None),
        ("checkpoints/discover/step_00000006.safetensors", None, None),
        ("tensorboard/events", "of another clock", None),
    ],
)
def test_what_counts_as_a_difference(tmp_path, name, text, found):
    """A planted difference is reported by its name, the clock's are not. Kills: a
    comparison that leaves out too much, or names alone.
    """
    expected, planted = write(tmp_path / "a", {}), write(tmp_path / "b", {name: text})
    assert differences(planted, expected) == ([f"{found} {name}"] if found else [])


def process_of(code, *args):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)], cwd=ROOT, start_new_session=True
    )


WORK = """
import pathlib, sys, time
path, go, harm = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
path.parent.mkdir(exist_ok=True)
done = path.read_text().count("\\n") if path.exists() else 0
torn = 0 < done < 5
if harm == "refuses" and torn:
    sys.exit(4)
for i in range(done - (harm == "doubles" and torn), 5):
    while i == 3 and not done and not go.exists():
        time.sleep(0.001)
    with path.open("a") as file:
        file.write(f"{i}\\n")
"""


@pytest.mark.parametrize("harm", [None, "doubles", "refuses"])
def test_a_command_that_a_signal_harms_is_reported(tmp_path, monkeypatch, capsys, harm):
    """Five lines, struck after three, and the next start goes on; with harm from the
    line before, which is then doubled, or not at all: code 4. Kills: a signal that
    never strikes, a command that is not started again, a fault that is not told.
    """
    path, go = tmp_path / "run" / "out" / "lines.txt", tmp_path / "go"

    def spent(process, until=None):
        if until is None:
            go.touch()
            process.wait(60)
            go.unlink()
        while process.poll() is None and not (
            path.exists() and path.read_text().count("\n") == 3
        ):
            time.sleep(0.001)
        return 1.0

    def start(words, log):
        log.touch()
        return process_of(WORK, path, go, harm)

    for name, value in (
        ("start", start),
        ("spent", spent),
        ("left_running", lambda _: []),
    ):
        monkeypatch.setattr(chaos, name, value)
    monkeypatch.setitem(chaos.COMMANDS, "run", Command(lambda out, made: []))
    found = disturb("run", 2, 0, tmp_path)
    assert found.struck == found.tries == 2 and found.files == 1
    assert found.again == (4 if harm == "refuses" else 0)
    how = {
        None: [],
        "doubles": ["0]: differs"] * 2,
        "refuses": ["4, 4, 4]", "4, 4, 4]: differs"] * 2,
    }[harm]
    assert len(found.faults) == len(how) and all(
        map(str.__contains__, found.faults, how)
    ), found
    assert all(line in capsys.readouterr().err for line in found.faults[-1:])


def test_a_process_that_outlives_its_command_is_named_and_ended(monkeypatch):
    """Kills: an orphan that is not found, as its parent is gone; one that goes on
    into the next try.
    """
    monkeypatch.setattr(chaos, "LEFT_S", 0.02)
    orphan = "import subprocess; subprocess.Popen(['sleep', '600'])"

    def lane():
        chaos.settle()
        assert chaos.finish(process_of(orphan)) == 0
        assert chaos.left_running() == ["sleep"] and chaos.left_running() == []

    assert forked(lane) == (0, "")
