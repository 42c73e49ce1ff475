"""The tables of accuracies: the right number in the right place, and nothing for
what was not measured.
"""

import re

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
    expected = {
        "k-means on features ": ["baseline/kmeans/novel/acc"],
        "Spectral clustering ": ["baseline/spectral/novel/acc"],
        "Chance": [
            f"{split}/novel/task_aware/chance/acc" for split in ("train", "test")
        ],
    }
    for which in ("avg", "best"):
        for name in ("task_aware", "task_agnostic_strict"):
            groups = [
                f"{split}/{rows}"
                for split in ("train", "test")
                for rows in ("known", "novel", "all")
            ]
            keys = [f"{group}/{name}/acc/{which}" for group in groups]
            expected[f"{PROTOCOLS[name].label} +{which} "] = keys
    for name, keys in expected.items():
        (line,) = [line for line in lines if re.match(name, line)]
        assert re.findall(r"-?\d+\.\d", line) == [
            f"{100 * values[key]:.1f}" for key in keys
        ]
    # What has no truth is left out: no KeyError, no invented number.
    known, novel, truth = random_rows(50, num_true_novel=0)
    values = protocol_metrics(counted(known, novel, truth, 0), 0, "test")
    table = format_table(
        {key: value for key, value in values.items() if "/task_aware/" in key}
    )
    assert (
        "training" not in table.splitlines()[0]
        and "k-means" not in table
        and "Chance" not in table
    )
    assert len(re.findall(r"\d+\.\d", table)) == 2
    assert not re.search(r"\d\.\d", format_table({}))


def test_one_head_has_one_row_and_no_average():
    values = {f"train/novel/task_aware/acc/{which}": 0.75 for which in ("avg", "best")}
    table = format_table(values)
    assert (
        table.count("75.0") == 1
        and "avg" not in table
        and not has_several_heads(values)
    )
    several = values | {"train/novel/task_aware/acc/best": 0.8}
    assert has_several_heads(several) and "80.0" in format_table(several)


def test_gcd_is_not_compared_with_clusterings_of_novel_rows_alone():
    """They were told which rows are novel, which nothing in the run was."""
    values = {"baseline/kmeans/novel/acc": 0.756, "baseline/kmeans/gcd/all": 0.5}
    values |= {
        "train/unlabeled/gcd/all/avg": 0.598,
        "train/novel/task_aware/acc/avg": 0.6,
    }
    table = format_table(values)
    assert "75.6" not in table and "59.8" in table and "50.0" in table


def test_the_table_of_a_mixed_pile():
    """Kills: columns exchanged, a baseline under the test rows, rows of a run that
    has no such pile.
    """
    values = {
        f"train/unlabeled/gcd/{name}/{which}": 0.1 * i
        for i, (name, which) in enumerate(GCD_KEYS)
    }
    values |= {
        f"test/unlabeled/gcd/{name}/{which}": 0.01 * i
        for i, (name, which) in enumerate(GCD_KEYS)
    }
    values |= {
        f"baseline/constrained_kmeans/gcd/{n}": 0.9 for n in ("all", "old", "new")
    }
    lines = format_table(values).splitlines()
    assert max(map(len, lines)) <= 80
    numbers = {line[:32].strip(): re.findall(r"\d+\.\d", line[32:]) for line in lines}
    assert numbers["One matching              avg"] == [
        "0.0",
        "20.0",
        "40.0",
        "0.0",
        "2.0",
        "4.0",
    ]
    assert numbers["One matching              best"] == [
        "10.0",
        "30.0",
        "50.0",
        "1.0",
        "3.0",
        "5.0",
    ]
    assert numbers["k-means, labels fixed"] == ["90.0"] * 3
    (columns,) = [line.split() for line in lines if line.startswith("unlabeled")]
    assert columns[-3:] == ["All", "Old", "New"]
    assert "unlabeled" not in format_table({"train/novel/task_aware/acc/avg": 1.0})


GCD_KEYS = [
    (name, which) for name in ("all", "old", "new") for which in ("avg", "best")
]
