"""Save, load and apply a trained model as a classifier, and align its cluster heads.

Heads are aligned if it is known which of their clusters are the same class. The order
is: scores of a batch, alignment of heads, saving and loading ``model/``, and scoring
rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from uno.config import Config, dump_yaml, override, parse_yaml, require_code
from uno.data.decode import Decoding, decoded, ok_mask
from uno.data.files import Storage
from uno.data.images import evenly_spaced
from uno.data.output import read_mapping
from uno.data.rows import Rows
from uno.encoders.build import changed_code, code_of, require_encoder
from uno.encoders.runtimes import Runtime, runtime_precision
from uno.errors import StorageError, one_line
from uno.limits import MAX_STATE_BYTES
from uno.model import Logits, UnoModel, build_network, forward
from uno.results.classes import (
    ModelClasses,
    OutputClass,
    first_classes,
    merge_outputs,
)
from uno.results.metrics import confusion, hungarian
from uno.steps import with_prefix

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
"""Errors that damaged or mismatched files of a model raise when they are loaded."""
BATCH_BYTES = 64 * 2**20  # bytes of the decoded pixels of a batch
MAX_BATCH_ROWS = 256
SAMPLE_ROWS = 10_000  # largest number of rows to align heads
# the alignment of the heads that the evaluation of a run computed, for save_model
ALIGNMENT_FILE = "alignment.json"

Decode = Callable[
    [Iterable[np.ndarray]], Iterator[tuple[np.ndarray, Tensor, Sequence[str | None]]]
]
"""Decode batches of rows: batches of row numbers (b,) -> tuples for each batch.

A tuple holds the row numbers (b,), the pixels uint8 (b, 3, S, S), and for each row why
it could not be read, or None. If a run has just computed the features of its frozen
encoder, they stand in the place of the pixels, float32 (b, D).
"""


class Scores(NamedTuple):
    """The predicted classes of B images, with scores.

    All scores are of probabilities in which those of merged classes were added to those
    of their targets.

    Attributes:
        class_index: The most probable class, int64 (B,). It may be a dropped class.
        probability: Probability of this class, (B,).
        margin: Difference to the probability of the second most probable class, (B,).
        entropy: Entropy of the probabilities in nats, (B,).
        head_agreement: Share of the heads that predict this class, (B,); NaN if it is
            not known which clusters of different heads are the same class.
        known_probability: Sum of the probabilities of the known classes, (B,).
        probabilities: Probabilities of the C outputs after merges, float32 (B, C).
        features: Features of the encoder, float32 (B, D).
    """

    class_index: Tensor
    probability: Tensor
    margin: Tensor
    entropy: Tensor
    head_agreement: Tensor
    known_probability: Tensor
    probabilities: Tensor
    features: Tensor


NUMBERS = Scores._fields[1:6]
"""Names of the scores that are one number for each row, as columns of predictions."""


def rows_that_fit(side: int) -> int:
    """Return how many decoded images to hold at once: at most 64 MiB of pixels.

    It is the largest power of two for which that many RGB images, with a byte for each
    value, have at most 64 MiB. It is 1 if a single image has more.

    Args:
        side: The side of the square images in pixels.
    """
    num_rows = max(1, BATCH_BYTES // (3 * side**2))
    return 1 << (num_rows.bit_length() - 1)


@dataclass(frozen=True, eq=False)
class Classifier:
    """A trained model with its classes, on one device.

    Attributes:
        module: The network, in eval mode.
        config: The configuration of the run that trained it.
        classes: The output classes, by index.
        best_head: The index of the head that predicts, the one with the lowest training
            loss.
        alignment: Which clusters of different heads are the same class: for each of the
            H heads and each of the K clusters of the best head the corresponding
            cluster, int64 (H, K); None if it is not known.
        model_hash: Hash of the weights, the image transform and the temperature (the
            divisor of the cosines in the softmax). The names of the classes do not
            change it.
    """

    module: UnoModel
    config: Config
    classes: list[OutputClass]
    best_head: int
    alignment: Tensor | None
    model_hash: str

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return self.module.known.weight.device

    @property
    def size(self) -> int:
        """The side S of the images that the model takes, in pixels."""
        return self.config.data.stored_size

    @property
    def code(self) -> dict[str, str]:
        """SHA-256 of the Python modules of an encoder that is the user's callable.

        They are the module of the callable and those that define the classes of the
        encoder's layers, except for PyTorch's. The keys are the names of the modules.
        The mapping is empty for encoders of this package and of libraries.
        """
        return code_of(self.config.model.encoder, self.module.encoder).get("code", {})

    @property
    def batch_rows(self) -> int:
        """The number of images to score at once.

        It is the largest power of two for which a batch has at most 256 images and 64
        MiB of pixels, but at least 1.
        """
        return min(MAX_BATCH_ROWS, rows_that_fit(self.size))

    def to(self, device: torch.device | str) -> Classifier:
        """Move the network to a device in place, and return this classifier.

        Args:
            device: The device, such as "cpu" or "cuda".
        """
        self.module.to(device)
        return self

    @torch.inference_mode()
    def score(self, images: Tensor) -> Scores:
        """Classify a batch of images.

        Args:
            images: B >= 1 images uint8 (B, 3, S, S), with sides of S = :attr:`size`
                pixels and B at most :attr:`batch_rows`; or the D features of each
                image, as the encoder computes them, (B, D). They may be on any device.

        Returns:
            For each image the predicted class, its probability and other scores, the
            probabilities of all classes after merges, and the features, on the CPU. All
            are of the best head, except for ``head_agreement``, in which all heads
            vote.
        """
        logits = forward(self.module, images, self.config)
        temperature = self.config.objective.temperature
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
    """Compute the scores of B images from the logits of their center crops.

    Args:
        logits: The cosines of the images with the prototypes, and their features. Only
            the first view (index 0) is read.
        temperature: The divisor of the cosines in the softmax.
        best_head: The index of the head that predicts.
        classes: The output classes, which may be merged.
        alignment: For each of H heads and each of K clusters of the best head the
            corresponding cluster, int64 (H, K). None if it is not known;
            ``head_agreement`` is NaN then.

    Returns:
        The scores, on the device of the logits. All H heads vote in ``head_agreement``,
        so it is at least 1 / H; all other scores are of the best head.
    """
    assert logits.novel is not None
    known = logits.known[0]  # (B, C_l)
    # (H, B, C)
    heads = class_probabilities(known, logits.novel[0], temperature, classes, alignment)
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


def class_probabilities(
    known: Tensor,
    novel: Tensor,
    temperature: float,
    classes: Sequence[OutputClass],
    alignment: Tensor | None,
) -> Tensor:
    """Compute the probabilities of all outputs for every head (paper Eq. 1).

    Each head has a softmax over its known and novel outputs. Then the probabilities of
    merged classes are added.

    Args:
        known: Cosines of B images with the prototypes of C_l known classes, (B, C_l).
        novel: Cosines with the K novel prototypes of each of H heads, (H, B, K).
        temperature: The divisor of the cosines, the same as in training.
        classes: The C = C_l + K output classes, which may be merged.
        alignment: For each head and each cluster of the best head (the one with the
            lowest training loss) the corresponding cluster, int64 (H, K). The clusters
            of each head are then numbered as those of the best head. None keeps the
            numbers of each head.

    Returns:
        Probabilities (H, B, C), known classes first, which sum to 1 over the classes.
        A merged class has 0, and a dropped class keeps its probability.
    """
    if alignment is not None:
        own = alignment.to(novel.device, non_blocking=True)
        novel = novel.gather(2, own[:, None].expand(novel.shape))
    joint = (
        torch.cat([known.expand(len(novel), *known.shape), novel], dim=-1) / temperature
    )
    return merge_outputs(joint.softmax(dim=-1), classes)


def predicted_novel(known: Tensor, novel: Tensor, best_head: int) -> Tensor:
    """Return which rows the best head assigns to a novel output.

    Args:
        known: Cosines of N rows with the prototypes of C_l known classes, (N, C_l).
        novel: Cosines with the K novel prototypes of each of H heads, (H, N, K).
        best_head: The index of the best head, the one with the lowest training loss.

    Returns:
        A mask, bool (N,), which is False for a tie. It is True for all rows if no row
        is assigned to a novel output.
    """
    found = novel[best_head].amax(dim=-1) > known.amax(dim=-1)
    return found if found.any() else torch.ones_like(found)


def align_heads(novel: Tensor, best_head: int) -> Tensor:
    """Match the clusters of every head to those of the best head.

    Args:
        novel: Cosines of N unlabeled rows with the K novel prototypes of each of H
            heads, (H, N, K).
        best_head: The index of the best head, the one with the lowest training loss.

    Returns:
        For each head and each cluster of the best head the cluster matched to it, int64
        (H, K) on the CPU. The matching is one to one and shares the most rows. For the
        best head each cluster is matched to itself.
    """
    num, assigned = novel.shape[-1], novel.argmax(dim=-1).cpu().numpy()  # K, (H, N)
    pairs = [
        hungarian(confusion(assigned[best_head], own, num, num)) for own in assigned
    ]
    pairs[best_head] = np.arange(num)  # even if clusters are empty
    return torch.from_numpy(np.stack(pairs))


@torch.no_grad()
def align_features(
    model: UnoModel, config: Config, best_head: int, features: Tensor
) -> Tensor:
    """Match the clusters of every head to those of the best head, by features of rows.

    Args:
        model: The network, in eval mode.
        config: The configuration of the run. In the GCD setting only rows that the best
            head assigns to a novel output count, or all if there is no such row.
        best_head: The index of the best head, the one with the lowest training loss.
        features: The encoder's features of N >= 1 unlabeled rows, D numbers each, (N,
            D). At most ``SAMPLE_ROWS`` (10,000) of them, evenly spaced, count.

    Returns:
        For each head and each cluster of the best head the cluster matched to it, int64
        (H, K) on the CPU, see :func:`align_heads`.
    """
    chosen = features[torch.from_numpy(evenly_spaced(SAMPLE_ROWS, len(features)))]
    found = []
    for some in chosen.split(config.train.eval_batch_size):
        logits = model.heads(some.to(model.known.weight.device))
        assert logits.novel is not None
        found.append((logits.known[0].cpu(), logits.novel[0].cpu()))
    known, novel = (torch.cat(parts, dim=-2) for parts in zip(*found, strict=True))
    if config.data.setting == "gcd":  # rows of known classes have no novel cluster
        novel = novel[:, predicted_novel(known, novel, best_head)]
    return align_heads(novel, best_head)


def save_model(
    config: Config,
    storage: Storage,
    module: UnoModel,
    best_head: int,
    known: Sequence[str],
) -> Classifier:
    """Write the files of a trained model to ``model/``, and replace existing ones.

    They are the configuration, the weights of the encoder under the keys of its
    library, the weights of the heads, and the classes with their first names. Names,
    merges and drops of an existing ``classes.json`` are lost. If the evaluation has
    matched the clusters of the heads to those of ``best_head`` (``alignment.json`` in
    the run directory), ``classes.json`` holds this alignment, otherwise none.

    Args:
        config: The configuration of the run.
        storage: The run directory.
        module: The trained network. It is changed to eval mode, without gradients, and
            to the memory format channels_last.
        best_head: The index of the head with the lowest training cluster loss.
        known: The names of the known classes, by index.

    Returns:
        The model that the files describe, around ``module``.

    Raises:
        StorageError: A file cannot be written, or ``alignment.json`` cannot be read.
    """
    weights = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in module.state_dict().items()
    }
    heads = {k: v for k, v in weights.items() if not k.startswith("encoder.")}
    classes = first_classes(known, module.num_novel)
    code = code_of(config.model.encoder, module.encoder)
    aligned = read_mapping(storage, ALIGNMENT_FILE) or {}
    is_of_head = aligned.get("best_head") == best_head
    stored = ModelClasses(
        classes=classes,
        best_head=best_head,
        alignment=aligned["alignment"] if is_of_head else None,
        encoder_code=code.get("code"),
    )
    files = {
        "encoder.safetensors": safetensors.torch.save(with_prefix(weights, "encoder.")),
        "heads.safetensors": safetensors.torch.save(
            heads, {"best_head": str(best_head)}
        ),
        "classes.json": stored.dump(),
        "config.yaml": dump_yaml(config).encode(),
    }
    for name, data in files.items():
        storage.write(f"model/{name}", data)
    return build_classifier(files, module.known.weight.device, module)


def load_classifier(storage: Storage, device: torch.device | str = "cpu") -> Classifier:
    """Load the model of a run directory, or of a copy of its folder ``model/``.

    The files are read as data only, but they can name code: an encoder
    ``package.module:callable``, a discovery method ``package.module:METHOD``, and, if
    the pretext task has epochs, a pretext task ``package.module:PRETEXT``. Such code is
    imported from this machine, never from the directory of the model, and a logged
    warning names it before. If the code of such an encoder differs from that of the
    run, another warning is logged.

    Args:
        storage: The directory.
        device: The device of the model.

    Returns:
        The model, with its network in eval mode and without gradients.

    Raises:
        StorageError: There is no model, its files are damaged, or the code of a pretext
            task that has epochs cannot be imported.
        ConfigError: The library or the callable of the encoder or the method is
            missing, or code that the files name lies in the directory.
    """
    files = read_model_files(storage)
    model = build_classifier(files, device, foreign=storage.uri)
    code = ModelClasses.parse(files["classes.json"]).encoder_code
    if changed := changed_code(model.config.model.encoder, code, model.code):
        log.warning("%s: its predictions may differ from those of the run", changed)
    return model


def model_folder(storage: Storage) -> str:
    """Return the folder of the model's files: "model/" in a run, "" in a copy of it.

    Args:
        storage: A run directory, or a copy of its folder ``model/``.

    Raises:
        StorageError: There is no ``classes.json`` in either place.
    """
    for folder in ("model/", ""):
        if storage.exists(f"{folder}classes.json"):
            return folder
    missing = "holds no trained model (no model/classes.json): run uno discover first"
    raise StorageError(f"{storage.uri} {missing}")


def read_model_files(storage: Storage) -> dict[str, bytes]:
    """Read the files that make a model, such as its weights and its classes.

    Args:
        storage: A run directory, or a copy of its folder ``model/``.

    Returns:
        The contents of :data:`MODEL_FILES` by name.

    Raises:
        StorageError: There is no model, a file is missing or cannot be read, or
            ``config.yaml`` or ``classes.json`` is too large.
    """
    folder = model_folder(storage)
    most = {name: None if name in WEIGHTS else MAX_STATE_BYTES for name in MODEL_FILES}
    return {name: storage.read(folder + name, most[name]) for name in MODEL_FILES}


def build_classifier(
    files: Mapping[str, bytes],
    device: torch.device | str = "cpu",
    module: UnoModel | None = None,
    foreign: str | None = None,
) -> Classifier:
    """Build a classifier from the contents of its files.

    Args:
        files: The contents of :data:`MODEL_FILES` by name, as :func:`read_model_files`
            returns them.
        device: The device of the model.
        module: The network that the files were written from. It is changed: it is moved
            to ``device``, and gets eval mode, no gradients and the memory format
            channels_last. None builds a network and loads the weights of the files into
            it.
        foreign: The URI of a directory that other people may have written. Code that
            the model names (an encoder, method or pretext task ``package.module:NAME``)
            must not lie in this directory. None if the files come from this program's
            own run.

    Returns:
        The classifier, with its network in eval mode and without gradients.

    Raises:
        StorageError: The files are damaged or do not belong together, or the code of a
            pretext task that has epochs cannot be imported.
        ConfigError: The method cannot be imported; code that the model names lies in
            ``foreign``; or the library or the callable of the encoder is missing.
    """
    stored = ModelClasses.parse(files["classes.json"])
    classes, best_head = stored.classes, stored.best_head
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
        alignment = None
        if not 0 <= best_head < module.num_heads:
            raise ValueError(f"best head {best_head}")
        if stored.alignment is not None:
            alignment = torch.tensor(stored.alignment, dtype=torch.int64)
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
    return Classifier(
        module, config, classes, best_head, alignment, _model_hash(config, files)
    )


def _load_network(
    config: Config, classes: Sequence[OutputClass], files: Mapping[str, bytes]
) -> UnoModel:
    """Build the network of a configuration, and load the weights of the files.

    Args:
        config: The configuration of the model.
        classes: The output classes, which decide the numbers of known and novel
            classes.
        files: The contents of the model's files, by name.

    Returns:
        The network on the CPU.

    Raises:
        Exception: One of :data:`DAMAGE`, if the weights are damaged or do not fit.
    """
    num_known = sum(c.kind == "known" for c in classes)
    module = build_network(config, num_known, len(classes) - num_known, seed=0)
    encoder, heads = (safetensors.torch.load(files[name]) for name in WEIGHTS)
    module.load_state_dict({**{f"encoder.{k}": v for k, v in encoder.items()}, **heads})
    return module


def _model_hash(config: Config, files: Mapping[str, bytes]) -> str:
    """Return a hash of the weights, the image transform and the temperature of a model.

    The files of the weights count whole, with the index of the best head in the
    metadata of ``heads.safetensors``. Names, merges and drops of the classes, and the
    alignment of the heads, do not change the hash.

    Args:
        config: The configuration of the model.
        files: The contents of the model's files, by name.

    Returns:
        16 hexadecimal digits.
    """
    data, side = config.data, config.augment.large.size
    parts = [
        data.stored_size,
        side,
        data.mean,
        data.std,
        *Decoding.of(data),
        config.objective.temperature,
    ]
    digest = hashlib.sha256(json.dumps(parts).encode())
    for name in WEIGHTS:
        digest.update(hashlib.sha256(files[name]).digest())
    return digest.hexdigest()[:16]


def decoder(model: Classifier, rows: Rows, threads: int | None = None) -> Decode:
    """Return a function that decodes the images of rows for a model, in threads.

    Decoding is up to two batches ahead of the caller that takes the results.

    Args:
        model: The model, which decides the size of the images.
        rows: The rows with their images.
        threads: The number of threads; None for one for each core that this process may
            use.

    Returns:
        A function that takes batches of row numbers, and for each yields the row
        numbers, the pixels, and why each row could not be read, as described at
        :data:`Decode`. In the place of pixels it yields features if the rows are
        embeddings, or if a run has just computed the features of its frozen encoder.
    """
    how = Decoding.of(model.config.data)
    return partial(decoded, rows.images, size=model.size, threads=threads, how=how)


@contextmanager
def accelerated_encoder(
    model: Classifier, config: Config, threads: int
) -> Iterator[None]:
    """Run the encoder of a model on a faster runtime inside the block.

    The runtime is ``compute.encoder_runtime`` of ``config``. The encoder is put back at
    the end. The model stays unchanged if it takes vectors, is not on the CPU, or the
    configuration names PyTorch.

    Args:
        model: The model. Its encoder is replaced inside the block.
        config: The configuration, which names the runtime.
        threads: The number of threads of the runtime.

    Raises:
        ConfigError: The configuration asks for OpenVINO, which is not installed, and
            the model takes images, on whatever device it is. In the block the first
            call of the encoder raises a ConfigError if OpenVINO cannot compute it, or
            computes other features than PyTorch.
    """
    vectors = model.config.model.takes_vectors
    precision = None if vectors else runtime_precision(config, model.device)
    encoder = model.module.encoder
    if precision is not None:
        model.module.encoder = Runtime(encoder, precision, threads)
    try:
        yield
    finally:
        model.module.encoder = encoder


def score_rows(
    model: Classifier, decode: Decode, batches: Iterable[np.ndarray]
) -> Iterator[tuple[np.ndarray, Sequence[str | None], Scores | None]]:
    """Classify batches of rows, and yield the scores of one batch after the other.

    A batch is classified when the caller takes its item. ``decode`` may read and decode
    later batches ahead.

    Args:
        model: The model.
        decode: Takes batches of row numbers; yields for each batch the row numbers, the
            pixels or features, and why each row could not be read, or None, as the
            function that :func:`decoder` returns.
        batches: Row numbers of each batch, int64 (b,), with b at most
            ``model.batch_rows``.

    Yields:
        The row numbers (b,); for each row why it could not be read, or None; and the
        scores of the readable rows in order, None if there are none.

    Raises:
        StorageError: An image's file cannot be read now, but perhaps later.
        ConfigError: A file that holds many images, such as a tar shard, cannot be read.
    """
    for index, pixels, reasons in decode(batches):
        ok = ok_mask(reasons)
        yield (
            index,
            reasons,
            model.score(pixels[torch.from_numpy(ok)]) if ok.any() else None,
        )


def sample_logits(
    model: Classifier, decode: Decode, rows: np.ndarray, limit: int
) -> tuple[np.ndarray, Logits] | None:
    """Compute the logits of an evenly spaced sample of rows.

    Args:
        model: The model.
        decode: Takes batches of row numbers; yields for each batch the row numbers, the
            pixels or features, and why each row could not be read, or None, as the
            function that :func:`decoder` returns.
        rows: Row numbers, int64 (N,).
        limit: The largest number of rows in the sample.

    Returns:
        The numbers (n,) of the readable rows in the sample, and the logits of their
        center crops as one view (V = 1), float32 on the CPU: the cosines with the
        prototypes of the known, cluster and overclustering heads, the features, and the
        projections, see :class:`~uno.model.Logits`. A field is None if the model has no
        such heads. A single None in the place of both if no row can be read.

    Raises:
        StorageError: An image's file cannot be read now, but perhaps later.
        ConfigError: A file that holds many images, such as a tar shard, cannot be read.
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
