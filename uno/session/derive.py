"""Decide from the data the settings of a run that the user has not set.

Images of the user's own have no published settings. For an encoder that is trained from
the start, the data decides the size of images, the batch size and the number of epochs.
For heads on features of a frozen encoder, it decides the batch size and the number of
epochs. For every run it decides the setting (``ncd`` or ``gcd``), and whether images
are kept in memory. A run that its directory holds keeps what was decided when it began.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from uno.config import OWN_ENCODERS, VECTORS, Config, flatten, override, to_dict
from uno.data.check import MIN_ROWS_PER_CLUSTER
from uno.data.embeddings import require_kind
from uno.data.files import Storage
from uno.data.sampling import largest_batch
from uno.data.splits import Task, decide_setting, train_rows
from uno.data.unreadable import check_bad
from uno.data.value_range import choose_value_range
from uno.encoders import weights
from uno.encoders.weights import PRETRAINED
from uno.presets import (
    FROZEN_PRESETS,
    IMAGE_SIZE,
    SIZES,
    Values,
    is_custom_data,
    preset,
    scale_sizes,
)
from uno.runs import CONFIG_FILE, directory
from uno.session.console import print_line
from uno.session.data import read_task
from uno.session.resources import FreeMemory, choose_loading, free_memory
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
# Least number of steps in an epoch. A small data set gets a smaller batch for it, as
# long as the batch holds enough rows of each class.
STEPS_OF_EPOCH = 8

OF_HEADS = ("train.batch_size", "discover.epochs", "discover.warmup_epochs")
"""Keys that are derived for heads on features of a frozen encoder."""
OF_ENCODER = (
    *SIZES,
    "augment.large.crop_padding",
    "augment.small.crop_padding",
    "model.stem",
    "data.mean",
    "data.std",
    "data.value_range",
)
"""Keys of how images are read, which belong to a trained encoder's weights."""
OF_TRAINING = (
    *OF_ENCODER,
    *OF_HEADS,
    "pretrain.epochs",
    "pretrain.warmup_epochs",
)
"""Keys that may be derived if an encoder is trained from the start."""


def resolve(
    config: Config,
    given: Collection[str],
    overwrite: bool = False,
    measure_memory: Callable[[Config], FreeMemory] = free_memory,
) -> tuple[Config, Task | None]:
    """Complete the configuration of a run, and print what was decided and why.

    If the output directory holds a ``config.yaml`` and is not overwritten, the values
    that were decided for that run are kept, and the data is not read. Otherwise the run
    is new: the data is read, with a sample of its images, and decides the values that
    the user has not set. ``data.loading`` and ``data.setting`` are not "auto" any more
    afterwards.

    Args:
        config: The configuration before the data is read. Without ``output`` the run is
            new.
        given: The dotted keys that the user has set.
        overwrite: Whether a run in the same directory is started over.
        measure_memory: Returns the free memory for the processes that train. It is
            called for a new run with ``data.loading`` "auto". For another value, the
            memory of this machine is measured, which is then only printed.

    Returns:
        The configuration of the run; and its rows, None if they were not read.

    Raises:
        ConfigError: The data cannot be read or does not fit the settings;
            ``data.num_novel`` of a new run is "auto"; the method needs the images in
            memory and ``data.loading`` is "streaming"; or the stored ``config.yaml`` is
            damaged.
        StorageError: The stored ``config.yaml``, or an image of the sample, cannot be
            read now.
    """
    if config.output is not None and not overwrite:
        storage = Storage(config.output)
        if storage.exists(CONFIG_FILE):
            stored = flatten(directory.read_config_tree(storage))
            begun = keep_derived(config, given, stored)
            is_auto = config.data.setting == "auto"
            print_line(decide_setting(begun, [], is_auto)[1])
            return begun, None
    task = read_task(config.data)
    setting, reason = decide_setting(config, task.rows.known)
    config = override(config, {"data.setting": setting})
    values, lines = derive_settings(config, given, task)
    config = override(config, values)
    if config.data.loading != "auto":
        measure_memory = free_memory  # no need to ask other machines
    loading, why = choose_loading(config, len(task.rows), measure_memory(config))
    for line in (reason, *lines, f"memory: {why}"):
        print_line(line)
    return override(config, {"data.loading": loading}), task


def keep_derived(
    config: Config, given: Collection[str], stored: Mapping[str, Any]
) -> Config:
    """Replace settings by the values that were derived when the stored run began.

    These are the settings of :func:`derived_keys`, ``data.validation_fraction`` and
    ``data.value_range``. Also ``data.setting``, ``data.loading`` and ``data.num_novel``
    are replaced where ``config`` has "auto", even if the user has set that.

    Args:
        config: The configuration of the command that resumes the run.
        given: The dotted keys that the user has set. Apart from "auto", they are not
            replaced.
        stored: The stored configuration of the run, by dotted key. A key that it lacks
            is not replaced.

    Returns:
        The configuration with the derived values of the stored run.
    """
    given = {*given, *(SIZES if IMAGE_SIZE in given else ())}
    keys = [*derived_keys(config), "data.validation_fraction", "data.value_range"]
    keys = [key for key in keys if key not in given]
    keys += [
        f"data.{name}"
        for name in ("setting", "loading", "num_novel")
        if getattr(config.data, name) == "auto"
    ]
    return override(config, {key: stored[key] for key in keys if key in stored})


def derived_keys(config: Config) -> tuple[str, ...]:
    """Return the keys of the settings that are derived from the data unless given.

    ``data.setting`` and ``data.loading`` are decided elsewhere, and are not among them.
    The range of stored values (``data.value_range``) is only among them if all settings
    of how images are read are, although it may be derived for any run.

    Args:
        config: The configuration of the run.

    Returns:
        Dotted keys. For the presets ``photos`` and ``vectors``: the batch size, epochs
        and warm-up epochs of discovery; also the settings of how images are read
        (image sizes, crop paddings, stem, mean, standard deviation and range of stored
        values) if ``model.weights`` is a run, and ``model.encoder`` if it takes
        vectors. For the preset ``scratch`` on the user's own data: these settings of
        how images are read, the batch size, and the epochs and warm-up epochs of
        pretraining and discovery. For ``scratch`` on a benchmark, and for other
        presets, none.
    """
    if config.preset in FROZEN_PRESETS:
        of_encoder = OF_ENCODER if _starts_from_run(config) else ()
        length = ("model.encoder",) if config.model.takes_vectors else ()
        return (*OF_HEADS, *of_encoder, *length)
    is_own = config.preset == "scratch" and is_custom_data(flatten(to_dict(config)))
    return OF_TRAINING if is_own else ()


def derives_batch(config: Config, given: Collection[str]) -> bool:
    """Return whether the batch size of a run is derived from its data.

    It is if it is among the :func:`derived_keys`, and the user has not set it.

    Args:
        config: The configuration of the run.
        given: Dotted keys that the user has set.
    """
    key = "train.batch_size"
    return key in derived_keys(config) and key not in given


def derive_settings(
    config: Config, given: Collection[str], task: Task
) -> tuple[Values, list[str]]:
    """Derive settings of a new run from its rows and a sample of its images.

    Args:
        config: The configuration before the data is read, with the final value of
            ``data.setting``.
        given: The dotted keys that the user has set. They are not derived.
        task: The rows of the run.

    Returns:
        Values by dotted key, for some of :func:`derived_keys` and, for any preset,
        "data.value_range" if the images have more than 8 bits; and lines for the user
        about these decisions.

    Raises:
        ConfigError: The encoder takes images and the source has vectors, or the
            reverse, or the vectors have another length. Or too many vectors are
            unusable. Or the run that ``model.weights`` names has no valid
            configuration. Or a file that holds many images cannot be read.
        StorageError: An image of the sample, or the configuration of that run, cannot
            be read now.
    """
    given = {*given, *(SIZES if IMAGE_SIZE in given else ())}
    rules: tuple[Rule, ...] = ()
    if config.preset in FROZEN_PRESETS:
        rules = (
            _derive_vector_length,
            _derive_image_settings,
            _derive_batch_size,
            _derive_epochs_of_heads,
        )
    elif derived_keys(config):
        rules = (
            _derive_image_settings,
            _derive_image_size,
            _derive_batch_size,
            _derive_epochs,
        )
    values, lines = Values(), list[str]()
    for rule in (*rules, derive_value_range):
        derived, line = rule(config, given, task)
        derived = {key: value for key, value in derived.items() if key not in given}
        if derived:
            values, config = values | derived, override(config, derived)
            lines += [line] * bool(line)
    require_kind(config.model, task.rows.images)
    return values, lines


Rule = Callable[[Config, Collection[str], Task], tuple[Values, str]]
"""Derives some settings from the configuration so far, the keys that the user has set,
and the rows. Returns values by dotted key, and a line that names them.
"""


def _derive_vector_length(
    config: Config, given: Collection[str], task: Task
) -> tuple[Values, str]:
    """Derive ``model.encoder`` from the length of the vectors of a source.

    Args:
        config: The configuration so far.
        given: Not used here; all functions that derive settings have this parameter.
        task: The rows of the run.

    Returns:
        A mapping of "model.encoder" to its value, such as "vectors:384", which is empty
        if the source holds images; and always "", because no line is printed for the
        user.

    Raises:
        ConfigError: The share of rows without a usable vector is above
            ``data.max_bad_fraction``. A vector is unusable if it has numbers that are
            not finite, has only zeros, or has another length than most.
    """
    rows, limit = task.rows, config.data.max_bad_fraction
    if (vectors := rows.vectors) is None:
        return {}, ""
    check_bad(rows.ids, vectors[1], limit, images=rows.images)
    return {"model.encoder": f"{VECTORS}:{vectors[0].shape[2]}"}, ""


def _derive_image_settings(
    config: Config, given: Collection[str], task: Task
) -> tuple[Values, str]:
    """Take the image settings from the run whose weights this run starts from.

    Args:
        config: The configuration so far.
        given: Not used here; the caller drops the keys that the user has set.
        task: Not used here.

    Returns:
        Values by dotted key, see :func:`settings_of_weights`, empty unless
        ``model.weights`` names a run; and a line that says so, which has no meaning if
        there are no values.

    Raises:
        UnoError: One of the errors of :func:`settings_of_weights`.
    """
    values = settings_of_weights(config)
    size = values.get(SIZES[0], config.augment.large.size)
    return values, (
        f"image size: {size} px; image size, mean and std: taken from"
        f" {config.model.weights}"
    )


def settings_of_weights(config: Config) -> Values:
    """Return the image settings of the run that ``model.weights`` names.

    The weights of an encoder belong to images of this size and normalization. The
    settings are read from the ``config.yaml`` of that run, see
    :func:`uno.runs.directory.read_config_tree`.

    Args:
        config: The configuration of the new run.

    Returns:
        Image sizes, crop padding, stem, mean, standard deviation and the range of
        stored values, by dotted key (:data:`OF_ENCODER`). Empty if ``model.weights`` is
        None, "pretrained" or a file.

    Raises:
        ConfigError: The configuration of that run is missing or damaged, or names code
            that cannot be imported or lies in the directory of the run.
        StorageError: The configuration cannot be read.
    """
    if not _starts_from_run(config):
        return {}
    storage = Storage(str(config.model.weights))
    stored = flatten(directory.read_config_tree(storage))
    return {key: stored[key] for key in OF_ENCODER if key in stored}


def derive_value_range(
    config: Config, given: Collection[str], task: Task
) -> tuple[Values, str]:
    """Derive which stored values become black and white in images of more than 8 bits.

    The two values are the percentiles 0.1 and 99.9 of pixels of the gray images of more
    than 8 bits in a sample of images. Nothing is derived if the sample has no such
    image that is readable, if the user has set "data.value_range", or if ``config`` has
    a range already, such as that of the run whose weights this run starts from.

    Args:
        config: The configuration so far.
        given: The dotted keys that the user has set.
        task: The rows of the run.

    Returns:
        "data.value_range" with the pair (black, white), by its key, and a line for the
        user. Both are empty if nothing is derived.

    Raises:
        ConfigError: A file that holds many images cannot be read.
        StorageError: An image of the sample cannot be read now.
    """
    if "data.value_range" in given or config.data.value_range is not None:
        return {}, ""
    found = choose_value_range(task.rows)
    if found is None:
        return {}, ""
    (low, high), why = found
    return {"data.value_range": (low, high)}, (
        f"values: {low:g} is black and {high:g} white in images of more than 8 bits"
        f" ({why}); change with --data.value-range"
    )


def _starts_from_run(config: Config) -> bool:
    """Return whether ``model.weights`` is a run directory.

    Otherwise it is None, the word "pretrained", or a file of weights, which is told by
    its suffix. It is not checked whether the directory exists.
    """
    source = config.model.weights
    return source not in (None, PRETRAINED) and not weights.is_file(source)


def _derive_image_size(
    config: Config, given: Collection[str], task: Task
) -> tuple[Values, str]:
    """Derive the sizes of images in pixels, and the encoder's stem.

    The size is the median of the shorter sides of a sample of images, down to a
    multiple of 4, at least 8 and at most 64 for the stem "cifar", else 128. If no image
    of the sample is readable, ``data.stored_size`` stands for the median. The stem
    becomes "imagenet" for a median from 96 pixels, unless the user gave one or the
    encoder is the small ResNet, for which "imagenet" becomes "cifar". The size is that
    of large views; other lengths in pixels are scaled with it. If the user gave
    the size of the large view or that of the stored images, both get this size, that of
    the view if both were given, and nothing else is derived; the caller drops the keys
    that the user gave. Nothing is derived if the encoder is not one of this package or
    has weights.

    Args:
        config: The configuration so far.
        given: The dotted keys that the user has set.
        task: The rows of the run.

    Returns:
        The sizes of views and of stored images, crop paddings and the stem by dotted
        key, empty if nothing is derived; and a line for the user that names the size.
        It is "" if nothing is derived, or if the user gave the size of the large view
        or of the stored images.
    """
    if config.model.weights is not None or config.model.encoder not in OWN_ENCODERS:
        return {}, ""
    has_view_size, has_stored_size = (key in given for key in SIZES[:2])
    if has_view_size or has_stored_size:
        size = config.augment.large.size if has_view_size else config.data.stored_size
        return dict.fromkeys(SIZES[:2], size), ""
    headers = [image.header for image in task.rows.image_sample.readable]
    sides = [min(header.width, header.height) for header in headers]
    median_side = int(np.median(sides or [config.data.stored_size]))
    stem = config.model.stem
    if config.model.encoder == "resnet_small":
        stem = "cifar" if stem == "imagenet" else stem
    elif "model.stem" not in given and median_side >= IMAGENET_STEM_FROM:
        stem = "imagenet"
    size = max(8, min(median_side, MOST_PIXELS[stem]) // 4 * 4)
    why = "; larger is slower" if median_side > size else ""
    return scale_sizes(config, size) | {"model.stem": stem}, (
        f"image size: {size} px (images are about {median_side} px{why}); change with"
        " --image-size"
    )


def _derive_batch_size(
    config: Config, given: Collection[str], task: Task
) -> tuple[Values, str]:
    """Derive a batch size for which there are enough rows, and enough steps.

    It is never larger than the batch size of ``config``, or than the training rows
    allow: they must fill a batch, and it must divide among the workers. Unusable
    vectors are not counted for this. For presets other than "photos" and "vectors", a
    small data set gets smaller batches, so that an epoch has at least about 8 steps.
    For this they are not made smaller than 32 rows, or than what gives each class that
    unlabeled rows can have (the novel classes, in the setting "gcd" also the known
    ones) 2.6 unlabeled rows on average, if labeled and unlabeled rows are mixed as in
    the data.

    Args:
        config: The configuration so far.
        given: Not used here: the caller leaves a batch size out that the user has set.
        task: The rows of the run.

    Returns:
        ``train.batch_size`` by its key, and a line for the user. Both are empty if the
        batch size of ``config`` stays, or if the preset is "photos" or "vectors" and
        discovery has no epochs. If the rows allow no batch size at all, the value is
        the one that would be taken with enough rows, and training refuses it later.
    """
    most = wanted = config.train.batch_size
    if config.preset not in FROZEN_PRESETS:
        labeled, unlabeled = task.sizes
        mixed = config.data.setting == "gcd"  # unlabeled rows of known classes, too
        num_classes = task.num_novel + (task.num_known if mixed else 0)
        share = (labeled + unlabeled) / max(unlabeled, 1)
        least = math.ceil(MIN_ROWS_PER_CLUSTER * num_classes * share)
        wanted = min(most, max(32, least, (labeled + unlabeled) // STEPS_OF_EPOCH))
    elif not config.discover.epochs:
        return {}, ""
    rows = train_rows(task, task.rows.usable)
    labeled, unlabeled = len(rows["labeled"]), len(rows["unlabeled"])
    sampling, workers = config.data.batch_sampling, config.compute.num_workers
    size = largest_batch(sampling, wanted, labeled, unlabeled, workers)
    if size == most:
        return {}, ""
    return {"train.batch_size": size}, (
        f"batch size: {size} of {labeled + unlabeled:,} images; change with"
        " --batch-size"
    )


def _derive_epochs(
    config: Config, given: Collection[str], task: Task
) -> tuple[Values, str]:
    """Derive the number of epochs of both phases, for the preset "scratch".

    Pretraining gets 30 epochs and discovery 60, or fewer so that the phase has about
    20,000 steps at most, but at least 5 epochs. A tenth of the epochs are warm-up. A
    phase keeps its number if the user gave it, or if it differs from that of the preset
    ``scratch``. With ``model.weights`` there is no pretraining, which then gets no
    number.

    Args:
        config: The configuration so far.
        given: The dotted keys that the user has set.
        task: The rows of the run.

    Returns:
        Epochs and warm-up epochs of the phases that get a number, by dotted key, which
        may be none; and a line for the user, which has no meaning if there are none.
    """
    scratch, values, parts = preset("scratch", config.recipe), Values(), list[str]()
    for name, most in EPOCHS.items():
        is_changed = getattr(config, name).epochs != getattr(scratch, name).epochs
        if f"{name}.epochs" in given or is_changed:
            continue
        if name == "pretrain" and config.model.weights is not None:
            continue
        rows = task.sizes[0] if name == "pretrain" else sum(task.sizes)
        steps = max(1, rows // config.train.batch_size)
        epochs = max(LEAST_EPOCHS, min(most, MOST_STEPS // steps))
        values |= {f"{name}.epochs": epochs, f"{name}.warmup_epochs": epochs / 10}
        parts.append(f"{epochs} ({name})")
    flags = ", ".join(f"--{name}.epochs" for name in EPOCHS)
    return values, (
        f"epochs: {', '.join(parts)} for {plural(sum(task.sizes), 'image')}; change"
        f" with {flags}"
    )


def _derive_epochs_of_heads(
    config: Config, given: Collection[str], task: Task
) -> tuple[Values, str]:
    """Derive the number of discovery epochs for heads on features of a frozen encoder.

    The preset's number is reduced so that there are about 5,000 steps at most, but one
    epoch at least. A tenth of the epochs are warm-up. Nothing is derived if the number
    of the preset is small enough, if the user gave it, or if the encoder is fine-tuned
    (``model.finetune`` is not "none").

    Args:
        config: The configuration so far.
        given: The dotted keys that the user has set.
        task: The rows of the run.

    Returns:
        Epochs and warm-up epochs of discovery by dotted key, and a line for the user.
        Both are empty if nothing is derived.
    """
    steps = max(1, sum(task.sizes) // config.train.batch_size)
    is_fixed = "discover.epochs" in given or config.model.finetune != "none"
    if is_fixed or config.discover.epochs * steps <= MOST_HEAD_STEPS:
        return {}, ""
    epochs = max(1, MOST_HEAD_STEPS // steps)
    values = {"discover.epochs": epochs, "discover.warmup_epochs": epochs / 10}
    return values, (
        f"epochs: {epochs} (discover) for {plural(sum(task.sizes), 'row')}; change with"
        " --discover.epochs"
    )
