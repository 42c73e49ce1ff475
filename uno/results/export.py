"""A trained model for other tools: encoder weights, a self-contained program, ONNX, and a card that explains.

Nothing is handed out unchecked: every format is loaded again and compared with the model it came from.
"""

import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uno.augment import eval_view
from uno.config import OWN_ENCODERS, ModelConfig, override
from uno.encoder import SMALL_STEMS, build_encoder, classifier_of
from uno.errors import ConfigError, NumericsError
from uno.methods import description
from uno.methods.registry import build_network
from uno.model import UnoModel
from uno.results.classes import OutputClass, dump_classes, fates, route
from uno.results.infer import Classifier
from uno.results.trust import verdict
from uno.weights import PRETRAINED, describe_encoder

FORMATS = {"encoder": "encoder.safetensors", "pt2": "model.pt2", "onnx": "model.onnx"}
"""Formats and the names of their files in ``model/``."""
CARD_FILE = "README.md"
TOLERANCE = {"encoder": 1e-6, "pt2": 1e-5, "onnx": 1e-4}  # of features; of probabilities
CHECK_ROWS = (1, 3, 8)  # batch sizes of the check; the example that is traced has another


def export(model: Classifier, format: str) -> bytes:
    """``model`` as a file of a format of :data:`FORMATS`. ConfigError: unknown format, or packages missing;
    NumericsError: the file, loaded again, computes something else than the model.
    """
    if format not in FORMATS:
        raise ConfigError(f"unknown format {format!r}; known are {', '.join(FORMATS)}")
    return {"encoder": _encoder, "pt2": _pt2, "onnx": _onnx}[format](model)


def can_check_onnx() -> bool:
    """Whether onnxruntime is here: without it an ONNX file is written unchecked."""
    return find_spec("onnxruntime") is not None


class Program(nn.Module):
    """Images, uint8 (B, 3, S, S) RGB -> the probabilities (B, C) float32 of ``uno predict``."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.config, self.classes = model.config, model.classes
        self.side = min(model.config.augment.large.size, model.size)
        self.network = _one_head(model, model.best_head)

    def forward(self, images: Tensor) -> Tensor:
        """Layer by layer: what ``self.network(...)`` says of autocast would be in the program."""
        network, data = self.network, self.config.data
        features = network.encoder(eval_view(images, self.side, data.mean, data.std))
        unit = F.normalize(features, dim=-1)
        if network.projector is None:  # a baseline's head, on the feature
            novel = network.novel(features)[0]
        else:
            projections = network.projector(unit if network.normalize_input else features)[0]
            novel = F.normalize(projections, dim=-1) @ network.novel.weight[0].T
        joint = torch.cat([unit @ network.known.weight.T, novel], dim=-1)
        return route((joint / self.config.objective.temperature).softmax(dim=-1), self.classes)


def _one_head(model: Classifier, head: int) -> UnoModel:
    """The network with cluster head ``head`` alone, without what only training uses, on the CPU."""
    module = model.module
    config = override(model.config, {"model.num_heads": 1, "model.overcluster_factor": 0})
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


def _encoder(model: Classifier) -> bytes:
    """Weights under the library's keys; checked against the encoder by features of random images."""
    state = model.module.encoder.state_dict().items()
    data = safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in state})
    encoder = build_encoder(model.config.model)
    encoder.load_state_dict(safetensors.torch.load(data))
    # The model's memory layout: another one sums in another order, which alone may move features by 2e-6.
    encoder = encoder.eval().to(model.device).to(memory_format=torch.channels_last)
    features, place = model.module.features, model.device
    _compare("encoder", model, lambda x: encoder(x.to(place) / 255), lambda x: features(x.to(place) / 255))
    return data


def _pt2(model: Classifier) -> bytes:
    exported, stream = torch.export.export(Program(model), **_traced(model)), io.BytesIO()
    torch.export.save(exported, stream, extra_files=_facts(model))
    data = stream.getvalue()
    program = torch.export.load(io.BytesIO(data)).module()
    _compare("pt2", model, program, lambda x: model.score(x).probabilities)
    return data


def _onnx(model: Classifier) -> bytes:
    missing = next((name for name in ("onnx", "onnxscript") if find_spec(name) is None), None)
    if missing:
        raise ConfigError(
            f"--format onnx needs the package {missing}: pip install onnx onnxscript onnxruntime"
        )
    with warnings.catch_warnings(action="ignore"):  # the exporter announces changes of its own code
        names: dict[str, Any] = {"input_names": ["images"], "output_names": ["probabilities"]}
        exported = torch.onnx.export(Program(model), **_traced(model), **names, dynamo=True, verbose=False)
    assert exported is not None
    proto = exported.model_proto
    for key, value in _facts(model).items():
        proto.metadata_props.add(key=key, value=value)
    data = proto.SerializeToString()
    if can_check_onnx():
        import onnxruntime

        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

        def program(images: Tensor) -> Tensor:
            return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

        _compare("onnx", model, program, lambda x: model.score(x).probabilities)
    return data


def _traced(model: Classifier) -> dict[str, Any]:
    """The example that is traced, of any number of images."""
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    return {"args": (_random_images(model, 2),), "dynamic_shapes": shapes}


def _facts(model: Classifier) -> dict[str, str]:
    classes = json.loads(dump_classes(b"{}", model.classes))["classes"]
    return {"classes.json": json.dumps(classes), "model_hash": model.model_hash}


def _compare(
    format: str, model: Classifier, found: Callable[[Tensor], Tensor], expected: Callable[[Tensor], Tensor]
) -> None:
    """NumericsError: the file's function of images uint8 (B, 3, S, S) is not the model's."""
    for num in CHECK_ROWS:
        images = _random_images(model, num)
        with torch.inference_mode():
            one, other = found(images), expected(images)
        difference = float((one - other).abs().max()) if one.shape == other.shape else float("nan")
        if not difference <= TOLERANCE[format]:
            what = f"differs from the model by {difference:.1e} (allowed: {TOLERANCE[format]:.0e})"
            raise NumericsError(f"the exported {format} file {what}; it was not written")


def _random_images(model: Classifier, num: int) -> Tensor:
    """Smooth random images, uint8 (num, 3, S, S)."""
    coarse = torch.rand(num, 3, 4, 4, generator=torch.Generator().manual_seed(num)) * 255
    return F.interpolate(coarse, size=(model.size, model.size), mode="bilinear").to(torch.uint8)


CARD = """\
# UNO model

- Encoder: {encoder}; {size} px RGB.
- Weights: {weights}.
- Outputs: {module.num_known} known and {module.num_novel} discovered classes (`classes.json`); \
cluster head {model.best_head} of {module.num_heads} predicts.
{edits}- Method {config.method}: {what}.
- Preset {config.preset}, recipe {config.recipe}, seed {config.seed}; all settings: `config.yaml`.
{facts}
## Measured

{trust}{measured}

## Limits

- A discovered class is a cluster. Their number was given, names like `novel-1` are placeholders until
  `uno classes` gives them others, and nothing guarantees that a cluster is one class.
- Every image gets one of these classes, also one of a class that was not in the data: look at
  `probability`, `margin` and `head_agreement`. Probabilities are not calibrated.
- Images are made square ({size} px: shorter side resized, {data.interpolation} with antialiasing, centre
  crop). It was trained on images like those of the data above; on others it has not been measured.

## Load

```python
import uno                                             # everything: names, confidence, bad files
print(uno.load("RUN").predict(["image.jpg"])[0])

import torch, safetensors.torch
{build}
encoder.load_state_dict(safetensors.torch.load_file("encoder.safetensors"))
# features = encoder.eval()((images / 255 - mean) / std), mean ({mean}), std ({std})

program = torch.export.load("model.pt2").module()      # after: uno export RUN --format pt2
probabilities = program(images)                        # uint8 (B, 3, {size}, {size}) -> (B, {num_outputs})
```
"""
SMALL_STEM = """\
encoder.conv1 = torch.nn.Conv2d(3, 64, {kernel}, {stride}, 1, bias=False)  # the stem for small images
encoder.maxpool = torch.nn.Identity()
"""


def model_card(model: Classifier, facts: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    """The card; ``facts`` are more lines of it, ``metrics`` flat, whichever there are."""
    config, net, data = model.config, model.config.model, model.config.data
    encoder, build = _rebuilt(net)
    mean, std = (", ".join(map("{:g}".format, numbers)) for numbers in (data.mean, data.std))
    return CARD.format(
        model=model, module=model.module, config=config, encoder=encoder, build=build, mean=mean, std=std,
        data=data, weights=origin(net), edits=_edits(model.classes),
        what=description(config.method), size=model.size, num_outputs=len(model.classes),
        facts="".join(f"- {key}: {' '.join(str(value).split())}\n" for key, value in facts.items()),
        measured=_metrics_table(metrics), trust=f"{found}.\n\n" if (found := verdict(metrics)) else "",
    )  # fmt: skip


def _edits(classes: Sequence[OutputClass]) -> str:
    """A line of the card on what `uno classes` has made of the discovered classes; "" where nothing."""
    said = [f"`{c.name}` {fate}" for c, fate in fates(classes) if fate]
    said += ["what falls into a dropped one is `rejected`"] * any(c.into is None for c in classes)
    return f"- Edited: {'; '.join(said)}.\n" if said else ""


def _rebuilt(net: ModelConfig) -> tuple[str, str]:
    """An encoder in words, and the lines of Python that build it."""
    library, _, what = net.encoder.partition(":")
    if net.encoder == "resnet_small":
        build = "from uno.encoder import SmallResNet\n"
        halved = net.stem == "halved"
        build += f"encoder = SmallResNet({net.width}, {net.blocks}, stages={net.stages}, halved={halved})"
        size = f"width {net.width}, {net.stages} stages of {net.blocks} block(s)"
        return f"resnet_small, {size}{', stem halved' * halved}", build
    if net.encoder in OWN_ENCODERS:
        build = f"import torchvision\nencoder = torchvision.models.{net.encoder}()\n"
        if net.stem in SMALL_STEMS:
            kernel, stride = SMALL_STEMS[net.stem]
            build += SMALL_STEM.format(kernel=kernel, stride=stride)
        build += "encoder.fc = torch.nn.Identity()"
        return f"{net.encoder}, stem {net.stem}, torchvision's keys, no `fc`", build
    if library == "torchvision":
        from torchvision.models import get_model

        with torch.device("meta"):
            name = classifier_of(get_model(what))
        build = f'import torchvision\nencoder = torchvision.models.get_model("{what}")\n'
        build += f'encoder.set_submodule("{name}", torch.nn.Identity())'
        return f"{net.encoder}, torchvision's keys, no `{name}`", build
    if library == "timm":
        build = f'import timm\nencoder = timm.create_model("{what}", num_classes=0)'
        return f"{net.encoder}, timm's keys, no classifier", build
    pooled = "# if it gives maps or tokens: their mean over positions, or the class token"
    return f"{net.encoder}, its own keys", f"from {library} import {what}\nencoder = {what}()  {pooled}"


def origin(net: ModelConfig) -> str:
    """Where training began."""
    if net.weights is None:
        library = net.encoder.partition(":")[0]
        random = library in ("torchvision", "timm", *OWN_ENCODERS)
        return f"trained here, from {'random ones' if random else 'those that the callable gives'}"
    if net.weights == PRETRAINED:
        about = describe_encoder(net.encoder)
        terms = f", licence {about.license}" if about.license else ""
        name = about.weights or "which it does not name"
        return f"started from the library's own, {name}{terms}; its pages say what those were trained on"
    name = net.weights.rstrip("/").rpartition("/")[2]
    return f"started from {name}; what those have seen stands with whoever made them"


def _metrics_table(metrics: Mapping[str, float]) -> str:
    rows = {
        "known classes alone": "known/task_aware/acc/best",
        "discovered classes alone (clusters matched to classes)": "novel/task_aware/acc/best",
        "chance of the line above": "novel/task_aware/chance/acc",
        "all classes together, strict": "all/task_agnostic_strict/acc/best",
        "unlabeled images of known and new classes, one matching": "unlabeled/gcd/all/best",
    }
    splits = [split for split in ("test", "train") if any(f"{split}/{k}" in metrics for k in rows.values())]
    named = {"test": "rows not trained on", "train": "training rows"}
    lines = [
        f"| accuracy, % | {' | '.join(named[split] for split in splits)} |",
        "|---|" + "---|" * len(splits),
    ]
    for title, row in rows.items():
        keys = [f"{split}/{row}" for split in splits]
        cells = [f"{100 * metrics[key]:.1f}" if key in metrics else "" for key in keys]
        lines += [f"| {title} | {' | '.join(cells)} |"] if any(cells) else []
    return "\n".join(lines) if splits else "Nothing: the data has no labels for the discovered classes."
