"""Make random views of a batch of images, with random parameters for each row.

This is the augmentation of the paper's Sec. 3.2 and 4.1, as tensor operations on the
whole batch. :mod:`uno.presets` says which operations a recipe uses. Their order is
always

    crop + flip -> affine -> jitter -> gray -> solarize -> equalize -> blur -> normalize

:func:`sample_uniforms` draws every random number from a generator on the host, and
:func:`apply` is deterministic. This has three consequences. The parameters do not
depend on the device. The number of rows that an operation changes is known without
waiting for the device. Each worker draws the numbers of the whole batch and keeps its
own rows, so that its views equal those of a single worker, up to the rounding of
batched matrix products (1e-6 of the value range).

Definitions and parameter ranges are those of torchvision, but values are not rounded to
8 bits after every operation. Unless its docstring says otherwise, an operation takes
float32 images (B,3,H,W) in 0-1 and one parameter per image (B,), on the same device,
and a name that ends in ``_`` means that the images are changed in place. On one CPU
core this is ten times as fast as torchvision on PIL images (``python -m
benchmarks.augment``).
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
BOX_NUMBERS = 2 * CROP_ATTEMPTS + 3  # random numbers for the crop of a view
OTHER_NUMBERS = 19  # random numbers for its other operations
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
# The orders of the four operations. An order is stored as an index into this tuple.
JITTER_ORDERS = tuple(permutations(range(4)))
# The kernel covers this many times the largest standard deviation on each side.
BLUR_RADIUS_SIGMAS = 4


@dataclass(frozen=True)
class AugmentParams:
    """The parameters of N views, on the host.

    The boolean masks (N,) say to which views an operation applies.
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
    """Return random normalized views of a batch: the large ones, then the small ones.

    Args:
        images: uint8 (B,3,S,S), on any device, B > 0.
        config: The settings of the large and the small views. With ``weak`` only the
            crop, the flip and the affine map are applied.
        generator: A generator on the CPU. It advances by the numbers of the whole
            batch, so its state afterwards does not depend on ``rows``.
        mean: The mean of each of the 3 channels, on the scale 0-1.
        std: The standard deviation of each channel, on the same scale.
        rows: The positions of these B images in the whole batch: a slice, or int64 (B,)
            on the host. None means all rows.
        num_rows: The number of rows of the whole batch. None means B.

    Returns:
        One contiguous tensor for each view, float32 (B,3,size,size), on the device of
        the images. ``size`` is the setting of the view's kind, large or small.

    Raises:
        ValueError: The images have another shape or type or are none, ``rows`` does not
            select B rows, or the crop is ``pad`` or ``pad_or_resized`` and its size
            exceeds the image with the padding on both sides.
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
    """Turn crops that :mod:`uno.crops` cut on the CPU into normalized views.

    This does everything that :func:`augment` does after the crop, from the flip to the
    normalization. The crops themselves are not changed.

    Args:
        crops: One uint8 tensor (B,V,3,size,size) for each kind of views that
            :func:`kinds` returns, where V is the number of views of the kind and
            ``size`` their side. The crops must have been cut with the same random
            numbers, that is with a generator in the state of ``generator``.
        config: The settings of the large and the small views. With ``weak`` only the
            flip and the affine map are applied.
        generator: A generator on the CPU. It advances by the numbers of the whole
            batch.
        mean: The mean of each of the 3 channels, on the scale 0-1.
        std: The standard deviation of each channel, on the same scale.
        rows: int64 (B,) on the host, the positions of the images in the whole batch.
        num_rows: The number of rows of the whole batch.
        side: The side of the stored square images in pixels. The boxes of the crops are
            drawn again from it and then ignored, so it only matters for the error.

    Returns:
        One float32 tensor (B,3,size,size) for each view, the large views first, on the
        device of the crops. ``size`` is that of the view's kind.

    Raises:
        ValueError: ``crops`` has another number of tensors than there are kinds, or the
            crop is ``pad`` or ``pad_or_resized`` and its size exceeds ``side`` with the
            padding on both sides.
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
    """Return the settings of the large and of the small views, in this order.

    A kind without views is left out. With ``config.weak`` color jitter, grayscale,
    solarize, equalize and blur have probability 0 in the result; crop, flip and affine
    stay. ``config`` itself is not changed.
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
    """Return ``(images - mean) / std`` for each channel.

    Args:
        images: float32 (...,3,H,W) in 0-1, which stay as they are.
        mean: The mean of each of the 3 channels, on the same scale.
        std: The standard deviation of each channel, on the same scale.

    Returns:
        A new float32 tensor of the same shape.
    """
    stats = torch.tensor([list(mean), list(std)], dtype=torch.float32).to(
        images.device, non_blocking=True
    )
    return images.sub(stats[0].view(3, 1, 1)).div_(stats[1].view(3, 1, 1))


def eval_view(
    images: Tensor, size: int, mean: Sequence[float], std: Sequence[float]
) -> Tensor:
    """Cut the center of images and normalize it: the view that evaluation uses.

    Args:
        images: uint8 (B,3,S,S).
        size: The side of the crop in pixels.
        mean: The mean of each of the 3 channels, on the scale 0-1.
        std: The standard deviation of each channel, on the same scale.

    Returns:
        float32 (B,3,size,size).

    Raises:
        ValueError: ``size`` exceeds S.
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
    """Draw the random numbers that decide V views of each of N images.

    A view takes 42 numbers whatever its configuration is, so that switching an
    operation on or off does not change the other parameters.

    Args:
        num_rows: The number of images N.
        num_views: The number of views V of each image.
        generator: A generator on the CPU, which advances by N * V * 42 numbers.

    Returns:
        float64 (N,V,42), uniform in [0, 1).
    """
    size = (num_rows, num_views, BOX_NUMBERS + OTHER_NUMBERS)
    return torch.rand(size, generator=generator, dtype=torch.float64)


def to_params(config: ViewConfig, numbers: Tensor, side: int) -> AugmentParams:
    """Turn uniform random numbers into the augmentation parameters of views.

    Args:
        config: The settings of one kind of views, large or small.
        numbers: float64 (N,V,42) in 0-1, from :func:`sample_uniforms`.
        side: The side of the stored square images in pixels.

    Returns:
        The parameters of N * V views, on the host: the crop boxes in pixels, for each
        operation a mask of the views to which it applies, and its parameters. The V
        views of an image follow each other.

    Raises:
        ValueError: The crop is ``pad`` or ``pad_or_resized``, and its size exceeds the
            image with the padding on both sides.
    """
    numbers = numbers.flatten(0, 1)
    column = iter(numbers[:, BOX_NUMBERS:].unbind(1))

    def coin(probability: float) -> Tensor:
        """Return a mask, bool (N * V,), that is true with the given probability.

        It uses up the next column of the random numbers, one number for each view.
        """
        return next(column) < probability

    def uniform(low: float, high: float) -> Tensor:
        """Return float32 numbers (N * V,), uniform from ``low`` to ``high``.

        It uses up the next column of the random numbers, one number for each view.
        """
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
    """Return crop boxes, float32 (N,4): top, left, height, width in pixels.

    With the crop ``none`` a box is the whole image. With ``pad`` it is a square of side
    ``c.size``, anywhere in the padded image, so top and left may be negative. With
    ``resized`` it comes from :func:`resized_boxes`. With ``pad_or_resized`` each view
    has one of the two, with probability 1/2.

    Args:
        c: The settings of one kind of views, large or small.
        side: The side of the stored square images in pixels.
        numbers: float64 (N,23), uniform in 0-1. They stand for ten areas and ten aspect
            ratios to try for a random-resized crop, one choice between ``pad`` and
            ``resized``, top and left.

    Raises:
        ValueError: The crop is ``pad`` or ``pad_or_resized``, and its size exceeds the
            image with the padding on both sides.
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
    """Choose the boxes of random-resized crops as torchvision's ``RandomResizedCrop``.

    Args:
        scale: The smallest and largest share of the image's area that a crop covers.
        numbers: float64 (N,23), uniform in 0-1. They stand for ten areas, uniform in
            ``scale``, and ten aspect ratios, log-uniform from 3/4 to 4/3, to try; one
            number that is not used here; top and left.
        height: The image's height in pixels.
        width: The image's width in pixels.

    Returns:
        float64 (N,4) of whole pixels: top, left, height, width. The first area and
        ratio that fit into the image count. If none of the ten fits, the box is the
        largest centered one with a ratio of width to height from 3/4 to 4/3, whatever
        ``scale`` is.
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
    """Make views of images by given augmentation parameters, without normalization.

    Args:
        images: uint8 (B,3,S,S), B > 0.
        draws: The parameters of N views, where N is a multiple of B. Rows b*N/B to
            (b+1)*N/B - 1 are the views of image b.
        config: The settings of these views.

    Returns:
        float32 (N,3,size,size) in 0-1, where size is ``config.size``.

    Raises:
        ValueError: The images have another shape or type, or there are none.
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
    # Interpolation weights in bfloat16 would visibly change the images.
    with torch.autocast(images.device.type, enabled=False):
        out = _crop(images, draws, config)
        _finish_(out, draws, config)
    return out


def _finish_(views: Tensor, draws: AugmentParams, config: ViewConfig) -> None:
    """Apply all operations that follow crop and flip, in place.

    They are affine, color jitter, grayscale, solarize, equalize and blur, in this
    order. Each changes only the views that its mask in ``draws`` selects.

    Args:
        views: float32 (N,3,size,size) in 0-1, which is changed.
        draws: The parameters of the N views.
        config: The settings of these views.
    """
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
    """Apply an operation to the images that a mask selects, in place.

    Nothing is computed for the other images.

    Args:
        images: (N,3,H,W), on any device. The selected images are overwritten.
        chosen: The mask, bool (N,), on the host.
        operation: Takes the R selected images and their parameters, and returns R
            images.
        *parameters: Tensors on the host with N rows. The operation gets the selected
            rows of each, on the images' device.
    """
    rows = chosen.nonzero()[:, 0]
    if len(rows) == 0:
        return
    here = rows.to(images.device, non_blocking=True)
    arguments = [p[rows].to(images.device, non_blocking=True) for p in parameters]
    images.index_copy_(0, here, operation(images.index_select(0, here), *arguments))


def _crop(images: Tensor, draws: AugmentParams, config: ViewConfig) -> Tensor:
    """Crop, resize and flip images with two batched matrix products.

    Without crop, resizing and any flip the images are only scaled to 0-1 and repeated.

    Args:
        images: uint8 (B,3,S,S).
        draws: The parameters of N views, where N is a multiple of B. The N / B views of
            an image follow each other.
        config: The settings of these views.

    Returns:
        float32 (N,3,size,size) in 0-1.
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
    """Return the interpolation weights (...,size,side) of crops along one axis.

    The interpolation is bilinear with antialiasing, as in Pillow and in torchvision
    with ``antialias=True``. The weights of a target pixel are a triangle around its
    center. The half width of the triangle is one source pixel when enlarging, and one
    target pixel when reducing. The triangle is cut off at the box and then normalized.
    A box with ``length == size`` is therefore copied exactly. Pixels of the box outside
    the image have no weight, so a target pixel beyond the image has only zeros.

    Args:
        start: (...), the first pixel of each crop's box. It may lie outside the image.
        length: (...), the length of each box in pixels.
        reverse: bool (...), whether to mirror the crop.
        size: The number of target pixels.
        side: The number of source pixels.
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
    """Resample images by two matrix products, ``down[n] @ image @ across[n].T``.

    Each channel is resampled from S x S to T x T pixels by interpolation weights. If
    the caller allows TF32 on CUDA, its three roundings by 2**-11 move a value by less
    than half of one of 255 levels.

    Args:
        images: (B,3,S,S) of any numeric type.
        down: float32 (N,T,S), the weights along the vertical axis. N is a multiple of
            B, and rows b*N/B to (b+1)*N/B - 1 belong to image b.
        across: float32 (N,T,S), the weights along the horizontal axis.

    Returns:
        float32 (N,3,T,T).
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
    """Shear images along x, rotate and zoom about the center, then shift them.

    Interpolation is bilinear with zeros outside the image, as in torchvision.

    Args:
        images: float32 (B,3,S,S).
        pose: (B,5): the angle of rotation in degrees, clockwise; the angle of shear in
            degrees, which moves rows below the center to the left if it is positive;
            the shift in x (to the right) and in y (down) as a share of the side; and
            the zoom factor, which enlarges the content if it is above 1.

    Returns:
        float32 (B,3,S,S), new images.
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
    """Apply a Gaussian blur with 2 * ``radius`` + 1 taps to images.

    Pixels are reflected at the border, as in torchvision.

    Views use ``radius = ceil(4 * largest sigma)``, but at most S - 1. That gives 17
    taps for the recipes' range of 0.1-2.0, and 6e-5 of the weight lie beyond. More taps
    cost nothing, because the weights are a dense matrix (S,S).

    Args:
        images: float32 (B,3,S,S).
        sigma: (B,), the standard deviation in pixels.
        radius: The largest distance in pixels with a weight, less than S.

    Returns:
        float32 (B,3,S,S).
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
    """Return the Rec. 601 brightness (B,1,H,W) of RGB images (B,3,H,W).

    The coefficients have four digits, as in torchvision.
    """
    red, green, blue = images.split(1, dim=1)
    return (red * 0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def grayscale(images: Tensor) -> Tensor:
    """Return images (B,3,H,W) with each pixel's luma in all three channels.

    The three channels share their memory, so the result must not be written to.
    """
    return luma(images).expand(-1, 3, -1, -1)


def blend_(images: Tensor, factor: Tensor, operation: Tensor) -> Tensor:
    """Change brightness, contrast or saturation of each image, in place.

    The result is ``factor * image + (1 - factor) * reference``, limited to 0-1. Each
    image has its own operation.

    Args:
        images: float32 (B,3,H,W) in 0-1.
        factor: (B,). A factor of 1 leaves the image as it is.
        operation: int64 (B,), which says what the reference is: black for
            ``BRIGHTNESS``, the image's mean luma for ``CONTRAST``, each pixel's luma
            for ``SATURATION``.

    Returns:
        ``images``.
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
    """Rotate the hue of each image, in place; HSV value and saturation stay.

    This is exact and has no branches, because torch.where is slow on the CPU. Let M and
    m be the largest and smallest channel, c = M - m, and u = (channel - m) / c. In each
    sixth of the color circle one u is 0, one is 1 and the third moves with slope one.
    The hue in sixths, in -3..3 with red at 0, is therefore h = sign(g - b) (1 - u_r +
    u_g + u_b). In the other direction, a channel is M - c clamp(d - 1, 0, 1), where d
    is the distance on the circle from h to the channel's own hue. It is |h| for red.
    For green and blue it is 3 minus the distance to the opposite hue, -1 and 1.

    Args:
        images: float32 (B,3,H,W) in 0-1.
        shift: (B,), the rotation in turns of the color circle, -0.5..0.5; positive from
            red toward green.

    Returns:
        ``images``.
    """
    red, green, blue = images.split(1, dim=1)
    high = torch.maximum(torch.maximum(red, green), blue)
    low = torch.minimum(torch.minimum(red, green), blue)
    chroma = high - low
    hue = (high - red).add_(green).sub_(low).add_(blue - low)
    hue.div_(chroma.clamp(min=1e-12)).copysign_(green - blue).add_(
        6 * shift.view(-1, 1, 1, 1)
    )
    hue.sub_((hue / 6).round_().mul_(6))  # wrapped into -3..3 again
    away = torch.cat(
        [hue.abs().sub_(1), 2 - (hue + 1).abs_(), 2 - (hue - 1).abs_()], dim=1
    ).clamp_(0, 1)
    return torch.addcmul(high, chroma, away, value=-1, out=images)


def jitter_(images: Tensor, rows: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue of the chosen images, in place.

    Each image has its own order of the four operations. The images are gathered and
    sorted by the place of hue in their order. Hue then runs once on all of them. Three
    of the six calls of :func:`blend_` run before it and three after it, each on a
    slice, so that each image gets its three blends at the right places.

    Args:
        images: float32 (B,3,H,W) in 0-1, on any device.
        rows: int64 (R,) on the host, the images to change, without repetition.
        factors: (R,4) on the host: brightness, contrast and saturation (1 leaves the
            image as it is), and hue shift (0 does).
        order: int64 (R,) on the host, indices into ``JITTER_ORDERS``.

    Returns:
        ``images``.
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
        """Apply blend k (0, 1, 2) of each image to the rows ``parts[k]`` of ``work``.

        Nothing is done if all factors of brightness, contrast and saturation are 1.
        """
        for k, part in enumerate(parts):
            if has_blend and work[part].shape[0]:
                blend_(work[part], strength[k, part], blends[k, part])

    blend([slice(rows_before, None) for rows_before in first])
    if has_hue:
        hue_(work, shift)
    blend([slice(rows_before) for rows_before in first])
    return images.index_copy_(0, chosen, work)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert the values of images that are at or above a threshold.

    Args:
        images: float32 (B,3,H,W) in 0-1.
        threshold: (B,), in 0-1, one for each image.

    Returns:
        float32 (B,3,H,W).
    """
    bright = (images >= threshold.view(-1, 1, 1, 1)).to(images.dtype)
    return bright.sub_(images).abs_()  # |1 - x| where bright, |0 - x| elsewhere


def equalize(images: Tensor) -> Tensor:
    """Equalize the histogram of each channel of images over 256 levels, as PIL does.

    The images are rounded to these levels, and the arithmetic is PIL's, in integers. A
    level becomes the number of darker pixels divided by ``step``, rounded, and at most
    255. ``step`` is 1/255 of the number of pixels below the brightest level present,
    rounded down. A channel with step 0 is only rounded to the levels.

    Args:
        images: float32 (B,3,H,W) in 0-1.

    Returns:
        float32 (B,3,H,W), multiples of 1/255.
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
