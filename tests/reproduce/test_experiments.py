"""The paper's tables as data: what they train exists, what they quote has a source."""

from functools import cache

import numpy as np
import pytest

from reproduce.experiments import build, cells, names
from tests.reproduce.finished import small

NOWHERE = {"cifar10": "/a", "cifar100": "/b", "imagenet": "/c", "cifar10-jpeg": "/d"}


@cache
def plan_all(name, scale):
    """The cells of two seeds of a table, on all its data sets. None is refused."""
    todo, refused = cells(build(name, scale), 2, NOWHERE, {})
    assert not refused
    return todo


def plan_changed(name, **changes):
    """The cells on the digits with settings of the user."""
    return cells(small(name), 1, NOWHERE, changes)[0]


@pytest.mark.parametrize("scale", ["small", "full"])
@pytest.mark.parametrize("name", names())
def test_a_table_is_consistent(name, scale):
    """Kills: an override that the schema does not have."""
    table = build(name, scale)
    rows = {row.key: row for row in table.rows}
    assert len(rows) == len(table.rows)
    for row in table.rows:
        assert rows[row.trained].of is None
        assert row.versus is None or row.versus in rows
    evaluations = {evaluation.name for evaluation in table.evaluations}
    for column in table.published:
        assert column.source.startswith(("Tab.", "appendix, Tab."))
        assert column.numbers.keys() <= evaluations
        for evaluation, quoted in column.numbers.items():
            assert scale == "small" or quoted.keys() <= rows.keys()
            numbers = np.array([column.read(row, evaluation) for row in quoted])
            assert numbers.shape == (len(quoted), len(table.groups), 2)
            assert ((numbers[..., 0] > 0) & (numbers[..., 0] < 100)).all()
    todo = plan_all(name, scale)
    trained = [row for row in table.rows if row.of is None]
    assert len(todo) == 2 * len(table.benchmarks) * len(trained)
    assert len({cell.name for cell in todo}) == len(todo)
    for cell in todo:
        assert cell.config.seed == cell.seed
        path = NOWHERE.get(cell.benchmark.option)
        assert cell.config.data.source == cell.benchmark.source.format(path)


def test_cells_mean_the_same_in_every_table():
    """Tables may share a directory. Kills: one row key for two configurations."""
    todo = [
        cell
        for scale in ("small", "full")
        for name in names()
        for cell in plan_all(name, scale)
    ]
    configs = {(cell.config.model_dump_json(), cell.name) for cell in todo}
    assert len(configs) == len({cell.name for cell in todo})


@pytest.mark.parametrize(("scale", "total"), [("small", 10), ("full", 100)])
def test_the_rest_of_the_classes_is_known(scale, total):
    for cell in plan_all("num-novel", scale):
        novel = int(cell.row.name.split()[1])  # "UNO, 4 novel"
        assert cell.config.data.known_classes == f"first:{total - novel}"


PUBLISHED = {  # read off the paper by hand: (table, data set, row, evaluation)
    ("ablation", 0, "no-concat", "task-agnostic, official"): [
        (48.5, None),
        (83.3, None),
        (65.9, None),
    ],
    ("ablation", 1, "uno", "task-aware"): [(78.8, None), (52.0, None), (65.4, None)],
    ("sota", 1, "rs-plus", "task-aware"): [(75.2, 4.2)],
    ("sota", 1, "uno-avg", "task-aware"): [(84.5, 1.0)],
    ("sota", -1, "ncl", "task-aware"): [(90.7, None)],
    ("sota", 1, "nobody", "task-aware"): [],
    ("sota", 1, "uno", "nothing"): [],
}


@pytest.mark.parametrize(("cell", "numbers"), PUBLISHED.items())
def test_published_numbers_as_printed(cell, numbers):
    name, column, row, evaluation = cell
    assert build(name, "full").published[column].read(row, evaluation) == numbers


def test_what_the_ablation_changes():
    """Kills: a removal that removes something else; a preset that wins over the
    command line.
    """
    changes = {"discover.epochs": 7, "model.overcluster_factor": 5, "recipe": "v2"}
    found = {cell.row.key: cell.config for cell in plan_changed("ablation", **changes)}
    values = {
        key: (c.objective.concat, c.model.overcluster_factor, c.augment.weak)
        for key, c in found.items()
    }
    assert values == {
        "uno": (True, 5, False),
        "no-concat": (False, 5, False),
        "no-overclustering": (True, 0, False),
        "weak-augmentation": (True, 5, True),
    }
    given = {(c.discover.epochs, c.model.mlp_input) for c in found.values()}
    assert given == {(7, "raw")}


OTHERS = {
    "ablation": {"weak-augmentation"},
    "rotation": {"uno-rotation", "rs-plus-rotation"},
}


@pytest.mark.parametrize(
    "name", ["ablation", "sota", "task-agnostic", "unknown-k", "extensions", "rotation"]
)
def test_rows_share_their_pretraining(name):
    """Kills: a row that starts from other weights than UNO, a pretraining shared
    between seeds.
    """
    todo = [c for c in plan_all(name, "small") if c.benchmark.key == "digits"]
    others = OTHERS.get(name, set())
    shared = {cell.start for cell in todo if cell.row.key not in others}
    assert len(shared) == 2
    assert {cell.row.key for cell in todo if cell.start not in shared} == others


AUTHORS = {  # weight of the consistency, part of the epochs in which it rises
    ("rs", "cifar100"): (50.0, 0.75),
    ("rs", "imagenet"): (10.0, 50 / 90),
    ("rs_plus", "cifar100"): (25.0, 0.75),
    ("rs_plus", "imagenet"): (10.0, 50 / 90),
    ("dtc", "cifar100"): (10.0, 5 / 130),
    ("dtc", "imagenet"): (100.0, 5 / 70),
}


@pytest.mark.parametrize("name", ["sota", "task-agnostic", "unknown-k", "num-novel"])
def test_full_scale_takes_the_constants_of_a_methods_authors(name):
    """Kills: CIFAR10's constants everywhere, a row that overwrites them."""
    seen = set()
    for cell in plan_all(name, "full"):
        key = cell.config.method, cell.benchmark.key.split("-")[0]
        if key in AUTHORS:
            constants = cell.config.method_options
            found = constants.consistency_weight, constants.rampup
            assert found == AUTHORS[key], cell.name
            seen.add(key)
    assert seen


def test_a_constant_of_one_method_leaves_the_others():
    found = plan_changed("sota", **{"rs.rampup": 0.5})
    methods = {cell.config.method: cell.config.method_options for cell in found}
    assert methods["rs"].rampup == 0.5
    assert methods["rs_plus"].rampup != 0.5


def test_one_size_of_images_holds_for_every_cell():
    """Each in the proportions of its data set. Kills: a key that no run has, a size
    for the digits alone.
    """
    for cell in plan_changed("ablation", image_size=12):
        assert cell.config.augment.large.size == 12
        assert cell.config.data.stored_size == 12
