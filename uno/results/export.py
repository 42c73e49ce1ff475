"""Export a trained model as a file for other tools, and describe it in a model card.

The formats are the encoder's weights, a self-contained PyTorch program, and ONNX. Each
file is loaded again and compared with the model before it is returned. Only ONNX is
returned unchecked if onnxruntime is missing.
"""

import io
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor, nn

from uno.augment import eval_view
from uno.config import OWN_ENCODERS, ModelConfig, override
from uno.data.files import split
from uno.encoders.build import build_encoder
from uno.encoders.weights import PRETRAINED, describe_encoder
from uno.errors import ConfigError, NumericsError
from uno.method import description
from uno.model import UnoModel, build_network
from uno.results.accuracy_table import SPLITS, filled_tables
from uno.results.classes import edits_of, merge_outputs
from uno.results.infer import Classifier
from uno.results.trust import verdict

FORMATS = {"encoder": "encoder.safetensors", "pt2": "model.pt2", "onnx": "model.onnx"}
"""Formats and the names of their files in ``model/``."""
CARD_FILE = "README.md"
# largest difference of features ("encoder") or probabilities
TOLERANCE = {"encoder": 1e-6, "pt2": 1e-5, "onnx": 1e-4}
# batch sizes of the check, which differ from that of the traced example
CHECK_ROWS = (1, 3, 8)


def export(model: Classifier, format: str) -> bytes:
    """Return a model as the content of a file in one of three formats.

    Nothing is written. The content is loaded again and compared with the model on
    random inputs, except for "onnx" if onnxruntime is not installed.

    Args:
        model: The model.
        format: "encoder" for the encoder's weights as safetensors, "pt2" for a program
            of ``torch.export``, or "onnx".

    Returns:
        The content of the file.

    Raises:
        ConfigError: The format is unknown; it is "onnx", and the package onnx or
            onnxscript is missing; or it is "encoder", and the model takes vectors, so
            it has no encoder.
        NumericsError: The file, loaded again, computes something else than the model.
    """
    if format not in FORMATS:
        raise ConfigError(
            f"unknown format {format!r}; choose from {', '.join(FORMATS)}"
        )
    return {"encoder": _export_encoder, "pt2": _export_pt2, "onnx": _export_onnx}[
        format
    ](model)


def can_check_onnx() -> bool:
    """Return whether onnxruntime is installed. Otherwise ONNX files are not checked."""
    return find_spec("onnxruntime") is not None


class Program(nn.Module):
    """A model with its best head alone, as a module that can be traced.

    It maps B images uint8 (B, 3, S, S) in RGB with sides of S pixels, or B vectors of D
    numbers, float32 (B, D), to the probabilities of C classes, (B, C), that ``uno
    predict`` computes. If the encoder takes smaller images, it crops their centers. The
    best head is the one with the lowest training loss.

    Args:
        model: The model, which is not changed. Its network is copied to the CPU.
    """

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.config, self.classes = model.config, model.classes
        self.side = min(model.config.augment.large.size, model.size)
        self.network = _one_head(model, model.best_head)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the probabilities of all C classes.

        The layers are called one by one, because a call of the network would put its
        autocast into the traced program.

        Args:
            images: Images uint8 (B, 3, S, S) RGB, or vectors float32 (B, D).

        Returns:
            Probabilities (B, C), known classes first. Those of merged classes have been
            added to those of their targets, and are 0.
        """
        network, data = self.network, self.config.data
        vectors = self.config.model.takes_vectors
        features = (
            images
            if vectors
            else network.encoder(eval_view(images, self.side, data.mean, data.std))
        )
        features = features if network.adapter is None else network.adapter(features)
        unit = F.normalize(features, dim=-1)
        if network.projector is None:  # the head of a baseline reads the feature
            novel = network.novel(features)[0]
        else:
            projections = network.projector(
                unit if network.normalize_input else features
            )[0]
            novel = F.normalize(projections, dim=-1) @ network.novel.weight[0].T
        joint = torch.cat([unit @ network.known.weight.T, novel], dim=-1)
        return merge_outputs(
            (joint / self.config.objective.temperature).softmax(dim=-1), self.classes
        )


def _one_head(model: Classifier, head: int) -> UnoModel:
    """Return a copy of the network with one cluster head, for prediction only.

    Overclustering heads and modules that only the training loss calls are left out.

    Args:
        model: The model.
        head: The index of the cluster head to keep.

    Returns:
        A new network on the CPU, in eval mode, without gradients.
    """
    module = model.module
    config = override(
        model.config, {"model.num_heads": 1, "model.overcluster_factor": 0}
    )
    alone = build_network(config, module.num_known, module.num_novel, seed=0)
    state = alone.state_dict()
    for name, tensor in module.state_dict().items():
        if name in state:
            stacked = tensor.shape != state[name].shape
            state[name] = tensor.split(len(state[name]))[head] if stacked else tensor
    alone.load_state_dict(state)
    if alone.projector is None:
        alone.novel.auxiliary = None
    return alone.eval().requires_grad_(False)


def _export_encoder(model: Classifier) -> bytes:
    """Return the encoder's weights as safetensors, under the keys of its library.

    The weights are loaded into a new encoder, and its features of random images are
    compared with those of the model.

    Raises:
        ConfigError: The model takes vectors, so it has no encoder.
        NumericsError: The loaded encoder computes other features.
    """
    if model.config.model.takes_vectors:
        raise ConfigError(
            "the model takes vectors, so it has no encoder; --format pt2 or onnx has"
            " its heads"
        )
    state = model.module.encoder.state_dict().items()
    data = safetensors.torch.save(
        {name: tensor.cpu().contiguous() for name, tensor in state}
    )
    encoder = build_encoder(model.config.model)
    encoder.load_state_dict(safetensors.torch.load(data))
    # This is the memory layout of the model. Another one sums in another order, which
    # alone changes features by up to 2e-6.
    encoder = encoder.eval().to(model.device).to(memory_format=torch.channels_last)
    expected, place = model.module.encoder, model.device
    _compare(
        "encoder",
        model,
        lambda x: encoder(x.to(place) / 255),
        lambda x: expected(x.to(place) / 255),
    )
    return data


def _export_pt2(model: Classifier) -> bytes:
    """Return the model as a program of ``torch.export``, for images or vectors.

    The program is loaded again, and its probabilities for random inputs are compared
    with those of the model. The texts of :func:`_metadata_of`, such as the classes, are
    stored in it as extra files.

    Raises:
        NumericsError: The program computes other probabilities than the model.
    """
    exported, stream = (
        torch.export.export(Program(model), **_trace_arguments(model)),
        io.BytesIO(),
    )
    torch.export.save(exported, stream, extra_files=_metadata_of(model))
    data = stream.getvalue()
    program = torch.export.load(io.BytesIO(data)).module()
    _compare("pt2", model, program, lambda x: model.score(x).probabilities)
    return data


def _export_onnx(model: Classifier) -> bytes:
    """Return the model as ONNX, for images or vectors.

    The texts of :func:`_metadata_of`, such as the classes, are stored in its metadata.
    If onnxruntime is installed, its probabilities for random inputs are compared with
    those of the model; otherwise they are not checked.

    Raises:
        ConfigError: The package onnx or onnxscript is not installed.
        NumericsError: The file computes other probabilities than the model.
    """
    missing = next(
        (name for name in ("onnx", "onnxscript") if find_spec(name) is None), None
    )
    if missing:
        raise ConfigError(
            f"--format onnx needs the package {missing}: pip install onnx onnxscript"
            " onnxruntime"
        )
    proto = to_onnx(
        Program(model), _input_name(model), "probabilities", **_trace_arguments(model)
    )
    for key, value in _metadata_of(model).items():
        proto.metadata_props.add(key=key, value=value)
    data = proto.SerializeToString()
    if can_check_onnx():
        import onnxruntime

        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

        def program(images: Tensor) -> Tensor:
            """Compute the probabilities (B, C) of images or vectors by the file."""
            return torch.from_numpy(
                session.run(None, {_input_name(model): images.numpy()})[0]
            )

        _compare("onnx", model, program, lambda x: model.score(x).probabilities)
    return data


def _input_name(model: Classifier) -> str:
    """Return the name of the input in an exported file: "vectors" or "images".

    Args:
        model: The model, which takes the one or the other.
    """
    return "vectors" if model.config.model.takes_vectors else "images"


def _trace_arguments(model: Classifier) -> dict[str, Any]:
    """Return arguments of ``torch.export.export`` and ``torch.onnx.export`` by name.

    Returns:
        "args", a tuple of one tensor, which is a batch of two random inputs; and
        "dynamic_shapes", by which the batch may have any size from 1.
    """
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    return {"args": (_random_images(model, 2),), "dynamic_shapes": shapes}


def _metadata_of(model: Classifier) -> dict[str, str]:
    """Return the metadata that an exported file holds about the model.

    Returns:
        "classes.json", the output classes as JSON; "model_hash"; and "value_range", as
        JSON the stored values that become 0 and 255 in images of more than 8 bits, or
        null.
    """
    classes = [asdict(c) for c in model.classes]
    return {
        "classes.json": json.dumps(classes),
        "model_hash": model.model_hash,
        "value_range": json.dumps(model.config.data.value_range),
    }


def _compare(
    format: str,
    model: Classifier,
    exported: Callable[[Tensor], Tensor],
    expected: Callable[[Tensor], Tensor],
) -> None:
    """Check that an exported file computes the same as the model on random inputs.

    There are batches of 1, 3 and 8 inputs, see :func:`_random_images`.

    Args:
        format: The format, "encoder", "pt2" or "onnx", which decides the tolerance.
        model: The model, which decides the shape of the inputs.
        exported: The function of the file. It takes images uint8 (B, 3, S, S), or
            vectors float32 (B, D).
        expected: The function of the model, with the same input.

    Raises:
        NumericsError: Shapes differ, the largest absolute difference of two values is
            above the format's ``TOLERANCE``, or a value is NaN.
    """
    for num in CHECK_ROWS:
        images = _random_images(model, num)
        with torch.inference_mode():
            one, other = exported(images), expected(images)
        difference = (
            float((one - other).abs().max())
            if one.shape == other.shape
            else float("nan")
        )
        if not difference <= TOLERANCE[format]:
            what = (
                f"differs from the model by {difference:.1e} (allowed:"
                f" {TOLERANCE[format]:.0e})"
            )
            raise NumericsError(
                f"the exported {format} file {what}; it was not written"
            )


def _random_images(model: Classifier, num: int) -> Tensor:
    """Return inputs on which an exported model is compared with the original.

    They are smooth random images, or random vectors if the model takes vectors.

    Args:
        model: The model, which decides the shape.
        num: The number of images. It is also the seed of a generator of its own, so
            equal calls return equal inputs.

    Returns:
        Images uint8 (num, 3, S, S), or vectors float32 (num, D).
    """
    if model.config.model.takes_vectors:
        width = int(model.module.encoder.num_features)  # type: ignore[arg-type]
        return torch.randn(num, width, generator=torch.Generator().manual_seed(num))
    coarse = (
        torch.rand(num, 3, 4, 4, generator=torch.Generator().manual_seed(num)) * 255
    )
    return F.interpolate(coarse, size=(model.size, model.size), mode="bilinear").to(
        torch.uint8
    )


def model_card(
    model: Classifier, facts: Mapping[str, Any], metrics: Mapping[str, float]
) -> str:
    """Return the model card, a description of a trained model, as Markdown.

    It describes the encoder and its weights, the outputs, the discovered classes that
    were merged or dropped, the method, the facts, the verdict on the run if the metrics
    have one, the tables of accuracy (of the best head, in percent), and the limits, and
    it shows code that loads the model. No file is written.

    Args:
        model: The model.
        facts: More facts about the run for the template: values by title, such as
            "Data".
        metrics: The metrics of the run by key, as fractions. A metric that is missing
            leaves its cell empty. Tables, rows and columns without any metric are left
            out.

    Raises:
        ConfigError: The encoder's pretrained weights cannot be described, see
            :func:`origin`.
    """
    config, net = model.config, model.config.model
    library, _, name = net.encoder.partition(":")
    keys = {"torchvision": "torchvision", "timm": "timm"}.get(library, "its own")
    if library in OWN_ENCODERS and library != "resnet_small":
        keys = "torchvision"
    edits = [f"`{c.name}` {fate}" for c, fate in edits_of(model.classes) if fate]
    if any(c.into is None for c in model.classes):
        edits.append("images of a dropped class are `rejected`")
    environment = Environment(
        loader=PackageLoader("uno.results"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("model_card.jinja").render(
        model=model,
        config=config,
        net=net,
        facts=facts,
        metrics=metrics,
        library=library,
        name=name,
        keys=keys,
        own_encoders=OWN_ENCODERS,
        edits=edits,
        weights=origin(net),
        method=description(config.method),
        trust=verdict(metrics),
        splits=SPLITS,
        tables=filled_tables(metrics),
        percent=lambda key: f"{100 * metrics[key]:.1f}" if key in metrics else "",
    )


def origin(net: ModelConfig) -> str:
    """Describe the weights that training began with, and their pretraining data.

    Args:
        net: The model section of the configuration.

    Returns:
        A text of one line. If ``weights`` is None, it is "trained in this run from"
        random initialization or the weights of the user's callable. Otherwise it says
        that the input is vectors, names the library's weights with their license if
        that is known, or gives the last part of the path in ``weights``, which is a
        file or a run.

    Raises:
        ConfigError: ``weights`` is "pretrained", and the encoder cannot be described,
            see :func:`~uno.encoders.weights.describe_encoder`.
    """
    if net.weights is None:
        library = net.encoder.partition(":")[0]
        random = library in ("torchvision", "timm", *OWN_ENCODERS)
        start = "random initialization" if random else "the weights of the callable"
        return f"trained in this run from {start}"
    if net.takes_vectors:
        return "none (the input is vectors)"
    if net.weights == PRETRAINED:
        about = describe_encoder(net.encoder)
        terms = f", license {about.license}" if about.license else ""
        name = about.weights or "unnamed"
        return f"{name} of the library{terms} (pretraining data: see its pages)"
    name = split(net.weights.rstrip("/"))[1]
    return f"{name} (pretraining data unknown)"


def to_onnx(module: nn.Module, input: str, output: str, **traced: Any) -> Any:
    """Export a module with one input and one output to ONNX.

    Args:
        module: The module.
        input: The name of the input.
        output: The name of the output.
        **traced: Arguments of ``torch.onnx.export``, such as ``args`` and
            ``dynamic_shapes``.

    Returns:
        The ``ModelProto``, in memory. Warnings of the exporter are not shown.
    """
    # The exporter warns about future changes of its own code.
    with warnings.catch_warnings(action="ignore"):
        exported = torch.onnx.export(
            module,
            **traced,
            input_names=[input],
            output_names=[output],
            dynamo=True,
            verbose=False,
        )
    assert exported is not None
    return exported.model_proto
