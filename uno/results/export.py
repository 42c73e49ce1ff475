"""A trained model for other tools: encoder weights, a self-contained program, ONNX, and a card that explains.

Nothing is handed out unchecked: every format is loaded again and compared with the model it came from.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uno.augment import normalize
from uno.config import Config
from uno.encoder import build_encoder
from uno.errors import ConfigError, NumericsError
from uno.heads import StackedProjector
from uno.methods import METHODS, num_heads
from uno.results.classes import OutputClass, route
from uno.results.infer import Classifier

FORMATS = {"encoder": "encoder.safetensors", "pt2": "model.pt2", "onnx": "model.onnx"}
"""Formats and the names of their files in ``model/``."""
TOLERANCE = {"encoder": 1e-6, "pt2": 1e-5, "onnx": 1e-4}
"""Largest difference from the model: of features (encoder), of probabilities (pt2, onnx)."""
CHECK_ROWS = (1, 3, 8)  # batch sizes of the check; the example that is traced has another


class Program(nn.Module):
    """Images -> probabilities in one module, without anything of this project but its weights.

    It has the encoder, the known head and the best cluster head of ``model``; the other heads, and what only
    training uses, stay behind.
    ``forward(images)``: uint8 (B, 3, S, S), values 0-255, RGB -> (B, C) float32: the probabilities that
    ``uno predict`` reports, merged classes added up, dropped ones zero.
    """

    known: Tensor  # (C_l, D) prototypes
    novel: Tensor  # (K, P)

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        config, module, head = model.config, model.module, model.best_head
        self.encoder = build_encoder(config.model)
        self.encoder.load_state_dict(_plain(module.encoder.state_dict()))
        self.projector = None if module.projector is None else _one_head(module.projector, head)
        self.register_buffer("known", _plain_tensor(module.known.weight))
        self.register_buffer("novel", _plain_tensor(module.novel.weight[head]))
        self.head: Any = None  # of a baseline, on the feature
        if self.projector is None:
            self.head = deepcopy(module.novel).cpu()
            self.head.auxiliary = None
        self.temperature, self.normalize_input = config.objective.temperature, module.normalize_input
        self.mean, self.std = config.data.mean, config.data.std
        self.classes: Sequence[OutputClass] = model.classes
        self.side = min(config.augment.large.size, config.data.store_size)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Uint8 (B, 3, S, S) -> probabilities (B, C)."""
        start = round((images.shape[-1] - self.side) / 2)
        centre = images[..., start : start + self.side, start : start + self.side]
        features = self.encoder(normalize(centre.to(torch.float32) / 255, self.mean, self.std))
        unit = F.normalize(features, dim=-1)
        if self.projector is None:
            novel = self.head(features)[0]
        else:
            projections = self.projector(unit if self.normalize_input else features)[0]
            novel = F.normalize(projections, dim=-1) @ self.novel.T
        joint = torch.cat([unit @ self.known.T, novel], dim=-1) / self.temperature
        return route(joint.softmax(dim=-1), self.classes)


def export(model: Classifier, format: str) -> bytes:
    """``model`` as a file of ``format`` (one of :data:`FORMATS`), loaded again and checked.

    Raises:
        ConfigError: unknown format, or its packages are not installed.
        NumericsError: what was written computes something else than the model.
    """
    exporters: dict[str, Callable[[Classifier], bytes]] = {
        "encoder": _encoder,
        "pt2": _pt2,
        "onnx": _onnx,
    }
    if format not in exporters:
        raise ConfigError(f"unknown format {format!r}; known are {', '.join(exporters)}")
    return exporters[format](model)


def can_check_onnx() -> bool:
    """Whether onnxruntime is here: without it an ONNX file is written unchecked."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------- formats
def _encoder(model: Classifier) -> bytes:
    """Weights under torchvision's keys; checked against the encoder by features of random images."""
    data = safetensors.torch.save(_plain(model.module.encoder.state_dict()))
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
    program = _export_program(model)
    stream = io.BytesIO()
    facts = {"classes.json": _class_list(model), "model_hash": model.model_hash}
    torch.export.save(program, stream, extra_files=facts)
    data = stream.getvalue()
    loaded = torch.export.load(io.BytesIO(data)).module()
    _compare("pt2", model, loaded)
    return data


def _onnx(model: Classifier) -> bytes:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--format onnx needs the package {error.name}: pip install 'uno-discovery[onnx]'"
        ) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter announces changes of its own code
        exported = torch.onnx.export(
            Program(model),
            (_random_images(model, 2),),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            input_names=["images"],
            output_names=["probabilities"],
            verbose=False,
        )
    assert exported is not None
    proto = exported.model_proto
    for key, value in (("classes.json", _class_list(model)), ("model_hash", model.model_hash)):
        proto.metadata_props.add(key=key, value=value)
    data = proto.SerializeToString()
    if can_check_onnx():
        import onnxruntime

        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        _compare("onnx", model, lambda x: torch.from_numpy(session.run(None, {"images": np.asarray(x)})[0]))
    return data


def _export_program(model: Classifier) -> torch.export.ExportedProgram:
    return torch.export.export(
        Program(model),
        (_random_images(model, 2),),
        dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
    )


# ----------------------------------------------------------------------------------------------------- checks
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
    generator = torch.Generator().manual_seed(num)
    coarse = torch.rand(num, 3, 4, 4, generator=generator) * 255
    return F.interpolate(coarse, size=(model.size, model.size), mode="bilinear").to(torch.uint8)


def _class_list(model: Classifier) -> str:
    return json.dumps([{"index": c.index, "name": c.name, "kind": c.kind} for c in model.classes])


def _one_head(projector: StackedProjector, head: int) -> StackedProjector:
    """Head number ``head`` of a stack, as a stack of one."""
    _, hidden, projection = projector.weight.shape
    rows = slice(head * hidden, (head + 1) * hidden)
    alone = StackedProjector(1, projector.hidden.in_features, hidden, projection)
    state = {
        name: tensor[rows] if name.startswith(("hidden.", "bn.")) and tensor.ndim else tensor
        for name, tensor in projector.state_dict().items()
    }
    state |= {name: state[name][head : head + 1] for name in ("weight", "bias")}
    alone.load_state_dict(_plain(state))
    return alone


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _plain_tensor(tensor) for name, tensor in tensors.items()}


def _plain_tensor(tensor: Tensor) -> Tensor:
    """A copy on the CPU in the usual memory layout."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


# --------------------------------------------------------------------------------------------- the model card
def model_card(
    config: Config,
    num_known: int,
    num_novel: int,
    best_head: int,
    facts: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> str:
    """``model/README.md``: what the model is, what was measured, what it cannot do, how to load it.

    Args:
        config: of the run.
        num_known: C_l.
        num_novel: C_u.
        best_head: the cluster head that predicts.
        facts: more lines, such as {"Data": "digits, fingerprint ..."}.
        metrics: flat metrics of the run; keys that are absent are left out of the table.
    """
    size, model = config.data.store_size, config.model
    lines = [
        "# UNO model",
        "",
        f"- Encoder: {model.encoder}, stem {model.stem}; {size} px RGB; torchvision's keys, no `fc`."
        if model.encoder != "resnet_small"
        else f"- Encoder: resnet_small, width {model.width}, {model.blocks} block(s) a stage; {size} px RGB.",
        f"- Outputs: {num_known} known and {num_novel} discovered classes (`classes.json`); "
        f"cluster head {best_head} of {num_heads(config)} predicts.",
        f"- Method {config.method}: {METHODS[config.method]}.",
        f"- Preset {config.preset}, recipe {config.recipe}, seed {config.seed}; all settings: `config.yaml`.",
        *(f"- {key}: {' '.join(str(value).split())}" for key, value in facts.items()),
        "",
        "## Measured",
        "",
        *_metrics_table(metrics),
        "",
        "## Limits",
        "",
        "- A discovered class is a cluster. Their number was given, their names are placeholders until",
        "  `uno classes` gives them others, and nothing guarantees that a cluster is one class.",
        "- Every image gets one of these classes, also one of a class that was not in the data: look at",
        "  `probability`, `margin` and `head_agreement`. Probabilities are not calibrated.",
        f"- Images are made square ({size} px: shorter side resized with antialiasing, centre crop). It was",
        "  trained on images like those of the data above; on others it has not been measured.",
        "",
        "## Load",
        "",
        "```python",
        "import uno                                             # everything: names, confidence, bad files",
        'print(uno.load("RUN").predict(["image.jpg"])[0])',
        "",
        *_encoder_lines(config),
        "",
        'program = torch.export.load("model.pt2").module()      # after: uno export RUN --format pt2',
        f"probabilities = program(images)                        # uint8 (B, 3, {size}, {size}) RGB -> (B, "
        f"{num_known + num_novel})",
        "```",
    ]
    return "\n".join(lines) + "\n"


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
