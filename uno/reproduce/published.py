"""The paper's numbers (Fini et al., ICCV 2021), percent, as they stand in its tables.

A column holds for each row of a table and each of its evaluations the numbers of the groups (known, novel,
all; or novel alone), in the paper's own writing: ``"96.6 95.1 95.8"`` or ``"96.1±0.5"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

AWARE, AGNOSTIC = "task-aware", "task-agnostic, official"


@dataclass(frozen=True)
class Column:
    """Published numbers of one data set: ``values[row key][evaluation name]``."""

    benchmark: str
    source: str
    values: Mapping[str, Mapping[str, str]]
    remark: str = ""

    @property
    def title(self) -> str:
        """Data set and source, for the head of a column."""
        return f"{self.benchmark}, {self.source}{f', {self.remark}' if self.remark else ''}"

    def numbers(self, row: str, evaluation: str) -> list[tuple[float, float | None]]:
        """(mean, sd or None) for each group; empty where the paper has none."""
        words = self.values.get(row, {}).get(evaluation, "").split()
        pairs = [word.partition("±") for word in words]
        return [(float(mean), float(sd) if sd else None) for mean, _, sd in pairs]


ABLATION = (
    Column("CIFAR10", "Tab. 2", {
        "uno": {AWARE: "96.6 95.1 95.8", AGNOSTIC: "93.5 93.3 93.4"},
        "no-concat": {AWARE: "90.6 89.9 90.2", AGNOSTIC: "48.5 83.3 65.9"},
        "no-overclustering": {AWARE: "96.4 93.0 94.7", AGNOSTIC: "93.5 90.5 92.0"},
        "weak-augmentation": {AWARE: "96.1 92.7 94.4", AGNOSTIC: "93.4 90.2 91.8"},
    }),
    Column("CIFAR100-50", "Tab. 2", {
        "uno": {AWARE: "78.8 52.0 65.4", AGNOSTIC: "71.5 50.7 61.1"},
        "no-concat": {AWARE: "78.4 44.5 62.4", AGNOSTIC: "65.5 43.2 54.3"},
        "no-overclustering": {AWARE: "78.9 49.8 64.4", AGNOSTIC: "71.5 48.4 59.0"},
        "weak-augmentation": {AWARE: "78.4 50.6 64.5", AGNOSTIC: "71.1 48.6 59.1"},
    }),
)  # fmt: skip


def _novel(**values: str) -> dict[str, dict[str, str]]:
    """Numbers of a table that has task-aware novel accuracy only; ``_`` in a row's key stands for ``-``."""
    return {row.replace("_", "-"): {AWARE: numbers} for row, numbers in values.items()}


SELF, SUPERVISED = "baselines pretrained with self-supervision", "supervised pretraining"

# "All methods except UNO initialize the encoder with self-supervised learning, except when evaluated on
# ImageNet" (caption of Tab. 3).
SOTA = (
    Column("CIFAR10", "Tab. 3", _novel(
        kmeans="72.5±0.0", kcl="72.3±0.2", mcl="70.9±0.1", dtc="88.7±0.3", rs="90.4±0.5", rs_plus="91.7±0.9",
        uno_avg="96.1±0.5", uno="96.1±0.5"), SELF),
    Column("CIFAR100-20", "Tab. 3", _novel(
        kmeans="56.3±1.7", kcl="42.1±1.8", mcl="21.5±2.3", dtc="67.3±1.2", rs="73.2±2.1", rs_plus="75.2±4.2",
        uno_avg="84.5±1.0", uno="85.0±0.6"), SELF),
    Column("CIFAR100-50", "Tab. 3", _novel(
        kmeans="28.3±0.7", dtc="35.9±1.0", rs="39.2±2.3", rs_plus="44.1±3.7",
        uno_avg="52.8±1.4", uno="52.9±1.4"), SELF),
    Column("ImageNet", "Tab. 3", _novel(
        kmeans="71.9", kcl="73.8", mcl="74.4", dtc="78.3", rs="82.5", rs_plus="82.5",
        uno_avg="89.2", uno="90.6"), SUPERVISED),
    Column("CIFAR10", "appendix, Tab. A", _novel(
        kmeans="65.5±0.0", kcl="66.5±3.9", mcl="64.2±0.1", dtc="87.5±0.3", rs="89.4±1.4",
        uno_avg="96.1±0.5", uno="96.1±0.5"), SUPERVISED),
    Column("CIFAR100-20", "appendix, Tab. A", _novel(
        kmeans="56.6±1.6", kcl="14.3±1.3", mcl="21.3±3.4", dtc="56.7±1.2", rs="67.4±2.0",
        uno_avg="84.5±1.0", uno="85.0±0.6"), SUPERVISED),
)  # fmt: skip

TASK_AGNOSTIC = (
    Column("CIFAR10", "Tab. 4", {
        "kcl": {AGNOSTIC: "79.4 60.1 69.8"}, "mcl": {AGNOSTIC: "81.4 64.8 73.1"},
        "dtc": {AGNOSTIC: "58.7 78.6 68.7"}, "rs-plus": {AGNOSTIC: "90.6 88.8 89.7"},
        "uno-avg": {AGNOSTIC: "93.5 93.3 93.4"}, "uno": {AGNOSTIC: "93.5 93.3 93.4"},
    }),
    Column("CIFAR100-20", "Tab. 4", {
        "kcl": {AGNOSTIC: "23.4 29.4 24.6"}, "mcl": {AGNOSTIC: "18.2 18.0 18.2"},
        "dtc": {AGNOSTIC: "47.6 49.1 47.9"}, "rs-plus": {AGNOSTIC: "71.2 56.8 68.3"},
        "uno-avg": {AGNOSTIC: "73.2 72.7 73.1"}, "uno": {AGNOSTIC: "73.2 73.1 73.2"},
    }),
    Column("CIFAR100-50", "Tab. 4", {
        "dtc": {AGNOSTIC: "30.2 34.7 32.5"}, "rs-plus": {AGNOSTIC: "69.7 40.9 55.3"},
        "uno-avg": {AGNOSTIC: "71.5 50.6 61.0"}, "uno": {AGNOSTIC: "71.5 50.7 61.1"},
    }),
)  # fmt: skip

AGGREGATION = (
    Column("CIFAR10", "appendix, Tab. B", _novel(uno="96.1", pseudo_labels="96.1", logits="94.4")),
    Column("CIFAR100-50", "appendix, Tab. B", _novel(uno="52.9", pseudo_labels="52.5", logits="52.2")),
)

# 23 classes were estimated for 20; "All methods except UNO initialize the encoder with self-supervised
# learning." The last column is Tab. 3's: the true number.
UNKNOWN_K = (
    Column("CIFAR100-20", "appendix, Tab. C", _novel(
        dtc_k="64.3", rs_k="70.5", rs_plus_k="71.2", uno_k_avg="74.7", uno_k="75.1"), SELF),
    Column("CIFAR100-20", "Tab. 3", _novel(uno="85.0±0.6")),
)  # fmt: skip

# Fig. 3 is a drawing, its source holds no numbers; two of its points are splits of Tab. 3.
NUM_NOVEL = (
    Column("CIFAR100", "Tab. 3", {
        "uno-20": {AWARE: "85.0±0.6"}, "uno-50": {AWARE: "52.9±1.4"}, "rs-20": {AWARE: "73.2±2.1"},
        "rs-50": {AWARE: "39.2±2.3"}, "rs-plus-20": {AWARE: "75.2±4.2"}, "rs-plus-50": {AWARE: "44.1±3.7"},
    }, SELF),
)  # fmt: skip
