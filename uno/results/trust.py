"""Can a run be trusted without ground truth for the new classes? Three signs that need
no such label.

Known classes: the share right, among all outputs, of labeled rows that training did not
see. k-means: the share of unlabeled rows on which the best head and k-means of the same
features agree. Neighbors: how many of an unlabeled row's nearest in features are in its
class, 0 as by chance. A run that fails may have either of them, and heads that agree:
the score is the first times the smaller of the others, which over the runs of
docs/results/trust.md ranks as the true accuracy does, and is about as large. The method
``clustering`` predicts its accuracy from other clusterings of the same rows
(:mod:`uno.expectation`); the verdict on it is that prediction in a word.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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
from uno.frozen import ONE_CLASS_MIXING
from uno.model import UnoModel
from uno.prototype_init import Sample, clusters_of
from uno.results import metrics
from uno.text import plural

MAX_ROWS = 4_000  # unlabeled ones that are looked at
NEIGHBORS = 10
BELIEVED, DOUBTED = 0.75, 0.5  # scores from which on a run is trustworthy, doubtful
MIN_HELD_OUT = 20  # rows; of fewer the share right says little
HELD_OUT, HELD_OUT_ROWS = "trust/held_out/acc", "trust/held_out/rows"
KMEANS, NEAR, SCORE = (
    "trust/kmeans/agreement",
    "trust/neighbors/agreement",
    "trust/score",
)
FEATURES = "trust/features/"  # and a word of ODD: 1 where they are so
LARGEST = "trust/largest_class/share"
MAX_SHOWN_PAIRS = 3  # of classes that look like one
ONE_CLASS = 0.99  # of the pile, from which on it is in one
# what the expected accuracy counts: by setting and matching
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
OUTSIDE = "trust/outside/"  # and a name of uno.expectation.COUNTED, or encoder
SIMILAR = "trust/similar/"  # and two indices of novel classes from 0: how much they mix
TRAINING = "train/known/task_agnostic_strict/acc/best"

Word = Literal["trustworthy", "doubtful", "not trustworthy"]


class Verdict(NamedTuple):
    """Whether to trust a run, with the reasons as lines of text."""

    word: Word
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.word}: " + "\n".join(self.reasons)


def verdict(values: Mapping[str, float]) -> Verdict | None:
    """Judge a run by its metrics.

    Args:
        values: The metrics of a run, flat.

    Returns:
        The verdict. Its reasons are, in this order: the expected accuracy with its
        interval (of the method ``clustering``), held-out labeled images, the agreement
        of k-means and nearest neighbors, and pairs of classes that look like one. None
        if the metrics hold no signs, as with too few unlabeled rows.
    """
    if KMEANS not in values:
        return None
    word, known = _on_known(values)
    if seen := _seen(values):
        advice = f"{seen}: another encoder, weights or image size may help"
        return Verdict("not trustworthy", (known, advice))
    expected = _expected(values)
    if expected:
        word = _word(
            next(values[f"{key}/acc"] for key in COUNTS if f"{key}/acc" in values)
        )
    agreement = _agreement(values, word, trained=not expected)
    return Verdict(word, (*expected, known, agreement, *_merge_advice(values)))


def _word(score: float) -> Word:
    if score < DOUBTED:
        return "not trustworthy"
    return "trustworthy" if score >= BELIEVED else "doubtful"


def _agreement(values: Mapping[str, float], word: Word, trained: bool) -> str:
    """Return the line on k-means and nearest neighbors, with advice."""
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


def _seen(values: Mapping[str, float]) -> str:
    """Return what makes a run worthless whatever its signs are, or an empty string."""
    seen = [text for word, text in ODD.items() if FEATURES + word in values]
    if (share := values.get(LARGEST, 0.0)) >= ONE_CLASS:
        seen.append(f"{100 * share:.0f}% of the unlabeled images are in one class")
    return ", and ".join(seen)


def _expected(values: Mapping[str, float]) -> list[str]:
    """Return lines on the expected accuracy, or none if it is not known."""
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


def _merge_advice(values: Mapping[str, float]) -> list[str]:
    """Return a line on the pairs of novel classes that look like one, the most
    first.
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
    """Return what the method ``clustering`` left in a checkpoint as metrics.

    Args:
        tensors: The checkpoint's tensors.
        setting: ``"ncd"`` or ``"gcd"``.
        encoder: ``config.model.encoder``.

    Returns:
        Fractions `trust/expected/{ncd|gcd|gcd_strict}/{acc|low|high}`, those of
        the run's setting; absent if there were too few rows. Values
        `trust/outside/NAME` outside the calibration's range. The mixing
        `trust/similar/A/B` of novel classes A and B that look like one class. Empty for
        other methods.
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
        if mixed >= ONE_CLASS_MIXING:
            found[f"{SIMILAR}{first:.0f}/{second:.0f}"] = mixed
    return found


def _on_known(values: Mapping[str, float]) -> tuple[Word, str]:
    """The verdict, and what is right of labeled rows."""
    signs = min(values[KMEANS], values[NEAR])
    if HELD_OUT not in values:
        text = "no labeled image was held out, so accuracy on unseen images is unknown"
        text += (
            f" (training images: {100 * values[TRAINING]:.1f}%)"
            if TRAINING in values
            else ""
        )
        return "not trustworthy" if signs < DOUBTED else "doubtful", text
    rows, score = round(values[HELD_OUT_ROWS]), values[SCORE]
    text = (
        f"{100 * values[HELD_OUT]:.1f}% of {plural(rows, 'held-out labeled image')} are"
        " correct"
    )
    if score < DOUBTED:
        return "not trustworthy", text
    if rows < MIN_HELD_OUT:
        return (
            "doubtful",
            f"{text}, too few for a verdict (raise --data.validation-fraction)",
        )
    return "trustworthy" if score >= BELIEVED else "doubtful", text


def looked_at(config: Config, sample: Sample, train: TrainData) -> Sample | None:
    """``sample`` with at most ``MAX_ROWS`` unlabeled rows; None where they are fewer
    than the outputs.
    """
    chosen = evenly_spaced(MAX_ROWS, len(sample.unlabeled))
    least = train.num_novel + (train.num_known if config.data.setting == "gcd" else 0)
    few = len(chosen) < least
    return (
        None
        if few
        else sample._replace(unlabeled=sample.unlabeled[torch.from_numpy(chosen)])
    )


def found_clusters(config: Config, sample: Sample, num_novel: int) -> Tensor:
    """Clusters (N_u,) of the unlabeled rows by k-means, known ones first in the GCD
    setting.
    """
    labeled, labels, unlabeled = sample
    setting, seed = config.data.setting, config.seed
    return clusters_of(unlabeled, labeled, labels, num_novel, setting, seed).assignment


@torch.no_grad()
def trust_metrics(
    model: UnoModel,
    best_head: int,
    unlabeled: Tensor,
    clusters: Tensor,
    values: Mapping[str, float],
    num_held_out: int,
) -> dict[str, float]:
    """The signs and the score of a trained ``model``, in eval mode, by features
    ``unlabeled`` (N_u, D) and
    :func:`found_clusters` of them (N_u,), fractions 0-1 but for rows:
    `trust/{kmeans|neighbors}/agreement`; of features that tell no images apart
    `trust/features/{zero|constant|huge}`; among several new classes
    `trust/largest_class/share`; and where ``num_held_out`` labeled rows were not seen
    in training `trust/held_out/{acc|rows}` and `trust/score`. ``values``: the run's
    metrics so far.
    """
    outputs, num = (
        _outputs(model, unlabeled, best_head),
        model.num_known + model.num_novel,
    )
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
    """Share of the 10 nearest rows, by the angle around the mean, that have a row's
    output, 0-1: 0 is what they would have by chance, or less. ``features`` (N, D), N >=
    2, ``outputs`` (N,) int64.
    """
    directions = F.normalize(features.float(), dim=1)
    directions = F.normalize(directions - directions.mean(dim=0), dim=1)
    similarity = (directions @ directions.T).fill_diagonal_(-torch.inf)
    nearest = similarity.topk(min(NEIGHBORS, len(features) - 1), dim=1).indices
    same = float((outputs[nearest] == outputs[:, None]).float().mean())
    chance = float((outputs.bincount().float() / len(outputs)).square().sum())
    return max(0.0, (same - chance) / (1 - chance)) if chance < 1 else 0.0


def _outputs(model: UnoModel, features: Tensor, head: int) -> Tensor:
    """(N, D) -> the output (N,) int64 of each row, known ones first, on the CPU."""
    logits = model.heads(features.to(model.known.weight.device))
    assert logits.novel is not None
    return (
        torch.cat([logits.known[0], logits.novel[0, head]], dim=1).argmax(dim=1).cpu()
    )
