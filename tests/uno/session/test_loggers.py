"""Each logger's record of a run, read back; one that fails stops nothing."""

import tempfile
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboardX.proto.event_pb2 import Event

from tests.uno.small_run import small_config
from uno.config import override
from uno.data.files import Storage
from uno.errors import ConfigError
from uno.presets import preset
from uno.session import loggers, pipeline
from uno.session.backend import LocalBackend

RESULTS = {"train/all/acc": 0.75, "undefined": float("nan")}


def line(step: int, phase: str = "discover", **more) -> dict:
    where = {
        "phase": phase,
        "event": "step",
        "step": step,
        "total_steps": 9,
        "epoch": 1,
        "epochs": 2,
    }
    return (
        where
        | {"loss": 1 / step, "lr": 0.1, "images_per_s": 5.0, "skipped_steps": 0}
        | more
    )


def report(names: str, storage: Storage, *metrics: dict, **more) -> None:
    with loggers.Loggers(
        override(preset("digits"), {"train.report_to": names}), storage, **more
    ) as log:
        for each in metrics:
            log(each)
        log.results(RESULTS)


@pytest.fixture(params=["local", "remote"])
def storage(request, tmp_path) -> Storage:
    return Storage(str(tmp_path / "run") if request.param == "local" else "mock:///run")


def events(storage: Storage, phase: str) -> list[Event]:
    """Of one directory, in order of its files, by TensorBoard's own reader."""
    found = []
    for name in sorted(storage.list(f"tensorboard/{phase}")):
        with tempfile.NamedTemporaryFile() as copy:
            copy.write(storage.read(f"tensorboard/{phase}/{name}"))
            copy.flush()
            found += map(Event.FromString, RawEventFileLoader(copy.name).Load())
    return found


def test_tensorboard_has_the_lines_of_a_run_its_resume_and_its_roll_back(storage):
    """Kills: charts of one phase purged by the next (purging hides later steps of the
    whole directory), points of abandoned steps, nothing on an object store, a position
    drawn as a number.
    """
    report("tensorboard", storage, line(4, "pretrain"), line(4, head_losses=[2.0, 3.0]))
    nowhere = {"phase": "discover", "step": 5, "event": "step", "every_s": 10.0}
    report(
        "tensorboard",
        storage,
        line(8),
        nowhere,
        line(9, loss=float("nan")),
        line(6),
        line(8),
    )
    for phase, expected in (("pretrain", [4]), ("discover", [4, 8, 6, 8])):
        found = events(storage, phase)
        scalars = [
            (e.step, v.tag, v.simple_value) for e in found for v in e.summary.value
        ]
        assert [step for step, tag, _ in scalars if tag == "loss"] == expected
        assert ((4, "head_loss/1", 3.0) in scalars) == (phase == "discover")
        assert {tag for _, tag, _ in scalars} <= {
            "loss",
            "lr",
            "images_per_s",
            "skipped_steps",
            "head_loss/0",
            "head_loss/1",
        }
        purges = [e.step for e in found if e.session_log.status == 1]
        assert purges == ([4] if phase == "pretrain" else [4, 8, 6])
    assert [v.tag for e in events(storage, "results") for v in e.summary.value] == 2 * [
        "train/all/acc"
    ]


@pytest.mark.slow
def test_mlflow_reads_a_run_and_its_resume_as_one(tmp_path, monkeypatch):
    """Kills: a second run after a resume, parameters logged twice (refused), a run
    that never ends.
    """
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    storage = Storage(str(tmp_path / "a-run"))
    for lines in ([line(4, head_losses=[2.0, 3.0])], [line(8)]):
        report("mlflow", storage, *lines, group="sweep")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("uno").experiment_id])
    assert sorted(  # MLflow sends them by several threads, so in any order
        (m.step, m.value)
        for m in client.get_metric_history(run.info.run_id, "discover/loss")
    ) == [(4, 0.25), (8, 0.125)]
    assert (
        run.data.metrics.items()
        >= {"discover/head_loss/1": 3.0, "results/train/all/acc": 0.75}.items()
    )
    assert (
        run.data.params.items()
        >= {"preset": "digits", "discover.base_lr": "0.1"}.items()
    )
    assert (run.info.status, run.info.run_name, run.data.tags["group"]) == (
        "FINISHED",
        "sweep-a-run",
        "sweep",
    )


@pytest.fixture
def wandb_runs(monkeypatch):
    """The offline runs of W&B that a test starts, each with its rows and summary."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    runs = []

    def init(**settings):
        run, rows, summary = start(**settings), [], {}
        log, finish = run.log, run.finish
        run.log = lambda row: (rows.append(row), log(row))
        run.finish = lambda **how: (summary.update(dict(run.summary)), finish(**how))
        runs.append((run, rows, summary))
        return run

    start = wandb.init
    monkeypatch.setattr(wandb, "init", init)
    return runs


@pytest.mark.slow
def test_wandb_has_an_offline_run(tmp_path, wandb_runs):
    """Kills: a run that asks for the network or a login, steps lost since they go
    back.
    """
    storage = Storage(str(tmp_path / "run"))
    report("wandb", storage, line(4, "pretrain"), line(8), line(6), group="sweep")
    ((run, rows, summary),) = wandb_runs
    assert [row.get("discover/step") for row in rows] == [None, 8, 6, None]
    assert rows[1]["discover/loss"] == 0.125 and rows[0]["pretrain/loss"] == 0.25
    assert (run.project, run.group, run.name) == ("uno", "sweep", "sweep-run")
    assert summary["results/train/all/acc"] == 0.75
    assert storage.read("loggers/wandb").decode() == run.id
    assert list((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))


@pytest.mark.parametrize(
    "when",
    ["side_effect", *(f"return_value.{name}.side_effect" for name in ("log", "close"))],
    ids=["made", "log", "close"],
)
def test_a_logger_that_fails_is_off_after_one_warning(
    tmp_path, monkeypatch, capsys, when
):
    """Kills: an error that ends training, a warning for every line, a healthy logger
    switched off too.
    """
    failing = Mock()
    failing.configure_mock(**{when: RuntimeError("no\nserver")})
    monkeypatch.setitem(loggers.LOGGERS, "wandb", ("json", failing))
    report("wandb,tensorboard", Storage(str(tmp_path)), line(1), line(2))
    assert capsys.readouterr().out == "warning: --report-to wandb is off: no server\n"
    found = events(Storage(str(tmp_path)), "discover")
    losses = [e.step for e in found for v in e.summary.value if v.tag == "loss"]
    assert losses == [1, 2]


def test_a_run_reports_to_its_loggers(tmp_path, monkeypatch):
    """From the driver: every line with a loss, the metrics at the end. Kills:
    loggers that nobody calls.
    """
    noting = Mock()
    monkeypatch.setitem(loggers.LOGGERS, "wandb", ("json", noting))
    config = small_config(
        train__log_every=50,
        output=str(tmp_path / "run"),
        train__report_to="jsonl,wandb",
        compute__threads=1,
    )
    train = LocalBackend.train
    monkeypatch.setattr(LocalBackend, "train", lambda *a: train(*a) or RESULTS)
    pipeline.discover(config, {}, last="pretrain")
    (record,) = noting.call_args.args
    assert (record.name, record.settings["model.width"]) == ("run", 4)
    *steps, results = [found.args for found in noting.return_value.log.call_args_list]
    assert [found[:2] for found in steps] == [("pretrain", 3 * i) for i in (1, 2, 3)]
    assert results[-1] == {"train/all/acc": 0.75}
    noting.return_value.close.assert_called_once_with(False)
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_package_that_is_not_there_is_refused_first(monkeypatch):
    """Kills: a package that is missed after an hour."""
    monkeypatch.setattr(
        loggers.importlib.util, "find_spec", lambda name: name == "json" or None
    )
    with pytest.raises(ConfigError, match=r"pip install 'uno-discovery\[mlflow\]'"):
        loggers.require_loggers(small_config(train__report_to="jsonl, mlflow"))
