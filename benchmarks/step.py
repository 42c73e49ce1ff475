"""How close is a discovery step to the encoder alone, and what takes the rest?

    python -m benchmarks.step --preset cifar10 --batch 64 --repeats 7 [--bf16] [--compile]

prints one JSON row. The limit is the encoder alone, forward and backward on random
tensors of the same sizes, in the fastest of its forms, in the same run, taking turns
with the whole step (indexing, augmentation, heads, Sinkhorn, loss, backward,
optimizer). The parts are timed alone, each with its own backward pass, so they need not
add up exactly. Beside them stand the device's largest matrix product and its memory
bandwidth.
"""  # noqa: E501

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import (
    CLASSES,
    add_timing_options,
    environment,
    limits,
    medians,
    spread,
    take_turns,
)
from uno.augment import augment
from uno.config import Config, override
from uno.data.decode import decode_many, ok_mask
from uno.data.memory import MemoryBatches, TrainSet, assemble
from uno.data.sampling import make_plan
from uno.data.sources import read_rows
from uno.data.splits import make_task
from uno.model import UnoModel, build_network
from uno.objective import discovery_loss, global_targets, unified_objective
from uno.presets import PRESETS, preset
from uno.steps import Batch, TrainState, new_state, take_step

PARTS = ("augment", "heads", "sinkhorn_and_loss", "optimizer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=list(PRESETS), default="cifar10")
    parser.add_argument("--recipe", choices=["paper", "v2"], default="paper")
    parser.add_argument(
        "--data",
        help="a source such as parquet:DIR; random images where it is not given",
    )
    add_timing_options(parser, batch=64, repeats=7, threads=2)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the encoder of the step"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)

    config = override(
        preset(options.preset, options.recipe), {"train.batch_size": options.batch}
    )
    train = train_set(options.data, config).to(device)
    plan = make_plan(
        0,
        config.data.batch_sampling,
        options.batch,
        len(train.labels),
        len(train.unlabeled_images),
    )
    batches = MemoryBatches(config, train, plan, 0, 1)
    model = build_network(config, train.num_known, train.num_novel, 0).train()
    model = model.to(device, memory_format=torch.channels_last)  # as uno.runs.run does
    if options.compile:
        model.encoder.compile()
    state = new_state(model, model, config.discover, device, options.bf16)
    batch, steps = batches(0), iter(range(1, 1_000_000))
    images = train.labeled_images[:1].expand(options.batch, -1, -1, -1).contiguous()
    encoders = encoder_alone(
        config, train, batch, device, options.bf16, options.compile
    )
    seconds = take_turns(
        {
            "step": lambda: take_step(
                unified_objective, state, batches(next(steps)), config, 1e-3
            ),
            **encoders,
            "augment": lambda: augment(
                images,
                config.augment,
                torch.Generator().manual_seed(0),
                config.data.mean,
                config.data.std,
            ),
            **parts(config, state, batch),
        },
        options.repeats,
        options.device,
        options.clock,
    )
    middle = medians(seconds)
    limit = min(middle[name] for name in encoders)
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    with FlopCounterMode(display=False) as counter:
        next(iter(encoders.values()))()
    device_limits = limits(options.device, dtype, options.clock)
    row = {
        "question": "share of a discovery step outside the encoder",
        "command": "python -m benchmarks.step " + " ".join(sys.argv[1:]),
        **vars(options),
        "images_per_s": round(options.batch / middle["step"], 1),
        "views_per_s": round(options.batch * len(batch.views) / middle["step"], 1),
        "encoder_only_over_step": round(limit / middle["step"], 3),
        "share_outside_encoder": round(1 - limit / middle["step"], 3),
        "share_of_step": {
            name: round(middle[name] / middle["step"], 4) for name in PARTS
        },
        "encoder_ms": {name: round(1000 * middle[name], 1) for name in encoders},
        "limits": device_limits,
        "encoder_tflops": round(counter.get_total_flops() / limit / 1e12, 3),
        "spread": spread(seconds),
        "seconds": {
            name: [round(value, 4) for value in values]
            for name, values in seconds.items()
        },
        **environment(options.device),
    }
    print(json.dumps(row))


def encoder_alone(
    config: Config,
    train: TrainSet,
    batch: Batch,
    device: torch.device,
    bf16: bool,
    compiled: bool,
) -> dict[str, Callable[[], Any]]:
    """Forward and backward of the encoder on random tensors as large as the views, per
    memory layout, and compiled as well.
    """

    def method(
        layout: torch.memory_format, compiled: bool = False
    ) -> Callable[[], None]:
        encoder = build_network(config, train.num_known, 0, 0).encoder.to(
            device, memory_format=layout
        )
        if compiled:
            encoder.compile()
        inputs = [views.contiguous(memory_format=layout) for views in by_size(batch)]
        return encoder_pass(encoder, inputs, bf16)

    layouts = {
        "contiguous": torch.contiguous_format,
        "channels_last": torch.channels_last,
    }
    found = {f"encoder_{name}": method(layout) for name, layout in layouts.items()}
    return (
        found | {"encoder_compiled": method(torch.channels_last, True)}
        if compiled
        else found
    )


def by_size(batch: Batch) -> list[Tensor]:
    """The views of a batch, those of one size in one tensor."""
    sizes = sorted({view.shape[-1] for view in batch.views})
    return [
        torch.cat([view for view in batch.views if view.shape[-1] == size])
        for size in sizes
    ]


def encoder_pass(
    encoder: nn.Module, views: list[Tensor], bf16: bool
) -> Callable[[], None]:
    """Forward and backward pass of an encoder on random tensors as large as views."""
    inputs = [torch.randn_like(images) for images in views]

    def run() -> None:
        encoder.zero_grad(set_to_none=True)
        with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=bf16):
            outputs = torch.cat([encoder(images) for images in inputs])
        outputs.float().square().mean().backward()

    return run


def parts(
    config: Config, state: TrainState, batch: Batch
) -> dict[str, Callable[[], Any]]:
    """The rest of a step, each part alone with its own backward."""
    model: UnoModel = state.model
    objective, num_views = config.objective, len(batch.views)
    with (
        torch.no_grad(),
        torch.autocast(state.device.type, torch.bfloat16, enabled=state.autocast),
    ):
        features = torch.cat([model.encoder(view) for view in batch.views]).float()
        logits = model.heads(features, num_views)

    def heads() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(state.device.type, torch.bfloat16, enabled=state.autocast):
            outputs = model.heads(features.requires_grad_(), num_views)
        parts = (outputs.known, outputs.novel, outputs.over)
        sum(part.sum() for part in parts if part is not None).backward()

    def sinkhorn_and_loss() -> None:
        families = [
            part.detach().requires_grad_()
            for part in (logits.novel, logits.over)
            if part is not None
        ]
        known = logits.known.detach().requires_grad_()
        targets = global_targets(
            families, batch.num_large, len(batch.labels), objective
        )
        discovery_loss(
            known, families, batch.labels, targets, objective.temperature
        ).mean().backward()

    parameters = list(model.parameters())
    gradients: list[Tensor] = [torch.zeros_like(parameter) for parameter in parameters]

    def optimizer() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        norm = torch.nn.utils.get_total_norm(gradients)
        assert state.optimizer is not None
        state.optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        state.optimizer.step()

    return {
        "heads": heads,
        "sinkhorn_and_loss": sinkhorn_and_loss,
        "optimizer": optimizer,
    }


def train_set(source: str | None, config: Config) -> TrainSet:
    """The source's rows, or random images of the preset's sizes."""
    if source is not None:
        limit = {"data.source": source, "data.limit": 4 * config.train.batch_size}
        data = override(config, limit).data
        task = make_task(read_rows(data), data)
        images, reasons = decode_many(task.rows.images, data.stored_size)
        return assemble(task, images, ok_mask(reasons))
    generator = torch.Generator().manual_seed(0)
    rows, side = 2 * config.train.batch_size, config.data.stored_size
    images = torch.randint(
        0, 256, (2, rows, 3, side, side), generator=generator, dtype=torch.uint8
    )
    known, novel, *_ = CLASSES[config.preset or "cifar10"]
    labels = torch.randint(0, known, (rows,), generator=generator)
    return TrainSet(images[0], labels, images[1], known, novel)


if __name__ == "__main__":
    main()
