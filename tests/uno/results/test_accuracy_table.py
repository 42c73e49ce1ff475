"""The tables of accuracies: the right number in the right place, and nothing for what was not measured."""

import re

from tests.uno.results.test_evaluate import counted, random_rows
from uno.results import accuracy_table
from uno.results.accuracy_table import accuracy_rows, filled_tables, format_table
from uno.results.evaluate import protocol_metrics
from uno.results.metrics import METRICS, PROTOCOLS, Metric


def test_format_table():
    """Kills: columns exchanged, avg and best exchanged, fractions for percent, lines beyond 80 columns."""
    values = {"baseline/kmeans/novel/acc": 0.8768, "baseline/kmeans_pixels/novel/acc": 1.0}
    values["baseline/kmeans_whitened/novel/acc"] = 0.9123
    for index, split in enumerate(("train", "test")):
        values |= protocol_metrics(counted(*random_rows(150, seed=index)), 2, split)
    lines = format_table(values).splitlines()
    assert max(map(len, lines)) <= 80
    expected = {
        "k-means on features ": ["baseline/kmeans/novel/acc"],
        "k-means, features whitened ": ["baseline/kmeans_whitened/novel/acc"],
        "k-means on pixels ": ["baseline/kmeans_pixels/novel/acc"],
        "Chance": [f"{split}/novel/task_aware/chance/acc" for split in ("train", "test")],
    }
    for which in ("avg", "best"):
        for name, protocol in PROTOCOLS.items():
            groups = [f"{split}/{rows}" for split in ("train", "test") for rows in ("known", "novel", "all")]
            expected[f"{protocol.label} +{which} "] = [f"{group}/{name}/acc/{which}" for group in groups]
        for name in METRICS.keys() - {"acc"}:
            keys = [f"{split}/novel/task_aware/{name}/{which}" for split in ("train", "test")]
            expected[f"Task-aware {METRICS[name].label} +{which} "] = keys
    for name, keys in expected.items():
        (line,) = [line for line in lines if re.match(name, line)]
        assert re.findall(r"-?\d+\.\d", line) == [f"{100 * values[key]:.1f}" for key in keys]
    # What has no truth is left out: no KeyError, no invented number.
    known, novel, truth = random_rows(50, num_true_novel=0)
    values = protocol_metrics(counted(known, novel, truth, 0), 0, "test")
    table = format_table({key: value for key, value in values.items() if "/task_aware/" in key})
    assert "training" not in table.splitlines()[0] and "k-means" not in table and "Chance" not in table
    assert len(re.findall(r"\d+\.\d", table)) == 2
    assert not re.search(r"\d\.\d", format_table({}))


def test_a_new_metric_is_one_entry(monkeypatch):
    """Its keys and its lines in every table follow. Kills: a list of metrics elsewhere."""
    mean_f1 = Metric(lambda counts: 0.25, "F1", "mean of the classes")
    monkeypatch.setitem(METRICS, "f1", mean_f1)
    monkeypatch.setattr(accuracy_table, "ACCURACY", accuracy_table.ACCURACY._replace(rows=accuracy_rows()))
    values = protocol_metrics(counted(*random_rows(150)), 2, "test")
    assert values["test/novel/task_agnostic_strict/f1/avg"] == 0.25
    (line,) = [line for line in format_table(values).splitlines() if re.match("Task-aware F1 +best", line)]
    assert line.split()[-1] == "25.0"
    assert any(row.title == "Task-aware F1" for row in filled_tables(values)[0].filled(values))


def test_the_table_of_a_mixed_pile():
    """Kills: columns exchanged, a baseline under the test rows, rows of a run that has no such pile."""
    values = {f"train/unlabeled/gcd/{name}/{which}": 0.1 * i for i, (name, which) in enumerate(GCD_KEYS)}
    values |= {f"test/unlabeled/gcd/{name}/{which}": 0.01 * i for i, (name, which) in enumerate(GCD_KEYS)}
    values |= {f"baseline/constrained_kmeans/gcd/{n}": 0.9 for n in ("all", "old", "new")}
    lines = format_table(values).splitlines()
    assert max(map(len, lines)) <= 80
    numbers = {line[:32].strip(): re.findall(r"\d+\.\d", line[32:]) for line in lines}
    assert numbers["One matching              avg"] == ["0.0", "20.0", "40.0", "0.0", "2.0", "4.0"]
    assert numbers["One matching              best"] == ["10.0", "30.0", "50.0", "1.0", "3.0", "5.0"]
    assert numbers["k-means, labels fixed"] == ["90.0"] * 3
    (columns,) = [line.split() for line in lines if line.startswith("unlabeled")]
    assert columns[-3:] == ["All", "Old", "New"]
    assert "unlabeled" not in format_table({"train/novel/task_aware/acc/avg": 1.0})


GCD_KEYS = [(name, which) for name in ("all", "old", "new") for which in ("avg", "best")]
