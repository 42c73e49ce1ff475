"""A trained model and what it says of images: probabilities, how sure it is, and which
heads agree.

In reading order: scores of a batch; saving and loading ``model/``; scoring rows;
aligning heads.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from uno.config import Config, dump_yaml, override, parse_yaml, require_code
from uno.data.decode import decoded, ok_mask
from uno.data.files import Storage, parse_json
from uno.data.images import evenly_spaced
from uno.data.output import find_mapping
from uno.data.rows import Rows
from uno.encoder import changed_code, code_of, require_encoder
from uno.errors import StorageError, one_line
from uno.limits import MAX_STATE_BYTES
from uno.methods.registry import build_network
from uno.model import Logits, UnoModel, forward
from uno.results.classes import (
    OutputClass,
    dump_classes,
    first_classes,
    merge_outputs,
    parse_classes,
)
from uno.results.metrics import confusion, hungarian
from uno.runs import hardware
from uno.runtime import plan_of
from uno.state import with_prefix

log = logging.getLogger(__name__)
WEIGHTS = ("encoder.safetensors", "heads.safetensors")
MODEL_FILES = ("config.yaml", "classes.json", *WEIGHTS)
DAMAGE = (
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    OverflowError,
    SafetensorError,
)
"""What files of a model raise that are damaged, or of another one."""
BATCH_BYTES = 64 * 2**20  # decoded pixels of a batch
MAX_BATCH_ROWS = 256
SAMPLE_ROWS = 10_000  # to align heads and to suggest names
# of a run: what its evaluation has found, for the model that is saved then
ALIGNMENT_FILE = "alignment.json"

Decode = Callable[
    [Iterable[np.ndarray]], Iterator[tuple[np.ndarray, Tensor, Sequence[str | None]]]
]
"""Batches of row numbers (b,) -> (row numbers, uint8 (b, 3, S, S), why a row has no
pixels or None); or their features float32 (b, D) in the place of pixels.
"""


class Scores(NamedTuple):
    """What the model says of B images. ``probabilities`` has one column for each of
    the C outputs.
    """

    # (B,) int64, the most probable outcome: a class, or a dropped one
    class_index: Tensor
    probability: Tensor  # (B,) of that class
    margin: Tensor  # (B,) lead over the second class
    entropy: Tensor  # (B,) nats, of all outcomes
    # (B,) share of heads with the same class; NaN where the heads are not aligned
    head_agreement: Tensor
    # (B,) probability that it is of a known class, whichever; novel is the rest
    known_probability: Tensor
    probabilities: Tensor  # (B, C) float32
    features: Tensor  # (B, D) pooled features z


NUMBERS = Scores._fields[1:6]
"""Columns of the predictions that are one number a row."""


@dataclass(frozen=True, eq=False)
class Classifier:
    """A trained model with its classes, on one device.

    ``alignment`` int64 (H, K): the cluster of head h that corresponds to each cluster
    of the best head; None where it is not known. ``model_hash`` identifies weights and
    transform, not the names of classes.
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
        return self.config.data.stored_size

    @property
    def code(self) -> dict[str, str]:
        """Hashes of the modules of an encoder that is a callable of the user's."""
        return code_of(self.config.model.encoder, self.module.encoder).get("code", {})

    @property
    def batch_rows(self) -> int:
        """Images scored at once: a power of two, at most 256 and 64 MiB of pixels."""
        fit = max(1, BATCH_BYTES // (3 * self.size**2))
        return min(MAX_BATCH_ROWS, int(2 ** (fit.bit_length() - 1)))

    def to(self, device: torch.device | str) -> Classifier:
        """This model on ``device``; it moves, it is not copied."""
        return replace(self, module=self.module.to(device), device=torch.device(device))

    @torch.inference_mode()
    def score(self, images: Tensor) -> Scores:
        """Classify images uint8 (B, 3, S, S), B <= :attr:`batch_rows`, or their
        features (B, D); results are on the CPU.
        """
        logits, temperature = (
            forward(self.module, images, self.config),
            self.config.objective.temperature,
        )
        scores = score(
            logits, temperature, self.best_head, self.classes, self.alignment
        )
        return Scores(*(tensor.cpu() for tensor in scores))


def score(
    logits: Logits,
    temperature: float,
    best_head: int,
    classes: list[OutputClass],
    alignment: Tensor | None,
) -> Scores:
    """Cosines of B images under one view -> what ``best_head`` says, and how many heads
    say the same.

    All heads vote: agreement is at least 1 / H.
    """
    assert logits.novel is not None and logits.features is not None
    known = logits.known[0]  # (B, C_l)
    # (H, B, C)
    heads = outcomes(known, logits.novel[0], temperature, classes, alignment)
    votes = heads.argmax(dim=-1)  # (H, B)
    probabilities, class_index = heads[best_head], votes[best_head]
    first, second = probabilities.topk(2, dim=-1).values.unbind(dim=-1)
    entropy = torch.special.entr(probabilities).sum(dim=-1)
    agreement = (
        (votes == class_index).float().mean(dim=0)
        if alignment is not None
        else first * torch.nan
    )
    known_probability = probabilities[:, : known.shape[1]].sum(dim=-1)
    features = logits.features[0].float()
    return Scores(
        class_index,
        first,
        first - second,
        entropy,
        agreement,
        known_probability,
        probabilities,
        features,
    )


def outcomes(
    known: Tensor,
    novel: Tensor,
    temperature: float,
    classes: Sequence[OutputClass],
    alignment: Tensor | None,
) -> Tensor:
    """Cosines ``known`` (B, C_l), ``novel`` (H, B, K) -> probabilities (H, B, C): of
    every head the softmax over [known, novel] outputs at the training ``temperature``
    (Eq. 1), its clusters renumbered by ``alignment``, then merges.
    """
    if alignment is not None:
        own = alignment.to(novel.device, non_blocking=True)
        novel = novel.gather(2, own[:, None].expand(novel.shape))
    joint = (
        torch.cat([known.expand(len(novel), *known.shape), novel], dim=-1) / temperature
    )
    return merge_outputs(joint.softmax(dim=-1), classes)


def taken_for_novel(known: Tensor, novel: Tensor, best_head: int) -> Tensor:
    """bool (N,): rows that the best head takes for novel, by cosines (N, C_l) and (H,
    N, K); all of them where it takes none for that.
    """
    found = novel[best_head].amax(dim=-1) > known.amax(dim=-1)
    return found if found.any() else torch.ones_like(found)


def align_heads(novel: Tensor, best_head: int) -> Tensor:
    """(H, N, K) cosines of N unlabeled rows -> int64 (H, K): the cluster of every head
    that shares most rows with each of the best head's.
    """
    num, assigned = novel.shape[-1], novel.argmax(dim=-1).cpu().numpy()  # K, (H, N)
    pairs = [
        hungarian(confusion(assigned[best_head], own, num, num)) for own in assigned
    ]
    pairs[best_head] = np.arange(num)  # also where clusters are empty
    return torch.from_numpy(np.stack(pairs))


@torch.no_grad()
def align_features(
    model: UnoModel, config: Config, best_head: int, features: Tensor
) -> Tensor:
    """:func:`align_heads` by features (N, D) of unlabeled rows, of which at most
    ``SAMPLE_ROWS`` count.
    """
    chosen = features[torch.from_numpy(evenly_spaced(SAMPLE_ROWS, len(features)))]
    found = []
    for some in chosen.split(config.train.eval_batch_size):
        logits = model.heads(some.to(model.known.weight.device))
        assert logits.novel is not None
        found.append((logits.known[0].cpu(), logits.novel[0].cpu()))
    known, novel = (torch.cat(parts, dim=-2) for parts in zip(*found, strict=True))
    return _align(known, novel, best_head, config.data.setting)


def _align(known: Tensor, novel: Tensor, best_head: int, setting: str | None) -> Tensor:
    """Cosines known (N, C_l) and novel (H, N, K) of unlabeled rows ->
    :func:`align_heads`.
    """
    if setting == "gcd":  # rows of known classes say nothing of novel clusters
        novel = novel[:, taken_for_novel(known, novel, best_head)]
    return align_heads(novel, best_head)


def save_model(
    config: Config,
    storage: Storage,
    module: UnoModel,
    best_head: int,
    known: Sequence[str],
) -> Classifier:
    """Write ``model/``: encoder under torchvision's keys, heads, which the evaluation
    may have aligned, classes. Returns what it holds.
    """
    weights = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in module.state_dict().items()
    }
    heads = {k: v for k, v in weights.items() if not k.startswith("encoder.")}
    classes, code = (
        first_classes(known, module.num_novel),
        code_of(config.model.encoder, module.encoder),
    )
    facts = {"best_head": best_head, **({"encoder_code": code["code"]} if code else {})}
    aligned = find_mapping(storage, ALIGNMENT_FILE) or {}
    facts |= aligned if aligned.get("best_head") == best_head else {}
    files = {
        "encoder.safetensors": safetensors.torch.save(with_prefix(weights, "encoder.")),
        "heads.safetensors": safetensors.torch.save(
            heads, {"best_head": str(best_head)}
        ),
        "classes.json": dump_classes(json.dumps(facts).encode(), classes),
        "config.yaml": dump_yaml(config).encode(),
    }
    for name, data in files.items():
        storage.write(f"model/{name}", data)
    return build_classifier(files, module.known.weight.device, module)


def load_classifier(storage: Storage, device: torch.device | str = "cpu") -> Classifier:
    """The model of a run directory, or of a copy of its ``model/``; StorageError: none,
    or a damaged one.

    A model's files are data, but for one thing: an encoder that is
    ``package.module:callable`` is code, which is imported from this machine, never from
    the model's directory, and named in a warning before.
    """
    files = read_model_files(storage)
    model = build_classifier(files, device, foreign=storage.uri)
    then, name = (
        parse_json(files["classes.json"]).get("encoder_code"),
        model.config.model.encoder,
    )
    if changed := changed_code(name, then, model.code):
        log.warning("%s: its predictions may differ from those of the run", changed)
    return model


def model_folder(storage: Storage) -> str:
    """Where the model's files are: ``model/`` in a run, "" in a copy of it.
    StorageError: nowhere.
    """
    for folder in ("model/", ""):
        if storage.exists(f"{folder}classes.json"):
            return folder
    missing = "holds no trained model (no model/classes.json): run uno discover first"
    raise StorageError(f"{storage.uri} {missing}")


def read_model_files(storage: Storage) -> dict[str, bytes]:
    """Content of the files that make a model, by name."""
    folder = model_folder(storage)
    most = {name: None if name in WEIGHTS else MAX_STATE_BYTES for name in MODEL_FILES}
    return {name: storage.read(folder + name, most[name]) for name in MODEL_FILES}


def build_classifier(
    files: Mapping[str, bytes],
    device: torch.device | str = "cpu",
    module: UnoModel | None = None,
    foreign: str | None = None,
) -> Classifier:
    """A model from the content of its files, or around the ``module`` they were written
    from; StorageError: damaged, or they do not belong together. ConfigError: the
    encoder's library is missing, or its callable; ``foreign`` is for
    :func:`~uno.encoder.require_encoder`.
    """
    classes, facts = (
        parse_classes(files["classes.json"]),
        parse_json(files["classes.json"]),
    )
    try:
        tree = parse_yaml(files["config.yaml"], "its configuration")
    except ValueError as error:
        raise StorageError(
            f"model files are damaged: config.yaml: {one_line(error)}"
        ) from None
    require_code(tree, foreign)
    try:
        config = override(Config(), tree)
    except ValueError as error:
        raise StorageError(
            f"model files are damaged: config.yaml: {one_line(error)}"
        ) from None
    if module is None:
        require_encoder(config.model.encoder, foreign)
    try:
        module = _load_network(config, classes, files) if module is None else module
        best_head, alignment = int(facts["best_head"]), facts.get("alignment")
        if not 0 <= best_head < module.num_heads:
            raise ValueError(f"best head {best_head}")
        if alignment is not None:
            alignment = torch.tensor(alignment, dtype=torch.int64)
            clusters = torch.arange(module.num_novel).expand(module.num_heads, -1)
            if not torch.equal(alignment.sort(dim=-1).values, clusters):
                raise ValueError("alignment of other heads")
    except DAMAGE as error:
        raise StorageError(
            f"model files are damaged or do not belong together: {one_line(error)}"
        ) from None
    module = (
        module.to(device)
        .eval()
        .requires_grad_(False)
        .to(memory_format=torch.channels_last)
    )
    device = module.known.weight.device
    return Classifier(
        module,
        config,
        classes,
        best_head,
        alignment,
        _model_hash(config, files),
        device,
    )


def _load_network(
    config: Config, classes: Sequence[OutputClass], files: Mapping[str, bytes]
) -> UnoModel:
    num_known = sum(c.kind == "known" for c in classes)
    module = build_network(config, num_known, len(classes) - num_known, seed=0)
    encoder, heads = (safetensors.torch.load(files[name]) for name in WEIGHTS)
    module.load_state_dict({**{f"encoder.{k}": v for k, v in encoder.items()}, **heads})
    return module


def _model_hash(config: Config, files: Mapping[str, bytes]) -> str:
    """Of all that fixes probabilities: the transform, the temperature and the
    weights.
    """
    data, side = config.data, config.augment.large.size
    parts = [
        data.stored_size,
        side,
        data.mean,
        data.std,
        data.interpolation,
        config.objective.temperature,
    ]
    digest = hashlib.sha256(json.dumps(parts).encode())
    for name in WEIGHTS:
        digest.update(hashlib.sha256(files[name]).digest())
    return digest.hexdigest()[:16]


def decoder(model: Classifier, rows: Rows, threads: int | None = None) -> Decode:
    """The pixels of ``rows`` for ``model``, decoded ahead of it by ``threads``
    (default: one a core); or their features float32 (b, D), where a run has just
    computed them.
    """
    how = model.config.data.interpolation
    return partial(
        decoded, rows.images, size=model.size, threads=threads, interpolation=how
    )


@contextmanager
def at_speed(model: Classifier, config: Config, threads: int) -> Iterator[None]:
    """Inside, ``model`` classifies as ``compute.encoder_runtime`` of ``config`` says.
    ConfigError: the runtime is not installed.
    """
    vectors = model.config.model.takes_vectors
    plan = None if vectors else plan_of(config, model.device)
    encoder = model.module.encoder
    if plan is not None:
        model.module.encoder = hardware.at_speed(encoder, plan, threads)
    try:
        yield
    finally:
        model.module.encoder = encoder


def score_rows(
    model: Classifier, decode: Decode, batches: Iterable[np.ndarray]
) -> Iterator[tuple[np.ndarray, Sequence[str | None], Scores | None]]:
    """Batches of row numbers (b,) -> them, why a row could not be read, scores of
    the others or None.
    """
    for index, pixels, reasons in decode(batches):
        ok = ok_mask(reasons)
        yield (
            index,
            reasons,
            model.score(pixels[torch.from_numpy(ok)]) if ok.any() else None,
        )


def sample_logits(
    model: Classifier, decode: Decode, rows: np.ndarray, limit: int = SAMPLE_ROWS
) -> tuple[np.ndarray, Logits] | None:
    """Of at most ``limit`` of ``rows`` int64 (N,), evenly spaced: the numbers of those
    that can be read, and their :class:`Logits` on the CPU; None where there are none.
    """
    chosen, size = rows[evenly_spaced(limit, len(rows))], model.batch_rows
    indices, parts = [], []
    for index, pixels, reasons in decode(
        chosen[i : i + size] for i in range(0, len(chosen), size)
    ):
        ok = ok_mask(reasons)
        if ok.any():
            logits = forward(model.module, pixels[torch.from_numpy(ok)], model.config)
            indices.append(index[ok])
            parts.append(
                {
                    k: t.float().cpu()
                    for k, t in logits._asdict().items()
                    if t is not None
                }
            )
    if not parts:
        return None
    joined = {
        name: torch.cat([part[name] for part in parts], dim=-2) for name in parts[0]
    }
    return np.concatenate(indices), Logits(**{"novel": None, "over": None, **joined})  # type: ignore[arg-type]


def with_alignment(
    model: Classifier, storage: Storage, decode: Decode, unlabeled: np.ndarray
) -> Classifier:
    """``model``, its heads aligned on the ``unlabeled`` training rows int64 (N_u,), as
    ``classes.json`` then says; as it is where it has been done, or no row can be read.
    """
    sample = (
        sample_logits(model, decode, unlabeled) if model.alignment is None else None
    )
    if sample is None or sample[1].novel is None:
        return model
    known, novel = sample[1].known[0], sample[1].novel[0]
    alignment = _align(known, novel, model.best_head, model.config.data.setting)
    name = model_folder(storage) + "classes.json"
    facts = parse_json(storage.read(name)) | {"alignment": alignment.tolist()}
    storage.write(name, json.dumps(facts, indent=1).encode())
    return replace(model, alignment=alignment)
