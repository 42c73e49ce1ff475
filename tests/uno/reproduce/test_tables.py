"""The definitions of the paper's tables: what they train exists, what they quote has a source."""

import pytest

from uno.errors import ConfigError
from uno.reproduce import tables
from uno.reproduce.published import ABLATION, AGNOSTIC, AWARE, SOTA
from uno.reproduce.tables import PAPER_ONLY, TABLES, cell_config, cells
from uno.runs.run import pretrain_hash

EVERY = [(name, scale) for name in TABLES for scale in ("small", "full")]
NOWHERE = {"cifar10": "/a", "cifar100": "/b", "imagenet": "/c", "cifar10-jpeg": "/d"}


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_every_cell_has_a_valid_configuration(name, scale):
    """Kills: an override that the schema does not have; a row that overwrites another's directory."""
    table = tables.build(name, scale)
    todo = cells(table, 2)
    assert (
        len({cell.slug for cell in todo})
        == len(todo)
        == 2 * len(table.benchmarks) * len([row for row in table.rows if row.of is None])
    )
    for cell in todo:
        config = cell_config(cell, NOWHERE, {"compute.threads": 1})
        assert config.seed == cell.seed and config.compute.threads == 1
        directory = NOWHERE.get(cell.benchmark.option or "", "")
        assert config.data.source == cell.benchmark.source.format(directory)


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_a_table_is_consistent(name, scale):
    """Kills: a reading of a row that is not trained, an effect in an evaluation the table does not have,
    published numbers of rows that do not exist.
    """
    table = tables.build(name, scale)
    keys = [row.key for row in table.rows]
    assert len(set(keys)) == len(keys)
    assert all(row.of == PAPER_ONLY or table.row(row.trained).of is None for row in table.rows)
    assert {e for e, _ in table.effects} <= {e.name for e in table.evaluations}
    assert {g for _, g in table.effects} <= set(table.groups)
    assert {row.claim for row in table.rows} <= {None, "lower", "higher", "same"}
    assert {row.versus for row in table.rows} <= {None, *keys}
    if table.effects:
        assert table.reference in keys
        assert any(row.claim for row in table.rows)
    for column in table.published:
        assert column.source.startswith(("Tab.", "appendix, Tab."))
        for row, evaluations in column.values.items():
            assert scale == "small" or row in keys
            for evaluation in evaluations:
                assert evaluation in {e.name for e in table.evaluations}
                numbers = column.numbers(row, evaluation)
                assert len(numbers) == len(table.groups)
                assert all(0 < mean < 100 for mean, _ in numbers)


def test_slugs_mean_the_same_in_every_table():
    """Tables may share a directory. Kills: one row key for two configurations."""
    for scale in ("small", "full"):
        seen = {}
        for name in TABLES:
            for cell in cells(tables.build(name, scale), 1):
                config = cell_config(cell, NOWHERE, {})
                assert seen.setdefault(cell.slug, config) == config, (name, cell.slug)


def test_published_numbers_as_printed():
    """Two cells of each kind, read off the paper by hand."""
    assert ABLATION[0].numbers("no-concat", AGNOSTIC) == [(48.5, None), (83.3, None), (65.9, None)]
    assert ABLATION[1].numbers("uno", AWARE) == [(78.8, None), (52.0, None), (65.4, None)]
    assert SOTA[1].numbers("rs-plus", AWARE) == [(75.2, 4.2)]
    assert SOTA[1].numbers("uno-avg", AWARE) == [(84.5, 1.0)]
    assert SOTA[0].numbers("nobody", AWARE) == []


def test_what_the_ablation_changes():
    """Kills: a removal that removes something else, and pretrainings that are shared wrongly."""
    table = tables.build("ablation", "small")
    configs = {cell.row.key: cell_config(cell, {}, {}) for cell in cells(table, 1)[:4]}
    assert list(configs) == ["uno", "no-concat", "no-overclustering", "weak-augmentation"]
    full = configs["uno"]
    assert full.objective.concat and full.model.overcluster_factor == 3 and not full.augment.weak
    assert not configs["no-concat"].objective.concat
    assert configs["no-overclustering"].model.overcluster_factor == 0
    assert configs["weak-augmentation"].augment.weak
    hashes = {key: pretrain_hash(config) for key, config in configs.items()}
    assert len(set(hashes.values())) == 2
    assert [key for key, value in hashes.items() if value != hashes["uno"]] == ["weak-augmentation"]


def test_all_methods_share_a_pretraining():
    """Kills: a baseline that starts from other weights than UNO."""
    for name in ("sota", "task-agnostic", "unknown-k"):
        table = tables.build(name, "small")
        for seed in (0, 1):
            configs = [cell_config(c, NOWHERE, {}) for c in cells(table, 2) if c.seed == seed]
            digits = [config for config in configs if config.data.source == "digits"]
            assert len({pretrain_hash(config) for config in digits}) == 1


def test_extensions_share_the_pretraining_of_uno():
    """Kills: an option compared to a UNO of other weights; rotation pretraining taken for the shared one."""
    for name, shared in (("extensions", {"uno", "iic", "rkd", "queue"}), ("rotation", {"uno", "rs-plus"})):
        todo = [cell for cell in cells(tables.build(name, "small"), 1) if cell.benchmark.key == "digits"]
        hashes = {cell.row.key: pretrain_hash(cell_config(cell, {}, {})) for cell in todo}
        assert {key for key, value in hashes.items() if value == hashes["uno"]} == shared


@pytest.mark.parametrize("name", ["sota", "task-agnostic", "unknown-k", "num-novel"])
def test_full_scale_takes_the_constants_that_a_methods_authors_set_on_the_data(name):
    """Han et al.'s code: consistency 50 (RS), 25 (RS+) on CIFAR100, 10 on ImageNet; the command line wins.
    Kills: CIFAR10's constants everywhere, a row that overwrites them.
    """
    expected = {
        ("rs", "cifar100"): (50.0, 0.75), ("rs_plus", "cifar100"): (25.0, 0.75),
        ("rs", "imagenet"): (10.0, 50 / 90), ("rs_plus", "imagenet"): (10.0, 50 / 90),
    }  # fmt: skip
    todo = cells(tables.build(name, "full"), 1)
    seen = set()
    for cell in todo:
        objective = cell_config(cell, NOWHERE, {}).objective
        key = (str(cell.row.overrides.get("method", "uno")), cell.benchmark.key.split("-")[0])
        assert (objective.consistency_weight, objective.rampup) == expected.get(key, (None, None)), cell.slug
        seen.add(key)
    assert seen & set(expected)
    changed = {cell_config(cell, NOWHERE, {"objective.rampup": 0.5}).objective.rampup for cell in todo}
    assert changed == {0.5}


def test_num_novel_keeps_the_number_of_classes():
    table = tables.build("num-novel", "small")
    assert len(table.rows) == 5 * 4
    for row in table.rows:
        if row.of is None:
            assert row.overrides["data.known_classes"] == f"first:{10 - row.x}"


def test_the_command_line_wins_over_the_preset_and_the_row_over_both():
    table = tables.build("ablation", "small")
    changes = {"discover.epochs": 7, "model.overcluster_factor": 5, "recipe": "v2"}
    found = {c.row.key: cell_config(c, {}, changes) for c in cells(table, 1) if c.benchmark.key == "digits"}
    assert {config.discover.epochs for config in found.values()} == {7}
    assert (
        found["uno"].model.overcluster_factor == 5
        and found["no-overclustering"].model.overcluster_factor == 0
    )
    assert found["uno"].model.mlp_input == "raw"


def test_unknown_table_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown table 'ablations'; did you mean 'ablation'"):
        tables.build("ablations", "small")
