"""Define the experiments of the tables of the paper and of this project.

``experiments.yaml`` has their rows and data sets, at the scale ``full`` of the paper
and at the scale ``small`` for two CPU cores. ``published.yaml`` has the paper's
numbers.
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

from uno.config import Config, config_hash, flatten, override, to_dict
from uno.data.files import split
from uno.errors import ConfigError, did_you_mean
from uno.method import METHODS, default_settings
from uno.presets import IMAGE_SIZE, preset, scale_sizes
from uno.runs import NUMERICS

DATA_OPTIONS = {
    "cifar10": "CIFAR10 in torchvision's layout",
    "cifar100": "CIFAR100 in torchvision's layout",
    "imagenet": "ImageNet: train/ and val/ with wnid folders",
    "cifar10-jpeg": (
        "CIFAR10 as JPEG in Parquet, for --scale small: adds a subset of it"
    ),
}
# key of the row of UNO itself, to which the differences of other rows refer
REFERENCE = "uno"


class Entry(BaseModel):
    """An immutable entry of ``experiments.yaml``. Unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Benchmark(Entry):
    """A data set with its known and novel classes.

    Attributes:
        key: The name on the command line and in directories.
        name: The name for people.
        preset: The preset of the runs.
        option: The option that names the directory on the command line, if any.
        source: The value of ``data.source``, with ``{}`` in the place of the directory.
        overrides: Settings that the data set changes, by dotted key.
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
    """A way to measure accuracy: a protocol on a split of the images.

    Each row of a table has a line for each of them.

    Attributes:
        name: The name for people.
        protocol: A name of :data:`uno.results.metrics.PROTOCOLS`.
        split: "train" or "test".
    """

    name: str
    protocol: str
    split: str


class Row(Entry):
    """A row of a table: a configuration to train, or another number of a row's runs.

    Attributes:
        key: The name on the command line and in directories.
        name: The name for people.
        overrides: Settings that the row changes, by dotted key.
        frozen: Settings for a frozen encoder. Those of the command line win.
        of: The key of the row whose runs are read instead of training.
        head: "best" (the head with the lowest training loss) or "avg" (mean over
            heads).
        metric: The key of ``metrics.json`` that is read for novel classes, in place of
            the accuracy; ``{split}`` stands for the split.
        versus: The key of the row that this one is compared to, if any.
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
        """The key of the row of the table whose runs this row reads.

        A row reads its own runs, or those of the row that it names in ``of``.
        """
        return self.of or self.key


class Column(Entry):
    """The paper's numbers of one data set.

    Attributes:
        data: The name of the data set.
        source: The table of the paper.
        remark: A condition under which the numbers were measured.
        numbers: By evaluation and row, one number for each group, separated by spaces,
            in the paper's form (``98.1±0.8``).
    """

    data: str
    source: str
    remark: str = ""
    numbers: dict[str, dict[str, Any]]

    @property
    def title(self) -> str:
        """The title of the column: data set, table of the paper, and remark if any."""
        return ", ".join(filter(None, (self.data, self.source, self.remark)))

    def read(self, row: str, evaluation: str) -> list[tuple[float, float | None]]:
        """Return the accuracies that the paper publishes for a row of a table.

        Args:
            row: The key of the row, such as "uno".
            evaluation: The name of the protocol and split, as in the table.

        Returns:
            For each group of images (such as known, novel, all) the mean and the
            standard deviation in percent; the latter is None if the paper has none. The
            list is empty if the paper has no number.
        """
        words = str(self.numbers.get(evaluation, {}).get(row, "")).split()
        pairs = [word.partition("±") for word in words]
        return [(float(mean), float(sd) if sd else None) for mean, _, sd in pairs]


class Table(Entry):
    """A table with the rows, data sets and published numbers of one scale.

    Attributes:
        name: The name on the command line.
        scale: "small" or "full".
        title: The title, with the place in the paper.
        question: The question that the table answers.
        rows: The rows, which are trained or read.
        evaluations: The protocols and splits that are counted.
        groups: The groups of images in each cell: "known", "novel", "all".
        benchmarks: The data sets.
        published: The paper's numbers.
        notes: Sentences below the table.
        frozen: The notes for a frozen encoder; None if they are the same.
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
        """Return the row of the table that has this key."""
        return next(row for row in self.rows if row.key == key)


@cache
def _load(file: str) -> dict[str, Any]:
    """Return the content of a YAML file that lies beside this module.

    The content is cached.

    Args:
        file: The name of the file: "experiments.yaml" or "published.yaml".
    """
    return dict(
        yaml.safe_load((resources.files("reproduce") / file).read_text("utf-8"))
    )


def names() -> list[str]:
    """Return the names of all tables of experiments, those in ``experiments.yaml``."""
    return list(_load("experiments.yaml")["tables"])


def build(name: str, scale: str) -> Table:
    """Build a table of experiments from ``experiments.yaml``, at one scale.

    Args:
        name: The name of the table, one of :func:`names`.
        scale: "full" for the scale of the paper, "small" for two CPU cores.

    Returns:
        The table with its rows, data sets and published numbers.

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
    """Replace ``$word`` in all texts of a YAML document by the value of ``word``.

    Args:
        node: A part of the document: a text, a list, a mapping or another value.
        values: The values by word. Words that are not among them stay.

    Returns:
        A copy of the part, with the words replaced in all texts below it.
    """
    if isinstance(node, str):
        return Template(node).safe_substitute(values)
    if isinstance(node, dict):
        return {key: _fill(value, values) for key, value in node.items()}
    return [_fill(value, values) for value in node] if isinstance(node, list) else node


class Cell(NamedTuple):
    """One run of a table: a row on a data set with a seed.

    Both directories have a hash of the settings, of the number of the numerics, and of
    the code of the user's own encoder in their names. So runs that differ in any of
    them never share a directory.

    Attributes:
        row: The row of the table.
        benchmark: The data set.
        seed: The seed.
        config: The configuration of the run.
        name: The directory of the run, below the output directory of the command. It
            consists of data set, row, seed and hash, such as
            ``cells/digits-uno-seed0-0123456789ab``.
        start: The directory of what the run starts from, below the output directory. It
            holds the pretraining, or the cached features of a frozen encoder. Runs that
            start from the same share it.
    """

    row: Row
    benchmark: Benchmark
    seed: int
    config: Config
    name: str
    start: str

    @property
    def is_frozen(self) -> bool:
        """Whether the run starts from cached features of a frozen encoder."""
        return self.config.model.finetune == "none"


def _make_cell(
    row: Row, benchmark: Benchmark, config: Config, code: dict[str, str] | None
) -> Cell:
    """Return a run of a table, with the names of its directories.

    Args:
        row: The row of the table.
        benchmark: The data set.
        config: The configuration of the run.
        code: The hash of each source file of an encoder that is the user's own code, by
            module; None for an encoder of this package or of a library.
    """
    # a plain command line needs no torch
    from uno.data.features import settings as settings_of_features
    from uno.runs.run import hash_pretraining

    if config.model.finetune == "none":
        data = config.data.model_dump(mode="json")
        facts = settings_of_features(config), data, config.model.weights
        start = f"features/{_hash(facts, NUMERICS, code)}"
    else:
        start = f"pretrain/{_hash(hash_pretraining(config), NUMERICS, code)}"
    own_hash = _hash(config_hash(config), NUMERICS, code)
    name = f"cells/{benchmark.key}-{row.key}-seed{config.seed}-{own_hash}"
    return Cell(row, benchmark, config.seed, config, name, start)


def _hash(*facts: Any) -> str:
    """Return a hash of values that JSON can hold, as 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def with_own_data(
    table: Table, config: Config, num_known: int, num_novel: int
) -> Table:
    """Return a table of experiments with the user's own data instead of its data sets.

    Args:
        table: The table, which is not changed.
        config: The settings of every run, which name the data. Rows of the table change
            some of them.
        num_known: Number of known classes of the data.
        num_novel: Number of novel classes of the data.

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
    """Return all runs of a table of experiments: each row, data set and seed.

    Rows that read the runs of another row (``of``) have none of their own.

    A configuration has these layers, and a later one wins: the preset, the data set,
    the settings that the authors of the row's method use for this data, the settings of
    the row for a frozen encoder, the changes of the command line, the row, and the
    seed.

    Args:
        table: The table.
        seeds: The number of seeds.
        directories: The directories of data sets, by option of the command line.
        changes: The settings of the command line, by dotted key.

    Returns:
        Two values. The first are the runs, ordered by seed. The second has the rows
        that are left out because their settings conflict with those of a data set or
        the command line: the reason by "DATASET-ROW".

    Raises:
        ConfigError: The settings of the reference row, or of a row without overrides,
            are invalid.
    """
    # a plain command line needs no torch
    from uno.encoders.build import code_of

    code_of_encoder = cache(code_of)
    found, refused = list[Cell](), dict[str, str]()
    for benchmark in table.benchmarks:
        source = benchmark.source.format(directories.get(benchmark.option or "", "DIR"))
        base = preset(benchmark.preset, str(changes.get("recipe", "paper")))
        base = override(base, {"data.source": source, **benchmark.overrides})
        own_changes = dict(changes)
        if (size := own_changes.pop(IMAGE_SIZE, None)) is not None:
            own_changes = scale_sizes(base, size) | own_changes
        frozen = own_changes.get("model.finetune", base.model.finetune) == "none"
        for row in (row for row in table.rows if row.of is None):
            method = str(
                row.overrides.get("method", changes.get("method", base.method))
            )
            own = {
                **default_settings(method, benchmark.preset),
                **(row.frozen if frozen else {}),
            }
            # all cells share cached features, so a method cannot change these
            own.pop("augment.num_cached_views", None)
            # the constants of other methods do not apply to this row
            others = METHODS.keys() - {method}
            own |= {
                k: v
                for k, v in own_changes.items()
                if k.partition(".")[0] not in others
            } | row.overrides
            try:
                configs = [override(base, {**own, "seed": n}) for n in range(seeds)]
            except ConfigError as error:
                if row.key == REFERENCE or not row.overrides:
                    raise
                refused[f"{benchmark.key}-{row.key}"] = str(error)
                continue
            for config in configs:
                code = code_of_encoder(config.model.encoder).get("code")
                found.append(_make_cell(row, benchmark, config, code))
    return sorted(found, key=lambda cell: cell.seed), refused
