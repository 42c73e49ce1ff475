"""Define tables of a run's accuracies for console, model card and report.

A table has rows of metrics, and columns of image groups ("known", "novel", "all") for
each split ("train", "test").
"""

from collections.abc import Mapping
from typing import NamedTuple

from uno.results.metrics import METRICS, PROTOCOLS

SPLITS = {"train": "training images", "test": "unseen images"}
HEADS_LEGEND = (
    "avg / best: mean over heads / the head with the lowest training cluster loss"
)
STRICT_LEGEND = (
    "strict: a new class found on a known output, or the reverse, is an error"
)
BASELINES_LEGEND = (
    "k-means, spectral: clusters of the encoder's features before discovery"
)


class Row(NamedTuple):
    """A row of an accuracy table: one metric, over all splits and groups of images.

    Attributes:
        title: The name of the metric, for people.
        meaning: A sentence that explains the metric.
        path: The key of the metric in ``metrics.json``, with the placeholder
            ``{group}`` and, depending on the metric, ``{split}`` ("train" or "test")
            and ``{which}`` ("avg" or "best" head). A path without ``{split}`` counts
            training rows. A path without ``{which}`` does not depend on the head.
        in_console: Whether the row is printed on the console.
    """

    title: str
    meaning: str
    path: str
    in_console: bool = False

    @property
    def has_heads(self) -> bool:
        """Whether the metric depends on the cluster head.

        It then has a key for the mean over the heads and one for the best head.
        """
        return "{which}" in self.path

    def key(self, split: str, group: str, which: str = "avg") -> str:
        """Return the key of one cell of this row in ``metrics.json``.

        Args:
            split: "train" or "test".
            group: The group of images, a key of :attr:`Table.groups` such as "known".
            which: "avg" for the mean over the heads, or "best" for the best head.

        Returns:
            The key. It is "" if the cell stays empty: the metric only counts training
            rows and another split is asked for, or it does not depend on the head and
            the best head is asked for.
        """
        if (split != "train" and "{split}" not in self.path) or (
            which != "avg" and not self.has_heads
        ):
            return ""
        return self.path.format(split=split, group=group, which=which)


class Table(NamedTuple):
    """A table of accuracies, with one column for each split and group of images.

    Attributes:
        title: The title, for people.
        groups: The title of each group of images, by its name in the keys of metrics.
        rows: All rows that the table can have.
    """

    title: str
    groups: dict[str, str]
    rows: list[Row]

    def filled(self, values: Mapping[str, float]) -> list[Row]:
        """Return the rows of this table that have a value in at least one cell.

        The cells of all splits and groups count. For a metric that depends on the head,
        the key of the mean over the heads ("avg") must be there.

        Args:
            values: The metrics of a run, by key.
        """
        cells = [(split, group) for split in SPLITS for group in self.groups]
        return [
            row for row in self.rows if any(row.key(*cell) in values for cell in cells)
        ]

    def columns(self, values: Mapping[str, float]) -> dict[str, list[str]]:
        """Return for each split the groups of images with a value in at least one row.

        For a metric that depends on the head, only the key of the mean over the heads
        ("avg") counts.

        Args:
            values: The metrics of a run, by key.

        Returns:
            The names of groups by "train" and "test". A split without any value is left
            out.
        """
        found = {
            split: [
                g
                for g in self.groups
                if any(row.key(split, g) in values for row in self.rows)
            ]
            for split in SPLITS
        }
        return {split: groups for split, groups in found.items() if groups}


NOVEL_BASELINES = [
    Row(
        "Chance",
        "Random choice among the discovered classes, matched in the best way.",
        "{split}/{group}/task_aware/chance/acc",
        in_console=True,
    ),
    Row(
        "k-means on features",
        "Clusters of the pretrained encoder's frozen features, no discovery.",
        "baseline/kmeans/{group}/acc",
        in_console=True,
    ),
    Row(
        "Spectral clustering",
        "Of the graph of the 10 nearest neighbors.",
        "baseline/spectral/{group}/acc",
        in_console=True,
    ),
]
ACCURACY = Table(
    "accuracy, %",
    {"known": "known", "novel": "novel", "all": "all"},
    [
        *(
            Row(
                protocol.label,
                protocol.meaning,
                f"{{split}}/{{group}}/{name}/acc/{{which}}",
                in_console=name in ("task_aware", "task_agnostic_strict"),
            )
            for name, protocol in PROTOCOLS.items()
        ),
        *NOVEL_BASELINES,
        *(
            Row(
                f"Task-aware {metric.label}",
                f"Of the discovered classes: {metric.meaning}.",
                f"{{split}}/{{group}}/task_aware/{name}/{{which}}",
            )
            for name, metric in METRICS.items()
            if name != "acc"
        ),
    ],
)
"""The accuracy under each protocol, baselines, and other metrics of novel classes.

The baselines are chance, k-means and spectral clustering of the novel classes. The
console does not show the other metrics, such as NMI, which are task-aware.
"""
GENERALIZED = Table(
    "unlabeled images, %",
    {"all": "All", "old": "Old", "new": "New"},
    [
        Row(
            "One matching",
            "Old: known classes; new: novel classes. Any unlabeled image can be"
            " assigned to any output; one matching of all classes to all outputs.",
            "{split}/unlabeled/gcd/{group}/{which}",
            in_console=True,
        ),
        Row(
            "k-means on features",
            "As many clusters as classes, no labels.",
            "baseline/kmeans/gcd/{group}",
            in_console=True,
        ),
        Row(
            "k-means, labels fixed",
            "Labeled images stay in their classes.",
            "baseline/constrained_kmeans/gcd/{group}",
            in_console=True,
        ),
        Row(
            "Spectral clustering",
            "Of the graph of the 10 nearest neighbors, labeled images in their"
            " classes.",
            "baseline/spectral/gcd/{group}",
            in_console=True,
        ),
    ],
)


def filled_tables(values: Mapping[str, float]) -> list[Table]:
    """Return the accuracy tables for which a run has at least one value.

    If the run has a value of :data:`GENERALIZED`, as in generalized category discovery,
    the rows of :data:`ACCURACY` whose key begins with "baseline/" are left out. These
    clusterings of the novel rows alone were told which rows are novel, so nothing in
    the run compares with them.

    Args:
        values: The metrics of the run, by key.

    Returns:
        :data:`GENERALIZED` and :data:`ACCURACY` in this order, either only if any of
        its rows has a value. The rows that are left out count for this, too. Other rows
        without a value are not removed.
    """
    tables = [table for table in (ACCURACY, GENERALIZED) if table.filled(values)]
    if GENERALIZED not in tables:
        return tables
    rows = [row for row in ACCURACY.rows if not row.path.startswith("baseline/")]
    return [
        GENERALIZED,
        *(t._replace(rows=rows) for t in tables if t is not GENERALIZED),
    ]


def has_several_heads(values: Mapping[str, float]) -> bool:
    """Return whether any metric differs between the average and the best head.

    A metric ``KEY/avg`` without ``KEY/best`` counts as equal.

    Args:
        values: The metrics of a run, by key.
    """
    return any(
        key.endswith("/avg") and values.get(f"{key[:-4]}/best", value) != value
        for key, value in values.items()
    )


def format_table(values: Mapping[str, float]) -> str:
    """Format the main metrics of a run as text of at most 80 columns.

    The first line has the titles of the splits. The tables of :func:`filled_tables`
    follow, each with its title, the titles of its groups, a line of dashes, and those
    rows for the console (``in_console``) that have a value. The numbers are in percent
    with one decimal, and a missing number is left blank. "train" and "test" have
    columns if any key begins with "train/" or "test/". If any metric differs between
    the mean over the heads and the best head, each metric that depends on the head has
    two rows, "avg" and "best". Otherwise it has one, for the mean.

    The last lines are the legend. They explain "avg" and "best" if any metric differs
    between them, then always the word "strict", and then k-means and spectral
    clustering if any key begins with "baseline/".

    Args:
        values: The metrics of the run, by key, as fractions.

    Returns:
        Lines of text without blanks at their ends, and without a line break at the end.
    """
    splits = [
        split for split in SPLITS if any(key.startswith(f"{split}/") for key in values)
    ]
    several = has_several_heads(values)

    def line(name: str, cells: list[str]) -> str:
        """Join the title of a row and its cells, one text for each split, to a line.

        The title is padded to 32 characters, and `` |`` stands before each cell.
        """
        return f"{name:<32}" + "".join(f" |{cell}" for cell in cells)

    def cell(key: str) -> str:
        """Format a metric in percent, 7 characters; blanks if ``values`` lacks it."""
        return f"{100 * values[key]:7.1f}" if key in values else " " * 7

    lines = [line("", [f"{SPLITS[split]:^21}" for split in splits])]
    for table in filled_tables(values):
        heads = "".join(f"{group:>7}" for group in table.groups.values())
        lines += [
            line(table.title, [heads] * len(splits)),
            "-" * (32 + 23 * len(splits)),
        ]
        for row in (row for row in table.filled(values) if row.in_console):
            both = row.has_heads and several
            for which in ("avg", "best") if both else ("avg",):
                cells = [
                    "".join(cell(row.key(s, group, which)) for group in table.groups)
                    for s in splits
                ]
                lines.append(line(f"{row.title:<26}{which if both else ''}", cells))
    legend = [HEADS_LEGEND, STRICT_LEGEND] if several else [STRICT_LEGEND]
    if any(key.startswith("baseline/") for key in values):
        legend.append(BASELINES_LEGEND)
    return "\n".join(text.rstrip() for text in [*lines, *legend])
