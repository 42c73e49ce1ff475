"""A command leaves no thread, open file, process or temporary file behind."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines import cli
from tests.pipelines.small import ROOT, SMALL, wait_for, write_images, write_weights
from tests.processes import below, running
from tests.tune.tiny import TINY
from uno.config import Config, override

TIMES = 3
RUN = [*SMALL, "--data.limit", "60", "--pretrain.epochs", "1", "--discover.epochs", "1"]
ONE = ["--compute.threads", "1"]
ENCODER = {"model.encoder": "resnet_small", "model.width": 4}
EMBED = [word for key, value in ENCODER.items() for word in (f"--{key}", value)]
ESTIMATE = ["--known-classes", "first:6", "--max-steps", "2"]
ESTIMATE += ["--num-splits", "1", "--max-novel", "2"]
# the words of a command, of the folder that they work in and a new output
COMMANDS: dict[str, Callable[[Path, Path], list[Any]]] = {
    "data pack": lambda made, out: [*("--data", made / "images", "--output", out)],
    "discover": lambda made, out: [*RUN, "--output", out],
    "evaluate": lambda made, out: [made / "run"],
    "predict": lambda made, out: [
        *(made / "run", "--data", made / "images", "--csv", "--folders"),
        *(*ONE, "--output", out),
    ],
    "classes": lambda made, out: [made / "run", "--rename", f"5=class {out.name}"],
    "report": lambda made, out: [made / "run"],
    "export": lambda made, out: [made / "run", "--format", "pt2"],
    "estimate-classes": lambda made, out: [*RUN, *ESTIMATE, "--output", out],
    "embed": lambda made, out: [
        *("--data", made / "images", *EMBED, "--image-size", "8", "--views", "1"),
        *("--weights", made / "encoder.safetensors", *ONE),
        *("--compute.cache", out, "--output", out.with_suffix(".parquet")),
    ],
}


def words_of(name: str, made: Path, number: int) -> list[str]:
    words = COMMANDS[name](made, made / f"{name.replace(' ', '-')}{number}")
    return [*name.split(), *map(str, words)]


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    """A folder with images, a run and an encoder; its path is short, for sockets."""
    with tempfile.TemporaryDirectory(prefix="uno-leaks-") as folder:
        made = Path(folder)
        write_images(made / "images", {"cat": 8, "dog": 8, "emu": 8})
        assert cli.main(["discover", *RUN, "--output", str(made / "run")]) == 0
        model = override(Config(), ENCODER).model
        write_weights(made / "encoder.safetensors", model)
        yield made


@pytest.fixture
def temporary(made, monkeypatch) -> Iterator[Path]:
    """The temporary directory of this process and its children, empty."""
    with tempfile.TemporaryDirectory(dir=made) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def count_held(temporary: Path) -> dict[str, int]:
    """Count what this process holds."""
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "processes": len(below([os.getpid()], running())),
        "shared memory": len(list(Path("/dev/shm").iterdir())),
        "temporary files": len(list(temporary.iterdir())),
    }


def has_processes(group: int) -> bool:
    """Return whether a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.release
@pytest.mark.parametrize("name", COMMANDS)
def test_a_process_that_goes_on_keeps_nothing_of_its_commands(name, made, temporary):
    """Pools of threads may grow by one; what a command leaves, it leaves each time."""
    assert cli.main(words_of(name, made, 0)) == 0
    first = count_held(temporary)
    for number in range(1, TIMES + 1):
        assert cli.main(words_of(name, made, number)) == 0
    last = count_held(temporary)
    assert not [what for what in first if last[what] >= first[what] + TIMES]


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["discover", "predict"])
@pytest.mark.parametrize("end", ["success", "error", "Ctrl-C"])
def test_a_process_that_ends_leaves_nothing(name, end, made, temporary):
    words = words_of(name, made, 1000)
    output = made / f"{end}-of-{name}"
    words[-1] = str(output)
    if end == "error":
        output.write_text("a file in the place of a folder")
    if (name, end) == ("predict", "Ctrl-C"):  # images that take seconds
        words[words.index("--data") + 1] = "digits"
    command = [sys.executable, "-m", "pipelines", *words]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    if end == "Ctrl-C":
        wait_for(lambda: output.exists() or process.poll() is not None)
        os.killpg(process.pid, signal.SIGINT)
    codes = {"success": (0,), "error": (2, 4), "Ctrl-C": (75, 130, -signal.SIGINT)}
    assert process.wait() in codes[end]
    wait_for(lambda: not has_processes(process.pid), 30)
    assert list(temporary.iterdir()) == []


@pytest.mark.release
@pytest.mark.ray
def test_a_sweep_holds_no_resources_of_a_cluster_that_goes_on(ray_cluster, tmp_path):
    """Kills: an actor that outlives its sweep."""
    words = ["--trials", "1", "--folds", "1", "--workers", "1"]
    assert cli.main(["tune", *TINY, *words, "--output", str(tmp_path / "sweep")]) == 0
    every = ray_cluster.cluster_resources()["CPU"]
    wait_for(lambda: ray_cluster.available_resources().get("CPU") == every)


@pytest.mark.release
@pytest.mark.ray
def test_a_private_cluster_leaves_no_temporary_directories(made, temporary):
    """Kills: those of Ray's processes, which are killed before they remove theirs."""
    environment = os.environ | {"RAY_ADDRESS": "local", "RAY_TMPDIR": str(made)}
    script = "import time; from pipelines import ray_env as e\n"
    script += "with e.connect(): time.sleep(1)"
    command = [sys.executable, "-c", script]
    subprocess.run(command, env=environment, check=True, timeout=800)
    assert list(temporary.iterdir()) == []


@pytest.mark.ray
def test_a_temporary_directory_too_long_for_sockets_is_one_line(tmp_path):
    """Ray's own words are "validate_socket_filename failed"."""
    long = tmp_path / ("x" * 60)
    long.mkdir()
    environment = os.environ | {"TMPDIR": str(long)}
    environment.pop("RAY_TMPDIR", None)
    script = "import sys\nfrom pipelines import cli, ray_env as e\n"
    script += "sys.exit(cli.run(lambda _: e.connect().__enter__()))"
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "set TMPDIR to one with a shorter path" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
