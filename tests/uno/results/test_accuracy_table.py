"""The tables of accuracies: the right number in the right place, and nothing for
what was not measured.
"""

import re
from itertools import product

from tests.uno.results.test_evaluate import counted, random_rows
from uno.results.accuracy_table import (
    format_table,
    has_several_heads,
)
from uno.results.evaluate import protocol_metrics
from uno.results.metrics import PROTOCOLS


def test_format_table():
    """Kills: columns exchanged, avg and best exchanged, fractions for percent, lines
    beyond 80 columns.
    """
    values = {
        "baseline/kmeans/novel/acc": 0.8768,
        "baseline/spectral/novel/acc": 0.9123,
    }
    for index, split in enumerate(("train", "test")):
        values |= protocol_metrics(counted(*random_rows(150, seed=index)), 2, split)
    lines = format_table(values).splitlines()
    assert max(map(len, lines)) <= 80
    groups = list(product(("train", "test"), ("known", "novel", "all")))
    expected = {
        "k-means on features ": ["baseline/kmeans/novel/acc"],
        "Spectral clustering ": ["baseline/spectral/novel/acc"],
        "Chance": [
            f"{split}/novel/task_aware/chance/acc" for split in ("train", "test")
        ],
    }
    for which, name in product(("avg", "best"), ("task_aware", "task_agnostic_strict")):
        expected[f"{PROTOCOLS[name].label} +{which} "] = [
            f"{split}/{rows}/{name}/acc/{which}" for split, rows in groups
        ]
    for name, keys in expected.items():
        (line,) = [line for line in lines if re.match(name, line)]
        shown = [f"{100 * values[key]:.1f}" for key in keys]
        assert re.findall(r"-?\d+\.\d", line) == shown


def test_one_head_has_one_row_and_no_average():
    """What was not measured is left out: no KeyError, no invented number."""
    values = {f"test/known/task_aware/acc/{which}": 0.75 for which in ("avg", "best")}
    table = format_table(values)
    assert re.findall(r"\d+\.\d", table) == ["75.0"]
    assert "avg" not in table and "train" not in table.splitlines()[0]
    assert not has_several_heads(values)
    values["test/known/task_aware/acc/best"] = 0.8
    assert has_several_heads(values) and "80.0" in format_table(values)


def test_the_table_of_a_mixed_pile():
    """Kills: columns exchanged, a baseline under the test rows; a comparison with
    clusterings that were told which rows are novel, which nothing in the run was.
    """
    groups = product(("train", "test"), ("all", "old", "new"), ("avg", "best"))
    keys = [f"{split}/unlabeled/gcd/{name}/{which}" for split, name, which in groups]
    values = {key: 0.01 * i for i, key in enumerate(keys)}
    for name in ("all", "old", "new"):
        values[f"baseline/constrained_kmeans/gcd/{name}"] = 0.9
    values["baseline/kmeans/novel/acc"] = 0.756
    lines = format_table(values).splitlines()
    assert max(map(len, lines)) <= 80
    numbers = {line[:32].strip(): re.findall(r"\d+\.\d", line[32:]) for line in lines}
    assert {name: shown for name, shown in numbers.items() if shown} == {
        "One matching              avg": ["0.0", "2.0", "4.0", "6.0", "8.0", "10.0"],
        "One matching              best": ["1.0", "3.0", "5.0", "7.0", "9.0", "11.0"],
        "k-means, labels fixed": ["90.0"] * 3,
    }
    (columns,) = [line.split() for line in lines if line.startswith("unlabeled")]
    assert columns[-3:] == ["All", "Old", "New"]
