"""Cut the views of an encoded image on the CPU, in 8 bits, from one decoding.

This is the half of the augmentation that streaming does where images are read.
:func:`uno.augment.augment_crops` does the rest on the training device. Both draw the
same random numbers for a row of a batch. The numbers are a function of seed, phase,
step and position in the global batch, so the crop does not depend on the process or the
time. On one core of a Xeon the antialiased 8-bit resize of torch takes 0.25 ms for a
crop of 224 px, and that of Pillow 0.65 ms.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from uno.augment import BOX_NUMBERS, kinds, resized_boxes, sample_uniforms, to_params
from uno.config import AugmentConfig, ViewConfig
from uno.data.decode import (
    PLAIN,
    BadImage,
    Decoding,
    Interpolation,
    decode,
    decode_rgb,
    decode_square_and_rgb,
)
from uno.data.images import Image
from uno.data.sampling import augment_generator


@dataclass(frozen=True)
class Cropper:
    """Cuts the random crops of one training phase from encoded images.

    It is plain data, so that it can be sent to the processes that read images.

    Attributes:
        seed: The seed of the random numbers.
        stream: The number of the phase's random stream, a constant of
            :mod:`uno.data.sampling`.
        num_rows: The number of images B in the global batch.
        augment: The settings of the large and the small views.
        side: The side in pixels of the stored square, which is the center of an image,
            resized. All crops but ``resized`` are taken from that square, as they are
            for images in memory. ``resized`` crops are taken from the whole image.
        how: How crops are resized and scaled to 8 bits.
    """

    seed: int
    stream: int
    num_rows: int
    augment: AugmentConfig
    side: int
    how: Decoding = PLAIN

    @cached_property
    def kinds(self) -> list[ViewConfig]:
        """The settings of the large and of the small views, in this order.

        Small views are left out if there are none. The settings are those that
        :func:`uno.augment.kinds` returns for ``augment``: with ``augment.weak`` the
        operations on colors and blur are off. They are computed once.
        """
        return kinds(self.augment)

    @property
    def row_bytes(self) -> int:
        """The number of bytes of all views of one image, as uint8 pixels."""
        return sum(3 * kind.num_views * kind.size**2 for kind in self.kinds)

    def split(self, pixels: Tensor) -> list[Tensor]:
        """Split the pixels of each image into its views, without a copy.

        Args:
            pixels: uint8 (B, ``row_bytes``): for each image the bytes of all its views,
                one after the other.

        Returns:
            uint8 (B,V,3,size,size) for the large views, and the same for the small
            views if there are any. V is the number of views of this kind, and ``size``
            their side in pixels, so both differ between the two.
        """
        shapes = [(kind.num_views, 3, kind.size, kind.size) for kind in self.kinds]
        parts = pixels.split([math.prod(shape) for shape in shapes], dim=1)
        return [
            part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)
        ]

    def crop(
        self,
        steps: np.ndarray,
        positions: np.ndarray,
        images: Sequence[Image],
        squares: np.ndarray | None = None,
    ) -> tuple[np.ndarray, list[str | None]]:
        """Cut the random views of n images, each of which is read once.

        Where a view is cut depends only on the attributes, the step and the position,
        and for ``resized`` crops on the size of the image, so another call with these
        cuts the same views. A view is cut, and resized if the box that is cut has
        another size than the view. It is not flipped, changed in color or normalized.

        Args:
            steps: int64 (n,), the number of the training step that uses each image.
            positions: int64 (n,), the position of each image in the global batch of
                that step.
            images: The n images: encoded bytes, paths or URIs, or pixels uint8 (H, W,
                3).
            squares: An array uint8 (n, 3, side, side) to be filled, where ``side`` is
                the attribute of that name. Into it the centered square of each image is
                written, resized to this side; black for an image that cannot be used.
                None if no square is wanted.

        Returns:
            Two values. The first are the pixels of all views of each image, uint8 (n,
            ``row_bytes``), which :meth:`split` divides. The second has for each image
            None, or the reason why it cannot be used, for example that its file is
            missing or cannot be decoded; :func:`uno.data.decode.decode` lists the
            reasons. All views of such an image are black.

        Raises:
            StorageError: The file of an image cannot be read now, but perhaps later.
            ValueError: The crop is ``pad`` or ``pad_or_resized``, and a view is larger
                than the square with its padding.
        """
        pixels = torch.zeros(len(images), self.row_bytes, dtype=torch.uint8)
        views = [
            [row.unbind(0) for row in part.unbind(0)] for part in self.split(pixels)
        ]
        reasons: list[str | None] = [None] * len(images)
        for step in np.unique(steps):
            rows = np.flatnonzero(steps == step)
            planned = self._draw_crops(int(step), positions[rows])
            for i, row in enumerate(rows.tolist()):
                try:
                    self._crop(
                        images[row],
                        [plan[i] for plan in planned],
                        [view[row] for view in views],
                        None if squares is None else squares[row],
                    )
                except BadImage as error:
                    reasons[row] = str(error)
                    pixels[row] = 0
                    if squares is not None:
                        squares[row] = 0
        return pixels.numpy(), reasons

    def _draw_crops(self, step: int, positions: np.ndarray) -> list[np.ndarray]:
        """Draw where to crop n images of one training step.

        The random numbers of the whole global batch are drawn, and those of the n
        images are used.

        Args:
            step: The number of the training step.
            positions: int64 (n,), the position of each image in the global batch.

        Returns:
            One array for the large views, and one for the small views if there are any.
            For ``resized`` crops it holds the random numbers (n,V,23) that
            :func:`uno.augment.resized_boxes` takes, because their boxes depend on the
            size of the image. For other crops it holds boxes (n,V,4) in whole pixels of
            the centered, resized square of the image: top, left, height, width. With
            padding they may reach outside the square. V is the number of views of the
            kind.

        Raises:
            ValueError: The crop is ``pad`` or ``pad_or_resized``, and a view is larger
                than the square with its padding.
        """
        generator, chosen = (
            augment_generator(self.seed, self.stream, step),
            torch.from_numpy(positions),
        )
        planned = []
        for kind in self.kinds:
            numbers = sample_uniforms(self.num_rows, kind.num_views, generator)[chosen]
            if kind.crop == "resized":
                planned.append(numbers[..., :BOX_NUMBERS].numpy())
            else:
                boxes = to_params(kind, numbers, self.side).box.int()
                planned.append(boxes.unflatten(0, (-1, kind.num_views)).numpy())
        return planned

    def _crop(
        self,
        image: Image,
        planned: list[np.ndarray],
        out: list[tuple[Tensor, ...]],
        square_out: np.ndarray | None,
    ) -> None:
        """Decode one image, and write its views into given tensors.

        Args:
            image: Encoded bytes, a path or URI, or pixels uint8 (H, W, 3).
            planned: For each kind of views (large, small) the row of this image in the
                result of :meth:`_draw_crops`.
            out: For each kind its V views, uint8 (3, size, size), where ``size`` is
                that of the kind. They are overwritten, except for a view whose box lies
                outside the square, see :func:`crop_`.
            square_out: uint8 (3, side, side), into which the centered square of the
                image is written, resized to ``side``; None if that is not wanted.

        Raises:
            BadImage: The image cannot be used, see :func:`uno.data.decode.decode`.
            StorageError: The image's file cannot be read now, but perhaps later.
        """
        square, whole = self._decode(image, square_out is not None)
        if square_out is not None:
            square_out[:] = square
        for kind, plan, views in zip(self.kinds, planned, out, strict=True):
            if kind.crop == "resized":
                source = torch.from_numpy(whole)
                boxes = resized_boxes(kind.crop_scale, plan, *whole.shape[:2])
            else:
                source = torch.from_numpy(square.copy()).permute(1, 2, 0)
                boxes = plan
            for view, box in zip(views, boxes.astype(int).tolist(), strict=True):
                crop_(view, source, box, self.how.interpolation)

    def _decode(self, image: Image, with_square: bool) -> tuple[Any, Any]:
        """Decode an image into the square and the whole image that views are cut from.

        Args:
            image: Encoded bytes, a path or URI, or pixels uint8 (H, W, 3).
            with_square: Whether the square is needed even if no view is cut from it.

        Returns:
            Two values, both upright and in RGB. The first is the centered square of the
            image, resized to the stored side, uint8 (3, side, side); None if all crops
            are ``resized`` and ``with_square`` is False. The second is the whole image,
            uint8 (H, W, 3), or (H, W, 4) with a fourth channel that means nothing (it
            is not alpha); None if no crop is ``resized``. A JPEG may be decoded at a
            smaller scale, and H and W are its sides at that scale.

        Raises:
            BadImage: The image cannot be used, see :func:`uno.data.decode.decode`.
            StorageError: The image's file cannot be read now, but perhaps later.
        """
        crops = {kind.crop for kind in self.kinds}
        needs_square = with_square or crops != {"resized"}
        if "resized" not in crops:
            return decode(image, self.side, self.how), None
        if not needs_square:
            return None, decode_rgb(image, self._draft_side, self.how.value_range)
        return decode_square_and_rgb(image, self.side, self._draft_side, self.how)

    @cached_property
    def _draft_side(self) -> int:
        """The side in pixels for which a whole image is decoded.

        If both sides of an image have this length or more, its smallest ``resized``
        crop has at least as many pixels as its view. A JPEG is decoded at a smaller
        scale, which is faster, as long as both sides then have at least four times
        (:data:`uno.data.decode.DRAFT`) this length. This property needs a kind of views
        with the crop ``resized``.
        """
        resized = (kind for kind in self.kinds if kind.crop == "resized")
        return max(
            math.ceil(kind.size / math.sqrt(kind.crop_scale[0])) for kind in resized
        )


def crop_(
    view: Tensor,
    image: Tensor,
    box: Sequence[int],
    interpolation: Interpolation = "bilinear",
) -> None:
    """Write a box of an image into a view, resized with antialiasing.

    A box of another size than the view must lie inside the image. A box of the view's
    size is copied, and may reach outside the image. Pixels outside are then black. If
    the box does not overlap the image at all, the view is left as it is.

    Args:
        view: uint8 (3,size,size), which is written.
        image: uint8 (H,W,3 or 4). A fourth channel is dropped.
        box: Top, left, height, width in pixels.
        interpolation: The mode of ``torch.nn.functional.interpolate``.
    """
    top, left, height, width = box
    size = view.shape[-1]
    if (height, width) != (size, size):
        part = (
            image[top : top + height, left : left + width].permute(2, 0, 1).unsqueeze(0)
        )
        view.copy_(
            F.interpolate(part, size=(size, size), mode=interpolation, antialias=True)[
                0, :3
            ]
        )
    elif -size < top < image.shape[0] and -size < left < image.shape[1]:
        # F.pad cuts off at a negative width.
        edges = (-left, left + size - image.shape[1], -top, top + size - image.shape[0])
        view.copy_(F.pad(image[..., :3].permute(2, 0, 1), edges))
