"""Colour operations on batches with a parameter per row, for :mod:`uno.augment`.

Images are float32 (B,3,H,W) in 0-1; parameters are (B,) tensors on the same device unless said otherwise.
Definitions are those of torchvision.transforms.functional on float images. ``_`` changes images in place.
"""

from itertools import permutations

import torch
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
JITTER_ORDERS = tuple(permutations(range(4)))  # an order of the four is an index into this tuple


def luma(images: Tensor) -> Tensor:
    """Rec. 601 brightness (B,1,H,W) of RGB images (B,3,H,W), with torchvision's four digits."""
    red, green, blue = images.split(1, dim=1)
    return (red * 0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def grey(images: Tensor) -> Tensor:
    """Each pixel's luma in all three channels, (B,3,H,W)."""
    return luma(images).expand(-1, 3, -1, -1)


def blend_(images: Tensor, factor: Tensor, operation: Tensor) -> Tensor:
    """Brightness, contrast or saturation by row: ``factor * image + (1 - factor) * reference``, kept in 0-1.

    ``operation`` (B,) says what the reference is: black for BRIGHTNESS, the image's mean luma for CONTRAST,
    each pixel's luma for SATURATION. A factor (B,) of 1 leaves the row as it is.
    """
    rows = (-1, 1, 1, 1)
    pixel = luma(images)
    mean = pixel.mean(dim=(2, 3), keepdim=True)
    reference = torch.addcmul(
        mean * (operation == CONTRAST).view(rows), pixel, (operation == SATURATION).to(pixel.dtype).view(rows)
    )
    return images.lerp_(reference, (1 - factor).view(rows)).clamp_(0, 1)


def hue_(images: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by ``shift`` (B,), in -0.5..0.5 of the colour circle; HSV value and saturation stay.

    Exact, without branches (torch.where is slow on the CPU). Let M and m be the largest and smallest channel,
    c = M - m, and u = (channel - m) / c. In each sixth of the circle one u is 0, one is 1 and the third moves
    with slope one, so the hue in sixths, in -3..3 with red at 0, is h = sign(g - b) (1 - u_r + u_g + u_b).
    Back, a channel is M - c clamp(d - 1, 0, 1), where d is the distance on the circle from h to the channel's
    own hue: |h| for red; 3 minus the distance to the opposite hue, -1 and 1, for green and blue.
    """
    red, green, blue = images.split(1, dim=1)
    high = torch.maximum(torch.maximum(red, green), blue)
    low = torch.minimum(torch.minimum(red, green), blue)
    chroma = high - low
    hue = (high - red).add_(green).sub_(low).add_(blue - low)
    hue.div_(chroma.clamp(min=1e-12)).copysign_(green - blue).add_(6 * shift.view(-1, 1, 1, 1))
    hue.sub_((hue / 6).round_().mul_(6))  # back to -3..3
    away = torch.cat([hue.abs().sub_(1), 2 - (hue + 1).abs_(), 2 - (hue - 1).abs_()], dim=1).clamp_(0, 1)
    return torch.addcmul(high, chroma, away, value=-1, out=images)


def jitter_(images: Tensor, rows: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue on the chosen rows, in an order of its own for each row.

    Rows are gathered sorted by the place of hue in their order. So hue runs once on all of them, after the
    blends that precede it (as many as hue's place) and before the others: six blends, each on a slice, three
    per row. On the host: ``rows`` (R,) int64 without repetition, ``factors`` (R,4) of brightness, contrast,
    saturation (1: none) and hue shift (0: none), ``order`` (R,) int64.
    """
    sequence = torch.tensor(JITTER_ORDERS)[order]
    is_hue = sequence == HUE
    place, by_place = is_hue.int().argmax(dim=1).sort(stable=True)
    first = torch.bincount(place, minlength=4).cumsum(0).tolist()[:3]  # first[k] rows have hue at place 0..k
    blends = sequence[~is_hue].view(-1, 3)
    strength = factors.gather(1, blends)[by_place]
    has_blend, has_hue = bool((strength != 1).any()), bool((factors[:, HUE] != 0).any())
    # Transposed: the parameters of each of the three blends lie together.
    chosen, shift, strength, blends = (
        t.to(images.device, non_blocking=True)
        for t in (
            rows[by_place],
            factors[by_place, HUE],
            strength.T.contiguous(),
            blends[by_place].T.contiguous(),
        )
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
    """Equalise the histogram of each channel over 256 levels in PIL's integer arithmetic; rounds to levels.

    A level becomes the number of darker pixels divided by ``step``, to the nearest integer, where ``step`` is
    one 255th, rounded down, of the pixels below the brightest level present. With step 0 a channel stays as
    it is.
    """
    num_pixels = images.shape[2] * images.shape[3]
    levels = (images * 255).round_().long().flatten(2)
    histogram = torch.zeros(*images.shape[:2], 256, dtype=torch.int32, device=images.device)
    histogram.scatter_add_(2, levels, histogram.new_ones(()).expand_as(levels))
    step = (num_pixels - histogram.gather(2, levels.amax(dim=2, keepdim=True))) // 255
    darker = histogram.cumsum(dim=2, dtype=torch.int32) - histogram
    table = ((darker + step // 2) // step.clamp(min=1)).clamp_(max=255)
    table = torch.where(step > 0, table, torch.arange(256, dtype=torch.int32, device=images.device))
    return (table / 255).gather(2, levels).view_as(images)
