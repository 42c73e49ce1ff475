"""From a run's ``model/`` to a class for every image: probabilities, how sure, and which heads agree.

``model/`` is all it takes: no checkpoint, no training data. ``Classifier`` scores pixels, ``predict_rows``
runs it over a whole source in this process, with decoding threads ahead of the model;
``pipelines.predict`` does the same on Ray.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
import yaml
from torch import Tensor

from uno.config import Config, dump_yaml, override
from uno.data.decode import decoded, readable
from uno.data.files import Storage
from uno.data.rows import Rows
from uno.errors import StorageError
from uno.methods import build_network
from uno.model import UnoModel
from uno.results.classes import OutputClass, parse_classes, route
from uno.results.forward import forward
from uno.results.metrics import hungarian
from uno.results.predictions import PredictionWriter, Summary, result_table

MODEL_FILES = ("config.yaml", "classes.json", "encoder.safetensors", "heads.safetensors")
BATCH_BYTES = 64 * 2**20  # decoded pixels of a batch
MAX_BATCH_ROWS = 256
BATCHES_AHEAD = 2  # decoded while the model works
SAMPLE_ROWS = 10_000  # to align heads and to suggest names


class Scores(NamedTuple):
    """What the model says of B images. ``probabilities`` has one column for each of the C outputs."""

    class_index: Tensor  # (B,) int64, the most probable class
    probability: Tensor  # (B,) of that class
    margin: Tensor  # (B,) lead over the second class
    entropy: Tensor  # (B,) nats, of all classes; a dropped class counts as an outcome
    head_agreement: Tensor  # (B,) share of heads with the same class; NaN where the heads are not aligned
    known_mass: Tensor  # (B,) probability of all known classes
    probabilities: Tensor  # (B, C) float32
    features: Tensor  # (B, D) pooled features z


@dataclass(frozen=True, eq=False)
class Classifier:
    """A trained model with its classes, on one device.

    ``alignment`` int64 (H, K): the cluster of head h that corresponds to each cluster of the best head; None
    where it is not known. ``model_hash`` identifies weights and transform, not the names of classes.
    """

    module: UnoModel
    config: Config
    classes: list[OutputClass]
    best_head: int
    alignment: Tensor | None
    model_hash: str
    device: torch.device

    @property
    def size(self) -> int:
        """Side S of the images it takes, in pixels."""
        return self.config.data.store_size

    @property
    def batch_rows(self) -> int:
        """Images scored at once: at most 256, and 64 MiB of pixels."""
        return max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // (3 * self.size**2)))

    def to(self, device: torch.device | str) -> Classifier:
        """This model on ``device``; it moves, it is not copied."""
        place = torch.device(device)
        return replace(self, module=self.module.to(place), device=place)

    @torch.inference_mode()
    def score(self, images: Tensor) -> Scores:
        """Classify images uint8 (B, 3, S, S), B <= :attr:`batch_rows`; results are on the CPU."""
        known, novel, features = self.cosines(images)
        results = score(
            known, novel, self.config.objective.temperature, self.best_head, self.classes, self.alignment
        )
        return Scores(*(tensor.cpu() for tensor in (*results, features)))

    def cosines(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Images uint8 (B, 3, S, S) -> known (B, C_l), novel (H, B, K) and features (B, D), on the device."""
        logits = forward(self.module, images, self.config)
        assert logits.novel is not None and logits.features is not None
        return logits.known[0], logits.novel[0], logits.features[0].float()


def score(
    known: Tensor,
    novel: Tensor,
    temperature: float,
    best_head: int,
    classes: Sequence[OutputClass],
    alignment: Tensor | None,
) -> tuple[Tensor, ...]:
    """Cosines of B images -> the fields of :class:`Scores` up to ``probabilities``.

    The probabilities are the softmax over [known, novel] outputs of the best head at the training temperature
    (Eq. 1), with merged classes added up and dropped ones left out. Every other head votes the same way, its
    clusters renumbered by ``alignment``; the best head counts, so agreement is at least 1 / H.

    Args:
        known: (B, C_l) cosines.
        novel: (H, B, K) cosines of all cluster heads.
        temperature: tau.
        best_head: the head whose probabilities are reported.
        classes: C = C_l + K outputs.
        alignment: (H, K) as in :class:`Classifier`; None: agreement is NaN.
    """
    num_heads, num_rows, num_clusters = novel.shape
    if alignment is None:
        heads, best = novel[best_head : best_head + 1], 0
    else:
        order = alignment.to(novel.device)[:, None, :].expand(num_heads, num_rows, num_clusters)
        heads, best = novel.gather(2, order), best_head
    joint = torch.cat([known.expand(len(heads), -1, -1), heads], dim=-1) / temperature
    routed = route(joint.softmax(dim=-1), classes)  # (H, B, C)
    votes = routed.argmax(dim=-1)  # (H, B)
    probabilities, class_index = routed[best], votes[best]
    top = probabilities.topk(2, dim=-1).values
    rest = (1 - probabilities.sum(dim=-1)).clamp(min=0)  # of dropped classes
    if all(c.into is not None for c in classes):
        rest = torch.zeros_like(rest)
    entropy = -(
        torch.special.xlogy(probabilities, probabilities).sum(dim=-1) + torch.special.xlogy(rest, rest)
    )
    agreement = (votes == class_index).float().mean(dim=0)
    if alignment is None:
        agreement = torch.full_like(agreement, torch.nan)
    known_mass = probabilities[:, : known.shape[1]].sum(dim=-1)
    margin = top[:, 0] - top[:, 1]
    return class_index, top[:, 0], margin, entropy, agreement, known_mass, probabilities


def align_heads(novel: Tensor, best_head: int) -> Tensor:
    """Which clusters of the heads are the same: (H, N, K) cosines of N unlabeled rows -> int64 (H, K).

    Head h and the best head put every row into a cluster each; the Hungarian method pairs the clusters so
    that most rows fall into paired ones. Row ``best_head`` of the result is 0..K-1.
    """
    num_heads, _, num_clusters = novel.shape
    assigned = novel.argmax(dim=-1).cpu()  # (H, N)
    cells = assigned[best_head] * num_clusters + assigned  # (H, N)
    counts = torch.zeros(num_heads, num_clusters**2, dtype=torch.int64)
    counts.scatter_add_(1, cells, torch.ones_like(cells))
    squares = counts.view(num_heads, num_clusters, num_clusters).numpy()
    alignment = torch.from_numpy(np.stack([hungarian(square) for square in squares]))
    alignment[best_head] = torch.arange(num_clusters)  # also where clusters are empty
    return alignment


# ----------------------------------------------------------------------------------------- saving and loading
def save_model(
    config: Config, storage: Storage, module: UnoModel, best_head: int, known: Sequence[str]
) -> Classifier:
    """Write ``model/``: encoder under torchvision's keys, heads, classes. Returns what it holds."""
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    encoder = {k.removeprefix("encoder."): v for k, v in weights.items() if k.startswith("encoder.")}
    heads = {k: v for k, v in weights.items() if not k.startswith("encoder.")}
    classes = [{"index": i, "name": name, "kind": "known"} for i, name in enumerate(known)]
    classes += [
        {"index": len(known) + i, "name": f"novel-{i + 1}", "kind": "novel"} for i in range(module.num_novel)
    ]
    files = {
        "encoder.safetensors": safetensors.torch.save(encoder),
        "heads.safetensors": safetensors.torch.save(heads, {"best_head": str(best_head)}),
        "classes.json": json.dumps({"best_head": best_head, "classes": classes}, indent=1).encode(),
        "config.yaml": dump_yaml(config).encode(),
    }
    for name, data in files.items():
        storage.write(f"model/{name}", data)
    return _classifier(files, module, best_head, None, config)


def load_classifier(storage: Storage, device: torch.device | str = "cpu") -> Classifier:
    """The model of a run directory, or of a copy of its ``model/``.

    Raises:
        StorageError: there is none, or a file of it is damaged.
    """
    return build_classifier(read_model_files(storage), device)


def model_folder(storage: Storage) -> str:
    """Where the model's files are: ``model/`` in a run, "" in a copy of that folder.

    Raises:
        StorageError: there is no model.
    """
    for folder in ("model/", ""):
        if storage.exists(f"{folder}classes.json"):
            return folder
    raise StorageError(
        f"{storage.uri} holds no trained model (no model/classes.json): run uno discover first"
    )


def read_model_files(storage: Storage) -> dict[str, bytes]:
    """Content of the files that make a model, by name. Raises StorageError as :func:`load_classifier`."""
    folder = model_folder(storage)
    return {name: storage.read(folder + name) for name in MODEL_FILES}


def build_classifier(files: Mapping[str, bytes], device: torch.device | str = "cpu") -> Classifier:
    """A model from the content of its files.

    Raises:
        StorageError: one of them is damaged, or they do not belong together.
    """
    classes = parse_classes(files["classes.json"])
    num_known = sum(c.kind == "known" for c in classes)
    try:
        tree = yaml.safe_load(files["config.yaml"])
        config = override(Config(), tree)
        facts = json.loads(files["classes.json"])
        best_head, alignment = int(facts["best_head"]), facts.get("alignment")
        encoder = safetensors.torch.load(files["encoder.safetensors"])
        heads = safetensors.torch.load(files["heads.safetensors"])
        module = build_network(config, num_known, len(classes) - num_known, seed=0)
        module.load_state_dict({**{f"encoder.{k}": v for k, v in encoder.items()}, **heads})
        shape = (module.num_heads, module.num_novel)
        aligned = None if alignment is None else torch.tensor(alignment, dtype=torch.int64).view(shape)
        if not 0 <= best_head < module.num_heads:
            raise ValueError(f"best head {best_head}")
        if aligned is not None and not bool(((aligned >= 0) & (aligned < module.num_novel)).all()):
            raise ValueError("alignment out of range")
    except (
        RuntimeError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError,
        safetensors.SafetensorError,
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split())[:160]
        raise StorageError(f"the model's files are damaged or do not belong together: {reason}") from None
    return _classifier(files, module.to(device), best_head, aligned, config)


def _classifier(
    files: Mapping[str, bytes], module: UnoModel, best_head: int, alignment: Tensor | None, config: Config
) -> Classifier:
    """``model_hash`` is 16 hex digits over weights, transform and temperature."""
    data, side = config.data, config.augment.large.size
    transform = [data.store_size, side, data.mean, data.std, config.objective.temperature]
    digest = hashlib.sha256(json.dumps(transform).encode())
    for name in ("encoder.safetensors", "heads.safetensors"):
        digest.update(hashlib.sha256(files[name]).digest())
    module = module.eval().requires_grad_(False).to(memory_format=torch.channels_last)
    classes, device = parse_classes(files["classes.json"]), module.known.weight.device
    return Classifier(module, config, classes, best_head, alignment, digest.hexdigest()[:16], device)


def save_alignment(storage: Storage, alignment: Tensor) -> None:
    """Keep the result of :func:`align_heads` in the run's ``classes.json``."""
    name = model_folder(storage) + "classes.json"
    facts = json.loads(storage.read(name)) | {"alignment": alignment.tolist()}
    storage.write(name, json.dumps(facts, indent=1).encode())


def with_alignment(model: Classifier, storage: Storage, unlabeled: Rows, threads: int | None) -> Classifier:
    """``model`` with its heads aligned on at most 10,000 rows, evenly spaced, and saved; as it is if it has
    been done.

    Args:
        model: to align.
        storage: of its run.
        unlabeled: the unlabeled training rows.
        threads: that decode.
    """
    if model.alignment is not None:
        return model
    parts = [novel.cpu() for _, novel, _ in sample_cosines(model, unlabeled, threads)]
    if not parts:
        return model
    alignment = align_heads(torch.cat(parts, dim=1), model.best_head)
    save_alignment(storage, alignment)
    return replace(model, alignment=alignment)


def sample_cosines(
    model: Classifier, rows: Rows, threads: int | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """:meth:`Classifier.cosines` of at most 10,000 rows, evenly spaced, in batches of readable ones."""
    num = min(SAMPLE_ROWS, len(rows))
    index = np.arange(num) * len(rows) // max(num, 1)
    batches = (index[i : i + model.batch_rows] for i in range(0, num, model.batch_rows))
    for _, pixels, reasons in decoded(rows.images, batches, model.size, threads):
        ok = readable(reasons)
        if ok.any():
            yield model.cosines(pixels[torch.from_numpy(ok)])


# --------------------------------------------------------------------------------------------------- the loop
def predict_rows(
    model: Classifier,
    rows: Rows,
    writer: PredictionWriter,
    threads: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Classify all rows that ``writer`` still lacks, here, and finish the table.

    Memory is that of a few batches and one shard, however many rows there are.

    Args:
        model: what classifies.
        rows: N rows.
        writer: of the same rows; says what is missing and whether embeddings are wanted.
        threads: that decode (default: as many as there are cores).
        on_progress: called after every batch with (rows done, N).
    """
    batches = writer.batches(model.batch_rows)
    for index, pixels, reasons in decoded(rows.images, batches, model.size, threads):
        ok = readable(reasons)
        scores = model.score(pixels[torch.from_numpy(ok)]) if ok.any() else None
        writer.add(result_table(index, reasons, scores, writer.embedding))
        on_progress(writer.num_done, len(rows))
    return writer.finish()
