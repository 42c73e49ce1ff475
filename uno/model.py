"""One network for known and novel classes (paper Sec. 3.1, Fig. 2)."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from uno.augment import eval_view
from uno.config import Config, ModelConfig
from uno.data.row_blocks import RowBlocks
from uno.encoder import build_encoder, frozen_parts
from uno.heads import Prototypes, StackedProjector, unit

BuildHead = Callable[[int, int], nn.Module]


class Logits(NamedTuple):
    """Cosines in float32 of V views; ``novel`` and ``over`` are None where the model
    has no such heads.

    ``features`` are the encoder's, which baselines rank and compare; ``directions`` the
    projections of the cluster heads, then of the overclustering heads, at length one
    and detached.
    """

    known: Tensor  # (V, B, C_l)
    novel: Tensor | None  # (V, H, B, C_u)
    over: Tensor | None  # (V, H, B, m C_u)
    features: Tensor | None = None  # (V, B, D)
    directions: Tensor | None = None  # (V, H or 2H, B, P)


class UnoModel(nn.Module):
    """Shared encoder E, known head h, cluster heads g_i and overclustering heads o_i.

    ``num_novel`` C_u of 0 builds the encoder and the known head of C_l outputs only
    (pretraining). ``novel_head`` builds, from (C_u, D), a baseline's one novel head,
    which reads the feature: (N, D) -> (1, N, C_u); default: UNO's projection heads.
    ``adapter`` builds, from D, a module (N, D) -> (N, ``width``) through which that
    head and the known one see the feature. What ``config.finetune`` freezes has no
    gradient and stays in eval mode.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_known: int,
        num_novel: int,
        novel_head: BuildHead | None = None,
        adapter: Callable[[int], Any] | None = None,
    ) -> None:
        super().__init__()
        self.encoder = build_encoder(config)
        features, projection = int(self.encoder.num_features), config.projection_dim  # type: ignore[arg-type]
        self.adapter: Any = None
        if num_novel and adapter is not None:
            self.adapter = adapter(features)
            features = self.adapter.width
        self.known = Prototypes(num_known, features)
        self.num_known, self.num_novel, self.num_heads = (
            num_known,
            num_novel,
            config.num_heads,
        )
        self.normalize_input = config.mlp_input == "normalized"
        self.projector = self.over = None
        self.novel: Any = None  # Prototypes, or a baseline's head
        if num_novel and novel_head is not None:
            self.num_heads, self.novel = 1, novel_head(num_novel, features)
        elif num_novel:
            heads, factor = config.num_heads, config.overcluster_factor
            self.projector = StackedProjector(
                2 * heads if factor else heads, features, config.hidden_dim, projection
            )
            self.novel = Prototypes(heads, num_novel, projection)
            self.over = (
                Prototypes(heads, factor * num_novel, projection) if factor else None
            )
        self._frozen, single = frozen_parts(self.encoder, config.finetune)
        frozen = [
            p
            for name in self._frozen
            for p in self.encoder.get_submodule(name).parameters()
        ]
        for parameter in [*frozen, *single]:
            parameter.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> Self:
        """As of any module, but for what is frozen."""
        super().train(mode)
        for name in self._frozen:
            self.encoder.get_submodule(name).eval()
        return self

    @torch.no_grad()
    def normalize_prototypes_(self) -> None:
        """Scale all prototypes to length one, in place: before training's forward,
        evaluation, saving.
        """
        for module in self.modules():
            if isinstance(module, Prototypes):
                module.weight.div_(
                    module.weight.norm(dim=-1, keepdim=True).clamp_min_(1e-12)
                )

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) normalized images -> (B, D) pooled features z."""
        return self.encoder(images)

    def forward(self, views: Sequence[Tensor]) -> Logits:
        """V views (B, 3, S_v, S_v), or features (B, D) -> :class:`Logits`; views of
        one size share a pass.
        """
        batches = [
            torch.cat(list(group))
            for _, group in groupby(views, key=lambda view: view.shape[-1])
        ]
        # (V * B, D)
        features = torch.cat([b if b.ndim == 2 else self.encoder(b) for b in batches])
        return self.heads(features, len(views))

    def heads(self, features: Tensor, num_views: int = 1) -> Logits:
        """(V * B, D) features -> :class:`Logits`."""
        by_view = features.unflatten(0, (num_views, -1))
        if self.adapter is not None:
            features = self.adapter(features)
        directions = unit(features)
        known = self.known.cosines(directions).unflatten(0, (num_views, -1))
        if self.novel is None:
            return Logits(known, None, None, by_view)
        if self.projector is None:
            novel, over, projections = self.novel(features), None, None
        else:
            projections = unit(
                self.projector(directions if self.normalize_input else features)
            )
            novel = self.novel.cosines(projections[: self.num_heads])
            over = (
                None
                if self.over is None
                else self.over.cosines(projections[self.num_heads :])
            )
            projections = projections.detach()
        novel, over, projections = (
            # (V, H, B, ...)
            None if rows is None else rows.unflatten(1, (num_views, -1)).transpose(0, 1)
            for rows in (novel, over, projections)
        )
        return Logits(known, novel, over, by_view, projections)


def build_model(
    config: ModelConfig,
    num_known: int,
    num_novel: int,
    seed: int,
    novel_head: BuildHead | None = None,
    adapter: Callable[[int], Any] | None = None,
) -> UnoModel:
    """A freshly initialized model; equal seeds give equal weights, the global random
    state is left alone.
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would reseed CUDA's too
        torch.default_generator.manual_seed(seed)
        return UnoModel(config, num_known, num_novel, novel_head, adapter)


@torch.inference_mode()
def forward(model: UnoModel, images: Tensor, config: Config) -> Logits:
    """What ``model``, in eval mode, says of images uint8 (B, 3, S, S), on any device,
    under the evaluation view: V = 1; or of that view's features, float (B, D), or first
    among cached ones (B, 1 + V, D). Whoever looks at rows without training on them asks
    here.
    """
    assert not model.training
    side = min(config.augment.large.size, images.shape[-1])
    images = images.to(model.known.weight.device, non_blocking=True)
    if images.ndim < 4:
        return model([images if images.ndim == 2 else images[:, 0]])
    return model([eval_view(images, side, config.data.mean, config.data.std)])


def features_of(model: UnoModel, images: Tensor | RowBlocks, config: Config) -> Tensor:
    """Pooled features z (N, D) float32, on the model's device, of images uint8 (N, 3,
    S, S), N >= 1, or of their cached features, which pass no head.
    """
    if images.ndim < 4:
        plain = images[:, 0] if images.ndim == 3 else images[:]
        return plain.float().to(model.known.weight.device)
    parts = [
        forward(model, part, config).features
        for part in images.split(config.train.eval_batch_size)
    ]
    return torch.cat([part[0].float() for part in parts if part is not None])
