"""A trained model for other tools: encoder weights, a self-contained program, ONNX, and a card that explains.

Nothing is handed out unchecked: every format is loaded again and compared with the model it came from.
"""

import io
import json
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uno.augment import eval_view
from uno.config import Config, override
from uno.encoder import build_encoder
from uno.errors import ConfigError, NumericsError
from uno.methods import METHODS
from uno.methods.registry import build_network
from uno.model import UnoModel
from uno.results.classes import route
from uno.results.infer import Classifier

FORMATS = {"encoder": "encoder.safetensors", "pt2": "model.pt2", "onnx": "model.onnx"}
"""Formats and the names of their files in ``model/``."""
TOLERANCE = {"encoder": 1e-6, "pt2": 1e-5, "onnx": 1e-4}
"""Largest difference from the model: of features (encoder), of probabilities (pt2, onnx)."""
CHECK_ROWS = (1, 3, 8)  # batch sizes of the check; the example that is traced has another


def export(model: Classifier, format: str) -> bytes:
    """``model`` as a file of ``format`` (one of :data:`FORMATS`), loaded again and checked.

    Raises:
        ConfigError: unknown format, or its packages are not installed.
        NumericsError: what was written computes something else than the model.
    """
    if format not in FORMATS:
        raise ConfigError(f"unknown format {format!r}; known are {', '.join(FORMATS)}")
    return {"encoder": _encoder, "pt2": _pt2, "onnx": _onnx}[format](model)


def can_check_onnx() -> bool:
    """Whether onnxruntime is here: without it an ONNX file is written unchecked."""
    return find_spec("onnxruntime") is not None


class Program(nn.Module):
    """Images -> probabilities in one module, without anything of this project but its weights.

    ``forward(images)``: uint8 (B, 3, S, S), values 0-255, RGB -> (B, C) float32: the probabilities that
    ``uno predict`` reports, merged classes added up, dropped ones zero.
    """

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.config, self.classes = model.config, model.classes
        self.side = min(model.config.augment.large.size, model.size)
        self.network = _one_head(model, model.best_head)

    def forward(self, images: Tensor) -> Tensor:
        """Uint8 (B, 3, S, S) -> probabilities (B, C)."""
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
            rows = (
                len(state[name]) if tensor.shape != state[name].shape else 0
            )  # of a head in a stack of them
            state[name] = tensor[head * rows : (head + 1) * rows] if rows else tensor
    alone.load_state_dict(state)
    if alone.projector is None:
        alone.novel.auxiliary = None
    return alone.eval().requires_grad_(False)


# ---------------------------------------------------------------------------------------------------- formats
def _encoder(model: Classifier) -> bytes:
    """Weights under torchvision's keys; checked against the encoder by features of random images."""
    state = model.module.encoder.state_dict()
    data = safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in state.items()})
    encoder = build_encoder(model.config.model)
    encoder.load_state_dict(safetensors.torch.load(data))
    # The model's memory layout: another one sums in another order, which alone may move features by 2e-6.
    encoder = encoder.eval().to(model.device).to(memory_format=torch.channels_last)
    side = min(model.config.augment.large.size, model.size)
    for num in CHECK_ROWS:
        images = torch.randn(num, 3, side, side, generator=torch.Generator().manual_seed(num))
        with torch.inference_mode():
            images = images.to(model.device)
            _check("encoder", encoder(images), model.module.features(images))
    return data


def _pt2(model: Classifier) -> bytes:
    program, stream = torch.export.export(Program(model), **_traced(model)), io.BytesIO()
    torch.export.save(program, stream, extra_files=_facts(model))
    data = stream.getvalue()
    _compare("pt2", model, torch.export.load(io.BytesIO(data)).module())
    return data


def _onnx(model: Classifier) -> bytes:
    missing = next((name for name in ("onnx", "onnxscript") if find_spec(name) is None), None)
    if missing:
        raise ConfigError(f"--format onnx needs the package {missing}: pip install 'uno-discovery[onnx]'")
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
        _compare("onnx", model, lambda x: torch.from_numpy(session.run(None, {"images": np.asarray(x)})[0]))
    return data


def _traced(model: Classifier) -> dict[str, Any]:
    """The example that is traced, of any number of images."""
    return {
        "args": (_random_images(model, 2),),
        "dynamic_shapes": ({0: torch.export.Dim("batch", min=1)},),
    }


def _facts(model: Classifier) -> dict[str, str]:
    classes = [{"index": c.index, "name": c.name, "kind": c.kind} for c in model.classes]
    return {"classes.json": json.dumps(classes), "model_hash": model.model_hash}


def _compare(format: str, model: Classifier, program: Callable[[Tensor], Tensor]) -> None:
    for num in CHECK_ROWS:
        images = _random_images(model, num)
        with torch.inference_mode():
            _check(format, program(images), model.score(images).probabilities)


def _check(format: str, found: Tensor, expected: Tensor) -> None:
    difference = float((found - expected).abs().max()) if found.shape == expected.shape else float("nan")
    if not difference <= TOLERANCE[format]:
        raise NumericsError(
            f"the exported {format} file differs from the model by {difference:.1e} "
            f"(allowed: {TOLERANCE[format]:.0e}); it was not written"
        )


def _random_images(model: Classifier, num: int) -> Tensor:
    """Smooth random images, uint8 (num, 3, S, S)."""
    coarse = torch.rand(num, 3, 4, 4, generator=torch.Generator().manual_seed(num)) * 255
    return F.interpolate(coarse, size=(model.size, model.size), mode="bilinear").to(torch.uint8)


# --------------------------------------------------------------------------------------------- the model card
CARD = """\
# UNO model

- Encoder: {encoder}; {size} px RGB.
- Outputs: {num_known} known and {num_novel} discovered classes (`classes.json`); \
cluster head {head} of {num_heads} predicts.
- Method {method}: {what}.
- Preset {preset}, recipe {recipe}, seed {seed}; all settings: `config.yaml`.
{facts}
## Measured

{measured}

## Limits

- A discovered class is a cluster. Their number was given, their names are placeholders until
  `uno classes` gives them others, and nothing guarantees that a cluster is one class.
- Every image gets one of these classes, also one of a class that was not in the data: look at
  `probability`, `margin` and `head_agreement`. Probabilities are not calibrated.
- Images are made square ({size} px: shorter side resized with antialiasing, centre crop). It was
  trained on images like those of the data above; on others it has not been measured.

## Load

```python
import uno                                             # everything: names, confidence, bad files
print(uno.load("RUN").predict(["image.jpg"])[0])

{load}

program = torch.export.load("model.pt2").module()      # after: uno export RUN --format pt2
probabilities = program(images)                        # uint8 (B, 3, {size}, {size}) -> (B, {num_outputs})
```
"""


def model_card(model: Classifier, facts: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
    """``model/README.md``: what the model is, what was measured, what it cannot do, how to load it.

    Args:
        model: of the run.
        facts: more lines, such as {"Data": "digits, fingerprint ..."}.
        metrics: flat metrics of the run; keys that are absent are left out of the table.
    """
    config, module = model.config, model.module
    encoder = f"{config.model.encoder}, stem {config.model.stem}, torchvision's keys, no `fc`"
    if config.model.encoder == "resnet_small":
        encoder = f"resnet_small, width {config.model.width}, {config.model.blocks} block(s) a stage"
    return CARD.format(
        encoder=encoder,
        size=model.size,
        num_known=module.num_known,
        num_novel=module.num_novel,
        num_outputs=len(model.classes),
        head=model.best_head,
        num_heads=module.num_heads,
        method=config.method,
        what=METHODS[config.method],
        preset=config.preset,
        recipe=config.recipe,
        seed=config.seed,
        facts="".join(f"- {key}: {' '.join(str(value).split())}\n" for key, value in facts.items()),
        measured="\n".join(_metrics_table(metrics)),
        load="\n".join(_encoder_lines(config)),
    )


def _encoder_lines(config: Config) -> list[str]:
    """Python that loads the encoder without this project; with it for the small ResNet."""
    model = config.model
    lines = ["import torch, safetensors.torch"]
    if model.encoder == "resnet_small":
        lines += [
            "from uno.encoder import SmallResNet",
            f"encoder = SmallResNet(width={model.width}, blocks={model.blocks})",
        ]
    else:
        lines += ["import torchvision", f"encoder = torchvision.models.{model.encoder}()"]
        if model.stem == "small":
            lines += [
                "encoder.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)  # the stem for small images",
                "encoder.maxpool = torch.nn.Identity()",
            ]
        lines.append("encoder.fc = torch.nn.Identity()")
    mean, std = (
        ", ".join(f"{value:g}" for value in values) for values in (config.data.mean, config.data.std)
    )
    return [
        *lines,
        'encoder.load_state_dict(safetensors.torch.load_file("encoder.safetensors"))',
        f"# features = encoder.eval()((images / 255 - mean) / std), mean ({mean}), std ({std})",
    ]


def _metrics_table(metrics: Mapping[str, float]) -> list[str]:
    rows = {
        "known classes alone": "known/task_aware/acc/best",
        "discovered classes alone (clusters matched to classes)": "novel/task_aware/acc/best",
        "chance of the line above": "novel/task_aware/chance/acc",
        "all classes together, strict": "all/task_agnostic_strict/acc/best",
    }
    splits = [split for split in ("train", "test") if any(f"{split}/{k}" in metrics for k in rows.values())]
    if not splits:
        return ["Nothing: the data has no labels for the discovered classes."]
    lines = [f"| accuracy, % | {' | '.join(splits)} |", "|---|" + "---|" * len(splits)]
    for title, key in rows.items():
        cells = [metrics.get(f"{split}/{key}") for split in splits]
        if any(cell is not None for cell in cells):
            lines.append(f"| {title} | {' | '.join('' if c is None else f'{100 * c:.1f}' for c in cells)} |")
    return lines
