"""How many views a second does each runtime of a frozen encoder compute on this CPU,
beside PyTorch?

    python -m benchmarks.runtimes --encoders timm:tf_efficientnet_lite0 timm:vit_small_patch16_224

prints one JSON row for each encoder, with random weights or those of ``--weights``, on
``--images`` of ``--size`` px: those of ``--data``, or random ones. Every runtime that
is installed takes its turn after ``torch``, the module as it is with ``--threads``
threads, ``--repeats`` times; ``views_s`` are medians and ``ratio`` those over torch's.
``settle_s`` is what conversion and comparison took, and ``difference`` the largest of a row, over the length of its
features. Rows of bf16 are of ``--compute.precision bf16``; torch alone is float32.
``gflops`` are float operations a second, 10^9, of torch and of float32 matrix products
of 2048 by 2048: what is left to gain where an encoder is made of them.
"""  # noqa: E501

import argparse
import json
import os
import statistics
import time
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measure import environment
from uno.config import Config, override
from uno.data import features
from uno.data.decode import decode_many, prefetch_map
from uno.data.images import evenly_spaced
from uno.data.sources import read_rows
from uno.encoder import build_encoder
from uno.errors import ConfigError
from uno.runs.hardware import at_speed
from uno.runtime import BUILD, TORCH, Plan, require_runtime

LOW = [("openvino bf16", "openvino", True), ("torch bf16", TORCH, True)]


def pixels_of(args: argparse.Namespace) -> Tensor:
    """uint8 (N, 3 S S)."""
    if args.data is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(
            0,
            256,
            (args.images, 3 * args.size**2),
            generator=generator,
            dtype=torch.uint8,
        )
    images = read_rows(override(Config(), {"data.source": args.data}).data).images
    rows = evenly_spaced(args.images, len(images))
    squares, _ = decode_many(images.take(rows), args.size, None, "bilinear")
    return squares.flatten(1)


def encode(config: Config, encoder: nn.Module, pixels: Tensor, threads: int) -> Tensor:
    """Features (N, D), as a run computes them."""

    def some(start: int) -> Tensor:
        torch.set_num_threads(1)  # of this thread
        own = pixels[start : start + features.ROWS_AT_ONCE]
        seeds, none = np.zeros(len(own), np.int64), np.zeros(len(own), bool)
        return features.encode_rows(config, encoder, seeds, own, none, ~none)[:, 0]

    return torch.cat(
        [
            *prefetch_map(
                some, range(0, len(pixels), features.ROWS_AT_ONCE), threads, threads
            )
        ]
    )


def operations(encoder: nn.Module, size: int) -> int:
    """Of a view (1, 3, size, size)."""
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        encoder(torch.zeros(1, 3, size, size))
    return int(counter.get_total_flops())


def products_per_s(threads: int, repeats: int, size: int = 2048) -> float:
    """Float operations a second of a product of float32 matrices, the median."""
    torch.set_num_threads(threads)
    one, other, times = torch.randn(size, size), torch.randn(size, size), list[float]()
    for _ in range(repeats + 1):
        start = time.perf_counter()
        one @ other
        times.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(times[1:])


def row(name: str, pixels: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """Of one encoder."""
    sizes = {"data.stored_size": args.size, "augment.large.size": args.size}
    config = override(
        Config(), {"model.encoder": name, "augment.num_cached_views": 0, **sizes}
    )
    torch.manual_seed(0)
    module = build_encoder(config.model)
    if args.weights:
        missing, _ = module.load_state_dict(
            safetensors.torch.load_file(args.weights), strict=False
        )
        assert not missing, missing
    module = module.eval().requires_grad_(False).to(memory_format=torch.channels_last)
    encoders, settled = {TORCH: module}, dict[str, float]()
    expected = encode(config, module, pixels[: features.ROWS_AT_ONCE], 1)
    difference = dict[str, float]()
    for other, runtime, bf16 in [(name, name, False) for name in args.runtimes] + LOW:
        try:
            require_runtime(override(config, {"compute.encoder_runtime": runtime}))
        except ConfigError:
            continue
        start, fast = (
            time.perf_counter(),
            at_speed(module, Plan(runtime, bf16), args.threads),
        )
        found = encode(config, fast, pixels[: features.ROWS_AT_ONCE], 1)
        settled[other], encoders[other] = round(time.perf_counter() - start, 1), fast
        difference[other] = float(
            ((found - expected).norm(dim=1) / expected.norm(dim=1)).max()
        )
    times: dict[str, list[float]] = {runtime: [] for runtime in encoders}
    for _ in range(args.repeats):
        for runtime, encoder in encoders.items():
            start = time.perf_counter()
            encode(config, encoder, pixels, args.threads)
            times[runtime].append(time.perf_counter() - start)
    products = products_per_s(args.threads, args.repeats)
    speed = {
        runtime: len(pixels) / statistics.median(spent)
        for runtime, spent in times.items()
    }
    return {
        "benchmark": "runtimes",
        "encoder": name,
        "size": args.size,
        "images": len(pixels),
        "data": args.data,
        "threads": args.threads,
        "repeats": args.repeats,
        "settle_s": settled,
        "difference": {key: float(f"{value:.1e}") for key, value in difference.items()},
        "views_s": {key: round(value, 1) for key, value in speed.items()},
        "ratio": {
            key: round(value / speed[TORCH], 2)
            for key, value in speed.items()
            if key != TORCH
        },
        "gflops": {
            TORCH: round(operations(module, args.size) * speed[TORCH] / 1e9, 1),
            "products": round(products / 1e9, 1),
        },
        **environment(),
    }


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = ["timm:tf_efficientnet_lite0", "timm:vit_small_patch16_224"]
    parser.add_argument("--encoders", nargs="+", default=default)
    parser.add_argument(
        "--runtimes", nargs="+", default=[name for name in BUILD if name != TORCH]
    )
    parser.add_argument(
        "--weights", help="a safetensors file of all encoders; default: random ones"
    )
    parser.add_argument("--data", help="a source of images; default: random ones")
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    pixels = pixels_of(args)
    for encoder in args.encoders:
        print(json.dumps(row(encoder, pixels, args)), flush=True)


if __name__ == "__main__":
    main()
