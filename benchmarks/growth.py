"""How do time and memory grow with batch, heads, overclustering, clusters and the size
of the data?

    python -m benchmarks.growth --repeats 5

prints one JSON row. Heads and objective (forward + backward) run on precomputed random
features, around the CIFAR100-20 `paper` recipe (batch 512, 4 heads, m = 3, 80 known and
20 novel classes); an epoch of the digits' network runs over random images. Each curve
comes with the exponent that the algorithm has. The encoder's own curve over the batch
needs ``--encoder``; on a CPU it takes minutes.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import environment, medians, spread, take_turns
from benchmarks.objective import NUM_FEATURES, outputs
from benchmarks.quantities import exponents, peak_bytes
from uno.config import Config, override
from uno.data.plan import make_plan
from uno.data.resident import ResidentBatches, TrainSet
from uno.model import build_model
from uno.objective import discovery_loss, discovery_step, global_targets
from uno.presets import preset
from uno.state import new_state

BASE = {"batch": 512, "heads": 4, "overclustering": 3, "clusters": 20}
NUM_KNOWN = 80
# the algorithm's exponent is 1 in every one, less where a part does not depend on the
# size
CURVES = {
    "batch": (64, 128, 256, 512, 1024),
    "heads": (1, 2, 4, 8),
    "overclustering": (1, 2, 5, 10),
    "clusters": (5, 20, 100, 300, 1000, 2000),
}
ROWS = (1024, 2048, 4096, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--curves",
        nargs="+",
        choices=[*CURVES, "rows", "encoder"],
        default=[*CURVES, "rows"],
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu on a busy machine"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {}
    for name in options.curves:
        if name == "rows":
            results["rows"] = curve(
                ROWS,
                lambda size: {"epoch": epoch(size, options.device)},
                options,
                False,
            )
        elif name == "encoder":
            results["encoder"] = curve(
                CURVES["batch"], lambda size: encoder(size, options.device), options
            )
        else:
            results[name] = curve(
                CURVES[name],
                lambda size, name=name: parts(
                    **BASE | {name: size}, device=options.device
                ),
                options,
            )
        print(name, json.dumps(results[name]["exponents"]), file=sys.stderr, flush=True)
    row = {
        "question": "growth of time and memory",
        "command": "python -m benchmarks.growth " + " ".join(sys.argv[1:]),
        **vars(options),
        "base": BASE,
        "results": results,
        **environment(options.device),
    }
    print(json.dumps(row))


def curve(
    sizes: Sequence[int],
    make: Callable[[int], dict[str, Callable[[], Any]]],
    options: argparse.Namespace,
    with_memory: bool = True,
) -> dict[str, Any]:
    """Milliseconds, spread and peak memory of every part at every size, and the
    fitted exponents.
    """
    methods = {(part, size): run for size in sizes for part, run in make(size).items()}
    seconds = take_turns(methods, options.repeats, options.device, options.clock)
    middle, spreads = medians(seconds), spread(seconds)
    result: dict[str, Any] = {"sizes": list(sizes), "exponents": {}}
    for part in dict.fromkeys(part for part, _ in methods):
        times = [middle[part, size] for size in sizes]
        result[part] = {
            "ms": [round(1000 * value, 3) for value in times],
            "spread": [spreads[part, size] for size in sizes],
        }
        result["exponents"][part] = {"time": exponents(sizes, times)}
        if with_memory:
            memory = [peak_bytes(methods[part, size], options.device) for size in sizes]
            result[part]["peak_mb"] = [round(value / 1e6, 2) for value in memory]
            result["exponents"][part]["memory"] = exponents(sizes, memory)
    return result


def parts(
    batch: int, heads: int, overclustering: int, clusters: int, device: str
) -> dict[str, Callable[[], Any]]:
    """Forward and backward of the heads, and of Sinkhorn + loss on their logits."""
    config = override(
        preset("cifar100_20"),
        {"model.num_heads": heads, "model.overcluster_factor": overclustering},
    )
    objective, num_views = config.objective, config.augment.large.num_views
    model = build_model(config.model, NUM_KNOWN, clusters, 0).to(device).train()
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(num_views * batch, NUM_FEATURES, generator=generator).to(
        device
    )
    labels = torch.randint(0, NUM_KNOWN, (batch // 2,), generator=generator).to(device)
    with torch.no_grad():
        known, families = outputs(model.heads(features, num_views))

    def run_heads() -> None:
        model.zero_grad(set_to_none=True)
        own_known, own = outputs(model.heads(features.requires_grad_(), num_views))
        sum(part.sum() for part in (own_known, *own)).backward()

    def run_objective() -> None:
        own_known, own = (
            known.detach().requires_grad_(),
            [f.detach().requires_grad_() for f in families],
        )
        targets = global_targets(own, num_views, len(labels), objective)
        discovery_loss(
            own_known, own, labels, targets, objective.temperature
        ).mean().backward()

    return {"heads": run_heads, "objective": run_objective}


def epoch(num_rows: int, device: str) -> Callable[[], None]:
    """One epoch of discovery with the digits' network over random images: index,
    augment, step.
    """
    config = preset("digits")
    train = random_images(config, num_rows).to(device)
    plan = make_plan(
        0,
        config.data.batch_sampling,
        config.train.batch_size,
        num_rows // 2,
        num_rows // 2,
    )
    batches = ResidentBatches(config, train, plan, 0, 1)
    model = build_model(config.model, train.num_known, train.num_novel, 0).train()
    model = model.to(device, memory_format=torch.channels_last)
    state = new_state(model, model, config.discover, torch.device(device), False)

    def run() -> None:
        for step in range(plan.steps_per_epoch):
            discovery_step(state, batches(step), config, 1e-3)

    return run


def random_images(config: Config, num_rows: int) -> TrainSet:
    """Half labeled, half unlabeled."""
    generator = torch.Generator().manual_seed(0)
    side = config.data.stored_size
    images: Tensor = torch.randint(
        0,
        256,
        (2, num_rows // 2, 3, side, side),
        generator=generator,
        dtype=torch.uint8,
    )
    return TrainSet(
        images[0],
        torch.randint(0, 5, (num_rows // 2,), generator=generator),
        images[1],
        5,
        5,
    )


def encoder(batch: int, device: str) -> dict[str, Callable[[], Any]]:
    """Forward and backward of ResNet18 on two views of 32 pixels."""
    module = build_model(preset("cifar100_20").model, NUM_KNOWN, 0, 0).encoder
    module = module.to(device, memory_format=torch.channels_last)
    images = torch.randn(2 * batch, 3, 32, 32, device=device).contiguous(
        memory_format=torch.channels_last
    )

    def run() -> None:
        module.zero_grad(set_to_none=True)
        module(images).square().mean().backward()

    return {"encoder": run}


if __name__ == "__main__":
    main()
