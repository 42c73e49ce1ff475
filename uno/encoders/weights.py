"""Read and load the weights of an encoder, and what its library says about it."""

import io
import os
import pickle
import urllib.request
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple
from urllib.error import HTTPError

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from uno.config import OWN_ENCODERS, VECTORS, Config, ModelConfig
from uno.data.files import Storage, split
from uno.encoders.build import (
    build_encoder,
    check_name,
    describe_timm,
    is_own_code,
    run_on_black_image,
)
from uno.errors import ConfigError, StorageError, one_line
from uno.steps import with_prefix

PRETRAINED = "pretrained"
"""The value of ``model.weights`` for the pretrained weights of the encoder's library.

A run keeps a copy of them as :data:`PRETRAINED_FILE`.
"""
PRETRAINED_FILE = "pretrained.safetensors"
SUFFIXES = (".safetensors", ".pt", ".pth")
NETWORK_TIMEOUT_S = 10


class Description(NamedTuple):
    """What the maker of an encoder says about it.

    A value that is not known is None or "". An unknown ``crop_share`` is 1.

    Attributes:
        size: The side of the images that the encoder takes, in pixels.
        crop_share: That side, divided by the shorter side to which images are resized
            before the crop.
        mean: The mean of each of the 3 channels by which images are normalized, on the
            scale 0-1.
        std: The standard deviation of each channel, on the same scale.
        interpolation: How images are resized, such as "bicubic".
        weights: The library's name of the weights, which says on which data they were
            trained.
        license: The license of the weights.
    """

    size: int | None = None
    crop_share: float = 1.0
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: str | None = None
    weights: str = ""
    license: str = ""

    def settings(self, size: int | None = None) -> dict[str, Any]:
        """Return the settings of a run that follow from the description.

        Args:
            size: The side of images in pixels that the user wants instead of the
                maker's. None for the maker's.

        Returns:
            Values by dotted key: ``augment.large.size`` and ``data.stored_size`` (sides
            in pixels; the second is the first divided by ``crop_share``, rounded down,
            at most 1024), ``data.mean``, ``data.std`` (tuples) and
            ``data.interpolation`` ("bicubic", or "bilinear" for any other). Unknown
            values are left out.
        """
        size = size or self.size
        store = size and min(int(size / self.crop_share + 1e-6), 1024)
        interpolation = self.interpolation and (
            "bicubic" if self.interpolation == "bicubic" else "bilinear"
        )
        values = {
            "augment.large.size": size,
            "data.stored_size": store,
            "data.mean": self.mean,
            "data.std": self.std,
            "data.interpolation": interpolation,
        }
        return {key: value for key, value in values.items() if value is not None}


def describe_encoder(name: str) -> Description:
    """Return what is known of the encoder that ``model.encoder`` names.

    The user's own callable is imported and builds its encoder, once in a process. For a
    repository ``timm:hf-hub:ORG/NAME`` the ``config.json`` is downloaded if the local
    cache lacks it. Weights are not downloaded.

    Args:
        name: The name, such as "resnet18", "torchvision:NAME", "timm:NAME",
            "package.module:NAME" for the user's own callable, or "vectors:D".

    Returns:
        The description. For torchvision's encoders, and for "resnet18", "resnet34" and
        "resnet50", it is that of torchvision's default weights. For timm's it is that
        of timm's ``pretrained_cfg``, or of the ``config.json`` of the repository. For
        the user's callable it is read from attributes of the encoder, and what these do
        not say is not known. For "resnet_small" and for vectors nothing is known.

    Raises:
        ConfigError: There is no such encoder, its package is missing, its description
            cannot be downloaded, or the user's callable cannot build it.
    """
    library, _, model_name = name.partition(":")
    if name == "resnet_small" or library == VECTORS:
        return Description()
    if name in OWN_ENCODERS or library == "torchvision":
        return _describe_torchvision(model_name or name)
    if library != "timm":
        return _describe_callable(name)
    check_name("timm", model_name)
    return _describe_cfg(describe_timm(model_name)[1])


def _torchvision_weights(model_name: str) -> Any:
    """Return torchvision's default weights of an encoder.

    Args:
        model_name: torchvision's name of the encoder without a prefix, such as
            "resnet50".

    Returns:
        The member of torchvision's enumeration of weights, such as
        ``ResNet50_Weights.IMAGENET1K_V2``. Nothing is downloaded.

    Raises:
        ConfigError: There is no such encoder.
    """
    check_name("torchvision", model_name)
    from torchvision.models import get_model_weights

    return get_model_weights(model_name).DEFAULT


def _describe_torchvision(model_name: str) -> Description:
    """Return torchvision's description of an encoder and its default weights.

    Args:
        model_name: torchvision's name of the encoder without a prefix.

    Returns:
        The description, all of whose values are known, except that the license may be
        "". ``weights`` is for example "torchvision IMAGENET1K_V2".

    Raises:
        ConfigError: There is no such encoder.
    """
    weights = _torchvision_weights(model_name)
    transforms = weights.transforms()
    size = int(transforms.crop_size[0])
    return Description(
        size,
        size / int(transforms.resize_size[0]),
        tuple(transforms.mean),
        tuple(transforms.std),
        transforms.interpolation.value,
        f"torchvision {weights.name}",
        weights.meta.get("license", ""),
    )


def _describe_cfg(cfg: Mapping[str, Any]) -> Description:
    """Turn timm's description of an encoder and its weights into a Description.

    Args:
        cfg: The values of timm's ``pretrained_cfg``. Those of an encoder of the user's
            own may be incomplete: a value that is missing is None or "" in the result,
            and without ``crop_pct`` the ``crop_share`` is 1.
    """
    size, mean, std = (cfg.get(key) for key in ("input_size", "mean", "std"))
    tag, interpolation = str(cfg.get("tag") or ""), cfg.get("interpolation")
    return Description(
        None if size is None else int(size[-1]),
        float(cfg.get("crop_pct") or 1),
        None if mean is None else tuple(mean),
        None if std is None else tuple(std),
        None if interpolation is None else str(interpolation),
        f"timm {tag}" if tag else "",
        str(cfg.get("license") or ""),
    )


@cache
def _describe_callable(name: str) -> Description:
    """Build an encoder of the user's own, and read its description from its attributes.

    These are timm's ``pretrained_cfg``, if it is a mapping, or else ``image_size``,
    ``mean``, ``std`` and ``interpolation``. Each value may be missing. The result is
    kept for later calls. PyTorch's random state on the CPU is not changed.

    Raises:
        ConfigError: The callable cannot be imported, or does not build an encoder that
            accepts a black image. Errors of the callable itself other than a TypeError
            are raised as they are.
    """
    with torch.random.fork_rng(devices=[]):
        encoder: Any = build_encoder(ModelConfig(encoder=name))
    if isinstance(getattr(encoder, "pretrained_cfg", None), Mapping):
        return _describe_cfg(encoder.pretrained_cfg)
    side, mean, std, interpolation = (
        getattr(encoder, key, None)
        for key in ("image_size", "mean", "std", "interpolation")
    )
    return Description(
        None if side is None else int(side if isinstance(side, int) else side[-1]),
        mean=None if mean is None else tuple(map(float, mean)),
        std=None if std is None else tuple(map(float, std)),
        interpolation=None if interpolation is None else str(interpolation),
    )


def check_encoder(config: Config, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Build the encoder of a run, and run it on an image of each size of its views.

    The sizes are those of the large and small views, as far as a run has such views,
    and of the evaluation view, which is the smaller of the large view and the stored
    image. The images are black. The encoder is dropped afterwards. Its fresh weights
    are drawn from PyTorch's global generator.

    Args:
        config: The configuration of the run.
        tensors: Weights to load into the encoder, by name; None to keep its fresh
            weights.

    Raises:
        ConfigError: The encoder cannot be built, does not accept such images, or
            ``tensors`` do not fit it, see :func:`load_encoder_`.
    """
    encoder = build_encoder(config.model).eval()
    if tensors is not None:
        load_encoder_(encoder, tensors, str(config.model.weights))
    kinds = (
        kind for kind in (config.augment.large, config.augment.small) if kind.num_views
    )
    for side in sorted(
        {kind.size for kind in kinds}
        | {min(config.augment.large.size, config.data.stored_size)}
    ):
        run_on_black_image(config.model.encoder, encoder, side)


def is_file(source: str | None) -> bool:
    """Return whether ``model.weights`` names a file of weights, and not a run.

    Args:
        source: The value of ``model.weights``. The result is True if its name ends in
            one of :data:`SUFFIXES`; the file need not exist. It is False for any other
            name, for ``pretrained`` and for None.
    """
    return source is not None and split(source)[1].endswith(SUFFIXES)


def read_weights(source: str, storage: Storage | None = None) -> dict[str, Tensor]:
    """Read the weights of an encoder, without executing anything in a file.

    Args:
        source: A path or URI of a file, or ``pretrained`` for the copy of the library's
            weights that the run keeps as :data:`PRETRAINED_FILE`.
        storage: The directory of the run, from which that copy is read. It may be None
            if ``source`` is a file.

    Returns:
        Tensors by name, on the CPU. Prefixes and classifiers are still there.

    Raises:
        StorageError: The file does not exist, cannot be read, is damaged, is a file of
            PyTorch that does not hold tensors by name, or could only be loaded by
            running code.
    """
    if source == PRETRAINED:
        assert storage is not None
        return _parse_weights(
            storage.read(PRETRAINED_FILE), storage.path(PRETRAINED_FILE)
        )
    folder, name = split(source)
    return _parse_weights(Storage(folder).read(name), source)


def _parse_weights(data: bytes, source: str) -> dict[str, Tensor]:
    """Read tensors by name from the content of a safetensors or PyTorch file.

    The tensors of a PyTorch checkpoint may be nested under ``state_dict`` or ``model``,
    also repeatedly, up to five levels deep. Only the innermost of these mappings is
    read, and its values that are not tensors are left out.

    Args:
        data: The content of the file.
        source: The path or URI. It is a safetensors file if the name of the file,
            without the options of a URI, ends in ".safetensors", and a PyTorch file
            otherwise.

    Raises:
        StorageError: The content is damaged; or it is a PyTorch file that holds no
            tensors by name, or whose loading would run code.
    """
    if split(source)[1].endswith(".safetensors"):
        try:
            return safetensors.torch.load(data)
        except (SafetensorError, ValueError) as error:
            raise StorageError(
                f"model.weights: {source} is not a safetensors file: {one_line(error)}"
            ) from None
    try:
        with warnings.catch_warnings(action="ignore"):  # warnings about old formats
            file = io.BytesIO(data)
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise StorageError(
            f"model.weights: {source} holds more than tensors, and loading that would"
            " run code; save its state_dict() alone"
        ) from None
    except (
        RuntimeError,
        LookupError,
        TypeError,
        AttributeError,
        EOFError,
        ValueError,
        OSError,
    ) as error:
        raise StorageError(
            f"model.weights: {source} is not a PyTorch file: {one_line(error)[:160]}"
        ) from None
    if not isinstance(content, Mapping):
        content = {}
    for _ in range(MAX_NESTING):  # a hostile file may hold itself
        for key in ("state_dict", "model"):
            if isinstance(content.get(key), Mapping):
                content = content[key]
                break
    tensors = {
        key: value for key, value in content.items() if isinstance(value, Tensor)
    }
    if not tensors:
        raise StorageError(
            f"model.weights: {source} holds no weights by name (a state dict)"
        )
    return tensors


# Prefixes and classifiers in checkpoints of other programs.
PREFIXES = ("", "module.", "encoder.", "module.encoder.", "backbone.", "model.")
MAX_NESTING = 5  # mappings in mappings of a checkpoint that are looked into
CLASSIFIERS = (
    *("fc.", "head.", "heads.", "classifier.", "head_dist."),
    *("aux1.", "aux2.", "AuxLogits."),
)


def load_encoder_(
    encoder: nn.Module, tensors: Mapping[str, Tensor], source: str
) -> None:
    """Load weights into an encoder, in place.

    Of the common prefixes of keys in :data:`PREFIXES`, such as ``module.`` or none, the
    one under which most keys fit is removed, and keys without it are ignored. Weights
    that the encoder lacks are ignored if they are of a classifier: their keys begin
    with one of :data:`CLASSIFIERS`. Only the counters ``num_batches_tracked`` may be
    missing; the encoder then keeps its own.

    Args:
        encoder: The encoder, which is changed.
        tensors: The weights by name.
        source: Where they are from, for the error.

    Raises:
        ConfigError: The weights do not fit the encoder. The message names keys that are
            missing, unexpected or of another shape.
    """
    expected = encoder.state_dict()
    candidates = [with_prefix(dict(tensors), prefix) for prefix in PREFIXES]
    # max() returns the first of equal candidates.
    given = max(candidates, key=lambda some: len(some.keys() & expected.keys()))
    problems = {
        "missing": [
            key
            for key in expected
            if key not in given and not key.endswith("num_batches_tracked")
        ],
        "unexpected": [
            key
            for key in given
            if key not in expected and not key.startswith(CLASSIFIERS)
        ],
        "of another shape": [
            f"{key} {tuple(given[key].shape)} for {tuple(value.shape)}"
            for key, value in expected.items()
            if key in given and given[key].shape != value.shape
        ],
    }
    if any(problems.values()):
        described = "; ".join(
            f"{len(keys)} {problem} ({', '.join(keys[:3])}{' ...' * (len(keys) > 3)})"
            for problem, keys in problems.items()
            if keys
        )
        raise ConfigError(
            f"model.weights: {source} does not fit the encoder: keys {described};"
            " --model.encoder names that of the weights"
        )
    encoder.load_state_dict({k: given.get(k, value) for k, value in expected.items()})


def fetch_pretrained(name: str) -> bytes:
    """Return the weights that a library has for an encoder, as a safetensors file.

    They come from the library's cache, or are downloaded into it.

    Args:
        name: The name of the encoder, as ``model.encoder`` has it.

    Returns:
        The content of the file: the weights by the library's names, for torchvision
        with those of the classifier, for timm without. It has no tensors if rows are
        vectors.

    Raises:
        ConfigError: There is no such encoder, timm is needed and not installed, no
            library has weights for the encoder, as for "resnet_small" and the user's
            own callable, or they cannot be downloaded.
    """
    library, _, model_name = name.partition(":")
    if library == VECTORS:
        return safetensors.torch.save({})
    if name == "resnet_small" or is_own_code(name):
        raise ConfigError(
            f"model.weights pretrained: no library has weights for {name}; pass a file"
        )
    state = _fetch_timm(model_name) if library == "timm" else _fetch_torchvision(name)
    return safetensors.torch.save(
        {key: tensor.contiguous() for key, tensor in state.items()}
    )


def _fetch_torchvision(name: str) -> dict[str, Tensor]:
    """Return the default weights of a torchvision model, classifier included, by name.

    They are read from torchvision's cache, or downloaded into it.

    Args:
        name: ``torchvision:NAME``, or torchvision's name alone.

    Raises:
        ConfigError: There is no such encoder, or its weights cannot be downloaded.
    """
    weights = _torchvision_weights(name.removeprefix("torchvision:"))
    try:
        return weights.get_state_dict(
            progress=False, check_hash=True, map_location="cpu", weights_only=True
        )
    # URLError is an OSError, and a damaged file raises RuntimeError.
    except (OSError, RuntimeError) as error:
        folder = os.path.join(torch.hub.get_dir(), "checkpoints")
        reason = one_line(error)[:120]
        raise ConfigError(
            f"model.weights pretrained: cannot be downloaded ({reason}); download"
            f" {weights.url} into {folder}, or pass it as --model.encoder"
            f" {name} --weights FILE, or train an encoder on your own"
            " images with --preset scratch"
        ) from None


def _fetch_timm(model_name: str) -> dict[str, Tensor]:
    """Return the pretrained weights of an encoder of timm by name, without classifier.

    They are read from the cache of the Hugging Face Hub, or downloaded into it. The few
    weights for which timm knows only a URL are in PyTorch's cache instead. If the
    Hub's cache has no weights of the encoder, the server must answer a first request
    within ``NETWORK_TIMEOUT_S`` (10) seconds.

    Args:
        model_name: The name after ``timm:``.

    Raises:
        ConfigError: timm is not installed, has no such encoder or no weights for it, or
            the weights cannot be downloaded.
    """
    check_name("timm", model_name)
    import timm
    from huggingface_hub import constants, try_to_load_from_cache

    cfg = describe_timm(model_name)[1]
    repository, _, revision = str(cfg.get("hf_hub_id") or "").partition("@")
    if not repository and not cfg.get("url"):
        raise ConfigError(
            f"model.weights pretrained: timm has no weights for {model_name}"
        )
    file = (
        f"{constants.ENDPOINT}/{repository}/resolve/{revision or 'main'}"
        "/model.safetensors"
        if repository
        else cfg["url"]
    )
    is_cached = repository and any(
        isinstance(
            try_to_load_from_cache(repository, name, revision=revision or None), str
        )
        for name in ("model.safetensors", "pytorch_model.bin")
    )
    try:
        if not is_cached:  # timm itself gives up only after a minute
            # An HTTP error is an answer, too. timm handles it.
            with suppress(HTTPError):
                request = urllib.request.Request(file, method="HEAD")
                urllib.request.urlopen(request, timeout=NETWORK_TIMEOUT_S).close()
        encoder = timm.create_model(model_name, pretrained=True, num_classes=0)
        return encoder.state_dict()
    # URLError and the errors of the hub are OSErrors.
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"model.weights pretrained: cannot be downloaded ({one_line(error)[:120]});"
            f" download {file} and pass it as --weights FILE, or copy another machine's"
            f" cache into {constants.HF_HUB_CACHE}"
        ) from None
