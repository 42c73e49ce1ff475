"""``uno reproduce``: its command line, what it runs and does not run again, and what it says of failures."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines import cells, cli, reproduce
from pipelines.cells import Ended, Job, Queue, read_history
from tests.pipelines.small import SMALL
from uno.config import Config, override
from uno.errors import ConfigError, Interrupted
from uno.runs.run import pretrain_hash

TINY = [word for word in SMALL if word not in ("--preset", "digits")]


class FakeRunner:
    """Ends every job at once; ``codes`` by name, ``started`` in order; cells leave metrics."""

    def __init__(self, output: Path, codes: dict[str, int] | None = None, capacity: int = 2) -> None:
        self.capacity, self.started, self._codes, self._output = capacity, [], codes or {}, output
        self._running: list[Job] = []
        self.most = 0

    def start(self, job, command, log):
        self.started.append(job.name)
        self._running.append(job)
        self.most = max(self.most, len(self._running))
        place = self._output / job.name
        place.mkdir(parents=True, exist_ok=True)
        code = self._codes.get(job.name, 0)
        log.write_text(f"chatter\nuno: error: {job.name} says why\n" if code else "done\n")
        if code == 0 and job.needs:
            (place / "metrics.json").write_text("{}")

    def wait(self):
        job = self._running.pop()
        return Ended(job, self._codes.get(job.name, 0), 2.0)

    def stop(self):
        pass


@pytest.fixture
def request_of(tmp_path):
    def make(*words):
        return reproduce.parse(["ablation", "--seeds", "2", "--output", str(tmp_path / "out"), *TINY, *words])

    return make


def run(request, codes=None):
    jobs = reproduce.plan(request)
    runner, ends = FakeRunner(request.output, codes), []
    for folder in ("cells", "pretrain"):
        (request.output / folder).mkdir(parents=True, exist_ok=True)
    Queue(request.output, runner, lambda ended, reason: ends.append((ended.job.name, reason))).run(jobs)
    return runner, ends


# --------------------------------------------------------------------------------------------- command line
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ablaton"], "unknown table 'ablaton'; did you mean 'ablation'"),
        ([], "required: TABLE"),
        (["ablation", "--seeds", "0"], "--seeds must be at least 1"),
        (["ablation", "--scale", "full"], "needs --cifar10 DIR .* and --cifar100 DIR"),
        (["ablation", "--scale", "full", "--datasets", "cifar100-50"], "needs --cifar100 DIR"),
        (["ablation", "--datasets", "mnist"], "ablation has digits, cifar10-jpeg"),
        (["ablation", "--rows", "no"], "ablation has uno, no-concat"),
        (["rotation", "--rows", "kcl"], "rotation has uno, uno-rotation"),
        (["ablation", "--seed", "3"], "seed is for the table to choose"),
        (["ablation", "--data", "digits"], "data.source is for the table to choose"),
        (["ablation", "--objective.epsilom", "1"], "unknown option --objective.epsilom"),
        (["ablation", "--output", "s3://a/b"], "must be a directory"),
        (["ablation", "--cifar10-jpeg", "/nowhere"], "/nowhere"),
    ],
)
def test_mistakes_are_one_line_and_nothing_starts(words, message, capsys, tmp_path, monkeypatch):
    """Kills: a traceback, and a run that starts before everything is known to be there."""
    monkeypatch.chdir(tmp_path)
    assert cli.guard(reproduce.main, words) == 2
    err = capsys.readouterr().err.strip()
    assert "\n" not in err
    assert __import__("re").search(message, err), err
    assert not list(tmp_path.iterdir())


def test_chosen_rows_bring_what_they_are_compared_to():
    """Kills: rows without the reference row, without the row whose runs they read."""
    for words, expected in (
        (["ablation", "--rows", "no-concat"], {"uno", "no-concat"}),
        (["rotation", "--rows", "rs-plus-rotation"], {"uno", "rs-plus", "rs-plus-rotation"}),
    ):
        assert {row.key for row in reproduce.parse(words).table.rows} == expected


def test_a_missing_device_is_found_before_anything_starts(tmp_path, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    words = ["ablation", "--seeds", "1", "--output", str(tmp_path / "out"), "--device", "cuda", *TINY]
    assert cli.guard(reproduce.main, words) == 2
    assert "CUDA" in capsys.readouterr().err and not list((tmp_path / "out").glob("cells/*"))


def test_cells_of_many_workers_run_one_at_a_time(request_of):
    """Kills: as many Ray runs at a time as there are cores or GPUs."""
    assert reproduce._default_parallel(request_of("--workers", "2")) == 1
    assert reproduce._default_parallel(request_of("--device", "cpu")) == (os.cpu_count() or 1)


def test_a_ray_job_needs_an_absolute_output(monkeypatch):
    from pipelines.options import RAY_JOB

    monkeypatch.setenv(RAY_JOB, "{}")
    with pytest.raises(ConfigError, match="absolute path that all nodes share"):
        reproduce.parse(["ablation"])


def test_the_commands_of_the_readme_parse():
    from tests.test_readme import commands

    found = [words[2:] for words in commands() if words[1] == "reproduce"]
    assert len(found) >= 4
    for words in found:
        assert reproduce.parse(words).table.rows


def test_help_lists_the_tables(capsys):
    with pytest.raises(SystemExit) as end:
        reproduce.main(["--help"])
    assert end.value.code == 0
    assert "num-novel" in capsys.readouterr().out


def test_the_recorded_command_leaves_out_where_and_how_fast():
    words = ["ablation", "--output", "x", "--seeds", "3", "--record=y", "--parallel", "1", "--recipe", "v2"]
    assert reproduce.parse(words).command == "uno reproduce ablation --seeds 3 --recipe v2"


def test_dry_run_lists_cells_and_cost(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert reproduce.main(["ablation", "--seeds", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "8 cells, 0 of them have a result" in out and "digits no-concat seed 1" in out and "minutes" in out
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------ queue
def test_pretrainings_are_shared_and_come_first(request_of):
    """Kills: a cell before its pretraining, a pretraining for each cell, weights of another seed."""
    request = request_of()
    jobs = reproduce.plan(request)
    assert len(reproduce.all_cells(request)) == 8 and len(jobs) == 8 + 4
    by_name = {job.name: job for job in jobs}
    for job in jobs:
        if job.needs:
            assert job.config.model.weights == str(request.output / job.needs)
            own = override(job.config, {"model.weights": None})
            assert job.needs == f"pretrain/{pretrain_hash(own)}"
            assert by_name[job.needs].config.seed == job.config.seed
            assert by_name[job.needs].config.augment.weak == job.config.augment.weak
    runner, _ = run(request)
    order = runner.started
    assert all(order.index(job.needs) < order.index(job.name) for job in jobs if job.needs)
    assert runner.most == 2


def test_finished_cells_are_never_repeated(request_of):
    """Kills: a second run of anything, and seeds that cannot be added."""
    run(request_of())
    assert reproduce.plan(request_of()) == []
    more = reproduce.plan(request_of("--seeds", "3"))
    assert [job.label.rpartition(" ")[2] for job in more] == ["2"] * 6


def test_a_lost_cell_is_run_again(request_of):
    request = request_of()
    run(request)
    (request.output / "cells" / "digits-uno-seed1" / "metrics.json").unlink()
    assert [job.name for job in reproduce.plan(request)] == ["cells/digits-uno-seed1"]


def test_failures_are_noted_and_only_divergence_is_final(request_of):
    """Kills: a diverged cell that is run for ever, a full disk that is never tried again."""
    request = request_of()
    codes = {"cells/digits-uno-seed0": 3, "cells/digits-no-concat-seed0": 4, "cells/digits-uno-seed1": 75}
    _, ends = run(request, codes)
    assert dict(ends)["cells/digits-uno-seed0"] == "cells/digits-uno-seed0 says why"
    history = read_history(request.output)
    assert history["cells/digits-uno-seed0"].failed and history["cells/digits-no-concat-seed0"].failed
    assert not history["cells/digits-uno-seed1"].failed
    again = {job.name for job in reproduce.plan(request)}
    assert again == {"cells/digits-no-concat-seed0", "cells/digits-uno-seed1"}
    assert history["cells/digits-uno-seed0"].seconds == 2.0


def test_a_failed_pretraining_fails_its_cells(request_of):
    """Kills: a queue that waits for ever, cells that start without weights."""
    request = request_of()
    jobs = reproduce.plan(request)
    shared = next(job.needs for job in jobs if job.needs and job.config.augment.weak)
    runner, _ = run(request, {shared: 3})
    lost = [job.name for job in jobs if job.needs == shared]
    assert lost and not set(lost) & set(runner.started)
    history = read_history(request.output)
    assert all(history[name].reason == f"pretraining: {shared} says why" for name in lost)
    assert len(runner.started) == len(jobs) - len(lost)


def test_a_full_scale_cell_is_run_with_what_its_methods_authors_set(tmp_path, monkeypatch):
    """RS weighs consistency 50 on CIFAR100, in the plan and in the process that reads the cell's file.
    Kills: constants that get lost on the way, or are those of CIFAR10.
    """
    from pipelines.options import parse
    from uno.config import dump_yaml

    monkeypatch.setattr(reproduce, "_check_data", lambda config, checked: None)
    words = ["sota", "--scale", "full", "--datasets", "cifar10", "cifar100-20", "--seeds", "1", "--dry-run"]
    words += ["--cifar10", "/a", "--cifar100", "/b", "--output", str(tmp_path)]
    jobs = {job.name: job for job in reproduce.plan(reproduce.parse(words))}
    for name, weight, rampup in (("cifar100-20-rs", 50.0, 0.75), ("cifar100-20-rs-plus", 25.0, 0.75),
                                 ("cifar10-rs", None, None)):  # fmt: skip
        job = jobs[f"cells/{name}-seed0"]
        (tmp_path / "cell.yaml").write_text(dump_yaml(job.config))
        found = parse(["--config", str(tmp_path / "cell.yaml")], "discover").config.objective
        assert found == job.config.objective
        assert (found.consistency_weight, found.rampup) == (weight, rampup)


def test_a_directory_of_other_settings_is_refused(request_of):
    """Kills: a table of mixed settings."""
    request = request_of()
    place = request.output / "cells" / "digits-uno-seed0"
    place.mkdir(parents=True)
    config = next(job.config for job in reproduce.plan(request) if job.name == "cells/digits-uno-seed0")
    from uno.config import dump_yaml

    (place / "config.yaml").write_text(dump_yaml(config))
    assert reproduce.plan(request)
    (place / "config.yaml").write_text(dump_yaml(override(config, {"objective.epsilon": 0.2})))
    with pytest.raises(ConfigError, match=r"other settings: objective\.epsilon; use another --output"):
        reproduce.plan(request)


def test_history_survives_a_line_cut_short(tmp_path):
    line = json.dumps({"job": "cells/a", "seconds": 1.5, "code": 0, "reason": ""})
    (tmp_path / cells.ATTEMPTS).write_text(f'{line}\n{line}\n{{"job": "cells/b", "sec')
    assert list(read_history(tmp_path)) == ["cells/a"]
    assert read_history(tmp_path)["cells/a"].seconds == 3.0


def test_a_signal_stops_the_queue(tmp_path):
    """Kills: a driver that starts the next cell after SIGTERM."""
    jobs = [Job(f"cells/{i}", Config(), str(i), "none") for i in range(3)]
    runner = FakeRunner(tmp_path, capacity=1)
    (tmp_path / "cells").mkdir()
    with pytest.raises(Interrupted):
        Queue(tmp_path, runner, lambda *_: os.kill(os.getpid(), signal.SIGTERM)).run(jobs)
    assert runner.started == ["cells/0"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_process_ends_with_its_driver(tmp_path):
    """Kills: cells that go on training for a driver that was killed."""
    child = "import threading, time; from pipelines.cells import end_with_parent as e\n"
    child += "threading.Thread(target=e, daemon=True).start(); time.sleep(100)"
    parent = "import sys; from pathlib import Path; from pipelines.cells import _spawn\n"
    parent += f"print(_spawn([sys.executable, '-c', {child!r}], Path({str(tmp_path / 'log')!r})).pid)"
    ended = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, timeout=60)
    pid = int(ended.stdout)
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the process outlives its driver")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_tiny_ablation_end_to_end(tmp_path, capsys):
    """Stopped by SIGTERM after a cell, continued, repeated: the table is whole and nothing runs twice."""
    out = tmp_path / "out"
    words = ["ablation", "--seeds", "2", "--output", str(out), "--parallel", "2", *TINY]
    driver = subprocess.Popen([sys.executable, "-m", "pipelines.reproduce", *words], stderr=subprocess.PIPE)
    while not list(out.glob("cells/*/metrics.json")):
        assert driver.poll() is None
        time.sleep(0.2)
    driver.terminate()
    _, said = driver.communicate(timeout=120)
    assert driver.returncode == 75 and b"resume with the same command" in said
    before = {path: path.stat().st_mtime for path in out.glob("cells/*/metrics.json")}
    assert 1 <= len(before) < 8
    assert cli.guard(reproduce.main, [*words, "--record", str(tmp_path / "record")]) == 0
    assert all(path.stat().st_mtime == time_of for path, time_of in before.items())
    assert len(list(out.glob("cells/*/metrics.json"))) == 8
    text = (out / "ablation.md").read_text()
    assert text.count("| 2 |") >= 12 and "not finished" not in text
    assert json.loads((tmp_path / "record" / "result.json").read_text())["missing"] == []
    capsys.readouterr()
    assert reproduce.main(words) == 0
    assert "nothing is run again" in capsys.readouterr().out


SAVES = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(print('saved', flush=True) or 75))\n"
SAVES += "print('ready', flush=True)\ntime.sleep(60)"


@pytest.mark.ray
def test_cells_on_ray(ray_cluster, tmp_path):
    """Exit codes and times come back; stop() lets a process save. Kills: processes that wait in turn."""
    (tmp_path / "cells").mkdir()
    runner = cells.RayRunner(ray_cluster, {"num_cpus": 1}, 2)
    for i, code in enumerate((0, 3)):
        job = Job(f"cells/{i}", Config(), str(i))
        runner.start(
            job, [sys.executable, "-c", f"print('said'); raise SystemExit({code})"], tmp_path / str(i)
        )
    ended = []
    while len(ended) < 2:
        ended += [one for one in [runner.wait()] if one is not None]
    assert {(e.job.name, e.code) for e in ended} == {("cells/0", 0), ("cells/1", 3)}
    assert all(e.seconds > 0 for e in ended) and (tmp_path / "1").read_text() == "said\n"
    runner.start(Job("cells/2", Config(), "2"), [sys.executable, "-c", SAVES], tmp_path / "2")
    while not (tmp_path / "2").exists() or "ready" not in (tmp_path / "2").read_text():
        time.sleep(0.1)
    runner.stop()
    stopped = None
    while stopped is None:
        stopped = runner.wait()
    assert stopped.code == Interrupted.exit_code
    for _ in range(100):
        if "saved" in (tmp_path / "2").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the process could not save")
