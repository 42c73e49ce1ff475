"""What a run on one's own images takes from them where it was not told: their size, the
batch, the length of both phases, mean and std. For encoders that learn from nothing
else; others come with theirs.
"""

import math
from collections.abc import Container
from typing import Any

import numpy as np
import torch

from uno.config import OWN_ENCODERS, VECTORS, Config, flatten, to_dict
from uno.data.check import MIN_ROWS_PER_CLUSTER, headers_of
from uno.data.decode import check_bad, decode_many, ok_mask
from uno.data.images import spread
from uno.data.plan import largest_batch
from uno.data.splits import Task, train_rows
from uno.presets import IMAGE_SIZE, SIZES, apply_image_size, is_custom_data, preset
from uno.text import plural

MOST_PIXELS = {"cifar": 64, "cifar_stride2": 128, "imagenet": 128}
"""A side by stem. ResNet-18: 2.2, 2.2 and .59 billion multiplications an image; the
paper's 32 pixels .56.
"""
IMAGENET_STEM_FROM = 96  # pixels, below which its last maps would be 2 x 2
# of the preset digits, whose 1,437 rows are few, too
EPOCHS = {"pretrain": 30, "discover": 60}
MOST_STEPS = 20_000  # of a phase; the paper's on CIFAR10 has 19,400
LEAST_EPOCHS = 5
MOST_HEAD_STEPS = 5_000  # of heads on features of a frozen encoder
OF_HEADS = ("train.batch_size", "discover.epochs", "discover.warmup_epochs")
"""Keys of such a run that :func:`from_images` may set."""
# at least, by smaller batches, while they hold enough rows of each class
STEPS_OF_EPOCH = 8
STATISTICS_ROWS, STATISTICS_PIXELS = 512, 256  # images, and the most of a side

FROM_IMAGES = (
    *SIZES,
    "augment.large.crop_padding",
    "augment.small.crop_padding",
    "model.stem",
    "train.batch_size",
    "pretrain.epochs",
    "pretrain.warmup_epochs",
    "discover.epochs",
    "discover.warmup_epochs",
    "data.mean",
    "data.std",
)
"""All keys that :func:`from_images` may set; a resumed run keeps its own."""
OF_ENCODER = (
    *SIZES,
    "augment.large.crop_padding",
    "augment.small.crop_padding",
    "model.stem",
    "data.mean",
    "data.std",
)
"""Those that belong to an encoder which has learned with them."""

Found = tuple[dict[str, Any], list[str]]
"""Values by dotted key, and a line for each choice with its reason."""


def keys_from_images(config: Config) -> tuple[str, ...]:
    """The keys of ``config`` that its images decide unless they are given; none for
    a benchmark's.
    """
    if config.preset in ("photos", VECTORS):
        return (*OF_HEADS, *["model.encoder"] * config.model.takes_vectors)
    return (
        FROM_IMAGES
        if config.preset == "scratch" and is_custom_data(flatten(to_dict(config)))
        else ()
    )


def derives_batch(config: Config, given: Container[str]) -> bool:
    """Return whether the batch size of a run is derived from its data."""
    key = "train.batch_size"
    return key in keys_from_images(config) and key not in given


def from_images(
    config: Config, task: Task, given: Container[str], setting: str
) -> Found:
    """What 512 training images suggest for keys that are not ``given``, in the run's
    ``setting``.
    """
    if not keys_from_images(config):
        return {}, []
    if config.preset in ("photos", VECTORS):
        made = task.rows.images.vectors(np.arange(len(task.rows)))
        if made is not None:
            limit = config.data.max_bad_fraction
            check_bad(task.rows.ids, made[1], limit, images=task.rows.images)
        values, lines = dict[str, Any](), list[str]()
        if config.discover.epochs:  # else nothing is trained in batches
            values, lines = _batch(config, task, given, 0, config.train.batch_size)
        size = values.get("train.batch_size", config.train.batch_size)
        epochs, said = _epochs_of_heads(config, task, given, size)
        if made is not None:
            values["model.encoder"] = f"{VECTORS}:{made[0].shape[2]}"
        return values | epochs, [*lines, *said]
    alone = config.model.weights is None and config.model.encoder in OWN_ENCODERS
    values, lines = _size(config, task, given) if alone else ({}, [])
    num_classes = task.num_novel + (task.num_known if setting == "gcd" else 0)
    batch = _batch(config, task, given, num_classes, sum(task.sizes) // STEPS_OF_EPOCH)
    size = batch[0].get("train.batch_size", config.train.batch_size)
    side = values.get("data.stored_size", config.data.stored_size)
    statistics = _statistics(config, task, given, side) if alone else ({}, [])
    for found, said in (batch, _epochs(config, task, given, size), statistics):
        values |= found
        lines += said
    return values, lines


def _size(config: Config, task: Task, given: Container[str]) -> Found:
    """As the images are, up to what is affordable; one of the two sizes that is
    given sets the other.
    """
    large, store = (key in given for key in SIZES[:2])
    if IMAGE_SIZE in given or (large and store):
        return {}, []
    if large or store:
        size = config.augment.large.size if large else config.data.stored_size
        return {key: size for key in SIZES[:2] if key not in given}, []
    usual = int(
        np.median(
            [min(side) for _, *side in headers_of(task)[0]] or [config.data.stored_size]
        )
    )
    stem = config.model.stem
    if config.model.encoder == "resnet_small":
        stem = "cifar" if stem == "imagenet" else stem
    elif "model.stem" not in given and usual >= IMAGENET_STEM_FROM:
        stem = "imagenet"
    size = max(8, min(usual, MOST_PIXELS[stem]) // 4 * 4)
    found = apply_image_size(config, {IMAGE_SIZE: size, "model.stem": stem})
    why = "; larger is slower" if usual > size else ""
    line = (
        f"image size: {size} px (images are about {usual} px{why}); change with"
        " --image-size"
    )
    return {key: value for key, value in found.items() if key not in given}, [line]


def _batch(
    config: Config, task: Task, given: Container[str], num_classes: int, wanted: int
) -> Found:
    """``wanted`` rows, at most the preset's, enough for every class, and no more
    than the data fills.
    """
    if "train.batch_size" in given:
        return {}, []
    made, most = (
        task.rows.images.vectors(np.arange(len(task.rows))),
        config.train.batch_size,
    )
    rows = train_rows(task, None if made is None else ok_mask(made[1]))
    labeled, unlabeled = len(rows["labeled"]), len(rows["unlabeled"])
    least = math.ceil(
        MIN_ROWS_PER_CLUSTER * num_classes * (labeled + unlabeled) / max(unlabeled, 1)
    )
    wanted = min(most, max(32, least, wanted))
    size = largest_batch(
        config.data.batch_sampling,
        wanted,
        labeled,
        unlabeled,
        config.compute.num_workers,
    )
    if size == most:
        return {}, []
    line = (
        f"batch size: {size} of {labeled + unlabeled:,} images; change with"
        " --batch-size"
    )
    return {"train.batch_size": size}, [line]


def _epochs(
    config: Config, task: Task, given: Container[str], batch_size: int
) -> Found:
    """As many as of the digits, fewer where they would be too many steps; a tenth of
    them is warm-up.
    """
    usual = preset("scratch", config.recipe)
    values, said = dict[str, Any](), []
    for name, most in EPOCHS.items():
        if name == "pretrain" and config.model.weights is not None:
            continue
        if (
            f"{name}.epochs" in given
            or getattr(config, name).epochs != getattr(usual, name).epochs
        ):
            continue
        rows = task.sizes[0] if name == "pretrain" else sum(task.sizes)
        epochs = max(LEAST_EPOCHS, min(most, MOST_STEPS // max(1, rows // batch_size)))
        values |= {f"{name}.epochs": epochs, f"{name}.warmup_epochs": epochs / 10}
        said.append(f"{epochs} ({name})")
    if not said:
        return {}, []
    flags = ", ".join(f"--{name}.epochs" for name in EPOCHS)
    line = (
        f"epochs: {', '.join(said)} for {plural(sum(task.sizes), 'image')}; change with"
        f" {flags}"
    )
    return {key: value for key, value in values.items() if key not in given}, [line]


def _epochs_of_heads(
    config: Config, task: Task, given: Container[str], batch_size: int
) -> Found:
    """The preset's, fewer where heads on features would take more than
    :data:`MOST_HEAD_STEPS`.
    """
    steps, (usual, warmup) = max(1, sum(task.sizes) // batch_size), OF_HEADS[1:]
    told = usual in given or config.model.finetune != "none"
    if told or config.discover.epochs * steps <= MOST_HEAD_STEPS:
        return {}, []
    epochs = max(1, MOST_HEAD_STEPS // steps)
    values: dict[str, Any] = {usual: epochs, warmup: epochs / 10}
    line = (
        f"epochs: {epochs} (discover) for {plural(sum(task.sizes), 'row')}; change with"
        " --discover.epochs"
    )
    return {key: value for key, value in values.items() if key not in given}, [line]


def _statistics(
    config: Config, task: Task, given: Container[str], stored_size: int
) -> Found:
    """Of the channels of training images, as they are stored."""
    if "data.mean" in given and "data.std" in given:
        return {}, []
    rows = np.flatnonzero(task.is_train)
    rows = rows[spread(task.rows.images, [rows], STATISTICS_ROWS, task.labels[rows])[0]]
    side = min(stored_size, STATISTICS_PIXELS)
    images, reasons = decode_many(
        task.rows.images.take(rows), side, config.compute.threads
    )
    images = images[torch.from_numpy(ok_mask(reasons))]
    if not len(images):
        return {}, []  # the checks say so
    moments = torch.zeros(2, 3, dtype=torch.float64)
    for part in images.split(32):
        values = part.double() / 255
        moments += torch.stack(
            [
                values.mean(dim=(2, 3)).sum(dim=0),
                values.square().mean(dim=(2, 3)).sum(dim=0),
            ]
        )
    mean, square = moments / len(images)
    found = {
        "data.mean": mean,
        "data.std": (square - mean.square()).clamp(min=1e-4).sqrt(),
    }
    rounded = {
        key: tuple(round(float(v), 4) for v in value) for key, value in found.items()
    }
    taken = {key: value for key, value in rounded.items() if key not in given}
    told = {"data.mean": config.data.mean, "data.std": config.data.std}
    shown = (
        " ".join(f"{v:.2f}" for v in numbers) for numbers in (told | taken).values()
    )
    return taken, [
        f"mean and std: {', '.join(shown)}, from"
        f" {plural(len(images), 'training image')}"
    ]
