"""The tables of the paper and of this project as data.

``experiments.yaml`` has their rows and data sets, at the paper's ``full`` scale and
``small`` for two CPU cores; ``published.yaml`` has the paper's numbers.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from string import Template
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict

from uno.config import Config, flatten, override, to_dict
from uno.data.files import split
from uno.errors import ConfigError, did_you_mean
from uno.methods import METHODS
from uno.methods.registry import settings
from uno.presets import apply_image_size, preset

DATA_OPTIONS = {
    "cifar10": "CIFAR10 in torchvision's layout",
    "cifar100": "CIFAR100 in torchvision's layout",
    "imagenet": "ImageNet: train/ and val/ with wnid folders",
    "cifar10-jpeg": (
        "CIFAR10 as JPEG in Parquet, for --scale small: adds a subset of it"
    ),
}
# key of the row that others are compared to, unless they say otherwise
REFERENCE = "uno"


class Entry(BaseModel):
    """A frozen entry of ``experiments.yaml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Benchmark(Entry):
    """A data set with its known and novel classes.

    Attributes:
        key: Its name on the command line and in directories.
        name: Its name for people.
        preset: The preset of its runs.
        option: The option that names its directory on the command line, if any.
        source: Its ``data.source``, with ``{}`` in the place of the directory.
        overrides: Settings that it changes.
        minutes: Minutes of one cell on one core, if they have been measured.
    """

    key: str
    name: str
    preset: str
    option: str | None = None
    source: str = "digits"
    overrides: dict[str, Any] = {}
    minutes: float | None = None


class Evaluation(Entry):
    """A protocol of :mod:`uno.results.evaluate` on a split; ``name`` is for people."""

    name: str
    protocol: str
    split: str


class Row(Entry):
    """A row of a table: a configuration that is trained, or another number of its runs.

    Attributes:
        key: Its name on the command line and in directories.
        name: Its name for people.
        overrides: Settings that the row changes.
        frozen: Settings of its method for a frozen encoder, unless the command line has
            others.
        of: Key of the row whose runs are read instead of training.
        head: ``best`` (lowest training loss) or ``avg`` (mean over heads).
        metric: Key of ``metrics.json`` that is read for novel classes, in place of the
            accuracy; ``{split}`` stands for the split.
        versus: Key of the row that this one is compared to, if any.
    """

    key: str
    name: str
    overrides: dict[str, Any] = {}
    frozen: dict[str, Any] = {}
    of: str | None = None
    head: str = "best"
    metric: str | None = None
    versus: str | None = None

    @property
    def trained(self) -> str:
        """The key of the row whose runs hold the numbers."""
        return self.of or self.key


class Column(Entry):
    """The paper's numbers of one data set.

    Attributes:
        data: Name of the data set.
        source: The table of the paper.
        remark: What else decides these numbers.
        numbers: By evaluation and row, one number for each group, in the paper's
            writing (``98.1±0.8``).
    """

    data: str
    source: str
    remark: str = ""
    numbers: dict[str, dict[str, Any]]

    @property
    def title(self) -> str:
        """The data set and the source, for the head of a column."""
        return ", ".join(filter(None, (self.data, self.source, self.remark)))

    def read(self, row: str, evaluation: str) -> list[tuple[float, float | None]]:
        """Return (mean, standard deviation or None) for each group.

        The list is empty if the paper has no number.
        """
        words = str(self.numbers.get(evaluation, {}).get(row, "")).split()
        pairs = [word.partition("±") for word in words]
        return [(float(mean), float(sd) if sd else None) for mean, _, sd in pairs]


class Table(Entry):
    """A table with the rows, data sets and published numbers of one scale.

    Attributes:
        name: Its name on the command line.
        scale: ``small`` or ``full``.
        title: Its title, with the place in the paper.
        question: What the table answers.
        rows: What is trained or read.
        evaluations: The protocols and splits that are counted.
        groups: The groups of images in each cell: ``known``, ``novel``, ``all``.
        benchmarks: The data sets.
        published: The paper's numbers.
        notes: Sentences below the table.
        frozen: The notes for a frozen encoder, if they are others.
        seeds: The default number of seeds.
    """

    name: str
    scale: str
    title: str
    question: str
    rows: tuple[Row, ...]
    evaluations: tuple[Evaluation, ...]
    groups: tuple[str, ...]
    benchmarks: tuple[Benchmark, ...]
    published: tuple[Column, ...] = ()
    notes: tuple[str, ...] = ()
    frozen: tuple[str, ...] | None = None
    seeds: int = 3

    def row(self, key: str) -> Row:
        """Return the row of that key."""
        return next(row for row in self.rows if row.key == key)


@cache
def _load(file: str) -> dict[str, Any]:
    return dict(
        yaml.safe_load((resources.files("uno.reproduce") / file).read_text("utf-8"))
    )


def names() -> list[str]:
    """Return the names of all tables."""
    return list(_load("experiments.yaml")["tables"])


def build(name: str, scale: str) -> Table:
    """Return a table at ``full`` or ``small`` scale.

    Raises:
        ConfigError: There is no table of that name.
    """
    if name not in names():
        hint = did_you_mean(name, names(), "choose from " + ", ".join(names()))
        raise ConfigError(f"unknown table {name!r}{hint}")
    tree = dict(_load("experiments.yaml")["tables"][name])
    own = {"small": tree.pop("small"), "full": tree.pop("full")}[scale]
    fills = own.get("fill", [{}])
    tree |= {
        key: [*tree.get(key, ()), *own.get(key, ())]
        for key in ("benchmarks", "rows", "notes")
    }
    tree["rows"] = [row for values in fills for row in _fill(tree["rows"], values)]
    tree |= {
        key: _fill(tree[key], fills[0]) for key in ("notes", "frozen") if key in tree
    }
    published = _load("published.yaml").get(name, ())
    return Table.model_validate(
        {"name": name, "scale": scale, "published": published, **tree}
    )


def _fill(node: Any, values: Mapping[str, Any]) -> Any:
    """Return a node of the YAML tree with its ``$words`` replaced by their values."""
    if isinstance(node, str):
        return Template(node).safe_substitute(values)
    if isinstance(node, dict):
        return {key: _fill(value, values) for key, value in node.items()}
    return [_fill(value, values) for value in node] if isinstance(node, list) else node


class Cell(NamedTuple):
    """One run: a row on a data set with a seed."""

    row: Row
    benchmark: Benchmark
    seed: int
    config: Config

    @property
    def name(self) -> str:
        """The cell's directory below the output."""
        return f"cells/{self.benchmark.key}-{self.row.key}-seed{self.seed}"

    @property
    def pretraining(self) -> str:
        """The directory of what cells share: a pretraining, or cached features."""
        # a plain command line needs no torch
        from uno.data.features import settings as settings_of_features
        from uno.runs.run import pretrain_hash

        config = self.config
        if config.model.finetune == "none":
            facts = [
                settings_of_features(config),
                config.data.model_dump(mode="json"),
                config.model.weights,
            ]
            return f"features/{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]}"  # noqa: E501
        return f"pretrain/{pretrain_hash(self.config)}"


def with_own_data(
    table: Table, config: Config, num_known: int, num_novel: int
) -> Table:
    """Return a table on the user's own data, in the place of its data sets.

    Args:
        table: The table.
        config: The settings of every cell, except for what rows change.
        num_known: Number of known classes.
        num_novel: Number of novel classes.

    Raises:
        ConfigError: Rows of the table choose classes of the paper's data.
    """
    if any(key.startswith("data.") for row in table.rows for key in row.overrides):
        raise ConfigError(
            f"{table.name} chooses classes of the paper's data: not with data of"
            " your own"
        )
    source = config.data.labeled or config.data.source
    name = split(source.rstrip("/"))[1].rpartition(":")[2]
    key = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-") or "own"
    values = flatten(to_dict(config))
    own = Benchmark(
        key=key,
        name=f"{name} ({num_known} / {num_novel})",
        preset=config.preset,
        overrides=values,
    )
    return table.model_copy(update={"benchmarks": (own,)})


def cells(
    table: Table, seeds: int, directories: Mapping[str, str], changes: Mapping[str, Any]
) -> tuple[list[Cell], dict[str, str]]:
    """Return all runs of a table, seed by seed.

    A configuration has these layers, and a later one wins: the preset, the data set,
    what the authors of the row's method set for this data, what the method needs on a
    frozen encoder, the command line's changes, the row, and the seed.

    Args:
        table: The table.
        seeds: Number of seeds.
        directories: Directories of data sets, by option of the command line.
        changes: Settings of the command line.

    Returns:
        The cells, and the reasons by ``DATASET-ROW`` of the rows that are left out
        because their settings do not go with the rest.

    Raises:
        ConfigError: The settings of the reference row are invalid.
    """
    found, refused = list[Cell](), dict[str, str]()
    for benchmark in table.benchmarks:
        source = benchmark.source.format(directories.get(benchmark.option or "", "DIR"))
        base = preset(benchmark.preset, str(changes.get("recipe", "paper")))
        base = override(base, {"data.source": source, **benchmark.overrides})
        own_changes = apply_image_size(base, changes)
        frozen = own_changes.get("model.finetune", base.model.finetune) == "none"
        for row in (row for row in table.rows if row.of is None):
            method = str(
                row.overrides.get("method", changes.get("method", base.method))
            )
            own = {
                **settings(method, benchmark.preset),
                **(row.frozen if frozen else {}),
            }
            # all cells share features, or a pretraining
            own.pop("augment.num_cached_views", None)
            others = METHODS.keys() - {method}  # whose constants are not this row's
            own |= {
                k: v
                for k, v in own_changes.items()
                if k.partition(".")[0] not in others
            } | row.overrides
            try:
                some = [
                    Cell(row, benchmark, n, override(base, {**own, "seed": n}))
                    for n in range(seeds)
                ]
            except ConfigError as error:
                if row.key == REFERENCE or not row.overrides:
                    raise
                refused[f"{benchmark.key}-{row.key}"] = str(error)
                continue
            found += some
    return sorted(found, key=lambda cell: cell.seed), refused
