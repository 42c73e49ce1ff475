"""Judge without labels of novel classes whether a run can be trusted.

Three measures need no label of a novel class. Known classes: the share of labeled rows
unseen in training that are correct among all outputs. k-means: the share of unlabeled
rows on which the best head and k-means of the same features agree. Neighbors: the share
of the nearest neighbors of an unlabeled row that have its class, 0 as by chance. A run
that fails can have a good value of one of them, or heads that agree. The score is the
first measure times the smaller of the other two. Over the runs of docs/results/trust.md
it ranks like the true accuracy, and is about as large.

The method ``clustering`` predicts its accuracy from other clusterings of the same rows
(:mod:`uno.expectation`). Its verdict is this prediction in a word.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from uno.clustering.initialization import Sample, cluster_features
from uno.config import Config
from uno.data.features import ODD, oddity
from uno.data.images import evenly_spaced
from uno.data.stream import TrainData
from uno.expectation import (
    Matching,
    describe_outside,
    expected_accuracy,
    outside_calibration,
)
from uno.model import UnoModel
from uno.results import metrics
from uno.text import plural

MAX_ROWS = 4_000  # unlabeled rows that the signs are computed from
NEIGHBORS = 10
BELIEVED, DOUBTED = 0.75, 0.5  # lowest scores of trustworthy and of doubtful runs
MIN_HELD_OUT = 20  # held-out rows; the accuracy of fewer rows says little
HELD_OUT, HELD_OUT_ROWS = "trust/held_out/acc", "trust/held_out/rows"
KMEANS, NEAR, SCORE = (
    "trust/kmeans/agreement",
    "trust/neighbors/agreement",
    "trust/score",
)
FEATURES = "trust/features/"  # followed by a word of ODD; 1 if it applies
LARGEST = "trust/largest_class/share"
MAX_SHOWN_PAIRS = 3  # pairs of classes that look like one
ONE_CLASS = 0.99  # share of the unlabeled rows in one class that is degenerate
# keys of the expected accuracy, by setting and matching
EXPECTED: dict[tuple[str, Matching], str] = {
    ("ncd", "one_to_one"): "trust/expected/ncd",
    ("gcd", "one_to_one"): "trust/expected/gcd",
    ("gcd", "strict"): "trust/expected/gcd_strict",
}
COUNTS = {
    "trust/expected/ncd": "accuracy on images of new classes",
    "trust/expected/gcd": "accuracy on all unlabeled images",
    "trust/expected/gcd_strict": (
        "strict accuracy, where a new class found on a known output is wrong"
    ),
}
NUM_NOVEL = "trust/clustering/classes"
NUM_AGREEMENTS = "trust/clustering/clusterings"
OUTSIDE = "trust/outside/"  # followed by a name of uno.expectation.COUNTED, or encoder
SIMILAR = "trust/similar/"  # followed by the indices A/B of two novel classes, from 0
TRAINING = "train/known/task_agnostic_strict/acc/best"

Word = Literal["trustworthy", "doubtful", "not trustworthy"]


class Verdict(NamedTuple):
    """Whether to trust a run, with the reasons as lines of text.

    Attributes:
        word: "trustworthy", "doubtful" or "not trustworthy".
        reasons: Lines of text.
    """

    word: Word
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.word}: " + "\n".join(self.reasons)


def verdict(values: Mapping[str, float]) -> Verdict | None:
    """Judge by the metrics of a run whether it can be trusted.

    Args:
        values: The metrics of a run, by key, as in its ``metrics.json``.

    Returns:
        The verdict; None if the metrics do not have those of :func:`trust_metrics`, as
        with too few unlabeled rows. If they have an expected accuracy, as for the
        method ``clustering``, that accuracy (the one-to-one one) decides the word:
        "trustworthy" from 0.75, "doubtful" from 0.5, and otherwise "not trustworthy".
        If not, the score decides, see :func:`_judge_by_held_out`. The reasons are, in
        this order: the expected accuracy with its interval if there is one, held-out
        labeled images, the agreement with k-means and of nearest neighbors, and pairs
        of classes that look like one if there are any. If the features do not tell
        images apart, or at least 99 % of the unlabeled rows are in one class, the run
        is not trustworthy, and the reasons are only the held-out labeled images and
        this fact.
    """
    if KMEANS not in values:
        return None
    word, known = _judge_by_held_out(values)
    if signs := _describe_failure(values):
        advice = f"{signs}: another encoder, weights or image size may help"
        return Verdict("not trustworthy", (known, advice))
    expected = _format_expected(values)
    if expected:
        word = _verdict_of_score(
            next(values[f"{key}/acc"] for key in COUNTS if f"{key}/acc" in values)
        )
    agreement = _format_agreement(values, word, trained=not expected)
    return Verdict(word, (*expected, known, agreement, *_format_merge_advice(values)))


def _verdict_of_score(score: float) -> Word:
    """Return the verdict of a score from 0 to 1 in a word.

    It is "trustworthy" from 0.75, "doubtful" from 0.5, and otherwise "not trustworthy".
    """
    if score < DOUBTED:
        return "not trustworthy"
    return "trustworthy" if score >= BELIEVED else "doubtful"


def _format_agreement(values: Mapping[str, float], word: Word, trained: bool) -> str:
    """Describe how far k-means and nearest neighbors agree with the clusters.

    Args:
        values: The metrics of a run, by key.
        word: The verdict.
        trained: Whether longer training can help. It is False for the method
            ``clustering``, which trains nothing.

    Returns:
        A line of text with both agreements in percent, and with a remark that depends
        on the first of these conditions that holds. If the verdict is "trustworthy",
        the number of classes is assumed to be right. If rows were held out and their
        accuracy is below the smaller of the two agreements, the advice is to try
        pretrained weights or larger images. If both agreements are at least 0.75 and
        ``trained``, the number of classes is assumed to be right. Otherwise the advice
        is to try another number of classes, or longer training (another encoder if not
        ``trained``).
    """
    signs = min(values[KMEANS], values[NEAR])
    if word == "trustworthy":
        advice = "assuming the number of classes is right"
    elif values.get(HELD_OUT, 1.0) < signs:
        advice = (
            "known classes are not separated either: try pretrained weights or larger"
            " images"
        )
    elif signs >= BELIEVED and trained:
        advice = "assuming the number of classes is right"
    else:
        other = "longer training" if trained else "another encoder"
        advice = (
            "the features do not separate these classes: try another number of them or"
            f" {other}"
        )
    kmeans, near = (f"{100 * values[key]:.0f}%" for key in (KMEANS, NEAR))
    return (
        f"k-means agrees on {kmeans} of the unlabeled images, nearest neighbors on"
        f" {near} ({advice})"
    )


def _describe_failure(values: Mapping[str, float]) -> str:
    """Describe why a run is worthless, whatever its other metrics are.

    The reasons are features that do not tell images apart, and at least 99 % of the
    unlabeled images in one class.

    Args:
        values: The metrics of the run, by key.

    Returns:
        The text; "" if there is no such reason.
    """
    seen = [text for word, text in ODD.items() if FEATURES + word in values]
    if (share := values.get(LARGEST, 0.0)) >= ONE_CLASS:
        seen.append(f"{100 * share:.0f}% of the unlabeled images are in one class")
    return ", and ".join(seen)


def _format_expected(values: Mapping[str, float]) -> list[str]:
    """Format the accuracy that the method ``clustering`` expects, with its interval.

    Args:
        values: The metrics of the run, by key.

    Returns:
        A line for each expected accuracy: in the setting GCD that of all unlabeled
        images, and the strict one, by which a new class on a known output is wrong; in
        NCD one. The first also has the number of new classes, and the number of other
        clusterings of the same images: the more these agree with the clusters of the
        run, the higher is the expected accuracy. A last line names properties of the
        task outside the calibration, if there are any. The list is empty if the metrics
        have no expected accuracy.
    """
    lines = []
    for key, counts in COUNTS.items():
        if f"{key}/acc" in values:
            acc, low, high = (
                100 * values[f"{key}/{end}"] for end in ("acc", "low", "high")
            )
            lines.append(f"expected {counts}: {acc:.0f}% ({low:.0f} to {high:.0f})")
    if lines:
        number, others = (round(values[key]) for key in (NUM_NOVEL, NUM_AGREEMENTS))
        lines[0] += (
            f", if there are {plural(number, 'new class', 'new classes')}; "
            f"from {others} other clusterings of the same images"
        )
        names = (key.removeprefix(OUTSIDE) for key in values if key.startswith(OUTSIDE))
        if outside := describe_outside(
            {name: values[OUTSIDE + name] for name in names}
        ):
            lines.append(f"less certain, as the task has {', '.join(outside)}")
    return lines


def _format_merge_advice(values: Mapping[str, float]) -> list[str]:
    """Return a line that names pairs of novel classes that may be one class.

    Args:
        values: The metrics of the run, by key.

    Returns:
        A list of one line with at most three pairs, most similar first, and the number
        of further pairs; an empty list if there are no such pairs. A class is called
        "novel-" and its number among the novel classes from 1, whatever its present
        name is.
    """
    pairs = sorted(
        (key for key in values if key.startswith(SIMILAR)), key=lambda k: -values[k]
    )
    if not pairs:
        return []
    names = [
        [int(i) + 1 for i in key.removeprefix(SIMILAR).split("/")] for key in pairs
    ]
    shown = ", ".join(f"novel-{a} and novel-{b}" for a, b in names[:MAX_SHOWN_PAIRS])
    more = (
        f" and {len(names) - MAX_SHOWN_PAIRS} more pairs"
        if len(names) > MAX_SHOWN_PAIRS
        else ""
    )
    return [
        f"may be one class each: {shown}{more} (compare their images, then merge them"
        " with uno classes)"
    ]


def clustering_metrics(
    tensors: Mapping[str, Tensor], setting: str, encoder: str
) -> dict[str, float]:
    """Return the metrics that the method ``clustering`` left in a checkpoint.

    Args:
        tensors: The tensors of the checkpoint, by name.
        setting: "ncd" or "gcd".
        encoder: ``config.model.encoder``.

    Returns:
        Values by key; empty if the checkpoint is that of another method:

        - ``trust/clustering/classes``: the number of novel classes.
        - ``trust/clustering/clusterings``: the number of other clusterings of the same
          rows, from whose agreement the accuracy is expected. It is 0 if there are too
          few rows; the keys of the next two items are then absent.
        - ``trust/expected/ncd/{acc|low|high}``, or in the setting "gcd"
          ``trust/expected/{gcd|gcd_strict}/{acc|low|high}``: the expected accuracy and
          the ends of its interval, as fractions.
        - ``trust/outside/NAME``: for each property of the task for which this
          expectation was not calibrated. The value is the number of unlabeled images,
          known classes or novel classes, or 1.0 for ``encoder`` and ``one known
          class``, see :func:`~uno.expectation.outside_calibration`.
        - ``trust/similar/A/B``: how often rows of the novel classes A and B (indices
          from 0) are nearest neighbors, relative to a random division of these rows, so
          that 1 suggests one class. The most similar pairs are there, at most as many
          as the run has more novel classes than are estimated.
    """
    if "extra/agreement" not in tensors:
        return {}
    agreement = tensors["extra/agreement"].tolist()
    num_rows, num_known, num_novel = tensors["extra/counts"].tolist()
    found = {NUM_NOVEL: float(num_novel), NUM_AGREEMENTS: float(len(agreement))}
    for (own, matching), key in EXPECTED.items():
        if own == setting and agreement:
            expected = expected_accuracy(agreement, setting, matching)
            assert expected is not None
            found |= {
                f"{key}/acc": expected.mean,
                f"{key}/low": expected.low,
                f"{key}/high": expected.high,
            }
    if agreement:
        outside = outside_calibration(num_rows, num_known, num_novel, encoder)
        found |= {OUTSIDE + name: value for name, value in outside.items()}
    for first, second, mixed in tensors["extra/similar"].tolist():
        found[f"{SIMILAR}{first:.0f}/{second:.0f}"] = mixed
    return found


def _judge_by_held_out(values: Mapping[str, float]) -> tuple[Word, str]:
    """Judge a run by its accuracy on held-out labeled rows and by its score.

    The score is this accuracy times the smaller of the agreements with k-means and of
    nearest neighbors. The verdict is "trustworthy" for a score from 0.75, "doubtful"
    from 0.5, and otherwise "not trustworthy". With fewer than 20 held-out rows it is
    "doubtful" at best. Without any held-out row, accuracy on unseen images is not
    known, so the verdict is "doubtful" if both agreements are at least 0.5, otherwise
    "not trustworthy".

    Args:
        values: The metrics of the run, by key, with ``trust/kmeans/agreement`` and
            ``trust/neighbors/agreement``. If rows were held out, they have
            ``trust/held_out/acc``, ``trust/held_out/rows`` and ``trust/score``, too.

    Returns:
        The verdict, and a line on the accuracy on held-out labeled rows. Without them
        the line has the accuracy on known training rows, if the metrics have it.
    """
    signs = min(values[KMEANS], values[NEAR])
    if HELD_OUT not in values:
        text = "no labeled image was held out, so accuracy on unseen images is unknown"
        text += (
            f" (training images: {100 * values[TRAINING]:.1f}%)"
            if TRAINING in values
            else ""
        )
        return "not trustworthy" if signs < DOUBTED else "doubtful", text
    rows, word = round(values[HELD_OUT_ROWS]), _verdict_of_score(values[SCORE])
    text = (
        f"{100 * values[HELD_OUT]:.1f}% of {plural(rows, 'held-out labeled image')} are"
        " correct"
    )
    if word != "not trustworthy" and rows < MIN_HELD_OUT:
        return (
            "doubtful",
            f"{text}, too few for a verdict (raise --data.validation-fraction)",
        )
    return word, text


def subsample_unlabeled(
    config: Config, sample: Sample, train: TrainData
) -> Sample | None:
    """Return a sample with at most ``MAX_ROWS`` (4,000) unlabeled rows, evenly spaced.

    Labeled rows stay as they are.

    Args:
        config: The configuration of the run.
        sample: Features of labeled and unlabeled rows.
        train: The training set, which has the numbers of classes.

    Returns:
        A new sample, which may have all unlabeled rows. None if it would have fewer
        unlabeled rows than clusters are needed: one for each novel class, and in the
        GCD setting (unlabeled rows can belong to known classes) one for each known
        class, too.
    """
    chosen = evenly_spaced(MAX_ROWS, len(sample.unlabeled))
    num_classes = train.num_novel
    if config.data.setting == "gcd":
        num_classes += train.num_known
    if len(chosen) < num_classes:
        return None
    return sample._replace(unlabeled=sample.unlabeled[torch.from_numpy(chosen)])


def cluster_unlabeled(config: Config, sample: Sample, num_novel: int) -> Tensor:
    """Cluster the unlabeled rows of a sample by k-means.

    Args:
        config: The configuration of the run.
        sample: Features of labeled and unlabeled rows. In the GCD setting the labeled
            rows are fixed to their classes.
        num_novel: The number of novel classes.

    Returns:
        The cluster of each of the N_u unlabeled rows, int64 (N_u,) on the CPU, from 0
        to ``num_novel`` - 1. In the GCD setting the C_l known classes have the numbers
        from 0 to C_l - 1, and the novel clusters follow.
    """
    labeled, labels, unlabeled = sample
    setting, seed = config.data.setting, config.seed
    return cluster_features(
        unlabeled, labeled, labels, num_novel, setting, seed
    ).assignment


@torch.no_grad()
def trust_metrics(
    model: UnoModel,
    best_head: int,
    unlabeled: Tensor,
    clusters: Tensor,
    values: Mapping[str, float],
    num_held_out: int,
) -> dict[str, float]:
    """Compute the measures by which a trained model is judged without novel labels.

    Args:
        model: The network in eval mode.
        best_head: The index of the best head, the one with the lowest training loss.
        unlabeled: Features of the N_u unlabeled rows, D numbers each, (N_u, D).
        clusters: The clusters of these rows by :func:`cluster_unlabeled`, int64 (N_u,).
        values: The metrics of the run so far, by key. If labeled rows were held out of
            training, their accuracy is ``test/known/task_agnostic_strict/acc/best``.
        num_held_out: The number of these held-out rows.

    Returns:
        Values by key:

        - ``trust/kmeans/agreement``: the share of rows on which the best head and
          k-means agree, 0-1, after all outputs of the head, known and novel, were
          matched one to one with the clusters.
        - ``trust/neighbors/agreement``: how often the nearest neighbors of a row have
          its output, 0 as by chance and 1 always, see :func:`neighbor_agreement`.
        - ``trust/largest_class/share``: with several novel classes, the share of the
          rows in the most frequent output, known or novel, 0-1.
        - ``trust/held_out/acc``, ``trust/held_out/rows`` and ``trust/score``: if
          ``values`` has the accuracy of held-out rows, this accuracy 0-1,
          ``num_held_out``, and the accuracy times the smaller of the two agreements.
        - ``trust/features/zero``, ``.../constant`` or ``.../huge``: 1 if the features
          are all zero, all the same, or extremely large, so that they do not
          distinguish images. Absent otherwise.
    """
    outputs = _outputs(model, unlabeled, best_head)
    num = model.num_known + model.num_novel
    counts = metrics.confusion(outputs.numpy(), clusters.numpy(), num, num)
    found = {
        KMEANS: metrics.cluster_accuracy(counts),
        NEAR: neighbor_agreement(unlabeled, outputs),
    }
    signs = {FEATURES + word: 1.0 for word in (oddity(unlabeled),) if word}
    if model.num_novel > 1:
        signs[LARGEST] = float(outputs.bincount().max()) / len(outputs)
    right = values.get("test/known/task_agnostic_strict/acc/best")
    if right is not None:
        score = right * min(found.values())
        found |= {HELD_OUT: right, HELD_OUT_ROWS: float(num_held_out), SCORE: score}
    return found | signs


def neighbor_agreement(features: Tensor, outputs: Tensor) -> float:
    """Return how often nearest neighbors share an output, corrected for chance.

    The 10 nearest rows of each row count, by the cosine of features from which the mean
    direction is subtracted.

    Args:
        features: Features (N, D) with N at least 2.
        outputs: The predicted output of each row, int64 (N,).

    Returns:
        0 if neighbors share an output as often as by chance, or less; 1 if always. It
        is also 0 if all rows have the same output.
    """
    directions = F.normalize(features.float(), dim=1)
    directions = F.normalize(directions - directions.mean(dim=0), dim=1)
    similarity = (directions @ directions.T).fill_diagonal_(-torch.inf)
    nearest = similarity.topk(min(NEIGHBORS, len(features) - 1), dim=1).indices
    same = float((outputs[nearest] == outputs[:, None]).float().mean())
    chance = float((outputs.bincount().float() / len(outputs)).square().sum())
    return max(0.0, (same - chance) / (1 - chance)) if chance < 1 else 0.0


def _outputs(model: UnoModel, features: Tensor, head: int) -> Tensor:
    """Return the most probable output of each row by one head, int64 (N,) on the CPU.

    All outputs compete. Known outputs have the numbers from 0 to C_l - 1, and the novel
    outputs of the head follow.

    Args:
        model: The network.
        features: Features (N, D).
        head: The index of the cluster head.
    """
    logits = model.heads(features.to(model.known.weight.device))
    assert logits.novel is not None
    return (
        torch.cat([logits.known[0], logits.novel[0, head]], dim=1).argmax(dim=1).cpu()
    )
