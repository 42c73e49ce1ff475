"""What a run on one's own images takes from them where it was not told: their size, the batch, the length of
both phases, mean and std. For encoders that learn from nothing else; others come with theirs.
"""

import math
from collections.abc import Container

import numpy as np
import torch

from uno.config import OWN_ENCODERS, Config, flatten, override, to_dict
from uno.data.check import MIN_ROWS_PER_CLUSTER, headers_of
from uno.data.decode import decode_many, readable
from uno.data.images import evenly_spaced
from uno.data.plan import largest_batch
from uno.data.splits import Task
from uno.presets import IMAGE_SIZE, SIZES, own_images, preset, sized

MOST_PIXELS = {"small": 64, "halved": 128, "imagenet": 128}
"""A side by stem. ResNet-18: 2.2, 2.2 and .59 billion multiplications an image; the paper's 32 pixels .56."""
IMAGENET_STEM_FROM = 96  # pixels, below which its last maps would be 2 x 2
EPOCHS = {"pretrain": 30, "discover": 60}  # of the preset digits, whose 1,437 rows are few, too
MOST_STEPS = 20_000  # of a phase; the paper's on CIFAR10 has 19,400
LEAST_EPOCHS = 5
STEPS_OF_EPOCH = 8  # at least, by smaller batches, while they hold enough rows of each class
STATISTICS_ROWS, STATISTICS_PIXELS = 512, 256  # images, and the most of a side

DECIDED = (
    *SIZES, "augment.large.crop_padding", "augment.small.crop_padding", "model.stem", "train.batch_size",
    "pretrain.epochs", "pretrain.warmup_epochs", "discover.epochs", "discover.warmup_epochs",
    "data.mean", "data.std",
)  # fmt: skip
"""All keys that :func:`from_images` may set; a run that goes on has them as it began."""
OF_ENCODER = (*SIZES, "augment.large.crop_padding", "augment.small.crop_padding", "model.stem", "data.mean",
    "data.std")  # fmt: skip
"""Those that belong to an encoder which has learnt with them."""


def decided(config: Config) -> tuple[str, ...]:
    """The keys of ``config`` that its images decide unless they are given; none for a benchmark's."""
    if config.preset == "photos":
        return ("train.batch_size",)
    return DECIDED if config.preset == "custom" and own_images(flatten(to_dict(config))) else ()


def from_images(config: Config, task: Task, given: Container[str]) -> tuple[Config, list[str]]:
    """``config`` with what the images of ``task`` suggest for keys that are not ``given``, and a line for
    each choice with its reason; 512 training images are decoded. The pile is decided.
    """
    lines: list[str] = []
    if not decided(config):
        return config, lines
    if config.preset == "photos":
        return _batch(config, task, given, 0, config.train.batch_size, lines), lines
    alone = config.model.weights is None and config.model.encoder in OWN_ENCODERS
    if alone:
        config = _size(config, task, given, lines)
    num_classes = task.num_novel + (task.num_known if config.data.pile == "mixed" else 0)
    config = _batch(config, task, given, num_classes, sum(task.sizes) // STEPS_OF_EPOCH, lines)
    config = _epochs(config, task, given, lines)
    return _statistics(config, task, given, lines) if alone else config, lines


def _size(config: Config, task: Task, given: Container[str], lines: list[str]) -> Config:
    """As the images are, up to what is affordable; one of the two sizes that is given sets the other."""
    large, store = (key in given for key in SIZES[:2])
    if IMAGE_SIZE in given or (large and store):
        return config
    if large or store:
        size = config.augment.large.size if large else config.data.store_size
        return override(config, {SIZES[0]: size, SIZES[1]: size})
    usual = int(np.median([min(side) for _, *side in headers_of(task)[0]] or [config.data.store_size]))
    stem = config.model.stem
    if config.model.encoder == "resnet_small":
        stem = "small" if stem == "imagenet" else stem
    elif "model.stem" not in given and usual >= IMAGENET_STEM_FROM:
        stem = "imagenet"
    size = max(8, min(usual, MOST_PIXELS[stem]) // 4 * 4)
    found = sized(config, {IMAGE_SIZE: size, "model.stem": stem})
    config = override(config, {key: value for key, value in found.items() if key not in given})
    why = "as more takes longer" if usual > size else "as they are"
    lines.append(f"size: {size} px of images that are usually {usual}, {why}; --image-size takes another")
    return config


def _batch(
    config: Config, task: Task, given: Container[str], num_classes: int, wanted: int, lines: list[str]
) -> Config:
    """``wanted`` rows, at most the preset's, enough for every class, and no more than the data fills."""
    if "train.batch_size" in given:
        return config
    (labeled, unlabeled), most = task.sizes, config.train.batch_size
    least = math.ceil(MIN_ROWS_PER_CLUSTER * num_classes * (labeled + unlabeled) / max(unlabeled, 1))
    wanted = min(most, max(32, least, wanted))
    size = largest_batch(config.data.composition, wanted, labeled, unlabeled, config.compute.workers)
    if size == most:
        return config
    lines.append(f"batch: {size} of {labeled + unlabeled:,} rows; --batch-size takes another")
    return override(config, {"train.batch_size": size})


def _epochs(config: Config, task: Task, given: Container[str], lines: list[str]) -> Config:
    """As many as of the digits, fewer where they would be too many steps; a tenth of them is warm-up."""
    usual, batch, said = preset("custom", config.recipe), config.train.batch_size, []
    for name, most in EPOCHS.items():
        if name == "pretrain" and config.model.weights is not None:
            continue
        if f"{name}.epochs" in given or getattr(config, name).epochs != getattr(usual, name).epochs:
            continue
        rows = task.sizes[0] if name == "pretrain" else sum(task.sizes)
        epochs = max(LEAST_EPOCHS, min(most, MOST_STEPS // max(1, rows // batch)))
        values = {f"{name}.epochs": epochs, f"{name}.warmup_epochs": epochs / 10}
        config = override(config, {key: value for key, value in values.items() if key not in given})
        said.append(f"{epochs} of {name}")
    if said:
        flags = " and ".join(f"--{name}.epochs" for name in EPOCHS)
        lines.append(f"epochs: {', '.join(said)}, for {sum(task.sizes):,} rows; {flags} take others")
    return config


def _statistics(config: Config, task: Task, given: Container[str], lines: list[str]) -> Config:
    """Of the channels of training images, as they are stored."""
    if "data.mean" in given and "data.std" in given:
        return config
    rows = np.flatnonzero(task.is_train)
    rows = rows[evenly_spaced(STATISTICS_ROWS, len(rows))]
    side = min(config.data.store_size, STATISTICS_PIXELS)
    images, reasons = decode_many(task.rows.images.take(rows), side, config.compute.threads)
    images = images[torch.from_numpy(readable(reasons))]
    if not len(images):
        return config  # the checks say so
    moments = torch.zeros(2, 3, dtype=torch.float64)
    for part in images.split(32):
        values = part.double() / 255
        moments += torch.stack(
            [values.mean(dim=(2, 3)).sum(dim=0), values.square().mean(dim=(2, 3)).sum(dim=0)]
        )
    mean, square = moments / len(images)
    found = {"data.mean": mean, "data.std": (square - mean.square()).clamp(min=1e-4).sqrt()}
    rounded = {key: tuple(round(float(v), 4) for v in value) for key, value in found.items()}
    config = override(config, {key: value for key, value in rounded.items() if key not in given})
    shown = (" ".join(f"{v:.2f}" for v in numbers) for numbers in (config.data.mean, config.data.std))
    lines.append(f"mean and std: {', '.join(shown)}, of {len(images):,} training images")
    return config
