"""What Ray Tune is told to run, and what becomes of each trial; no cluster, but the
package is needed.
"""

from itertools import product
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


def open_search(sweep, trials=5, method="random", stopping=False):
    """A searcher that continues the sweep up to so many trials."""
    from tune.search import SweepSearcher

    options = sweep[0]._replace(trials=trials, search=method)
    return SweepSearcher(sweep[1], options, 3, print, lambda: stopping)


def hand_out(searcher):
    """The numbers of all trials that are left, which Ray Tune calls a, b, c ..."""
    names = "abcdefg"[: len(searcher.missing)]
    return [searcher.suggest(name)["index"] for name in names]


def write_epochs(storage, index, count):
    lines = [f'{{"epoch": {epoch}, "score": 0.5}}\n' for epoch in range(1, count + 1)]
    storage.append(f"{records.trial_name(index)}/epochs.jsonl", "".join(lines).encode())


def test_only_trials_without_a_result_are_run(sweep):
    searcher = open_search(sweep)
    assert hand_out(searcher) == [2, 3, 4] and searcher.suggest("d") == "FINISHED"
    drawn = [trial.overrides for trial in records.read_trials(sweep[1])]
    assert drawn[2] == spaces.draw(UNO, 9, 9)  # as it was begun
    assert drawn[4] == spaces.draw(UNO, 0, 4)


@pytest.mark.parametrize(
    ("method", "known_before"),
    [
        ("random", [(9, 9), (0, 3), (0, 4)]),
        pytest.param("optuna", [(9, 9)], id="Optuna draws new values from results"),
    ],
)
def test_values_that_no_result_changes_are_known_before_the_trials(
    sweep, method, known_before
):
    """By them the driver sees which pretrainings trials share."""
    drawn = open_search(sweep, method=method).values_drawn()
    assert drawn == [spaces.draw(UNO, *of) for of in known_before]


def test_how_trials_end(sweep):
    storage, searcher = sweep[1], open_search(sweep, trials=7)
    hand_out(searcher)
    write_epochs(storage, 3, 3)
    write_epochs(storage, 4, 1)
    failure = b'{"kind": "NumericsError", "reason": "non-finite"}'
    storage.write("trials/0005/failure.json", failure)
    storage.write("trials/0005/fold0/x", b"")
    for name in "bcd":
        searcher.on_trial_complete(name, result={})
    searcher.on_trial_complete("e", error=True)  # killed: out of memory
    ended = [(t.status, t.reason) for t in records.read_trials(storage)]
    assert ended[2:] == [
        (None, ""),
        (FINISHED, ""),
        (STOPPED, ""),
        (FAILED, "non-finite"),
        (FAILED, "the process died (out of memory?)"),
    ]
    assert not storage.exists("trials/0005/fold0")
    assert open_search(sweep, trials=7).missing == [2]


def test_a_trial_that_is_interrupted_has_no_result(sweep):
    searcher = open_search(sweep, stopping=True)
    hand_out(searcher)
    searcher.on_trial_complete("a", result={})
    searcher.on_trial_complete("b", error=True)
    assert open_search(sweep).missing == [2, 3, 4]


def test_a_full_disk_is_not_the_fault_of_the_configuration(sweep):
    """The trial has no result, and no further one is handed out."""
    searcher = open_search(sweep)
    searcher.suggest("a")
    failure = b'{"kind": "StorageError", "reason": "no space left"}'
    sweep[1].write("trials/0002/failure.json", failure)
    searcher.on_trial_complete("a", result={})
    assert searcher.storage_error == "no space left"
    assert searcher.suggest("b") == "FINISHED"
    assert open_search(sweep).missing == [2, 3, 4]


@pytest.mark.parametrize(
    ("num_earlier", "score", "expected"),
    [(4, 0.1, "STOP"), (4, 0.95, "CONTINUE"), (0, 0.1, "CONTINUE")],
)
def test_early_stopping_remembers_earlier_trials(
    tmp_path, num_earlier, score, expected
):
    """Kills: a continued sweep whose first trial meets empty rungs and survives."""
    from tune.search import scheduler

    lines = [{"epoch": epoch, "score": 0.9} for epoch in (1, 2, 3)]
    earlier = [records.Trial(i, {}, lines, FINISHED) for i in range(num_earlier)]
    asha = scheduler(tiny_options(tmp_path, "--grace-epochs", "1"), 9, earlier)
    new = SimpleNamespace(trial_id="new")
    asha.on_trial_add(None, new)
    assert asha.on_trial_result(None, new, {"epoch": 1, "score": score}) == expected


def grid_options(tmp_path, text, *words):
    (tmp_path / "space.yaml").write_text(text)
    space = str(tmp_path / "space.yaml")
    return tiny_options(tmp_path / "s", "--space", space, "--search", "grid", *words)


def test_a_grid_has_every_combination_once(tmp_path):
    """Trial 0 is the given configuration, one of them. Kills: a point that is run
    twice, one left out.
    """
    text = (
        "objective.epsilon: {choices: [0.025, 0.05, 0.1]}\n"
        "model.num_heads: {low: 3, high: 4, scale: int}\n"
    )
    options, _ = open_sweep_data(grid_options(tmp_path, text))
    storage = fake_sweep(tmp_path / "s", options, [])
    hand_out(open_search((options, storage), options.trials, "grid"))
    values = [tuple(trial.overrides.values()) for trial in records.read_trials(storage)]
    assert values[0] == (0.05, 4) and len(values) == options.trials == 6
    assert {*values} == set(product((0.025, 0.05, 0.1), (3, 4)))


HUNDREDS = [i / 1000 for i in range(1, 300)]


@pytest.mark.parametrize(
    ("text", "words", "says"),
    [
        (
            "objective.epsilon: {low: 0.1, high: 0.2}",
            "",
            "objective.epsilon: --search grid needs choices",
        ),
        ("model.num_heads: {choices: [2, 4]}", "--trials 3", "leave --trials out"),
        (
            f"objective.epsilon: {{choices: {HUNDREDS}}}\n"
            f"objective.temperature: {{choices: {HUNDREDS}}}\n",
            "",
            "89,401 combinations, more than 10,000",
        ),
    ],
    ids=["a range", "a number of trials", "too many points"],
)
def test_a_grid_needs_lists(tmp_path, text, words, says):
    with pytest.raises(ConfigError, match=says):
        open_sweep_data(grid_options(tmp_path, text, *words.split()))


def test_optuna_is_told_what_happened_before(sweep):
    pytest.importorskip("optuna")
    options, storage = sweep
    searcher = open_search(sweep, method="optuna")
    hand_out(searcher)
    study = searcher._optuna.study
    assert study.direction.name == "MAXIMIZE"
    assert [(t.state.name, t.value) for t in study.trials[:2]] == [
        ("COMPLETE", 0.6),
        ("FAIL", None),
    ]
    for domain, trial in product(options.space, records.read_trials(storage)):
        value, (low, *_, high) = trial.overrides[domain.key], sorted(domain.ends)
        assert value in domain.choices if domain.choices else low <= value <= high
    write_epochs(storage, 4, 3)
    searcher.on_trial_complete("c", result={})
    assert study.trials[-1].value == 0.5
