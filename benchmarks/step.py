"""Which share of a discovery step is not the encoder's own forward and backward pass?

    python -m benchmarks.step --preset cifar10 --batch 64 --repeats 7

prints one JSON row. The limit is the encoder alone on random tensors of the same sizes, in the same run,
taking turns with the whole step (augmentation, heads, Sinkhorn, loss, backward, optimizer). The parts are
timed alone, each with its own backward pass, so they need not add up exactly.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
from torch import Tensor

from benchmarks.measure import environment, medians, spread, take_turns
from uno.augment import augment
from uno.batches import ResidentBatches
from uno.config import Config, override
from uno.data.batches import make_plan
from uno.data.resident import TrainSet, assemble, load_resident
from uno.model import build_model
from uno.objective import discovery_loss
from uno.presets import PRESETS, preset
from uno.state import new_state
from uno.steps import discovery_step, global_targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=list(PRESETS), default="cifar10")
    parser.add_argument("--recipe", choices=["paper", "v2"], default="paper")
    parser.add_argument("--data", help="a source such as parquet:DIR; random images where it is not given")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)

    config = override(preset(options.preset, options.recipe), {"train.batch_size": options.batch})
    train = train_set(options.data, config).to(device)
    plan = make_plan(
        0, config.data.composition, options.batch, len(train.labels), len(train.unlabeled_images)
    )
    batches = ResidentBatches(config, train, plan, 0, 1)
    model = build_model(config.model, train.num_known, train.num_novel, 0).to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)
    state = new_state(model, model, config.discover, device, options.bf16)
    model.train()
    batch = batches(0)
    views = [torch.randn_like(view) for view in batch.views]
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
        features = torch.cat([model.features(view) for view in views]).float()
        logits = model.heads(features, len(views))
    images = train.labeled_images[:1].expand(options.batch, -1, -1, -1).contiguous()
    generator = torch.Generator().manual_seed(0)

    def encoder_only() -> None:
        by_size: dict[int, list[Tensor]] = {}
        for view in views:
            by_size.setdefault(view.shape[-1], []).append(view)
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            outputs = torch.cat([model.features(torch.cat(group)) for group in by_size.values()])
        outputs.float().square().mean().backward()

    def heads() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.bf16):
            outputs = model.heads(features.requires_grad_(), len(views))
        sum(part.sum() for part in outputs if part is not None).backward()

    def loss() -> None:
        families = [
            part.detach().requires_grad_() for part in (logits.novel, logits.over) if part is not None
        ]
        known = logits.known.detach().requires_grad_()
        targets = global_targets(families, batch.num_large, len(batch.labels), config.objective)
        pairs = zip(families, targets, strict=True)
        losses = [
            discovery_loss(known, own, batch.labels, t, config.objective.temperature) for own, t in pairs
        ]
        sum(value.sum() for value in losses).backward()

    steps = iter(range(1, 1_000_000))
    seconds = take_turns(
        {
            "step": lambda: discovery_step(state, batches(next(steps)), config.objective, 1e-3),
            "encoder_only": encoder_only,
            "augment": lambda: augment(images, config.augment, generator, config.data.mean, config.data.std),
            "heads": heads,
            "sinkhorn_and_loss": loss,
        },
        options.repeats,
        options.device,
    )
    middle = medians(seconds)
    row = {
        "question": "share of a discovery step outside the encoder",
        "command": "python -m benchmarks.step " + " ".join(sys.argv[1:]),
        **vars(options),
        "images_per_s": round(options.batch / middle["step"], 1),
        "views_per_s": round(options.batch * len(views) / middle["step"], 1),
        "encoder_only_over_step": round(middle["encoder_only"] / middle["step"], 3),
        "share_outside_encoder": round(1 - middle["encoder_only"] / middle["step"], 3),
        "share_of_step": {
            name: round(middle[name] / middle["step"], 4)
            for name in ("augment", "heads", "sinkhorn_and_loss")
        },
        "spread": spread(seconds),
        "seconds": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
        **environment(options.device),
    }
    print(json.dumps(row))


def train_set(source: str | None, config: Config) -> TrainSet:
    if source is not None:
        limits = {"data.source": source, "data.limit": 4 * config.train.batch_size}
        task, images, ok, _ = load_resident(override(config, limits).data)
        return assemble(task, images, ok)
    generator = torch.Generator().manual_seed(0)
    rows, side = 2 * config.train.batch_size, config.data.store_size
    images = torch.randint(0, 256, (2, rows, 3, side, side), generator=generator, dtype=torch.uint8)
    known = {"cifar100_20": 80, "cifar100_50": 50, "imagenet": 882}.get(config.preset, 5)
    novel = {"cifar100_20": 20, "cifar100_50": 50, "imagenet": 30}.get(config.preset, 5)
    labels = torch.randint(0, known, (rows,), generator=generator)
    return TrainSet(images[0], labels, images[1], known, novel)


if __name__ == "__main__":
    main()
