"""The paper's tables and figures (``experiments.yaml``), and what it says of them
(``published.yaml``), at the paper's ``full`` scale, or ``small`` for two CPU cores.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from string import Template
from typing import Any, Literal, NamedTuple

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
    """A data set with its split. ``source`` has a place for the directory of the
    command line's ``option``; ``minutes`` are one cell's on one core, if somebody has
    measured them.
    """

    key: str
    name: str
    preset: str
    option: str | None = None
    source: str = "digits"
    overrides: dict[str, Any] = {}
    minutes: float | None = None


class Evaluation(Entry):
    """A way of counting: ``protocol`` of :mod:`uno.results.evaluate` on ``split``;
    ``name`` is for people.
    """

    name: str
    protocol: str
    split: str


class Row(Entry):
    """A network that is trained, or another reading of what another row (``of``)
    trained; ``metric`` is then read of novel rows. ``claim`` is what its paper says
    against ``versus``; ``series`` and ``x`` place it in a chart; ``frozen`` are
    settings of its method for a frozen encoder, unless the command line has others.
    """

    key: str
    name: str
    overrides: dict[str, Any] = {}
    frozen: dict[str, Any] = {}
    of: str | None = None
    head: str = "best"
    metric: str | None = None
    claim: Literal["lower", "higher", "same"] | None = None
    versus: str = REFERENCE
    series: str | None = None
    x: int | None = None

    @property
    def trained(self) -> str:
        """Key of the row whose runs hold the numbers."""
        return self.of or self.key


class Column(Entry):
    """Published numbers of one data set: ``numbers[evaluation][row]``, one for each
    group.
    """

    data: str
    source: str
    remark: str = ""
    numbers: dict[str, dict[str, Any]]

    @property
    def title(self) -> str:
        """Data set and source, for the head of a column."""
        return ", ".join(filter(None, (self.data, self.source, self.remark)))

    def read(self, row: str, evaluation: str) -> list[tuple[float, float | None]]:
        """(mean, standard deviation or None) for each group; empty where the paper
        has none.
        """
        words = str(self.numbers.get(evaluation, {}).get(row, "")).split()
        pairs = [word.partition("±") for word in words]
        return [(float(mean), float(sd) if sd else None) for mean, _, sd in pairs]


class Table(Entry):
    """A table or figure; ``effects``: groups by evaluation in which rows are compared
    to each other; ``frozen``: the notes where the encoder is frozen, if they are
    others.
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
    effects: dict[str, tuple[str, ...]] = {}
    notes: tuple[str, ...] = ()
    frozen: tuple[str, ...] | None = None
    x_label: str = ""
    seeds: int = 3
    maps: bool = False

    def row(self, key: str) -> Row:
        """The row of that key."""
        return next(row for row in self.rows if row.key == key)


@cache
def _load(file: str) -> dict[str, Any]:
    return dict(
        yaml.safe_load((resources.files("uno.reproduce") / file).read_text("utf-8"))
    )


def names() -> list[str]:
    """Names of all tables."""
    return list(_load("experiments.yaml")["tables"])


def build(name: str, scale: str) -> Table:
    """The table of that name at ``full`` or ``small`` scale. ConfigError: there is
    none.
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
        key: _fill(tree[key], fills[0])
        for key in ("notes", "x_label", "frozen")
        if key in tree
    }
    published = _load("published.yaml").get(name, ())
    return Table.model_validate(
        {"name": name, "scale": scale, "published": published, **tree}
    )


def _fill(node: Any, values: Mapping[str, Any]) -> Any:
    """``node`` with the ``$words`` of all its texts replaced by their values."""
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
        """Its directory below the output."""
        return f"cells/{self.benchmark.key}-{self.row.key}-seed{self.seed}"

    @property
    def pretraining(self) -> str:
        """Directory of the pretraining, or of a frozen encoder's features, that
        cells share.
        """
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
    """``table`` on the data of ``config`` alone, whose settings its cells have but for
    what rows change. ConfigError: its rows choose among the classes of data sets of
    their own.
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
    """All runs of a table, seed by seed, so that an unfinished table compares complete
    seeds; and why others are refused, by name: what a row changes does not go with the
    rest. A configuration is preset < data set < what the authors of the row's method
    set there < what it needs on a frozen encoder < ``changes`` < row < seed.
    ConfigError: that of the row which others are compared to is none.
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
