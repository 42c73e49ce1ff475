"""Tables, best.yaml and the page, from sweeps that never ran."""

import json
from contextlib import suppress
from functools import partial
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipelines.commands import DISCOVER
from pipelines.options import parse
from tests.tune.tiny import fake_sweep, tiny_options
from tests.uno.report.reading import Page, requests
from tune import driver, records, report
from tune.spaces import current, load_space
from tune.sweep import main
from uno.config import differing_keys, override, to_dict
from uno.errors import ConfigError
from uno.presets import preset
from uno.runs import lock
from uno.session import loggers
from uno.text import visible

UNO = load_space("uno", preset("digits"))

VALUES = {
    "objective.epsilon": 0.03,
    "objective.temperature": 0.07,
    "model.num_heads": 6,
    "model.overcluster_factor": 5,
}
NASTY = "</td><script>alert(1)</script>\u202e&\"'"


def trials(options):
    first = current(UNO, options.config)
    return [
        {"overrides": first, "scores": [0.3, 0.5, 0.6], "status": "finished"},
        {"overrides": VALUES, "scores": [0.4, 0.6, 0.8], "status": "finished"},
        {
            "overrides": VALUES | {"objective.epsilon": 0.2},
            "scores": [0.99],
            "status": "stopped",
        },
        {
            "overrides": VALUES,
            "scores": [0.9, 0.95],
            "status": "failed",
            "reason": NASTY,
        },
        {
            "overrides": VALUES,
            "status": "failed",
            "reason": "non-finite loss at pretrain step 4",
        },
        {
            "overrides": VALUES | {"model.num_heads": 2},
            "scores": [0.2, 0.3, 0.4],
            "status": "finished",
        },
        {"overrides": VALUES, "scores": [0.5]},
    ]


@pytest.fixture
def options(tmp_path):
    return tiny_options(tmp_path / "sweep")


@pytest.fixture
def storage(tmp_path, options):
    return fake_sweep(tmp_path / "sweep", options, trials(options))


def finished(*scores, **more):
    return {"overrides": VALUES, "scores": scores, "status": "finished"} | more


def test_only_a_finished_trial_wins_and_the_console_shows_the_cost(storage):
    """A stopped and a failed trial have the higher scores; neither wins."""
    summary = report.read(storage)
    assert summary.best.index == 1
    assert [t.index for t in summary.ranked] == [1, 0, 5, 2]
    costs = {key: summary.cost[key] for key in ("epochs", "seconds", "pretrainings")}
    assert costs == {"epochs": 13, "seconds": 2 * 13, "pretrainings": 0}
    # trials 0, 1, 2, 5 of 3 epochs each
    assert summary.cost["saved"] == pytest.approx(1 - 10 / 12)
    text = report.format_table(summary)
    assert text.splitlines()[1].startswith("1 ")
    assert "0 (yours)" in text and "4 trials, 2 failed" in text


def test_the_standard_error_of_a_score():
    """By hand: 9 of 10 right, one right and one wrong added: 10 of 12."""
    trial = records.Trial(0, {}, [{"epoch": 1, "score": 0.9, "rows": 10}])
    assert trial.standard_error == pytest.approx((10 / 12 * 2 / 12 / 10) ** 0.5)


@pytest.mark.parametrize(
    ("rows", "given", "winner"),
    [(0, 0.999, 0), (0, 0.995, 1), (100, 0.995, 0), (100_000, 0.995, 1)],
)
def test_a_change_needs_evidence(tmp_path, options, rows, given, winner):
    """.999 against .995 as given: a tie on 100 rows, not on 100,000; 0 rows: the
    score is no share.
    """
    both = [finished(0.5, score, line={"rows": rows}) for score in (given, 0.999)]
    summary = report.read(fake_sweep(tmp_path / "s", options, both))
    assert summary.best.index == winner
    keeps = winner == 0 and given < 0.999
    assert ("keeps your configuration" in report.format_table(summary)) == keeps
    assert ("no trial beat it" in report.page(summary)) == keeps


@pytest.mark.parametrize("winner", [0, 1])
def test_best_yaml_is_taken_by_uno_discover_as_it_is(tmp_path, options, winner):
    """All searched keys are in it, also where the winner has the default; options
    override them.
    """
    storage = fake_sweep(tmp_path / "s", options, trials(options)[: winner + 1])
    report.write(storage)
    words = ["--config", storage.path("best.yaml")]
    wanted = override(options.config, VALUES) if winner else options.config
    assert differing_keys(to_dict(wanted), parse(words, DISCOVER).config) == []
    overridden = parse([*words, "--objective.epsilon", "0.5"], DISCOVER)
    assert overridden.config.objective.epsilon == 0.5
    text = storage.read("best.yaml").decode()
    assert all(key in text for key in VALUES)
    assert "compute" not in text and "output" not in text


def test_the_page_is_self_contained_and_inert(storage):
    report.write(storage)
    page = Page(storage.read("sweep.html").decode())
    assert page.unclosed == [] and page.scripts == [] and requests(page) == []
    assert page.tags[3][1]["content"].startswith(
        "default-src 'none'; img-src data:; style-src 'unsafe-in"
    )
    assert visible(NASTY) in page.text and "nan" not in page.text
    dots = [attrs["class"] for tag, attrs in page.tags if tag == "circle"]
    # legend, learning curves, a scatter for each key
    assert dots.count("dot best") == 1 + 1 + len(UNO)
    numbers = [
        value
        for _, attrs in page.tags
        for name, value in attrs.items()
        if name in ("cx", "cy", "d")
    ]
    assert numbers and not any("nan" in value or "inf" in value for value in numbers)


@pytest.mark.parametrize(
    "keep",
    [
        slice(2, 5),
        *(
            pytest.param(slice(*ends), marks=pytest.mark.release)
            for ends in ((0, 0), (0, 1), (4, 5), (3, 7))
        ),
    ],
)
def test_any_number_of_trials_has_a_page_a_finished_sweep_a_best_yaml(
    tmp_path, options, keep
):
    kept = trials(options)[keep]
    report.write(storage := fake_sweep(tmp_path / "s", options, kept))
    assert storage.exists("sweep.html")
    assert storage.exists("best.yaml") == any(
        trial.get("status") == "finished" for trial in kept
    )


def test_a_report_of_a_sweep_that_is_not_finished(storage, tmp_path, capsys):
    """By `uno tune --report`. Kills: a trial that it starts, a report that needs the
    data, a directory that it makes.
    """
    words = ["--data", "folder:/nowhere", "--report", "--output"]
    main([*words, str(tmp_path / "sweep")])
    assert "0 (yours)" in capsys.readouterr().out
    page = storage.read("sweep.html").decode()
    assert "unfinished" in page and not storage.exists("lock.json")
    with pytest.raises(ConfigError, match="not the directory of a sweep"):
        main(["--report", "--output", str(tmp_path / "none")])
    assert not (tmp_path / "none").exists()


def tell(storage, options, names):
    """Write the report of a sweep and send its results to these loggers."""
    config = override(options.config, {"train.report_to": names})
    with lock.lock_run(storage, on_wait=pytest.fail) as claim:
        summary = report.write(claim.storage)
        driver._tell_loggers(config, claim, summary)
    return summary


def shown_by_tensorboard(storage, trial, phase, tag):
    """What TensorBoard shows of a trial, as a value for each step."""
    folder = storage.path(f"{records.trial_name(trial)}/tensorboard/{phase}")
    events = EventAccumulator(folder).Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_tensorboard_and_jsonl_have_a_run_of_each_trial_and_the_best_is_marked(
    storage, options
):
    """Trial 5 becomes the best one after trial 1. Kills: a mark that stays."""
    assert tell(storage, options, "tensorboard,jsonl").best.index == 1
    line = {"epoch": 4, "score": 0.9, "loss": 1.0}
    storage.append("trials/0005/epochs.jsonl", json.dumps(line).encode() + b"\n")
    summary = tell(storage, options, "tensorboard,jsonl")
    lines = [json.loads(line) for line in storage.read("sweep.jsonl").splitlines()]
    for trial, line in zip(summary.trials, lines, strict=True):
        assert (line["values"], line["epochs"]) == (trial.overrides, trial.epochs)
        mark = shown_by_tensorboard(storage, trial.index, "results", "best")
        assert line["best"] == mark[0] == (trial.index == 5)
        if trial.epochs:
            scores = {epoch["epoch"]: epoch["score"] for epoch in trial.epochs}
            shown = shown_by_tensorboard(storage, trial.index, "tune", "score")
            assert shown == pytest.approx(scores)
            last = shown_by_tensorboard(storage, trial.index, "results", "score")
            assert last == {0: pytest.approx(trial.score)}


def test_epochs_are_sent_to_each_logger_once_also_after_an_interruption(
    storage, options, monkeypatch
):
    """Kills: epochs that are never sent after a kill or an error of a logger, or to a
    logger that is new; epochs that every command sends again.
    """
    sent, problems = [], {}

    def recorder(name, record):
        trial = int(record.name.rpartition("-")[2])

        def log(phase, step, values):
            if trial in problems:
                raise problems[trial]
            if phase == "tune":
                sent.append((name, trial, step))

        return Mock(log=log)

    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(loggers.LOGGERS, name, (name, partial(recorder, name)))

    def sent_now(names):
        sent.clear()
        with suppress(KeyboardInterrupt):
            tell(storage, options, names)
        return sorted(sent)

    epochs = [
        ("wandb", trial.index, line["epoch"])
        for trial in report.read(storage).trials
        for line in trial.epochs
    ]
    problems[1] = KeyboardInterrupt()
    assert sent_now("wandb") == [epoch for epoch in epochs if epoch[1] == 0]
    problems[1] = OSError("down")
    assert sent_now("wandb") == [epoch for epoch in epochs if epoch[1] > 1]
    problems.clear()
    assert sent_now("wandb") == [epoch for epoch in epochs if epoch[1] == 1]
    assert sent_now("wandb") == []
    new = [("mlflow", *epoch[1:]) for epoch in epochs]
    assert sent_now("wandb,mlflow")[: len(epochs)] == new
    assert sent_now("wandb,mlflow") == []
