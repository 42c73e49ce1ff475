"""Can a run be trusted without ground truth for the new classes? Three signs that need no such label.

Known classes: the share right, among all outputs, of labeled rows that training did not see. k-means: the
share of unlabeled rows on which the best head and k-means of the same features agree. Neighbors: how many of
an unlabeled row's nearest in features are in its class, 0 as by chance. A run that fails may have either of
them, and heads that agree: the score is the first times the smaller of the others, which over the runs of
docs/results/trust.md ranks as the true accuracy does, and is about as large. Method ``choice``
hides known classes in turn: what is right of their rows is what may be expected of new ones.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from uno.choice import CANDIDATES, PLAIN, Choice
from uno.config import Config
from uno.data.features import ODD, oddity
from uno.data.images import evenly_spaced
from uno.data.stream import TrainData
from uno.model import UnoModel
from uno.prototype_init import Sample, clusters_of
from uno.results import metrics
from uno.text import plural

MAX_ROWS = 4_000  # unlabeled ones that are looked at
NEIGHBORS = 10
BELIEVED, DOUBTED = 0.75, 0.5  # scores from which on a run is trustworthy, doubtful
MIN_HELD_OUT = 20  # rows; of fewer the share right says little
HELD_OUT, HELD_OUT_ROWS = "trust/held_out/acc", "trust/held_out/rows"
KMEANS, NEAR, SCORE = "trust/kmeans/agreement", "trust/neighbors/agreement", "trust/score"
FEATURES = "trust/features/"  # and a word of ODD: 1 where they are so
LARGEST = "trust/largest_class/share"
ONE_CLASS = 0.99  # of the pile, from which on it is in one
CHOSEN, GAIN, DRAWS, HIDDEN = (f"trust/choice/{name}" for name in ("candidate", "gain", "draws", "hidden"))
ASKED, FOUND = "trust/choice/asked", "trust/choice/found"
EXPECTED, LOW, HIGH = (f"trust/expected/{name}" for name in ("acc", "low", "high"))
TRAINING = "train/known/task_agnostic_strict/acc/best"

Word = Literal["trustworthy", "doubtful", "not trustworthy"]


class Verdict(NamedTuple):
    """Whether to trust a run, and why: lines about held-out rows, k-means and neighbors; of method ``choice``
    before them the accuracy expected on new classes, where it was measured, and after them what was chosen
    and, where not all that were asked for, how many new classes were found.
    """

    word: Word
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.word}: " + "\n".join(self.reasons)


def verdict(values: Mapping[str, float]) -> Verdict | None:
    """What the metrics of a run say; None where they hold no signs, as with too few unlabeled rows."""
    if KMEANS not in values:
        return None
    word, first = _on_known(values)
    kmeans, near = (f"{100 * values[key]:.0f}%" for key in (KMEANS, NEAR))
    if seen := _seen(values):
        return Verdict("not trustworthy", (first, f"{seen}: another encoder, weights or image size may help"))
    if word == "trustworthy":
        advice = "assuming the number of classes is right"
    elif values.get(HELD_OUT, 1.0) < (signs := min(values[KMEANS], values[NEAR])):
        advice = "known classes are not separated either: try pretrained weights or larger images"
    elif signs >= BELIEVED:
        advice = "assuming the number of classes is right"
    else:
        other = "another encoder" if CHOSEN in values else "longer training"
        advice = f"the features do not separate these classes: try another number of them or {other}"
    second = f"k-means agrees on {kmeans} of the unlabeled images, nearest neighbors on {near} ({advice})"
    expected, chosen = _on_choice(values)
    return Verdict(word, (*expected, first, second, *chosen))


def _seen(values: Mapping[str, float]) -> str:
    """What makes a run worthless whatever its signs are."""
    seen = [text for word, text in ODD.items() if FEATURES + word in values]
    if (share := values.get(LARGEST, 0.0)) >= ONE_CLASS:
        seen.append(f"{100 * share:.0f}% of the unlabeled images are in one class")
    return ", and ".join(seen)


def _on_choice(values: Mapping[str, float]) -> tuple[list[str], list[str]]:
    """What is expected of new classes, if it was measured, and why the classes were found as they were."""
    if CHOSEN not in values:
        return [], []
    chosen = CANDIDATES[round(values[CHOSEN])]
    if EXPECTED not in values:
        unknown = "expected accuracy on new classes: unknown, too few known classes to hide some of them"
        return [], [unknown, f"chosen without evidence: {chosen}"]
    acc, low, high = (f"{100 * values[key]:.0f}" for key in (EXPECTED, LOW, HIGH))
    draws = f"{values[DRAWS]:.0f} draws of {values[HIDDEN]:.0f} hidden known classes"
    gain = f"{100 * values[GAIN]:+.1f} points vs. {CANDIDATES[PLAIN]} on hidden known classes"
    why = [f"chosen: {chosen}, {gain}"]
    asked, found = (round(values.get(key, 0)) for key in (ASKED, FOUND))
    if asked > found:
        empty = plural(asked - found, "output stays empty", "outputs stay empty")
        why.append(f"of {asked} new classes {found} were found: clusters that mix were joined, {empty}")
    given = f", if there are {asked} of them" if asked else ""  # older runs do not say
    return [f"expected accuracy on new classes{given}: {acc}% ({low} to {high}), measured on {draws}"], why


def choice_metrics(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """What method ``choice`` left in a checkpoint, fractions 0-1 but for numbers: `trust/choice/{candidate|
    gain|draws|hidden|asked|found}`, the gain in all unlabeled rows, new classes asked for and found, and
    `trust/expected/{acc|low|high}`, absent where no class could be hidden; {} of other methods.
    """
    if "extra/chosen" not in tensors:
        return {}
    candidate, num_hidden = tensors["extra/chosen"].tolist()
    joined = tensors.get("extra/right_joined", torch.zeros(0))  # of numerics 24 on
    choice = Choice(candidate, tensors["extra/right"], tensors["extra/right_new"], num_hidden, joined)
    found = {CHOSEN: float(candidate), DRAWS: float(len(choice.scores)), HIDDEN: float(num_hidden)}
    if "extra/classes" in tensors:  # older runs found all
        found |= dict(zip((ASKED, FOUND), map(float, tensors["extra/classes"].tolist()), strict=True))
    if (expected := choice.expected()) is None:
        return found
    mean = choice.scores.mean(dim=0)
    found[GAIN] = float(mean[candidate] - mean[PLAIN])
    return found | dict(zip((EXPECTED, LOW, HIGH), expected, strict=True))


def _on_known(values: Mapping[str, float]) -> tuple[Word, str]:
    """The verdict, and what is right of labeled rows."""
    signs = min(values[KMEANS], values[NEAR])
    if HELD_OUT not in values:
        text = "no labeled image was held out, so accuracy on unseen images is unknown"
        text += f" (training images: {100 * values[TRAINING]:.1f}%)" if TRAINING in values else ""
        return "not trustworthy" if signs < DOUBTED else "doubtful", text
    rows, score = round(values[HELD_OUT_ROWS]), values[SCORE]
    text = f"{100 * values[HELD_OUT]:.1f}% of {plural(rows, 'held-out labeled image')} are correct"
    if score < DOUBTED:
        return "not trustworthy", text
    if rows < MIN_HELD_OUT:
        return "doubtful", f"{text}, too few for a verdict (raise --data.validation-fraction)"
    return "trustworthy" if score >= BELIEVED else "doubtful", text


def looked_at(config: Config, sample: Sample, train: TrainData) -> Sample | None:
    """``sample`` with at most ``MAX_ROWS`` unlabeled rows; None where they are fewer than the outputs."""
    chosen = evenly_spaced(MAX_ROWS, len(sample.unlabeled))
    least = train.num_novel + (train.num_known if config.data.setting == "gcd" else 0)
    few = len(chosen) < least
    return None if few else sample._replace(unlabeled=sample.unlabeled[torch.from_numpy(chosen)])


def found_clusters(config: Config, sample: Sample, num_novel: int) -> Tensor:
    """Clusters (N_u,) of the unlabeled rows by k-means, known ones first in the GCD setting."""
    labeled, labels, unlabeled = sample
    setting, seed = config.data.setting, config.seed
    return clusters_of(unlabeled, labeled, labels, num_novel, setting, seed).assignment


@torch.no_grad()
def trust_metrics(
    model: UnoModel, best_head: int, unlabeled: Tensor, clusters: Tensor, values: Mapping[str, float],
    num_held_out: int,
) -> dict[str, float]:  # fmt: skip
    """The signs and the score of a trained ``model``, in eval mode, by features ``unlabeled`` (N_u, D) and
    :func:`found_clusters` of them (N_u,), fractions 0-1 but for rows:
    `trust/{kmeans|neighbors}/agreement`; of features that tell no images apart
    `trust/features/{zero|constant|huge}`; among several new classes `trust/largest_class/share`; and where
    ``num_held_out`` labeled rows were not seen in training `trust/held_out/{acc|rows}` and `trust/score`.
    ``values``: the run's metrics so far.
    """
    outputs, num = _outputs(model, unlabeled, best_head), model.num_known + model.num_novel
    counts = metrics.confusion(outputs.numpy(), clusters.numpy(), num, num)
    found = {KMEANS: metrics.cluster_accuracy(counts), NEAR: neighbor_agreement(unlabeled, outputs)}
    signs = {FEATURES + word: 1.0 for word in (oddity(unlabeled),) if word}
    if model.num_novel > 1:
        signs[LARGEST] = float(outputs.bincount().max()) / len(outputs)
    right = values.get("test/known/task_agnostic_strict/acc/best")
    if right is not None:
        score = right * min(found.values())
        found |= {HELD_OUT: right, HELD_OUT_ROWS: float(num_held_out), SCORE: score}
    return found | signs


def neighbor_agreement(features: Tensor, outputs: Tensor) -> float:
    """Share of the 10 nearest rows, by the angle around the mean, that have a row's output, 0-1: 0 is what
    they would have by chance, or less. ``features`` (N, D), N >= 2, ``outputs`` (N,) int64.
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
    return torch.cat([logits.known[0], logits.novel[0, head]], dim=1).argmax(dim=1).cpu()
