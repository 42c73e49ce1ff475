"""Warnings of a report: what may be wrong with a run, and what to do about it.

The verdict (:mod:`uno.results.trust`) says how far a run can be trusted. The warnings
name single causes that the verdict does not contain.
"""

from collections.abc import Iterator, Sequence

from uno.report.facts import RunData
from uno.report.findings import SampleSummary
from uno.results.accuracy_table import ACCURACY, GENERALIZED, filled_tables
from uno.runs import PHASES
from uno.text import plural

UNUSED = 0.02  # share of an equal class size, below which a class counts as empty
UNEVEN = 3.0  # ratio of the largest to the smallest class, above which to warn
ABSORBED = 0.1  # share of NCD's unlabeled images on known classes, above which to warn

CHECKED = (
    f"collapse (classes with less than {UNUSED:.0%} of an equal share), imbalance"
    f" (largest more than {UNEVEN:g} times the smallest), more than {ABSORBED:.0%} of"
    " the images of the NCD setting assigned to known classes, accuracy not above"
    " clustering, skipped training steps, unfinished phases, files of the run that"
    " cannot be read, images and labels of the source that are left out"
)
"""The list of all checks, which the report shows."""

Warnings = Iterator[tuple[str, str]]
"""Pairs of what was seen, and what it may mean or what to do. Class names are in quotes
and not escaped.
"""


def warnings(
    setting: str,
    facts: RunData,
    findings: SampleSummary | None,
    left_out: Sequence[str] = (),
) -> Warnings:
    """Yield all warnings: the source, the classes, then the run.

    Args:
        setting: ``"ncd"`` or ``"gcd"``.
        facts: What the run directory records.
        findings: What the predicted rows show, None if there are none.
        left_out: Lines ``"what: advice"`` about images and labels of the source that
            the run has not seen.
    """
    for line in left_out:
        what, _, advice = line.partition(": ")
        yield what, advice[:1].upper() + advice[1:] + "."
    if findings is not None and findings.num_unlabeled:
        if len(findings.clusters) > 1:
            yield from _class_sizes(facts, findings)
        if setting == "ncd":
            yield from _absorbed_images(findings)
    yield from _unfinished_phases(facts)
    yield from _no_better_than_clustering(facts)
    yield from _unreadable_files(facts)


def _class_sizes(facts: RunData, findings: SampleSummary) -> Warnings:
    """Warn of discovered classes that are empty or very unequal."""
    clusters = findings.clusters
    equal_share = sum(cluster.count for cluster in clusters) / len(clusters)
    used = [c for c in clusters if c.count > UNUSED * max(equal_share, 1)]
    unused = [c.name for c in clusters if c not in used]
    if unused:
        yield (
            f"Collapse: {len(unused)} of {len(clusters)} discovered classes have almost"
            f" no images ({_quoted(unused)})",
            "Ask for fewer classes (--num-novel)"
            + (
                ", train longer, or raise --objective.epsilon."
                if facts.has_trained
                else "."
            ),
        )
    largest = max(used, key=lambda c: c.count, default=clusters[0])
    smallest = min(used, key=lambda c: c.count, default=clusters[0])
    if largest.count > UNEVEN * smallest.count:
        prior = "Pseudo-labels assume" if facts.has_trained else "k-means prefers"
        yield (
            f"Imbalance: “{largest.name}” has {plural(largest.count, 'image')} and"
            f" “{smallest.name}” {smallest.count:,}; an equal share is"
            f" {equal_share:,.0f}",
            f"{prior} equally frequent classes. If yours are not, a large class may be"
            " split or small ones merged; look at both galleries.",
        )


def _absorbed_images(findings: SampleSummary) -> Warnings:
    """Warn if known classes take many unlabeled images, which NCD calls novel."""
    if findings.absorbed > ABSORBED:
        yield (
            f"{findings.absorbed:.0%} of the unlabeled images are assigned to known"
            " classes",
            "If the unlabeled images really contain known classes, train with"
            " --data.setting gcd; otherwise novel images are lost to known classes.",
        )


def _unfinished_phases(facts: RunData) -> Warnings:
    """Warn of phases that stopped early, and of training steps that were skipped."""
    for phase in PHASES:
        last = (facts.entries(phase) or [{}])[-1]
        step, total = last.get("step", 0), last.get("total_steps", 0)
        if step < total:
            yield (
                f"Unfinished: the {phase} phase stopped at step {step:,} of {total:,}",
                "Run the same command again to resume.",
            )
        if skipped := last.get("skipped_steps", 0):
            epochs = plural(last.get("epochs", 0), "epoch")
            yield (
                f"{plural(skipped, 'step')} of {phase} skipped because the loss was"
                " not finite",
                f"Lower --{phase}.base-lr if there are more than a handful ({epochs}"
                " trained).",
            )
    if not facts.entries("discover") and not facts.metrics:
        yield (
            "No discovery phase is recorded in this directory",
            "Run uno discover first.",
        )


def _no_better_than_clustering(facts: RunData) -> Warnings:
    """Warn if a plain clustering of the same images is at least as accurate.

    In GCD the accuracy on all unlabeled images is compared, in NCD the task-aware
    accuracy on training images of novel classes.
    """
    if GENERALIZED in filled_tables(facts.metrics):
        table, group, images = GENERALIZED, "all", "unlabeled"
        accuracy = facts.metrics.get("train/unlabeled/gcd/all/avg")
    else:
        table, group, images = ACCURACY, "novel", "novel"
        accuracy = facts.metrics.get("train/novel/task_aware/acc/avg")
    baselines = {
        row.title: facts.metrics.get(row.key("train", group))
        for row in table.rows
        if row.path.startswith("baseline/")
    }
    measured = [
        (value, title) for title, value in baselines.items() if value is not None
    ]
    best, title = max(measured, default=(0.0, ""))
    if title and accuracy is not None and accuracy <= best:
        yield (
            f"No better than clustering: {accuracy:.1%} of the {images} images are"
            f" correct, {title} {best:.1%}",
            "Discovery did not improve on clustering"
            + ("; see the learning curves." if facts.has_trained else "."),
        )


def _unreadable_files(facts: RunData) -> Warnings:
    """Warn of files of the run that cannot be read."""
    if facts.unreadable:
        yield (
            f"{', '.join(facts.unreadable)} could not be read",
            "Sections that need it are missing in this report.",
        )


def _quoted(names: Sequence[str]) -> str:
    """Return at most four names in quotes, and how many more there are."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f"“{name}”" for name in names[:4]) + more
