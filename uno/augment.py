"""Random views of a batch of images: tensor operations with a parameter set per row
(paper Sec. 3.2, 4.1).

``uno.presets`` says which operations a recipe uses; their order is always

    crop + flip -> affine -> jitter -> gray -> solarize -> equalize -> blur -> normalize

:func:`sample_uniforms` takes every random number from a generator on the host;
:func:`apply` is deterministic. So parameters do not depend on the device, how many rows
an operation works on is known without asking it, and a worker draws for the whole batch
and keeps its rows: its views are those that one worker would make, up to the rounding
of batched products, 1e-6 of the range.

Definitions and parameter ranges are torchvision's, without its rounding to 8 bits after
every operation. An operation takes float32 images (B,3,H,W) in 0-1 and parameters (B,)
on their device; ``_`` changes images. On one CPU core this is ten times as fast as
torchvision on PIL images (``python -m benchmarks.augment``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from uno.config import AugmentConfig, ViewConfig

CROP_ATTEMPTS = 10  # torchvision.transforms.RandomResizedCrop.get_params
CROP_RATIO = (3 / 4, 4 / 3)
BOX_NUMBERS = 2 * CROP_ATTEMPTS + 3  # of a row that its crop takes
OTHER_NUMBERS = 19
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
# an order of the four is an index into this tuple
JITTER_ORDERS = tuple(permutations(range(4)))
# the kernel covers +- this many of the largest standard deviation
BLUR_RADIUS_SIGMAS = 4


@dataclass(frozen=True)
class AugmentParams:
    """The parameters of N views, on the host; booleans say whether an operation
    applies to the row.
    """

    # (N,4) float32: top, left, height, width in whole stored pixels; may reach outside
    # the image
    box: Tensor
    flip: Tensor  # (N,) bool
    affine: Tensor  # (N,) bool
    # (N,5) float32: angle and shear in degrees, shift in x and y as a share of the
    # side, zoom
    pose: Tensor
    jitter: Tensor  # (N,) bool
    factors: Tensor  # (N,4) float32: brightness, contrast, saturation, hue shift
    order: Tensor  # (N,) int64: index into JITTER_ORDERS
    grayscale: Tensor  # (N,) bool
    solarize: Tensor  # (N,) bool
    threshold: Tensor  # (N,) float32, 0-1
    equalize: Tensor  # (N,) bool
    blur: Tensor  # (N,) bool
    sigma: Tensor  # (N,) float32, pixels


def augment(
    images: Tensor,
    config: AugmentConfig,
    generator: torch.Generator,
    mean: Sequence[float],
    std: Sequence[float],
    rows: slice | Tensor | None = None,
    num_rows: int | None = None,
) -> list[Tensor]:
    """All views of a batch, normalized: the large ones, then the small ones.

    Images (B,3,S,S) uint8 -> V tensors (B,3,size,size) float32, contiguous, on the same
    device. ``generator`` is on the CPU and advances by as much whatever ``rows`` is;
    ``mean`` and ``std`` of the channels are on the 0-1 scale; ``rows``, a slice or (B,)
    int64 on the host, says which of the whole batch's ``num_rows`` the images are
    (default: all). ValueError: images of another shape or type or none, ``rows`` that
    are not B, a crop larger than the padded image.
    """
    total = len(images) if num_rows is None else num_rows
    chosen = torch.arange(total)[slice(None) if rows is None else rows]
    if len(chosen) != len(images):
        raise ValueError(
            f"rows selects {len(chosen)} of {total} rows but got {len(images)}"
        )
    views: list[Tensor] = []
    for kind in kinds(config):
        numbers = sample_uniforms(total, kind.num_views, generator)[chosen]
        batch = apply(images, to_params(kind, numbers, images.shape[-1]), kind)
        views += [
            normalize(one, mean, std)
            for one in batch.unflatten(0, (len(images), -1)).unbind(1)
        ]
    return views


def augment_crops(
    crops: Sequence[Tensor],
    config: AugmentConfig,
    generator: torch.Generator,
    mean: Sequence[float],
    std: Sequence[float],
    rows: Tensor,
    num_rows: int,
    side: int,
) -> list[Tensor]:
    """:func:`augment` for crops that :mod:`uno.crops` made on the CPU: everything after
    the crop.

    ``crops``: for each of :func:`kinds` (B,V,3,size,size) uint8, made with a generator
    in the state of this one; ``side``: of the stored square, in pixels.
    """
    views: list[Tensor] = []
    for kind, crop in zip(kinds(config), crops, strict=True):
        draws = to_params(
            kind,
            sample_uniforms(num_rows, kind.num_views, generator)[rows],
            side,
        )
        batch = crop.flatten(0, 1) / 255
        _on_rows(batch, draws.flip, lambda images: images.flip(-1))
        with torch.autocast(batch.device.type, enabled=False):
            _finish_(batch, draws, kind)
        views += [
            normalize(one, mean, std)
            for one in batch.unflatten(0, crop.shape[:2]).unbind(1)
        ]
    return views


def kinds(config: AugmentConfig) -> list[ViewConfig]:
    """The kinds of views that there are, large ones first; ``weak`` ones without
    color.
    """
    off = (
        dict.fromkeys(("jitter", "grayscale", "solarize", "equalize", "blur"), 0.0)
        if config.weak
        else {}
    )
    return [
        kind.model_copy(update=off)
        for kind in (config.large, config.small)
        if kind.num_views
    ]


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """``(images - mean) / std`` by channel: (...,3,H,W) in 0-1 -> float32 of the
    same shape.
    """
    stats = torch.tensor([list(mean), list(std)], dtype=torch.float32).to(
        images.device, non_blocking=True
    )
    return images.sub(stats[0].view(3, 1, 1)).div_(stats[1].view(3, 1, 1))


def eval_view(
    images: Tensor, size: int, mean: Sequence[float], std: Sequence[float]
) -> Tensor:
    """The center of uint8 (B,3,S,S), normalized: float32 (B,3,size,size).
    ValueError: size exceeds S.
    """
    side = images.shape[-1]
    if size > side:
        raise ValueError(
            f"the center crop of {size} pixels exceeds the stored side of {side}"
        )
    start = round((side - size) / 2)
    return normalize(
        images[..., start : start + size, start : start + size] / 255, mean, std
    )


def sample_uniforms(
    num_rows: int, num_views: int, generator: torch.Generator
) -> Tensor:
    """Draw all numbers that V views of N rows take, float64 (N,V,42) in 0-1.

    There are as many whatever the configuration says, so that crops are equal.
    """
    size = (num_rows, num_views, BOX_NUMBERS + OTHER_NUMBERS)
    return torch.rand(size, generator=generator, dtype=torch.float64)


def to_params(config: ViewConfig, numbers: Tensor, side: int) -> AugmentParams:
    """What :func:`sample_uniforms` (N,V,42) mean: parameters of N * V views, those
    of an image together.
    """
    numbers = numbers.flatten(0, 1)
    column = iter(numbers[:, BOX_NUMBERS:].unbind(1))

    def coin(probability: float) -> Tensor:
        return next(column) < probability

    def uniform(low: float, high: float) -> Tensor:
        return (low + (high - low) * next(column)).float()

    c = config
    turn, shear, shift = c.affine_degrees, c.affine_shear, c.affine_translate
    return AugmentParams(
        box=_draw_box(c, side, numbers[:, :BOX_NUMBERS]),
        flip=coin(c.flip),
        affine=coin(c.affine),
        pose=torch.stack(
            [
                uniform(-turn, turn),
                uniform(-shear, shear),
                uniform(-shift, shift),
                uniform(-shift, shift),
                uniform(*c.affine_scale),
            ],
            dim=1,
        ),
        jitter=coin(c.jitter),
        factors=torch.stack(
            [
                uniform(1 - c.brightness, 1 + c.brightness),
                uniform(1 - c.contrast, 1 + c.contrast),
                uniform(1 - c.saturation, 1 + c.saturation),
                uniform(-c.hue, c.hue),
            ],
            dim=1,
        ),
        order=(next(column) * len(JITTER_ORDERS)).long(),
        grayscale=coin(c.grayscale),
        solarize=coin(c.solarize),
        threshold=uniform(0, 1),
        equalize=coin(c.equalize),
        blur=coin(c.blur),
        sigma=uniform(*c.blur_sigma),
    )


def _draw_box(c: ViewConfig, side: int, numbers: Tensor) -> Tensor:
    """Crop boxes (N,4) from numbers (N,23): areas and ratios to try, which kind of
    crop, top and left.
    """
    if c.crop == "none":
        return torch.tensor([0.0, 0.0, side, side]).expand(len(numbers), 4)
    if c.crop != "resized" and c.size > side + 2 * c.crop_padding:
        raise ValueError(
            f"crop {c.crop} of {c.size} pixels exceeds the stored side {side} with"
            f" padding {c.crop_padding}"
        )
    resized = torch.from_numpy(resized_boxes(c.crop_scale, numbers.numpy(), side, side))
    choice, top, left = numbers[:, 2 * CROP_ATTEMPTS :].unbind(1)
    places = side + 2 * c.crop_padding - c.size + 1
    square = torch.full_like(choice, c.size)
    top, left = (
        (top * places).floor() - c.crop_padding,
        (left * places).floor() - c.crop_padding,
    )
    padded = torch.stack([top, left, square, square], dim=1)
    use_padded = {
        "pad": choice >= 0,
        "resized": choice < 0,
        "pad_or_resized": choice < 0.5,
    }[c.crop]
    return torch.where(use_padded[:, None], padded, resized).float()


def resized_boxes(
    scale: tuple[float, float], numbers: np.ndarray, height: int, width: int
) -> np.ndarray:
    """RandomResizedCrop's boxes (torchvision), float64 (N,4) of whole pixels: top,
    left, height, width.

    ``scale`` is the range of a crop's share of the area; ``numbers``, float64 (N,23)
    uniform in 0-1, are ten areas, ten ratios, one unused, top and left; ``height`` and
    ``width`` are the image's, in pixels.
    """
    area, ratio = (
        numbers[:, :CROP_ATTEMPTS],
        numbers[:, CROP_ATTEMPTS : 2 * CROP_ATTEMPTS],
    )
    low, high = math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])
    area = height * width * (scale[0] + (scale[1] - scale[0]) * area)
    ratio = np.exp(low + (high - low) * ratio)
    h, w = np.sqrt(area / ratio).round(), np.sqrt(area * ratio).round()
    fits = (h >= 1) & (h <= height) & (w >= 1) & (w <= width)
    first = np.arange(len(fits)), fits.argmax(axis=1)
    h, w, (top, left) = h[first], w[first], numbers[:, -2:].T
    top, left = np.floor(top * (height - h + 1)), np.floor(left * (width - w + 1))
    boxes = np.stack([top, left, h, w], axis=1)
    # the middle, as near to the image's shape as the ratios allow
    if not fits.any(axis=1).all():
        shape = width / height
        wide = (
            min(width, max(1, round(height * CROP_RATIO[1])))
            if shape > CROP_RATIO[1]
            else width
        )
        tall = (
            min(height, max(1, round(width / CROP_RATIO[0])))
            if shape < CROP_RATIO[0]
            else height
        )
        boxes[~fits.any(axis=1)] = (height - tall) // 2, (width - wide) // 2, tall, wide
    return boxes


def apply(images: Tensor, draws: AugmentParams, config: ViewConfig) -> Tensor:
    """The views that ``draws`` describes: uint8 (B,3,S,S) -> float32 (N,3,size,size) in
    0-1.

    N is a multiple of B; the views of image b are the N/B rows from b*N/B. ValueError
    as in :func:`augment`.
    """
    side = images.shape[-1]
    if (
        images.dtype != torch.uint8
        or images.shape[1:] != (3, side, side)
        or len(images) == 0
    ):
        raise ValueError(
            f"images must be uint8 (B,3,S,S), B > 0; got {images.dtype}"
            f" {tuple(images.shape)}"
        )
    # interpolation weights in bfloat16 would show
    with torch.autocast(images.device.type, enabled=False):
        out = _crop(images, draws, config)
        _finish_(out, draws, config)
    return out


def _finish_(views: Tensor, draws: AugmentParams, config: ViewConfig) -> None:
    """Everything after crop and flip, in place: (N,3,size,size) float32 in 0-1."""
    _on_rows(views, draws.affine, affine, draws.pose)
    if len(rows := draws.jitter.nonzero()[:, 0]):
        jitter_(views, rows, draws.factors[rows], draws.order[rows])
    _on_rows(views, draws.grayscale, grayscale)
    _on_rows(views, draws.solarize, solarize, draws.threshold)
    _on_rows(views, draws.equalize, equalize)
    radius = min(math.ceil(BLUR_RADIUS_SIGMAS * config.blur_sigma[1]), config.size - 1)
    _on_rows(
        views, draws.blur, lambda some, sigma: blur(some, sigma, radius), draws.sigma
    )


def _on_rows(
    images: Tensor,
    chosen: Tensor,
    operation: Callable[..., Tensor],
    *parameters: Tensor,
) -> None:
    """Replace the rows where the host mask ``chosen`` (N,) is true; no work and no
    kernel for the others.
    """
    rows = chosen.nonzero()[:, 0]
    if len(rows) == 0:
        return
    here = rows.to(images.device, non_blocking=True)
    arguments = [p[rows].to(images.device, non_blocking=True) for p in parameters]
    images.index_copy_(0, here, operation(images.index_select(0, here), *arguments))


def _crop(images: Tensor, draws: AugmentParams, config: ViewConfig) -> Tensor:
    """Crop, resize and flip as two batched products, (B,3,S,S) uint8 ->
    (N,3,size,size) float32 in 0-1.
    """
    side, num_views = images.shape[-1], len(draws.flip) // len(images)
    if config.crop == "none" and config.size == side and not draws.flip.any():
        return (images / 255).repeat_interleave(num_views, dim=0)
    box = draws.box.T.contiguous().to(images.device, non_blocking=True)
    flip = torch.stack([torch.zeros_like(draws.flip), draws.flip]).to(
        images.device, non_blocking=True
    )
    down, across = crop_weights(box[:2], box[2:], flip, config.size, side)
    return resample(images, down.mul_(1 / 255), across)


def crop_weights(
    start: Tensor, length: Tensor, reverse: Tensor, size: int, side: int
) -> Tensor:
    """Interpolation weights (...,size,side) of crops along one axis of ``side`` pixels.

    Bilinear with antialiasing, as Pillow and torchvision (antialias=True) define it: a
    triangle around the center of each target pixel with a half width of one source
    pixel when enlarging, one target pixel when reducing; cut off at the box and
    normalized. So size = length is an exact copy, with zeros where the box, ``start``
    (...) and ``length`` (...) in pixels, reaches outside the image. ``reverse`` (...)
    bool mirrors.
    """
    start, length = start.unsqueeze(-1), length.unsqueeze(-1)
    scale = length / size
    target = torch.arange(size, device=start.device, dtype=start.dtype) + 0.5
    target = torch.where(reverse.unsqueeze(-1), size - target, target)
    source = torch.arange(side, device=start.device, dtype=start.dtype) + 0.5
    distance = source - (start + target * scale).unsqueeze(-1)
    distance.abs_().div_(scale.clamp(min=1).unsqueeze(-1))
    inside = (source > start) & (source < start + length)
    weights = (
        distance.sub_(1)
        .neg_()
        .clamp_(min=0)
        .mul_(inside.unsqueeze(-2).to(distance.dtype))
    )
    return weights.mul_(
        weights.sum(dim=-1, keepdim=True).clamp_(min=1e-12).reciprocal_()
    )


def resample(images: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """``down[n] @ image @ across[n].T`` by channel: images (B,3,S,S), both maps (N,T,S)
    -> float32 (N,3,T,T).

    Rows b*N/B and on belong to image b, so that one product makes all its views. If the
    caller allows TF32 on CUDA, its three roundings by 2**-11 move a value by less than
    half of a level.
    """
    num_images, _, side, _ = images.shape
    num_rows, size, _ = down.shape
    lines = images.permute(0, 2, 1, 3).to(
        torch.float32, memory_format=torch.contiguous_format, copy=True
    )
    lines = torch.bmm(
        down.reshape(num_images, -1, side), lines.view(num_images, side, 3 * side)
    )
    out = torch.bmm(lines.view(num_rows, size * 3, side), across.transpose(1, 2))
    return out.view(num_rows, size, 3, size).permute(0, 2, 1, 3).contiguous()


def affine(images: Tensor, pose: Tensor) -> Tensor:
    """Shear along x, turn and zoom about the center, then shift: bilinear with zeros
    outside (torchvision).

    Images (B,3,S,S) float32; pose (B,5): clockwise angle and shear in degrees, shift in
    x and y as a share of the side, zoom.
    """
    angle, shear, shift_x, shift_y, zoom = pose.unbind(1)
    angle, shear = torch.deg2rad(angle), torch.deg2rad(shear)
    cos, sin, tan = torch.cos(angle), torch.sin(angle), torch.tan(shear)
    # The inverse map, from target to source; grid coordinates run over -1..1, so a side
    # is 2.
    xx, xy, yx, yy = (
        (cos - sin * tan) / zoom,
        (sin + cos * tan) / zoom,
        -sin / zoom,
        cos / zoom,
    )
    back_x, back_y = (
        -2 * (xx * shift_x + xy * shift_y),
        -2 * (yx * shift_x + yy * shift_y),
    )
    theta = torch.stack([xx, xy, back_x, yx, yy, back_y], dim=1).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(
        images, grid, mode="bilinear", padding_mode="zeros", align_corners=False
    )


def blur(images: Tensor, sigma: Tensor, radius: int) -> Tensor:
    """Gaussian blur of (B,3,S,S) float32 by sigma (B,) pixels, 2 * radius + 1 taps,
    torchvision's border.

    Views use ``radius = ceil(4 * largest sigma)`` < S, 17 taps for the recipes'
    0.1-2.0: 6e-5 of the weight lie beyond, and in a dense matrix (S,S) more taps cost
    nothing.
    """
    side = images.shape[-1]
    target = torch.arange(side, device=images.device).unsqueeze(1)
    source = torch.arange(side, device=images.device)
    # The places (S,S) at which a reflected line shows a source pixel; the border itself
    # is not repeated.
    offset = torch.stack(
        [source - target, -source - target, 2 * (side - 1) - source - target]
    ).float()
    exists = torch.stack([source >= 0, source > 0, source < side - 1]).unsqueeze(1)
    squares = torch.where(exists & (offset.abs() <= radius), offset.square(), torch.inf)
    weights = torch.exp(-squares / (2 * sigma.square()).view(-1, 1, 1, 1)).sum(dim=1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return resample(images, weights, weights)


def luma(images: Tensor) -> Tensor:
    """Rec. 601 brightness (B,1,H,W) of RGB images (B,3,H,W), with torchvision's four
    digits.
    """
    red, green, blue = images.split(1, dim=1)
    return (red * 0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def grayscale(images: Tensor) -> Tensor:
    """Each pixel's luma in all three channels, (B,3,H,W)."""
    return luma(images).expand(-1, 3, -1, -1)


def blend_(images: Tensor, factor: Tensor, operation: Tensor) -> Tensor:
    """Brightness, contrast or saturation by row:
    ``factor * image + (1 - factor) * reference``, kept in 0-1.

    ``operation`` (B,) says what the reference is: black for BRIGHTNESS, the image's
    mean luma for CONTRAST, each pixel's luma for SATURATION. A factor (B,) of 1 leaves
    the row as it is.
    """
    rows = (-1, 1, 1, 1)
    pixel = luma(images)
    mean = pixel.mean(dim=(2, 3), keepdim=True)
    reference = torch.addcmul(
        mean * (operation == CONTRAST).view(rows),
        pixel,
        (operation == SATURATION).to(pixel.dtype).view(rows),
    )
    return images.lerp_(reference, (1 - factor).view(rows)).clamp_(0, 1)


def hue_(images: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by ``shift`` (B,), in -0.5..0.5 of the color circle; HSV value and
    saturation stay.

    Exact, without branches (torch.where is slow on the CPU). Let M and m be the largest
    and smallest channel, c = M - m, and u = (channel - m) / c. In each sixth of the
    circle one u is 0, one is 1 and the third moves with slope one, so the hue in
    sixths, in -3..3 with red at 0, is h = sign(g - b) (1 - u_r + u_g + u_b). Back, a
    channel is M - c clamp(d - 1, 0, 1), where d is the distance on the circle from h to
    the channel's own hue: |h| for red; 3 minus the distance to the opposite hue, -1 and
    1, for green and blue.
    """
    red, green, blue = images.split(1, dim=1)
    high = torch.maximum(torch.maximum(red, green), blue)
    low = torch.minimum(torch.minimum(red, green), blue)
    chroma = high - low
    hue = (high - red).add_(green).sub_(low).add_(blue - low)
    hue.div_(chroma.clamp(min=1e-12)).copysign_(green - blue).add_(
        6 * shift.view(-1, 1, 1, 1)
    )
    hue.sub_((hue / 6).round_().mul_(6))  # back to -3..3
    away = torch.cat(
        [hue.abs().sub_(1), 2 - (hue + 1).abs_(), 2 - (hue - 1).abs_()], dim=1
    ).clamp_(0, 1)
    return torch.addcmul(high, chroma, away, value=-1, out=images)


def jitter_(images: Tensor, rows: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue on the chosen rows, in an order of its
    own for each row.

    Rows are gathered sorted by the place of hue in their order. So hue runs once on all
    of them, after the blends that precede it (as many as hue's place) and before the
    others: six blends, each on a slice, three per row. On the host: ``rows`` (R,) int64
    without repetition, ``factors`` (R,4) of brightness, contrast, saturation (1: none)
    and hue shift (0: none), ``order`` (R,) int64.
    """
    sequence = torch.tensor(JITTER_ORDERS)[order]
    is_hue = sequence == HUE
    place, by_place = is_hue.int().argmax(dim=1).sort(stable=True)
    # first[k] rows have hue at place 0..k
    first = torch.bincount(place, minlength=4).cumsum(0).tolist()[:3]
    blends = sequence[~is_hue].view(-1, 3)
    strength = factors.gather(1, blends)[by_place]
    has_blend, has_hue = bool((strength != 1).any()), bool((factors[:, HUE] != 0).any())
    # Transposed: the parameters of each of the three blends lie together.
    parts = (
        rows[by_place],
        factors[by_place, HUE],
        strength.T.contiguous(),
        blends[by_place].T.contiguous(),
    )
    chosen, shift, strength, blends = (
        part.to(images.device, non_blocking=True) for part in parts
    )
    work = images.index_select(0, chosen)

    def blend(parts: list[slice]) -> None:
        for k, part in enumerate(parts):
            if has_blend and work[part].shape[0]:
                blend_(work[part], strength[k, part], blends[k, part])

    blend([slice(rows_before, None) for rows_before in first])
    if has_hue:
        hue_(work, shift)
    blend([slice(rows_before) for rows_before in first])
    return images.index_copy_(0, chosen, work)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert the values at or above ``threshold`` (B,), in 0-1."""
    bright = (images >= threshold.view(-1, 1, 1, 1)).to(images.dtype)
    return bright.sub_(images).abs_()  # |1 - x| where bright, |0 - x| elsewhere


def equalize(images: Tensor) -> Tensor:
    """Equalise the histogram of each channel over 256 levels in PIL's integer
    arithmetic; rounds to levels.

    A level becomes the number of darker pixels / ``step``, to the nearest integer:
    ``step`` is one 255th, rounded down, of the pixels below the brightest level
    present. With step 0 a channel stays as it is.
    """
    num_pixels = images.shape[2] * images.shape[3]
    levels = (images * 255).round_().long().flatten(2)
    histogram = torch.zeros(
        *images.shape[:2], 256, dtype=torch.int32, device=images.device
    )
    histogram.scatter_add_(2, levels, histogram.new_ones(()).expand_as(levels))
    step = (num_pixels - histogram.gather(2, levels.amax(dim=2, keepdim=True))) // 255
    darker = histogram.cumsum(dim=2, dtype=torch.int32) - histogram
    table = ((darker + step // 2) // step.clamp(min=1)).clamp_(max=255)
    table = torch.where(
        step > 0, table, torch.arange(256, dtype=torch.int32, device=images.device)
    )
    return (table / 255).gather(2, levels).view_as(images)
