"""How many images a second do we augment, next to torchvision on PIL images and on tensors, one at a time?

    python -m benchmarks.augment --batch 512 --repeats 5

prints one JSON row. An image counts once, however many views the recipe makes of it; every method ends with
normalised float32 batches, one for each view. The methods take turns; the row has medians and all raw times.
Speedups are of wall time, and of processor time, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import PIL
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor
from torchvision import transforms as v1
from torchvision.transforms import v2

from uno.augment import augment
from uno.config import ViewConfig
from uno.presets import PRESETS, preset


class RandomThreshold(torch.nn.Module):
    """Solarize at a uniform random threshold, on PIL images or uint8 tensors."""

    def forward(self, image: Any) -> Any:  # noqa: D102
        return v2.functional.solarize(image, 255 * random.random())


def torchvision_view(config: ViewConfig, library: Any, finish: list[Any]) -> Callable[[Any], Tensor]:
    """The recipe of a view from the classes of ``torchvision.transforms`` or its ``v2``."""
    padded = library.RandomCrop(config.size, padding=config.crop_padding)
    resized = library.RandomResizedCrop(config.size, config.crop_scale)
    crops = {"pad": padded, "resized": resized, "pad_or_resized": library.RandomChoice([padded, resized])}
    jitter = library.ColorJitter(config.brightness, config.contrast, config.saturation, config.hue)
    steps = [crops[config.crop], library.RandomHorizontalFlip(config.flip)]
    optional = [
        (config.jitter, jitter),
        (config.grey, library.Grayscale(3)),
        (config.solarize, RandomThreshold()),
        (config.equalize, library.RandomEqualize(1.0)),
        (config.blur, library.GaussianBlur(17, config.blur_sigma)),
    ]
    steps += [library.RandomApply([operation], p) for p, operation in optional if p > 0]
    return library.Compose(steps + finish)


def one_at_a_time(images: list[Any], views: list[Callable[[Any], Tensor]]) -> list[Tensor]:
    rows = [[view(image) for view in views] for image in images]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=[name for name in PRESETS if name != "digits"], default="cifar10")
    parser.add_argument("--recipe", choices=["paper", "v2"], default="v2")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="where ours runs; the others stay on the CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    config = preset(options.preset, options.recipe)
    recipe, data, side = config.augment, config.data, config.data.store_size
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(options.batch, 3, 8, 8, generator=generator)
    images = (F.interpolate(noise, side, mode="bicubic") * 70 + 128).clamp(0, 255).to(torch.uint8)
    on_device = images.to(options.device)
    pil_images = [v1.functional.to_pil_image(image) for image in images]
    tensors = list(images)
    normalize = v1.Normalize(data.mean, data.std)
    as_float = v2.ToDtype(torch.float32, scale=True)
    kinds = [kind for kind in (recipe.large, recipe.small) for _ in range(kind.num_views)]
    pil_views = [torchvision_view(kind, v1, [v1.ToTensor(), normalize]) for kind in kinds]
    v2_views = [torchvision_view(kind, v2, [as_float, normalize]) for kind in kinds]

    def ours() -> list[Tensor]:
        views = augment(on_device, recipe, generator, data.mean, data.std)
        if on_device.is_cuda:
            torch.cuda.synchronize()
        return views

    methods: dict[str, Callable[[], list[Tensor]]] = {
        "ours": ours,
        "pil": lambda: one_at_a_time(pil_images, pil_views),
        "v2_tensor": lambda: one_at_a_time(tensors, v2_views),
    }
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(options.repeats + 1):
        for name, method in methods.items():
            start, cpu_start = time.perf_counter(), time.process_time()
            method()
            if repeat:  # the first turn warms up
                seconds[name].append(round(time.perf_counter() - start, 4))
                cpu_seconds[name].append(round(time.process_time() - cpu_start, 4))
    wall = {name: statistics.median(times) for name, times in seconds.items()}
    cpu = {name: statistics.median(times) for name, times in cpu_seconds.items()}
    host = platform.processor() or platform.machine()
    row = {
        "question": "images augmented per second",
        "command": "python -m benchmarks.augment " + " ".join(sys.argv[1:]),
        **vars(options),
        "views": [kind.size for kind in kinds],
        "images_per_s": {name: round(options.batch / value, 1) for name, value in wall.items()},
        "speedup": {name: round(wall[name] / wall["ours"], 2) for name in ("pil", "v2_tensor")},
        "cpu_speedup": {name: round(cpu[name] / cpu["ours"], 2) for name in ("pil", "v2_tensor")},
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "hardware": torch.cuda.get_device_name() if on_device.is_cuda else host,
        "versions": {m.__name__: m.__version__ for m in (torch, torchvision, PIL)},
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
