"""The agreement lane itself: a run of it here, some that have every kind among the
slow tests.
"""

import json
from dataclasses import replace
from itertools import islice

import pytest

from tests.agreement import (
    CHOICES,
    EDITS,
    FORMS,
    GCD,
    ITEMS,
    PACKED,
    PROGRAMS,
    VECTORS,
    check_run,
    specs,
)
from tests.test_fuzz import CORPUS
from uno.data.decode import Decoding, decoded
from uno.results import export, folders, predictions
from uno.results.classes import without_merges
from uno.session import api, pipeline

SEED, NUM_RUNS = 521, 8  # with every kind in the first runs, in 13 of seed 0


def disagreements(runs, **options):
    return [
        f"{number}: {line}"
        for number, spec in runs
        for line in check_run(spec, **options)
    ]


@pytest.mark.parametrize(
    "path", sorted(CORPUS.glob("agreement_*")), ids=lambda path: path.name
)
def test_past_disagreements_stay_repaired(path):
    assert check_run(json.loads(path.read_text())) == []


def test_specs_are_a_function_of_the_seed():
    """Kills: a run that cannot be repeated, or that a corpus file does not hold."""
    first, again, other = (list(islice(specs(seed), 5)) for seed in (1, 1, 2))
    assert first == again != other and json.loads(json.dumps(first)) == first


def test_a_slice():
    """A run, the same every time; ``python -m tests.agreement`` for more."""
    assert disagreements(enumerate(islice(specs(1), 1))) == []


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", range(NUM_RUNS))
def test_all_say_the_same(number):
    assert disagreements(islice(enumerate(specs(SEED)), number, number + 1)) == []


def test_every_kind_is_drawn():
    """In the lane's cases. Kills: a kind of source, encoder, edit or answer that no
    seed reaches.
    """
    runs = list(islice(specs(SEED), NUM_RUNS))
    cases = [case for run in runs for case in run["cases"]]
    assert {case["edit"] for case in cases} == {*EDITS} and {
        case["items"] for case in cases
    } == {*ITEMS}
    assert {case["form"] for case in cases} == {*FORMS, *PACKED, *VECTORS}
    assert {case["program"] for case in cases} == {None, *PROGRAMS}
    assert {flag for case in cases for flag in case["more"]} == {
        "--csv",
        "--folders",
        "--embedding",
    }
    for key, values in CHOICES.items():
        default = "vectors" if key == "model.encoder" else None
        assert {run["options"].get(key, default) for run in runs} >= {*values}, key
    gcd = {
        run["hidden"] and run["form"] != "two folders"
        for run in runs
        if run["options"]["method"] in GCD
    }
    assert gcd == {True, False} and {run["default"] for run in runs} == {True, False}
    assert sum(case["form"].startswith("packed") for case in cases) > 10


def shifted(scores):
    return scores and scores._replace(features=scores.features + 1)


PLAIN = {
    "pixels": 7,
    "form": "parquet",
    "hidden": True,
    "size": 8,
    "known": 2,
    "novel": 3,
    "rows": 8,
    "options": {
        "model.encoder": "resnet_small",
        "model.finetune": "full",
        "method": "uno",
    },
    "cases": [
        {
            "edit": "merge into known",
            "form": "csv",
            "items": "bytes",
            "program": "pt2",
            "new": 3,
            "more": ["--csv", "--folders", "--embedding"],
        }
    ],
}
PLANTED = {
    "the run's own table": {
        (
            pipeline,
            "predict_run",
        ): lambda run, model, predict=pipeline.predict_run: predict(
            run, replace(model, classes=without_merges(model.classes))
        )
    },
    "predict of bytes": {
        (api, "decoded"): lambda *args, **how: decoded(
            *args, **how | {"how": Decoding("bicubic")}
        )
    },
    "embedding": {
        (
            predictions,
            "result_table",
        ): lambda facts, ok, scores, *more, make=predictions.result_table: make(
            facts, ok, shifted(scores), *more
        )
    },
    "CSV": {
        (folders, "read_batches"): lambda storage, names, read=folders.read_batches: (
            batch
            if len(names) < 9
            else batch.set_column(6, "margin", batch["probability"])
            for batch in read(storage, names)
        )
    },
    "folders": {(folders, "_encoded"): lambda image: (b"another", "")},
    "pt2": {
        (export, "merge_outputs"): lambda probabilities, _: probabilities,
        (export, "_compare"): lambda *_: None,
    },
}


@pytest.mark.release
@pytest.mark.parametrize("what", [None, *PLANTED])
def test_each_that_says_something_else_is_named(monkeypatch, what):
    """Kills: an answer that is not compared."""
    for (module, name), other in PLANTED.get(what, {}).items():
        monkeypatch.setattr(module, name, other)
    lines = check_run(PLAIN)
    assert bool(lines) == (what is not None)
    assert all(
        line.startswith(f"case 0 (merge into known, csv): {what}: ")
        for line in lines[:1]
    ), lines


@pytest.mark.ray
@pytest.mark.release
@pytest.mark.timeout(600)
def test_ray_says_the_same_of_what_it_trains(ray_cluster):
    """Predictions by two workers, of what two workers have trained."""
    assert disagreements([(0, PLAIN)], workers=2, trained_by=2) == []


@pytest.mark.ray
@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("encoder", [None, *CHOICES["model.encoder"]])
def test_ray_says_the_same_of_every_kind(ray_cluster, encoder):
    """Of what one process has trained: a case of the first run of each encoder, of the
    first GCD run of the default method for None.
    """
    spec = next(
        run
        for run in specs(0)
        if (
            run["options"].get("model.encoder", "vectors") == encoder
            if encoder
            else run["default"]
        )
        and (encoder or not run["hidden"])
    )
    case = min(
        spec["cases"], key=lambda case: not case["form"].startswith(("packed", "tar"))
    )
    assert disagreements([(0, spec | {"cases": [case]})], workers=1) == []
