"""What may be wrong with a run, in the words of somebody who has to decide whether to trust it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from uno.config import Config
from uno.report.clusters import Findings
from uno.report.facts import Facts
from uno.report.predictions import Predictions

UNUSED = 0.02  # of an equal share: such a class is as good as empty
UNEVEN = 3.0  # largest over smallest class; pseudo-labels are forced to be equally frequent
MIN_ROWS = 20
SIMILAR = 0.5  # cosine of prototypes; digits stay below .2
LOW_AGREEMENT = 0.8
LOW_CONFIDENCE = 0.5
ABSORBED = 0.1

CHECKED = (
    f"collapse (classes that take less than {UNUSED:.0%} of an equal share), "
    f"imbalance (largest more than {UNEVEN:g} times the smallest), "
    f"classes of fewer than {MIN_ROWS} images, "
    f"prototypes with a cosine above {SIMILAR:g}, "
    f"heads that agree on less than {LOW_AGREEMENT:.0%} of the images, "
    f"median confidence below {LOW_CONFIDENCE:.0%}, "
    f"more than {ABSORBED:.0%} of the unlabeled images taken for known classes, "
    "accuracy not above k-means, skipped training steps, unfinished phases, unreadable images"
)
"""What :func:`problems` looks for, for the page."""


@dataclass(frozen=True)
class Problem:
    """A warning: what was seen, and what it may mean or what to do."""

    title: str
    advice: str


def problems(
    config: Config, facts: Facts, predictions: Predictions | None, findings: Findings | None
) -> list[Problem]:
    """All warnings, the gravest first; class names are in quotes and not escaped."""
    found: list[Problem] = []
    if predictions is not None and findings is not None:
        found += _clusters(config, predictions, findings)
        found += _doubts(findings)
    return [*found, *_training(facts), *_results(facts)]


def _clusters(config: Config, predictions: Predictions, findings: Findings) -> Iterator[Problem]:
    counts = np.array([cluster.count for cluster in findings.clusters])
    total = int(findings.unlabeled.sum())
    if not total or len(counts) < 2:
        return
    equal = counts.sum() / len(counts)
    unused = counts <= UNUSED * max(equal, 1)
    names = [cluster.name for cluster in findings.clusters]
    if unused.any():
        listed = _list([name for name, empty in zip(names, unused, strict=True) if empty])
        yield Problem(
            f"Collapse: {unused.sum()} of {len(counts)} discovered classes take almost no image ({listed})",
            "Train longer, raise --objective.epsilon, or ask for fewer classes (--num-novel).",
        )
    used = counts[~unused]
    if len(used) > 1 and used.max() > UNEVEN * used.min():
        big, small = names[int(counts.argmax())], names[int(np.where(unused, counts.max(), counts).argmin())]
        yield Problem(
            f"Imbalance: “{big}” has {used.max():,} images and “{small}” {used.min():,}; "
            f"an equal share is {equal:,.0f}",
            "Pseudo-labels assume equally frequent classes. If yours are not, a large class may be split "
            "or small ones merged; look at both galleries.",
        )
    few = [
        c.name for c, empty in zip(findings.clusters, unused, strict=True) if not empty and c.count < MIN_ROWS
    ]
    if few and not predictions.is_sample:
        yield Problem(
            f"Few images: {_count(len(few), 'discovered class', 'discovered classes')} with fewer than "
            f"{MIN_ROWS} unlabeled images ({_list(few)})",
            "Their numbers say little; more unlabeled images or fewer classes would help.",
        )
    factor = config.model.overcluster_factor if config.method == "uno" else 0
    if factor and not predictions.is_sample and total < MIN_ROWS * factor * len(counts):
        yield Problem(
            f"Few images per cluster: {total:,} unlabeled images for {factor * len(counts)} overclusters",
            f"Below {MIN_ROWS} images each, lower --model.overcluster-factor (now {factor}).",
        )
    yield from _similar(predictions, names)


def _similar(predictions: Predictions, names: list[str]) -> Iterator[Problem]:
    upper = np.argwhere(np.triu(predictions.similarity > SIMILAR, k=1))
    if len(upper):
        a, b = max(upper.tolist(), key=lambda pair: float(predictions.similarity[pair[0], pair[1]]))
        yield Problem(
            f"Look-alikes: {_count(len(upper), 'pair', 'pairs')} of discovered classes with similar "
            f"prototypes, most so “{names[a]}” and “{names[b]}” (cosine {predictions.similarity[a, b]:.2f})",
            "They may be one class: compare their galleries, then merge them (uno classes) or ask for fewer.",
        )


def _doubts(findings: Findings) -> Iterator[Problem]:
    mine = findings.unlabeled
    if not mine.any():
        return
    if (
        findings.agreement is not None
        and (agreement := float(findings.agreement[mine].mean())) < LOW_AGREEMENT
    ):
        yield Problem(
            f"Heads disagree: on average only {agreement:.0%} of the other heads confirm an image's class",
            "The grouping depends on a head's random start: train longer or try another number of classes.",
        )
    confidence = float(np.median(findings.confidence[mine]))
    if confidence < LOW_CONFIDENCE:
        yield Problem(
            f"Low confidence: the median probability of an unlabeled image's class is {confidence:.0%}",
            "Treat single predictions with care; training may have been too short.",
        )
    if findings.absorbed > ABSORBED:
        yield Problem(
            f"{findings.absorbed:.0%} of the unlabeled images are taken for known classes",
            "Expected only if the unlabeled images really contain known classes; otherwise novel ones are "
            "being absorbed.",
        )


def _training(facts: Facts) -> Iterator[Problem]:
    for phase in ("pretrain", "discover"):
        last = facts.last(phase)
        step, total, epochs = last.get("step", 0), last.get("total_steps", 0), last.get("epochs", 0)
        if step < total:
            yield Problem(
                f"Unfinished: the {phase} phase stopped at step {step:,} of {total:,}",
                "The command of the run, given again, resumes it.",
            )
        skipped = last.get("skipped_steps", 0)
        if skipped:
            yield Problem(
                f"{_count(skipped, 'step', 'steps')} of {phase} skipped because the loss was not finite",
                f"Lower --{phase}.base-lr if there are more than a handful ({epochs} epochs were trained).",
            )
    if not facts.entries("discover") and not facts.metrics:
        yield Problem("No discovery phase is recorded in this directory", "Run uno discover first.")


def _results(facts: Facts) -> Iterator[Problem]:
    ours = facts.metrics.get("train/novel/task_aware/acc/avg")
    for key, name in (("kmeans", "the frozen features"), ("kmeans_pixels", "the pixels")):
        baseline = facts.metrics.get(f"baseline/{key}/novel/acc")
        if ours is not None and baseline is not None and ours <= baseline:
            yield Problem(
                f"No better than k-means: {ours:.1%} of the novel images are right, k-means on {name} gets "
                f"{baseline:.1%}",
                "Discovery did not help here; see the learning curves.",
            )
    if facts.bad:
        yield Problem(
            f"{_count(len(facts.bad), 'image', 'images')} could not be read and so left out", "Listed below."
        )
    if facts.unreadable:
        yield Problem(
            f"{', '.join(facts.unreadable)} could not be read", "What depends on it is missing on this page."
        )


def _list(names: list[str]) -> str:
    quoted = [f"“{name}”" for name in names[:4]]
    return ", ".join(quoted) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
