"""Warnings of a report: what may be wrong with a run, and what to do about it.

The verdict (:mod:`uno.results.trust`) says how far a run can be trusted. The five
checks name single causes that the verdict does not contain: classes without images,
unequal classes, novel images on known classes, clustering that is as good, and phases
that are not finished.
"""

from collections.abc import Iterator, Sequence

from uno.report.facts import RunData
from uno.report.findings import Cluster, SampleSummary
from uno.results.accuracy_table import ACCURACY, GENERALIZED, filled_tables
from uno.runs import PHASES
from uno.text import plural

UNUSED = 0.02  # share of an equal class size, below which a class counts as empty
UNEVEN = 3.0  # ratio of the largest to the smallest class, above which to warn
ABSORBED = 0.1  # share of NCD's unlabeled images on known classes, above which to warn

Warnings = Iterator[tuple[str, str]]
"""Pairs of two sentences: what was seen, and what it may mean or what to do.

Class names are in quotes and not escaped.
"""


def warnings(setting: str, facts: RunData, findings: SampleSummary | None) -> Warnings:
    """Yield the warnings of all checks of a run, for its report.

    Two checks are of predictions, if there are unlabeled training rows among them: the
    sizes of several discovered classes, and in the setting "ncd" whether more than 10%
    of the rows are assigned to known classes. The checks of the run directory follow:
    accuracy no better than that of a clustering, phases that are not finished, and
    skipped training steps.

    Args:
        setting: ``"ncd"`` if unlabeled images belong to novel classes only, ``"gcd"``
            if they may belong to known classes, too.
        facts: Metrics and history that the run directory records.
        findings: Summary of the predicted rows; None if nothing was predicted.

    Yields:
        Pairs of two texts: what was seen, and what it may mean or what to do.
    """
    if findings is not None and findings.num_unlabeled:
        if len(findings.clusters) > 1:
            yield from _class_sizes(findings.clusters)
        if setting == "ncd" and findings.absorbed > ABSORBED:
            yield (
                f"{findings.absorbed:.0%} of the unlabeled images are assigned to known"
                " classes",
                "If the unlabeled images really contain known classes, train with"
                " --data.setting gcd; otherwise novel images are lost to known"
                " classes.",
            )
    yield from _no_better_than_clustering(facts)
    yield from _unfinished_phases(facts)


def _class_sizes(clusters: Sequence[Cluster]) -> Warnings:
    """Warn if discovered classes are almost empty or very unequal in size.

    A class is almost empty if it has at most 2% of an equal share of the images, where
    an equal share counts as at least one image. Sizes are very unequal if the largest
    class has more than three times the images of the smallest class that is not almost
    empty.

    Args:
        clusters: The discovered classes, at least one.

    Yields:
        Up to two pairs of texts: what was seen, and what to do. At most four of the
        almost empty classes are named.
    """
    equal_share = sum(cluster.count for cluster in clusters) / len(clusters)
    used = [c for c in clusters if c.count > UNUSED * max(equal_share, 1)]
    unused = [f"“{c.name}”" for c in clusters if c not in used]
    if unused:
        more = f" and {len(unused) - 4} more" if len(unused) > 4 else ""
        yield (
            f"Collapse: {len(unused)} of {len(clusters)} discovered classes have almost"
            f" no images ({', '.join(unused[:4])}{more})",
            "Ask for fewer classes (--num-novel), or train longer.",
        )
    largest = max(used, key=lambda c: c.count, default=clusters[0])
    smallest = min(used, key=lambda c: c.count, default=clusters[0])
    if largest.count > UNEVEN * smallest.count:
        yield (
            f"Imbalance: “{largest.name}” has {plural(largest.count, 'image')} and"
            f" “{smallest.name}” {smallest.count:,}; an equal share is"
            f" {equal_share:,.0f}",
            "Discovery assumes equally frequent classes. If yours are not, a large"
            " class may be split or small ones merged; look at both galleries.",
        )


def _no_better_than_clustering(facts: RunData) -> Warnings:
    """Warn if a plain clustering of the same images is at least as accurate as the run.

    If there are metrics of generalized category discovery (GCD), the accuracy on all
    unlabeled training images is compared, else the task-aware accuracy on training
    images of novel classes. The run has the mean accuracy of its heads. It is compared
    with the best of the clusterings of the encoder's features whose accuracy the
    metrics have: k-means, spectral clustering and, for GCD, k-means with labeled images
    fixed to their classes.

    Args:
        facts: Metrics that the run directory records. Without both accuracies there is
            no warning.

    Yields:
        At most one pair of texts: what was seen, and what it means.
    """
    table, group, images = ACCURACY, "novel", "novel"
    key = "train/novel/task_aware/acc/avg"
    if GENERALIZED in filled_tables(facts.metrics):
        table, group, images = GENERALIZED, "all", "unlabeled"
        key = "train/unlabeled/gcd/all/avg"
    baselines = [
        (facts.metrics[row.key("train", group)], row.title)
        for row in table.rows
        if row.path.startswith("baseline/") and row.key("train", group) in facts.metrics
    ]
    if baselines and key in facts.metrics:
        accuracy, (best, title) = facts.metrics[key], max(baselines)
        if accuracy <= best:
            yield (
                f"No better than clustering: {accuracy:.1%} of the {images} images are"
                f" correct, {title} {best:.1%}",
                "Discovery did not improve on clustering.",
            )


def _unfinished_phases(facts: RunData) -> Warnings:
    """Warn of training phases that stopped early, and of skipped training steps.

    A step is skipped in training if its gradients are not finite.

    Args:
        facts: The training history that the run directory records. Its last line of a
            phase counts. A phase without lines gives no warning.

    Yields:
        Up to two pairs of texts for each phase: what was seen, and what to do.
    """
    for phase in PHASES:
        last = (facts.entries(phase) or [{}])[-1]
        step, total = last.get("step", 0), last.get("total_steps", 0)
        if step < total:
            yield (
                f"Unfinished: the {phase} phase stopped at step {step:,} of {total:,}",
                "Run the same command again to resume.",
            )
        if skipped := last.get("skipped_steps", 0):
            yield (
                f"{plural(skipped, 'step')} of {phase} skipped because the loss was"
                " not finite",
                f"Lower --{phase}.base-lr if there are more than a handful.",
            )
