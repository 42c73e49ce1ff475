"""Choose settings that the user did not give from the images of the data set.

For images of the user's own, an encoder that is trained from the start has no published
settings. So the size of images, the batch size, the number of epochs of both phases,
and mean and standard deviation of the channels are chosen from the data. For heads on
features of a frozen encoder, only the batch size and the number of epochs are chosen,
because the other settings belong to the encoder.
"""

import math
from collections.abc import Container
from typing import Any

import numpy as np
import torch

from uno.config import OWN_ENCODERS, VECTORS, Config, flatten, to_dict
from uno.data.check import MIN_ROWS_PER_CLUSTER, headers_of
from uno.data.decode import decode_many, ok_mask
from uno.data.images import spread
from uno.data.plan import largest_batch
from uno.data.splits import Task, train_rows
from uno.data.unreadable import check_bad
from uno.presets import IMAGE_SIZE, SIZES, apply_image_size, is_custom_data, preset
from uno.text import plural

MOST_PIXELS = {"cifar": 64, "cifar_stride2": 128, "imagenet": 128}
"""Largest side of an image in pixels that is chosen, by the encoder's stem. At these
sizes ResNet-18 takes 2.2, 2.2 and 0.59 billion multiplications for an image; it takes
0.56 billion for the paper's images of 32 pixels.
"""
# Side in pixels from which the stem of ImageNet is chosen. For smaller images the last
# feature maps of this stem would have only 2 x 2 values.
IMAGENET_STEM_FROM = 96
# Most epochs that are chosen. They are those of the preset for the digits, which are a
# small data set of 1,437 rows.
EPOCHS = {"pretrain": 30, "discover": 60}
MOST_STEPS = 20_000  # steps of a phase; the paper takes 19,400 on CIFAR10
LEAST_EPOCHS = 5
MOST_HEAD_STEPS = 5_000  # steps of training heads on features of a frozen encoder
OF_HEADS = ("train.batch_size", "discover.epochs", "discover.warmup_epochs")
"""Keys that :func:`from_images` may set for heads on features of a frozen encoder."""
# Least number of steps in an epoch. A small data set gets a smaller batch for it, as
# long as the batch holds enough rows of each class.
STEPS_OF_EPOCH = 8
# images that the statistics are computed from, and largest side of them in pixels
STATISTICS_ROWS, STATISTICS_PIXELS = 512, 256

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
"""Keys that :func:`from_images` may set when an encoder is trained from the start.
A resumed run keeps the values that it began with.
"""
OF_ENCODER = (
    *SIZES,
    "augment.large.crop_padding",
    "augment.small.crop_padding",
    "model.stem",
    "data.mean",
    "data.std",
)
"""Keys of :data:`FROM_IMAGES` that belong to a trained encoder's weights."""

Found = tuple[dict[str, Any], list[str]]
"""Chosen values by dotted key, and lines for the user that explain the choices."""


def keys_from_images(config: Config) -> tuple[str, ...]:
    """Return the keys of settings that are chosen from the images unless given.

    Args:
        config: The configuration of the run.

    Returns:
        Dotted keys. The result is empty for a run on the data of a benchmark, and for a
        preset other than ``scratch``, ``photos`` and the one for vectors.
    """
    if config.preset in ("photos", VECTORS):
        return (*OF_HEADS, *["model.encoder"] * config.model.takes_vectors)
    return (
        FROM_IMAGES
        if config.preset == "scratch" and is_custom_data(flatten(to_dict(config)))
        else ()
    )


def derives_batch(config: Config, given: Container[str]) -> bool:
    """Return whether the batch size of a run is derived from its data.

    Args:
        config: The configuration of the run.
        given: Dotted keys that the user has set.
    """
    key = "train.batch_size"
    return key in keys_from_images(config) and key not in given


def from_images(
    config: Config, task: Task, given: Container[str], setting: str
) -> Found:
    """Choose settings from the training images.

    Args:
        config: The configuration, with the preset's values for the keys to choose.
        task: The rows and their classes. Only a sample of the images is read.
        given: Dotted keys that the user has set. They are not chosen.
        setting: 'ncd' if all unlabeled rows are of novel classes, or 'gcd' if they are
            of known classes, too.

    Returns:
        Values by dotted key, for some of :func:`keys_from_images`; for a source of
        vectors also ``model.encoder``, with the length of the vectors. And a line for
        the user about each choice.

    Raises:
        ConfigError: The source has vectors, and too many of them are unusable.
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
    """Choose the sizes of images in pixels, and the encoder's stem.

    The size is the median of the images' shorter sides, down to a multiple of 4,
    between 8 and the limit of :data:`MOST_PIXELS`. If the user gave one of the sizes of
    the large view and of the stored images, the other becomes equal. Nothing is chosen
    if the user gave both, or ``image_size``.

    Args:
        config: The configuration, with the preset's values.
        task: The rows. The headers of a sample of images are read.
        given: Dotted keys that the user has set. They are not chosen.

    Returns:
        Sizes of views and of stored images, paddings of crops and the stem, by dotted
        key; and a line for the user.
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
    """Choose the batch size.

    Args:
        config: The configuration. Its batch size is the largest that is chosen.
        task: The rows. Unusable vectors are not counted.
        given: Dotted keys that the user has set.
        num_classes: Number of classes among the unlabeled rows. The batch has at least
            :data:`MIN_ROWS_PER_CLUSTER` unlabeled rows for each of them, if the largest
            size allows it.
        wanted: The batch size if nothing else limits it. It becomes at least 32.

    Returns:
        The batch size, at most what the rows fill; nothing if it is that of ``config``
        or was given.
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
    """Choose the number of epochs of both phases, for an encoder that is trained.

    A phase gets the number of :data:`EPOCHS`, or fewer so that it has about
    :data:`MOST_STEPS` steps, but at least :data:`LEAST_EPOCHS`. A tenth of the epochs
    are warm-up. A phase keeps its number if the user gave it, or if it differs from
    that of the preset ``scratch``. With ``model.weights`` there is no pretraining,
    which then gets no number.

    Args:
        config: The configuration, with the preset's values.
        task: The rows, which are counted.
        given: Dotted keys that the user has set. They are not chosen.
        batch_size: The batch size of both phases.

    Returns:
        Numbers of epochs and of warm-up epochs by dotted key, and a line for the user.
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
    """Choose the number of discovery epochs for heads on features of a frozen encoder.

    The preset's number is reduced so that there are at most :data:`MOST_HEAD_STEPS`
    steps, but one epoch at least. A tenth of the epochs are warm-up. Nothing is chosen
    if the preset's number is small enough, if the user gave it, or if the encoder is
    fine-tuned.

    Args:
        config: The configuration, with the preset's values.
        task: The rows, which are counted.
        given: Dotted keys that the user has set. They are not chosen.
        batch_size: The batch size of the run.

    Returns:
        Numbers of epochs and of warm-up epochs by dotted key, and a line for the user.
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
    """Compute mean and standard deviation of each color channel of training images.

    A sample of about :data:`STATISTICS_ROWS` images is decoded to squares of
    ``stored_size`` pixels, at most :data:`STATISTICS_PIXELS`.

    Args:
        config: The configuration of the run.
        task: The rows.
        given: Dotted keys that the user has set. They are not chosen.
        stored_size: The side of the stored images in pixels.

    Returns:
        ``data.mean`` and ``data.std``, each three numbers between 0 and 1, and a line
        for the user. Nothing if both were given or no image can be read.
    """
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
        return {}, []  # the checks report unreadable images
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
