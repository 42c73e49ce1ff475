"""What may be wrong with a run, for somebody who has to decide whether to trust it."""

from collections.abc import Iterator, Sequence

import numpy as np

from uno.config import Config
from uno.methods import load
from uno.report.facts import RunData
from uno.report.findings import SIMILAR, SampleSummary
from uno.report.sample import Sample
from uno.results.accuracy_table import ACCURACY, GENERALIZED, filled_tables
from uno.runs import PHASES
from uno.text import plural

UNUSED = 0.02  # of an equal share: such a class is as good as empty
# largest over smallest class; pseudo-labels are forced to be equally frequent
UNEVEN = 3.0
MIN_ROWS = 20
LOW_AGREEMENT = 0.85
# of the images: so much less the chosen head agrees with others than they with each
# other
ALONE = 0.02
LOW_CONFIDENCE = 0.5
ABSORBED = 0.1

CHECKED = (  # for the page
    f"collapse (classes with less than {UNUSED:.0%} of an equal share), imbalance"
    f" (largest more than {UNEVEN:g} times the smallest), classes of fewer than"
    f" {MIN_ROWS} images, classes more similar than {SIMILAR:g}, heads that agree on"
    f" less than {LOW_AGREEMENT:.0%} of the images, a best head unlike the others,"
    f" median confidence below {LOW_CONFIDENCE:.0%}, more than {ABSORBED:.0%} of the"
    " images of the NCD setting assigned to known classes, accuracy not above k-means,"
    " skipped training steps, unfinished phases, unreadable images, images and labels"
    " of the source that are left out"
)

Warnings = Iterator[tuple[str, str]]
"""What was seen, and what it may mean or what to do. Class names are in quotes and
not escaped.
"""


def warnings(
    config: Config,
    facts: RunData,
    sample: Sample | None,
    findings: SampleSummary | None,
    left_out: Sequence[str] = (),
) -> Warnings:
    """Yield all warnings, the gravest first.

    Args:
        config: The configuration of the run.
        facts: What its directory records.
        sample: The rows that were predicted, None if there are none.
        findings: What they show, None if there are none.
        left_out: Lines about images and labels of the source that the run has not seen.
    """
    for line in left_out:
        what, _, advice = line.partition(": ")
        yield what, advice[:1].upper() + advice[1:] + "."
    if sample is not None and findings is not None and findings.num_unlabeled:
        if len(findings.clusters) > 1:
            yield from _sizes(config, sample, findings)
        yield from _doubts(sample, findings, config.data.setting == "gcd")
    yield from _run(facts)


def _sizes(config: Config, sample: Sample, findings: SampleSummary) -> Warnings:
    clusters = findings.clusters
    total, num = findings.num_unlabeled, len(clusters)
    equal = sum(c.count for c in clusters) / num
    used = [c for c in clusters if c.count > UNUSED * max(equal, 1)]
    if unused := [c.name for c in clusters if c not in used]:
        yield (
            (
                f"Collapse: {len(unused)} of {num} discovered classes have almost no"
                f" images ({_list(unused)})"
            ),
            (
                "Train longer, raise --objective.epsilon, or ask for fewer classes"
                " (--num-novel)."
            ),
        )
    big, small = (
        f(used, key=lambda c: c.count, default=clusters[0]) for f in (max, min)
    )
    if big.count > UNEVEN * small.count:
        yield (
            (
                f"Imbalance: “{big.name}” has {plural(big.count, 'image')} and"
                f" “{small.name}” {small.count:,}; an equal share is {equal:,.0f}"
            ),
            (
                "Pseudo-labels assume equally frequent classes. If yours are not, a"
                " large class may be split or small ones merged; look at both"
                " galleries."
            ),
        )
    few = [c.name for c in used if c.count < MIN_ROWS]
    if few and sample.is_whole:
        yield (
            (
                "Few images:"
                f" {plural(len(few), 'discovered class', 'discovered classes')} with"
                f" fewer than {MIN_ROWS} unlabeled images ({_list(few)})"
            ),
            (
                "Metrics of such small classes are unreliable; add unlabeled images or"
                " ask for fewer classes."
            ),
        )
    factor = (
        config.model.overcluster_factor if load(config.method).novel_head is None else 0
    )
    if sample.is_whole and total < MIN_ROWS * factor * num:
        yield (
            (
                f"Few images per cluster: {plural(total, 'unlabeled image')} for"
                f" {factor * num} overclusters"
            ),
            (
                f"Below {MIN_ROWS} images each, lower --model.overcluster-factor (now"
                f" {factor})."
            ),
        )


def _doubts(sample: Sample, findings: SampleSummary, mixed: bool) -> Warnings:
    num_known = len(sample.classes) - len(sample.novel[0, 0])
    pairs = np.triu(findings.likeness[num_known:, num_known:], k=1)
    if num := (pairs > SIMILAR).sum():
        a, b = (
            sample.names[num_known + i]
            for i in np.unravel_index(pairs.argmax(), pairs.shape)
        )
        yield (
            (
                f"Similar classes: {plural(num, 'pair')} of discovered classes, "
                f"most similar “{a}” and “{b}” ({pairs.max():.2f})"
            ),
            (
                "They may be one class: compare their galleries, then merge them (uno"
                " classes) or ask for fewer."
            ),
        )
    if sample.num_heads > 1 and findings.mean_agreement < LOW_AGREEMENT:
        yield (
            (
                f"Heads disagree: on average only {findings.mean_agreement:.0%} of the"
                " heads assign an image to the same class"
            ),
            (
                "Clusters depend on the initialization: train longer or try another"
                " number of classes."
            ),
        )
    elif sample.num_heads > 2:
        shares = np.delete(findings.pairs, sample.best_head, axis=1)  # (H, H - 1)
        others = np.delete(shares, sample.best_head, axis=0)
        num = len(others)
        own, theirs = (
            shares[sample.best_head].mean(),
            (others.sum() - np.trace(others)) / num / (num - 1),
        )
        if theirs - own > ALONE:
            yield (
                (
                    "Heads disagree: the chosen one agrees with each of the others on"
                    f" {own:.1%} of the images, they with each other on {theirs:.1%}"
                ),
                (
                    "The head with the lowest training loss disagrees with the others:"
                    " look at images with low head_agreement in predictions.parquet, or"
                    " compare with another --seed."
                ),
            )
    if findings.median_confidence < LOW_CONFIDENCE:
        yield (
            (
                "Low confidence: the median probability of an unlabeled image's class"
                f" is {findings.median_confidence:.0%}"
            ),
            "Treat single predictions with care; training may have been too short.",
        )
    if findings.absorbed > ABSORBED and not mixed:
        yield (
            (
                f"{findings.absorbed:.0%} of the unlabeled images are assigned to known"
                " classes"
            ),
            (
                "If the unlabeled images really contain known classes, train with"
                " --data.setting gcd; otherwise novel images are lost to known classes."
            ),
        )


def _run(facts: RunData) -> Warnings:
    for phase in PHASES:
        last = (facts.entries(phase) or [{}])[-1]
        step, total, skipped = (
            last.get(key, 0) for key in ("step", "total_steps", "skipped_steps")
        )
        if step < total:
            seen = (
                f"Unfinished: the {phase} phase stopped at step {step:,} of {total:,}"
            )
            yield seen, "Run the same command again to resume."
        if skipped:
            yield (
                (
                    f"{plural(skipped, 'step')} of {phase} skipped because the loss was"
                    " not finite"
                ),
                (
                    f"Lower --{phase}.base-lr if there are more than a handful "
                    f"({plural(last.get('epochs', 0), 'epoch')} trained)."
                ),
            )
    if not facts.entries("discover") and not facts.metrics:
        yield (
            "No discovery phase is recorded in this directory",
            "Run uno discover first.",
        )
    yield from _against_clustering(facts)
    if facts.bad:
        yield (
            f"{plural(len(facts.bad), 'image')} could not be read and left out",
            "Listed below.",
        )
    if facts.unreadable:
        missing = "Sections that need it are missing in this report."
        yield f"{', '.join(facts.unreadable)} could not be read", missing


def _against_clustering(facts: RunData) -> Warnings:
    """Compare with clusterings of the same rows in the same setting."""
    tables = filled_tables(facts.metrics)
    if GENERALIZED in tables:
        table, group, images, key = (
            GENERALIZED,
            "all",
            "unlabeled",
            "train/unlabeled/gcd/all/avg",
        )
    else:
        table, group, images, key = (
            ACCURACY,
            "novel",
            "novel",
            "train/novel/task_aware/acc/avg",
        )
    rows = (row for row in table.rows if row.path.startswith("baseline/"))
    found = {row.title: facts.metrics.get(row.key("train", group)) for row in rows}
    known = [(value, title) for title, value in found.items() if value is not None]
    best, title = max(known, default=(0.0, ""))
    right = facts.metrics.get(key)
    if title and right is not None and right <= best:
        yield (
            (
                f"No better than clustering: {right:.1%} of the {images} images are"
                f" correct, {title} {best:.1%}"
            ),
            "Discovery did not improve on clustering"
            + ("; see the learning curves." if facts.has_trained else "."),
        )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f"“{name}”" for name in names[:4]) + more
