"""Build encoders, which map images (B, 3, S, S) to features (B, D).

There are torchvision's ResNets with either stem, a small ResNet for tiny images, and
any encoder that torchvision, timm or a callable of the user builds.

State-dict keys are those of the library, without its classifier, so that weights can be
loaded anywhere. The pooling of maps and tokens is a forward hook and adds no keys.
Libraries are imported where a network is built, because torchvision takes 2 s, which
processes that only decode images need not spend.
"""

import hashlib
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from uno.config import OWN_ENCODERS, VECTORS, ModelConfig
from uno.errors import ConfigError, did_you_mean, one_line
from uno.imports import check_origin, import_object, working_directory

ONEDNN_BLOCK = 8  # channels that one AVX2 register holds
PROBE_SIDE = 224  # side of the images for an encoder that names none, in pixels


class SmallResNet(nn.Module):
    """ResNet for tiny images (He et al. 2016, Sec. 4.2).

    It has a stem and stages of widths w, 2w, 4w and so on. The paper has three stages.
    Where the width changes, the shortcut is a 1x1 convolution, as in torchvision, and
    not zero padding.

    Args:
        width: w, the number of channels of the first stage.
        blocks: The number of blocks of each stage.
        stages: The number of stages.
        halved: Whether the stem is a 4x4 convolution of stride 2. The paper's is a 3x3
            convolution of stride 1.
    """

    def __init__(
        self, width: int, blocks: int, stages: int = 3, halved: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = _small_stem(width, "cifar_stride2" if halved else "cifar")
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(width, width, blocks, stride=1)
        for i in range(1, stages):
            self.add_module(
                f"layer{i + 1}", _stage(width << i - 1, width << i, blocks, stride=2)
            )
        self.num_stages, self.num_features = stages, width << stages - 1  # D
        _init_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        """Compute features (B, D) of images (B, 3, S, S), D = w * 2^(stages - 1).

        w is the number of channels of the first stage. The last maps are averaged over
        all positions.
        """
        x = torch.relu(self.bn1(self.conv1(images)))
        for i in range(self.num_stages):
            x = getattr(self, f"layer{i + 1}")(x)
        return x.mean(dim=(2, 3))


HUB = "hf-hub:"
"""Prefix of an encoder in a repository of the Hugging Face Hub, after ``timm:``."""
AUXILIARY = ("aux1", "aux2", "AuxLogits")
"""Classifiers in the middle of a model of torchvision, which only training uses."""
SMALL_STEMS = {"cifar": (3, 1), "cifar_stride2": (4, 2)}
"""Kernel size and stride of the stems for small images. Their padding is 1."""


def _small_stem(width: int, stem: str) -> nn.Conv2d:
    """Build the first convolution of an encoder for small images, without a bias.

    It has 3 input channels, and a padding of 1 pixel.

    Args:
        width: The number of its output channels.
        stem: ``cifar`` (3x3, stride 1) or ``cifar_stride2`` (4x4, stride 2).
    """
    return nn.Conv2d(3, width, *SMALL_STEMS[stem], 1, bias=False)


def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    """Build a stage of residual blocks (He et al. 2016).

    A block is torchvision's ``BasicBlock`` of two 3x3 convolutions. The shortcut of the
    first block is a 1x1 convolution with batch normalization, or the identity if its
    stride is 1 and the number of channels stays the same. All other shortcuts are the
    identity. With fewer than ``ONEDNN_BLOCK`` (8) input channels the 1x1 convolution
    has no stride: average pooling over single pixels comes before it with the stride,
    which computes the same.

    Args:
        inputs: The number of channels of the input.
        outputs: The number of channels of every block.
        blocks: The number of blocks.
        stride: The stride of the first block. The others have stride 1.
    """
    from torchvision.models.resnet import BasicBlock

    shortcut = None
    if stride != 1 or inputs != outputs:
        # On CPUs with AVX2 and no AVX512 the gradient of a strided 1x1 convolution of
        # few channels is written past its buffer (oneDNN issue 6035): a crash, or wrong
        # weights. So the stride comes first.
        few = inputs < ONEDNN_BLOCK
        pick: list[tuple[str, nn.Module]] = (
            [("every", nn.AvgPool2d(1, stride))] if few else []
        )
        pointwise = nn.Conv2d(inputs, outputs, 1, 1 if few else stride, bias=False)
        shortcut = nn.Sequential(
            OrderedDict([*pick, ("0", pointwise), ("1", nn.BatchNorm2d(outputs))])
        )
    first = BasicBlock(inputs, outputs, stride, shortcut)
    return nn.Sequential(
        first, *(BasicBlock(outputs, outputs) for _ in range(blocks - 1))
    )


def _init_convolutions(module: nn.Module) -> None:
    """Initialize all convolutions of a module with Kaiming normal values, in place.

    The mode is fan-out. This is the authors' choice for the stems for small images.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


class Vectors(nn.Module):
    """The encoder of rows that are vectors already: it returns its input.

    Args:
        num_features: D, the length of the vectors. It is 1 until the data is read.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, vectors: Tensor) -> Tensor:
        """Return the vectors (B, D) unchanged.

        Raises:
            ConfigError: The input does not have the shape (B, D), because it consists
                of images or of vectors of another length.
        """
        if vectors.shape[1:] != (self.num_features,):
            kind = f"vectors of {vectors.shape[1]}" if vectors.ndim == 2 else "images"
            raise ConfigError(
                f"the model takes vectors of {self.num_features} numbers, not {kind}"
            )
        return vectors


def build_encoder(config: ModelConfig) -> nn.Module:
    """Build the encoder that a configuration names, with fresh weights.

    The weights are drawn from PyTorch's global generator. Files of weights that the
    configuration names are not loaded, but a callable of the user may load some.

    Args:
        config: The section ``model`` of the configuration.

    Returns:
        A module (B, 3, S, S) -> (B, D) with an attribute ``num_features`` = D; for
        vectors (B, D) -> (B, D).

    Raises:
        ConfigError: The encoder does not exist, its package is missing, a description
            that it needs cannot be downloaded, a model of torchvision does not end in a
            linear classifier, or a callable of the user cannot be imported or returns
            something else than an encoder, which is run on a black image to see that.
    """
    if config.encoder == "resnet_small":
        return SmallResNet(
            config.width, config.blocks, config.stages, config.stem == "cifar_stride2"
        )
    if config.takes_vectors:
        return Vectors(int(config.encoder.partition(":")[2] or 1))
    if config.encoder not in OWN_ENCODERS:
        return _library_encoder(config.encoder)
    from torchvision.models import resnet

    encoder = getattr(resnet, config.encoder)()
    encoder.num_features = encoder.fc.in_features  # D
    encoder.fc = nn.Identity()
    if config.stem in SMALL_STEMS:
        encoder.conv1 = _small_stem(64, config.stem)
        encoder.maxpool = nn.Identity()
        _init_convolutions(encoder)
    return encoder


def _library_encoder(name: str) -> nn.Module:
    """Build an encoder of timm, of torchvision, or of the user's own function.

    A forward hook turns outputs into vectors, see :func:`_pool_output`. An encoder of
    the user is run once in eval mode on a black image, whose side is that of
    :func:`image_side`, to learn D. Afterwards all its modules have the training mode
    that the encoder itself had.

    Args:
        name: ``timm:NAME``, ``torchvision:NAME`` or ``package.module:NAME``.

    Returns:
        A module (B, 3, S, S) -> (B, D) with an attribute ``num_features`` = D. It has
        random weights, unless the user's function loads some.

    Raises:
        ConfigError: The encoder does not exist, its package is missing, the description
            of an encoder of the Hugging Face Hub cannot be downloaded, a model of
            torchvision does not end in a linear classifier, or the user's function
            cannot be imported or returns something else than an encoder.
    """
    library, _, model_name = name.partition(":")
    encoder: Any
    if library == "timm":
        encoder = _from_timm(model_name)
    elif library == "torchvision":
        encoder = _from_torchvision(model_name)
    else:
        encoder = _from_callable(name)
    encoder.register_forward_hook(_pool_output)
    if library not in ("timm", "torchvision"):
        training, side = encoder.training, image_side(encoder)
        features = run_on_black_image(name, encoder.eval(), side)
        encoder.num_features = features.shape[1]
        encoder.train(training)
    return encoder


def run_on_black_image(name: str, encoder: nn.Module, side: int) -> Tensor:
    """Return the features of a black image, to see that an encoder accepts its size.

    No gradient is computed.

    Args:
        name: The name of the encoder, for the error.
        encoder: The encoder, in eval mode and on the CPU.
        side: The side of the image in pixels.

    Returns:
        The features, (1, D).

    Raises:
        ConfigError: The encoder raises a RuntimeError, AssertionError, TypeError or
            ValueError. One of these is the error of :func:`_pool_output` for an output
            that cannot be turned into vectors. Other errors are raised as they are.
    """
    try:
        # In inference_mode a tensor that a module caches could not be used in training.
        with torch.no_grad():
            return encoder(torch.zeros(1, 3, side, side))
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model.encoder {name} does not accept images of {side} px (--image-size):"
            f" {one_line(error)[:160]}"
        ) from None


def _from_timm(model_name: str) -> nn.Module:
    """Build an encoder of timm without its classifier, with random weights.

    No weights are downloaded. The image encoders of CLIP are also built without the
    projection by which they are compared with texts. A vision transformer takes images
    of any size that is a multiple of its patches, if timm can build it so: it then
    resamples its position embeddings to the number of patches.

    Args:
        model_name: The name after ``timm:``. ``hf-hub:ORG/NAME`` names a repository of
            the Hugging Face Hub, whose ``config.json`` is downloaded if the local cache
            lacks it.

    Returns:
        The encoder, with its number of outputs D as ``num_features``.

    Raises:
        ConfigError: timm has no such encoder or is not installed, or ``config.json``
            cannot be downloaded or does not describe an encoder of timm.
    """
    check_name("timm", model_name)
    import timm

    encoder = None
    if describe_timm(model_name)[1].get("fixed_input_size"):
        # Transformers with windows lack the argument, and refuse other sizes.
        with suppress(TypeError):
            encoder = timm.create_model(
                model_name, num_classes=0, dynamic_img_size=True
            )
    if encoder is None:
        encoder = timm.create_model(model_name, num_classes=0)
    # Some models, such as MobileNetV3, have a layer between the pooled map and the
    # classes.
    hidden_width = getattr(encoder, "head_hidden_size", None)
    encoder.num_features = hidden_width or encoder.num_features
    return encoder


def describe_timm(model_name: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the description of an encoder that timm builds.

    The package timm must be installed.

    Args:
        model_name: The name after ``timm:``. ``hf-hub:ORG/NAME`` or
            ``hf-hub:ORG/NAME@REVISION`` names a repository of the Hugging Face Hub,
            whose ``config.json`` is downloaded if the local cache lacks it.

    Returns:
        timm's name of the encoder, which for a repository is that in its
        ``config.json`` and otherwise ``model_name`` itself, and may have the name of
        weights after a dot; and the fields of timm's ``pretrained_cfg``, such as
        ``input_size`` and ``mean``, which are {} if timm has no description of an
        encoder of this name.

    Raises:
        ConfigError: The ``config.json`` of the repository cannot be downloaded, or
            names no architecture, as timm's do.
        RuntimeError: timm has the encoder, but no weights of the name after the dot.
    """
    from huggingface_hub import constants
    from timm.models import get_pretrained_cfg, load_model_config_from_hf

    if not model_name.startswith(HUB):
        found = get_pretrained_cfg(model_name)
        return model_name, {} if found is None else found.to_dict()
    try:
        description, name, _ = load_model_config_from_hf(model_name.removeprefix(HUB))
    except (OSError, ValueError) as error:  # ValueError: a name that no repository has
        raise ConfigError(
            f"model.encoder timm:{model_name}: config.json cannot be downloaded"
            f" ({one_line(error)[:120]}); copy another machine's cache into"
            f" {constants.HF_HUB_CACHE}"
        ) from None
    except KeyError:
        raise ConfigError(
            f"model.encoder timm:{model_name} is not a repository of timm's: its"
            " config.json names no architecture; timm has most encoders under its own"
            " names (timm:NAME), and a function of yours can build any other"
            " (package.module:callable)"
        ) from None
    return name, description


def _from_torchvision(model_name: str) -> nn.Module:
    """Build an encoder of torchvision without its last linear layer, untrained.

    Auxiliary classifiers in the middle of the model (:data:`AUXILIARY`) are removed,
    too.

    Args:
        model_name: The name after ``torchvision:``.

    Returns:
        The encoder, with its number of outputs D as ``num_features``.

    Raises:
        ConfigError: There is no such encoder, or it does not end in a linear
            classifier.
    """
    from torchvision import models

    check_name("torchvision", model_name)
    encoder = models.get_model(model_name, weights=None)
    classifier = classifier_of(encoder)
    if not classifier:
        raise ConfigError(
            f"model.encoder torchvision:{model_name} does not end in a linear"
            " classifier; choose another"
        )
    encoder.num_features = encoder.get_submodule(classifier).in_features
    encoder.set_submodule(classifier, nn.Identity())
    for name in AUXILIARY:
        if hasattr(encoder, name):
            setattr(encoder, name, None)
            encoder.aux_logits = False
    return encoder


def classifier_of(encoder: nn.Module) -> str:
    """Return the name of the linear classifier in which a model of torchvision ends.

    Args:
        encoder: The model.

    Returns:
        The dotted name of the model's last linear layer, if this name is "fc" or begins
        with "head" or "classifier", such as "classifier.6"; otherwise, or without a
        linear layer, "".
    """
    last = [
        name for name, layer in encoder.named_modules() if isinstance(layer, nn.Linear)
    ][-1:]
    return last[0] if last and re.match(r"fc$|head|classifier", last[0]) else ""


def check_name(library: str, model_name: str) -> None:
    """Check that timm or torchvision has an encoder of a name.

    Args:
        library: ``timm`` or ``torchvision``.
        model_name: The library's name of the encoder. For timm it may have the name of
            weights after a dot, or be a repository ``hf-hub:ORG/NAME``, whose
            ``config.json`` is downloaded if the local cache lacks it.

    Raises:
        ConfigError: timm is not installed; the library has no encoder of that name, or
            no weights of that name; or the repository cannot be reached or does not
            describe an encoder of timm.
    """
    if library == "timm":
        if find_spec("timm") is None:
            raise ConfigError(
                f"model.encoder timm:{model_name} needs the package timm: pip install"
                " timm"
            )
        import timm

        if model_name.startswith(HUB):
            model_name = describe_timm(model_name)[0]
        architecture, _, weights = model_name.partition(".")
        if weights and timm.is_model(architecture):
            known = timm.list_pretrained(f"{architecture}.*")
        else:
            known = timm.list_models()
    else:
        from torchvision import models

        known = models.list_models(module=models)
    if model_name not in known:
        hint = did_you_mean(model_name, known, show=f"{library}:{{}}".format)
        raise ConfigError(f"model.encoder: {library} has no {model_name!r}{hint}")


def require_encoder(name: str, foreign: str | None = None) -> None:
    """Check that the encoder that ``model.encoder`` names can be found.

    The encoder is not built, but a callable of the user is imported. With ``foreign`` a
    warning that names this callable is logged first. Names of this project's encoders
    and of vectors are not checked.

    Args:
        name: The name of the encoder.
        foreign: The directory of a model of unknown origin. Code that such a model
            names must not lie in that directory, so that a downloaded model does not
            run code of its own. None if the origin is known.

    Raises:
        ConfigError: timm is needed and not installed, no encoder has that name, the
            description of an encoder of the Hugging Face Hub cannot be downloaded or is
            not one of timm's, the user's callable cannot be imported or is not
            callable, or its code lies in ``foreign``.
    """
    library, _, model_name = name.partition(":")
    if library in ("torchvision", "timm"):
        check_name(library, model_name)
    elif is_own_code(name):
        if foreign is not None:
            check_origin("model.encoder", name, foreign)
        _import_callable(name)


def is_own_code(name: str) -> bool:
    """Return whether ``model.encoder`` names a function of the user's own.

    It does if the name is not one of :data:`uno.config.OWN_ENCODERS`, and the part
    before the first colon, or the whole name without one, is not ``torchvision``,
    ``timm`` or ``vectors``. Nothing is imported.
    """
    library = name.partition(":")[0]
    return name not in OWN_ENCODERS and library not in ("torchvision", "timm", VECTORS)


def _import_callable(name: str) -> Callable[[], Any]:
    """Import the user's function that builds an encoder, without calling it.

    Args:
        name: ``package.module:NAME``.

    Raises:
        ConfigError: The object cannot be imported, or is not callable. Other errors of
            the module's code than an ImportError, AttributeError or SyntaxError are
            raised as they are.
    """
    build = import_object("model.encoder", name)
    if not callable(build):
        raise ConfigError(
            f"model.encoder {name} cannot be called: it is of type"
            f" {type(build).__name__}"
        )
    return build


def _from_callable(name: str) -> nn.Module:
    """Build an encoder by the user's own function.

    The function is imported and called. Imports in it also find modules in the working
    directory.

    Args:
        name: ``package.module:NAME`` of a function without arguments.

    Returns:
        The module that the function returns, unchanged.

    Raises:
        ConfigError: The function cannot be imported, raises a TypeError, which an
            argument that is missing also does, or does not return a module. Its other
            errors are raised as they are.
    """
    build = _import_callable(name)
    with working_directory():
        try:
            encoder = build()
        except TypeError as error:
            raise ConfigError(
                f"model.encoder {name} cannot be called without arguments:"
                f" {one_line(error)[:160]}"
            ) from None
    if not isinstance(encoder, nn.Module):
        raise ConfigError(
            f"model.encoder {name} must return a torch.nn.Module, not a"
            f" {type(encoder).__name__}"
        )
    return encoder


def code_of(name: str, encoder: nn.Module | None = None) -> dict[str, dict[str, str]]:
    """Return which code defines an encoder of the user's own.

    Args:
        name: The name of the encoder.
        encoder: The encoder; it is built if this is None.

    Returns:
        Two mappings. ``code`` gives, by the name of the Python module in ``name`` and
        of each module that defines a class of the encoder's layers, the SHA-256 of its
        file as hex digits; modules of the package torch, modules without a file and
        files that cannot be read are left out. ``packages`` gives the version of each
        top-level package of these modules, torch included, or "" if it is not known.
        The result is {}, without these two keys, for any encoder that is not a callable
        of the user.

    Raises:
        ConfigError: ``encoder`` is None, and the encoder cannot be built.
    """
    if not is_own_code(name):
        return {}
    encoder = _library_encoder(name) if encoder is None else encoder
    modules = {
        name.partition(":")[0],
        *(type(layer).__module__ for layer in encoder.modules()),
    }
    sources, versions = {}, {}
    for module in sorted(modules):
        package = module.partition(".")[0]
        versions[package] = str(getattr(sys.modules.get(package), "__version__", ""))
        file = getattr(sys.modules.get(module), "__file__", None)
        if file and package != "torch":
            with suppress(OSError), open(file, "rb") as source:
                sources[module] = hashlib.sha256(source.read()).hexdigest()
    return {"code": sources, "packages": versions}


def changed_code(name: str, then: Any, now: Any) -> str:
    """Return a sentence that says which modules of an encoder's code have changed.

    Args:
        name: The name of the encoder.
        then: The mapping ``code`` in the result of :func:`code_of` when the run began;
            anything but a dict if it is not known.
        now: The same, now.

    Returns:
        The sentence, without a full stop, with the names of the modules that were
        changed, added or removed; "" if there are none or either mapping is not known.
    """
    if then == now or not isinstance(then, dict) or not isinstance(now, dict):
        return ""
    modules = sorted(m for m in then.keys() | now.keys() if then.get(m) != now.get(m))
    return (
        f"the code of model.encoder {name} has changed since the run began"
        f" ({', '.join(modules)})"
    )


def _pool_output(module: nn.Module, inputs: Any, output: Any) -> Tensor:
    """Turn the output of an encoder into one vector for each image.

    This is a forward hook. Vectors (B, D) stay. Maps (B, D, h, w) are averaged over
    positions. Of tokens (B, T, D) the first is taken if the module has a class token,
    an attribute ``cls_token`` or ``class_token`` that is not None. Otherwise they are
    averaged.

    Args:
        module: The encoder.
        inputs: The inputs, which are not used.
        output: The output.

    Returns:
        (B, D).

    Raises:
        ConfigError: The output is of another kind.
    """
    if isinstance(output, Tensor):
        if output.ndim == 2:
            return output
        if output.ndim == 4:
            return output.mean(dim=(2, 3))
        if output.ndim == 3:
            has_token = any(
                getattr(module, name, None) is not None
                for name in ("cls_token", "class_token")
            )
            return output[:, 0] if has_token else output.mean(dim=1)
    kind = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
    raise ConfigError(
        f"the encoder returns {kind}, not vectors (B, D), tokens (B, T, D) or (B, D,"
        " h, w)"
    )


def image_side(encoder: nn.Module) -> int:
    """Return the side in pixels of the images for which an encoder was made.

    The encoder says so by ``image_size``, ``patch_embed.img_size`` or the key
    ``input_size`` of ``pretrained_cfg``; the first of these counts. Of several numbers
    the last is taken. The result is 224 if the encoder does not say it.
    """
    patches = getattr(getattr(encoder, "patch_embed", None), "img_size", None)
    described = (getattr(encoder, "pretrained_cfg", None) or {}).get("input_size")
    for side in (getattr(encoder, "image_size", None), patches, described):
        if side is not None:
            return int(side if isinstance(side, int) else side[-1])
    return PROBE_SIDE


def frozen_parts(
    encoder: nn.Module, finetune: str
) -> tuple[list[str], list[nn.Parameter]]:
    """Return the parts of an encoder that ``model.finetune`` keeps unchanged.

    Args:
        encoder: The encoder.
        finetune: ``full`` freezes nothing, ``none`` the whole encoder, and
            ``last_stage`` all that comes before the last stage or block.

    Returns:
        The dotted names of frozen submodules ("" means the whole encoder), and frozen
        parameters that are in none of these modules, such as a class token. What comes
        after the last stage is not frozen. Nothing is changed here.

    Raises:
        ConfigError: ``last_stage``, and the encoder has no stages or blocks.
    """
    if finetune == "full":
        return [], []
    if finetune == "none":
        return [""], []
    path = _last_stage(encoder)
    if not path:
        raise ConfigError(
            "model.finetune last_stage: the encoder has no stages or blocks; use full"
            " or none"
        )
    modules, parameters, outer = list[str](), list[nn.Parameter](), ""
    for name in path:
        module = encoder.get_submodule(outer)
        before = [child for child, _ in module.named_children()]
        modules += [
            f"{outer}.{child}".lstrip(".") for child in before[: before.index(name)]
        ]
        parameters += module.parameters(recurse=False)
        outer = f"{outer}.{name}".lstrip(".")
    return modules, parameters


STAGES = ("blocks", "stages", "layers", "features", "trunk_output", "encoder")


def _last_stage(module: nn.Module) -> list[str]:
    """Find the last stage or block of a module.

    It is the last child with a name such as "layer4", "stage3" or "s4". Otherwise a
    child named in :data:`STAGES` is searched. If it is a Sequential or ModuleList, the
    last entry is taken that has a child with children of its own, such as a stage or a
    transformer block, and no plain convolution with normalization. If there is no such
    entry, this child is searched by the same rules. A module with a single child that
    has parameters is taken for a wrapper, and the child is searched.

    Returns:
        The names of the nested children that lead to it, from the outside; [] if the
        module has none.
    """
    children = dict(module.named_children())
    numbered = [name for name in children if re.fullmatch(r"(layer|stage|s)\d+", name)]
    if numbered:
        return numbered[-1:]
    for name in (name for name in STAGES if name in children):
        stages = []
        if isinstance(children[name], nn.Sequential | nn.ModuleList):
            # A stage holds blocks, and a block layers; a last convolution, which holds
            # neither, is none.
            parts = children[name].named_children()
            stages = [
                n
                for n, part in parts
                if any([*block.children()] for block in part.children())
            ]
        inner = stages[-1:] or _last_stage(children[name])
        if inner:
            return [name, *inner]
    weighty = [
        name
        for name, child in children.items()
        if next(child.parameters(), None) is not None
    ]
    # The module is a wrapper.
    inner = _last_stage(children[weighty[0]]) if len(weighty) == 1 else []
    return inner and [weighty[0], *inner]
