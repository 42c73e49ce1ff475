"""What Ray Tune is told to run, and what becomes of each trial; no cluster, but the
package is needed.
"""

from types import SimpleNamespace

import pytest

from tests.tune.tiny import fake_sweep, tiny_options
from tune import records, spaces
from tune.driver import open_sweep_data
from tune.records import FAILED, FINISHED, STOPPED
from tune.spaces import load_space
from uno.errors import ConfigError
from uno.presets import preset

UNO = load_space("uno", preset("digits"))

pytestmark = pytest.mark.ray


@pytest.fixture
def sweep(tmp_path):
    options = tiny_options(tmp_path / "s")
    trials = [
        {
            "overrides": spaces.current(UNO, options.config),
            "scores": [0.1, 0.5, 0.6],
            "status": "finished",
        },
        {
            "overrides": spaces.draw(UNO, 0, 1),
            "scores": [0.2],
            "status": "failed",
            "reason": "x",
        },
        # begun with values of its own, then killed
        {"overrides": spaces.draw(UNO, 9, 9), "scores": [0.3]},
    ]
    return options, fake_sweep(tmp_path / "s", options, trials)


def plan_of(sweep, trials=5, stopping=False, search="random"):
    """A searcher, the trials that it says ended, and the numbers of those that it
    hands out.
    """
    from tune.search import SweepSearcher

    options, ended = sweep[0]._replace(trials=trials, search=search), []
    plan = SweepSearcher(sweep[1], options, 3, ended.append, lambda: stopping)
    names = "abcdefg"[: len(plan.missing)]
    return plan, ended, [plan.suggest(name)["index"] for name in names]


def epochs(storage, index, count):
    lines = [f'{{"epoch": {epoch}, "score": 0.5}}\n' for epoch in range(1, count + 1)]
    storage.append(f"{records.trial_name(index)}/epochs.jsonl", "".join(lines).encode())


def test_only_trials_without_a_result_are_run(sweep):
    plan, _, indices = plan_of(sweep)
    assert indices == [2, 3, 4] and plan.suggest("d") == "FINISHED"
    drawn = {t.index: t.overrides for t in records.read_trials(sweep[1])}
    assert drawn[2] == spaces.draw(UNO, 9, 9)  # as it was begun
    assert drawn[4] == spaces.draw(UNO, 0, 4)


def test_values_that_no_result_changes_are_known_before_the_trials(sweep):
    """By them the driver sees which pretrainings trials share."""
    from tune.search import SweepSearcher

    def drawn(search):
        options = sweep[0]._replace(search=search, trials=5)
        return SweepSearcher(
            sweep[1], options, 3, pytest.fail, lambda: False
        ).values_drawn()

    assert drawn("random") == [spaces.draw(UNO, 9, 9), *drawn_by_numbers(3, 4)]
    assert drawn("optuna") == [spaces.draw(UNO, 9, 9)]


def drawn_by_numbers(*numbers):
    return [spaces.draw(UNO, 0, number) for number in numbers]


def test_how_trials_end(sweep):
    storage = sweep[1]
    plan, ended, _ = plan_of(sweep, trials=7)
    epochs(storage, 3, 3)
    epochs(storage, 4, 1)
    storage.write(
        "trials/0005/failure.json", b'{"kind": "NumericsError", "reason": "non-finite"}'
    )
    storage.write("trials/0005/fold0/x", b"")
    for name in "bcd":
        plan.on_trial_complete(name, result={})
    plan.on_trial_complete("e", error=True)  # killed: out of memory
    assert [(t.index, t.status) for t in ended] == [
        (3, FINISHED),
        (4, STOPPED),
        (5, FAILED),
        (6, FAILED),
    ]
    assert [t.reason for t in ended[2:]] == [
        "non-finite",
        "the process died (out of memory?)",
    ]
    assert not storage.exists("trials/0005/fold0")
    assert plan_of(sweep, trials=7)[2] == [2]  # it never ended


def test_a_trial_that_is_interrupted_has_no_result(sweep):
    plan, ended, _ = plan_of(sweep, stopping=True)
    plan.on_trial_complete("a", result={})
    plan.on_trial_complete("b", error=True)
    assert ended == [] and len(plan_of(sweep)[2]) == 3
    # nor has one whose disk is full, which is not the configuration's fault
    plan, ended, _ = plan_of(sweep, trials=12)  # some are not handed out yet
    sweep[1].write(
        "trials/0002/failure.json",
        b'{"kind": "StorageError", "reason": "no space left"}',
    )
    plan.on_trial_complete("a", result={})
    assert plan.storage_error == "no space left"
    assert ended == [] and plan.suggest("h") == "FINISHED"


def test_early_stopping_remembers_earlier_trials(tmp_path):
    """Kills: a continued sweep whose first trial meets empty rungs and survives."""
    from tune.search import scheduler

    options = tiny_options(tmp_path, "--grace-epochs", "1")
    lines = [{"epoch": epoch, "score": 0.9} for epoch in (1, 2, 3)]
    before = [records.Trial(i, {}, lines, FINISHED) for i in range(4)]
    for past, score, expected in (
        (before, 0.1, "STOP"),
        (before, 0.95, "CONTINUE"),
        ([], 0.1, "CONTINUE"),
    ):
        found, new = scheduler(options, 9, past), SimpleNamespace(trial_id="new")
        found.on_trial_add(None, new)
        assert (
            found.on_trial_result(None, new, {"epoch": 1, "score": score}) == expected
        )


def space_of(tmp_path, text):
    (tmp_path / "space.yaml").write_text(text)
    return ["--space", str(tmp_path / "space.yaml")]


def test_a_grid_has_every_combination_once(tmp_path):
    """Trial 0 is the given configuration, one of them. Kills: a point that is run
    twice, one left out.
    """
    from tune.search import SweepSearcher

    words = space_of(
        tmp_path,
        "objective.epsilon: {choices: [0.025, 0.05, 0.1]}\n"
        "model.num_heads: {low: 3, high: 4, scale: int}\n",
    )
    options = tiny_options(tmp_path / "s", *words, "--search", "grid")
    options, _ = open_sweep_data(options)
    storage = fake_sweep(tmp_path / "s", options, [])
    plan = SweepSearcher(storage, options, 3, pytest.fail, lambda: False)
    while plan.suggest(str(len(plan.missing))) != "FINISHED":
        pass
    values = [tuple(trial.overrides.values()) for trial in records.read_trials(storage)]
    assert values[0] == (0.05, 4) and len(values) == options.trials == 6
    assert {*values} == {
        (epsilon, heads) for epsilon in (0.025, 0.05, 0.1) for heads in (3, 4)
    }


def test_a_grid_needs_lists(tmp_path):
    """Kills: a grid of a range, of a number of trials that it has not, of a million
    points.
    """
    many = f"objective.epsilon: {{choices: {[i / 1000 for i in range(1, 300)]}}}\n"
    many += f"objective.temperature: {{choices: {[i / 1000 for i in range(1, 300)]}}}\n"
    for words, says in (
        (["--space", "uno"], "objective.epsilon: --search grid needs choices"),
        (
            [
                *space_of(tmp_path, "model.num_heads: {choices: [2, 4]}"),
                "--trials",
                "3",
            ],
            "leave --trials out",
        ),
        (space_of(tmp_path, many), "89,401 combinations, more than 10,000"),
    ):
        with pytest.raises(ConfigError, match=says):
            open_sweep_data(tiny_options(tmp_path, *words, "--search", "grid"))


def test_optuna_is_told_what_happened_before(sweep):
    pytest.importorskip("optuna")
    options, storage = sweep
    plan, _, _ = plan_of(sweep, search="optuna")
    study = plan._optuna.study
    assert study.direction.name == "MAXIMIZE"
    assert [(t.state.name, t.value) for t in study.trials[:2]] == [
        ("COMPLETE", 0.6),
        ("FAIL", None),
    ]
    for trial in records.read_trials(storage):
        for domain in options.space:
            value = trial.overrides[domain.key]
            assert (
                value in domain.choices
                if domain.choices
                else domain.low <= value <= domain.high
            )
    epochs(storage, 4, 3)
    plan.on_trial_complete("c", result={})
    assert study.trials[-1].value == 0.5
