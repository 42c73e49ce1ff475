"""Measure images/s of augmentation, and of torchvision one image at a time.

    python -m benchmarks.augment --batch 512 --repeats 5

prints one JSON row. An image counts once, however many views the recipe makes of it;
every method ends with normalized float32 batches, one for each view. With ``--device
cuda`` ours runs there, and the others stay on the CPU. The methods take turns; the row
has medians and all raw times. ``--clock cpu`` counts processor time, which other
processes disturb less.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import PIL
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision import transforms as v1
from torchvision.transforms import v2

from benchmarks.measure import (
    add_timing_options,
    environment,
    medians,
    spread,
    take_turns,
)
from uno.augment import augment
from uno.config import ViewConfig
from uno.presets import PRESETS, preset


class RandomThreshold(torch.nn.Module):
    """Solarize at a uniform random threshold, on PIL images or uint8 tensors."""

    def forward(self, image: Any) -> Any:  # noqa: D102
        return v2.functional.solarize(image, 255 * random.random())


def torchvision_view(
    config: ViewConfig, library: Any, finish: list[Any]
) -> Callable[[Any], Tensor]:
    """Build the recipe of a view from ``torchvision.transforms`` or its ``v2``."""
    padded = library.RandomCrop(config.size, padding=config.crop_padding)
    resized = library.RandomResizedCrop(config.size, config.crop_scale)
    crops = {
        "pad": padded,
        "resized": resized,
        "pad_or_resized": library.RandomChoice([padded, resized]),
    }
    jitter = library.ColorJitter(
        config.brightness, config.contrast, config.saturation, config.hue
    )
    steps = [crops[config.crop], library.RandomHorizontalFlip(config.flip)]
    optional = [
        (config.jitter, jitter),
        (config.grayscale, library.Grayscale(3)),
        (config.solarize, RandomThreshold()),
        (config.equalize, library.RandomEqualize(1.0)),
        (config.blur, library.GaussianBlur(17, config.blur_sigma)),
    ]
    steps += [library.RandomApply([operation], p) for p, operation in optional if p > 0]
    return library.Compose(steps + finish)


def one_at_a_time(
    images: list[Any], views: list[Callable[[Any], Tensor]]
) -> list[Tensor]:
    """Make every view of each image alone; return one batch for each view."""
    rows = [[view(image) for view in views] for image in images]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def main() -> None:
    """Run the command line, and print one row of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--preset",
        choices=[name for name in PRESETS if name != "digits"],
        default="cifar10",
    )
    parser.add_argument("--recipe", choices=["paper", "v2"], default="v2")
    add_timing_options(parser, batch=512, repeats=5, threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    config = preset(options.preset, options.recipe)
    recipe, data, side = config.augment, config.data, config.data.stored_size
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(options.batch, 3, 8, 8, generator=generator)
    images = (
        (F.interpolate(noise, side, mode="bicubic") * 70 + 128)
        .clamp(0, 255)
        .to(torch.uint8)
    )
    on_device = images.to(options.device)
    pil_images = [v1.functional.to_pil_image(image) for image in images]
    tensors = list(images)
    normalize = v1.Normalize(data.mean, data.std)
    as_float = v2.ToDtype(torch.float32, scale=True)
    kinds = [
        kind for kind in (recipe.large, recipe.small) for _ in range(kind.num_views)
    ]
    pil_views = [
        torchvision_view(kind, v1, [v1.ToTensor(), normalize]) for kind in kinds
    ]
    v2_views = [torchvision_view(kind, v2, [as_float, normalize]) for kind in kinds]

    methods: dict[str, Callable[[], list[Tensor]]] = {
        "ours": lambda: augment(on_device, recipe, generator, data.mean, data.std),
        "pil": lambda: one_at_a_time(pil_images, pil_views),
        "v2_tensor": lambda: one_at_a_time(tensors, v2_views),
    }
    seconds = take_turns(methods, options.repeats, options.device, options.clock)
    middle = medians(seconds)
    row = {
        "question": "images augmented per second",
        "command": "python -m benchmarks.augment " + " ".join(sys.argv[1:]),
        **vars(options),
        "views": [kind.size for kind in kinds],
        "images_per_s": {
            name: round(options.batch / value, 1) for name, value in middle.items()
        },
        "speedup": {
            name: round(middle[name] / middle["ours"], 2)
            for name in ("pil", "v2_tensor")
        },
        "spread": spread(seconds),
        "seconds": {
            name: [round(value, 4) for value in values]
            for name, values in seconds.items()
        },
        **environment(options.device),
        "pillow": PIL.__version__,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
