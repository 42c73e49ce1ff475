"""The network for known and novel classes (paper Sec. 3.1, Fig. 2)."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from uno.augment import eval_view
from uno.config import Config, ModelConfig
from uno.data.memory import RowBlocks
from uno.encoders.build import build_encoder, frozen_parts
from uno.heads import Prototypes, StackedProjector, unit
from uno.method import Method, load


class Logits(NamedTuple):
    """The outputs of the network for V views of B rows: cosines with prototypes.

    The outputs of heads are at least float32. The features have the type that the
    encoder returns, which is bfloat16 if training uses it.

    Attributes:
        known: (V, B, C_l), of the known head.
        novel: (V, H, B, C_u), of the cluster heads; None if the model has no novel
            head. H is 1 for the novel head of a baseline. The head of DTC gives
            log-similarities instead of cosines.
        over: (V, H, B, m C_u), of the overclustering heads; None if the model has none.
        features: (V, B, D), the features of the encoder, before the adapter.
        directions: (V, H or 2H, B, P), the projections of the cluster heads, then of
            the overclustering heads, at length one and detached; None if the model has
            no projection heads.
    """

    known: Tensor
    novel: Tensor | None
    over: Tensor | None
    features: Tensor
    directions: Tensor | None = None


class UnoModel(nn.Module):
    """Shared encoder E, known head h, cluster heads g_i and overclustering heads o_i.

    The parts of the encoder that ``config.finetune`` freezes have no gradient and stay
    in eval mode.

    Args:
        config: The encoder and the sizes of the heads.
        num_known: C_l, the number of outputs of the known head.
        num_novel: C_u, the number of outputs of each cluster head. With 0, as in
            pretraining, the model has the encoder and the known head only.
        method: Builds the adapter, which maps the features before all heads, and the
            single novel head of a baseline. It may be None only if ``num_novel`` is 0.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_known: int,
        num_novel: int,
        method: Method | None = None,
    ) -> None:
        super().__init__()
        self.encoder = build_encoder(config)
        self.num_known, self.num_novel = num_known, num_novel
        self.num_heads = config.num_heads
        self.normalize_input = config.mlp_input == "normalized"
        # of the input of the heads
        width = int(self.encoder.num_features)  # type: ignore[arg-type]
        self.adapter: Any = None
        self.novel: Any = None  # Prototypes, or a baseline's head
        self.projector: StackedProjector | None = None
        self.over: Prototypes | None = None
        if num_novel:
            assert method is not None
            self.adapter = method.build_adapter(width)
            width = width if self.adapter is None else self.adapter.width
        self.known = Prototypes(num_known, width)
        if method is not None and method.has_projection_heads and num_novel:
            self._add_projection_heads(config, width)
        elif method is not None and num_novel:
            self.num_heads = 1
            is_frozen = config.finetune == "none"
            self.novel = method.build_head(num_novel, width, is_frozen)
        self._frozen, frozen_parameters = frozen_parts(self.encoder, config.finetune)
        for name in self._frozen:
            frozen_parameters += self.encoder.get_submodule(name).parameters()
        for parameter in frozen_parameters:
            parameter.requires_grad_(False)
        self.train()

    def _add_projection_heads(self, config: ModelConfig, num_features: int) -> None:
        """Build UNO's cluster heads, and the overclustering heads if there are any.

        Each head is a projection (an MLP) and prototypes. They become the attributes
        ``projector``, ``novel`` and, if ``config.overcluster_factor`` is not 0,
        ``over``.

        Args:
            config: The numbers and sizes of heads.
            num_features: The number of features that the heads take.
        """
        heads, factor = config.num_heads, config.overcluster_factor
        self.projector = StackedProjector(
            2 * heads if factor else heads,
            num_features,
            config.hidden_dim,
            config.projection_dim,
        )
        self.novel = Prototypes(heads, self.num_novel, config.projection_dim)
        if factor:
            self.over = Prototypes(
                heads, factor * self.num_novel, config.projection_dim
            )

    def train(self, mode: bool = True) -> Self:
        """Set training or eval mode; frozen parts of the encoder stay in eval mode.

        Args:
            mode: True for training mode, False for eval mode.

        Returns:
            The model itself.
        """
        super().train(mode)
        for name in self._frozen:
            self.encoder.get_submodule(name).eval()
        return self

    @torch.no_grad()
    def normalize_prototypes_(self) -> None:
        """Scale all prototypes to length one, in place.

        Every module of the class :class:`uno.heads.Prototypes` is changed: the known
        head, and those in the novel and overclustering heads. A novel head that has
        none, such as that of DTC, stays as it is. Training calls this before each
        forward pass, because each step of the optimizer changes the lengths.
        """
        for module in self.modules():
            if isinstance(module, Prototypes):
                module.weight.div_(
                    module.weight.norm(dim=-1, keepdim=True).clamp_min_(1e-12)
                )

    def forward(self, views: Sequence[Tensor]) -> Logits:
        """Compute the logits of V views of the same B rows.

        Args:
            views: V tensors: normalized images (B, 3, S_v, S_v), or features (B, D),
                which skip the encoder. Neighboring views of one size share a pass of
                the encoder.

        Returns:
            Cosines with the prototypes of the known head (V, B, C_l), the cluster heads
            (V, H, B, C_u) and the overclustering heads (V, H, B, m C_u), before the
            division by the temperature; the features before the adapter (V, B, D); and
            the projections (V, H or 2H, B, P) at length one, detached. A field is None
            if the model has no such heads.
        """
        batches = [
            torch.cat(list(group))
            for _, group in groupby(views, key=lambda view: view.shape[-1])
        ]
        # (V * B, D)
        features = torch.cat([b if b.ndim == 2 else self.encoder(b) for b in batches])
        return self.heads(features, len(views))

    def heads(self, features: Tensor, num_views: int = 1) -> Logits:
        """Compute the logits of all heads from features of the encoder.

        Args:
            features: Features of V views of the same B rows, (V * B, D), the rows of
                view 0 first.
            num_views: The number of views V.

        Returns:
            Cosines with the prototypes of the known head (V, B, C_l), the cluster heads
            (V, H, B, C_u) and the overclustering heads (V, H, B, m C_u), before the
            division by the temperature; the given features by view (V, B, D), before
            the adapter; and the projections (V, H or 2H, B, P) at length one, detached.
            A field is None if the model has no such heads.
        """
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


def build_network(
    config: Config, num_known: int, num_novel: int, seed: int
) -> UnoModel:
    """Build the network of a run's method with fresh weights.

    Args:
        config: The configuration of the run.
        num_known: C_l, the number of known classes.
        num_novel: C_u, the number of novel classes; 0 for the encoder and the known
            head alone, as in pretraining.
        seed: Equal seeds give equal weights. The global random state is not changed.

    Returns:
        The network on the CPU, in training mode.

    Raises:
        ConfigError: The method cannot be loaded, the encoder cannot be built (see
            :func:`uno.encoders.build.build_encoder`), ``model.finetune`` is
            "last_stage" and the encoder has no stages or blocks, or the novel head does
            not fit the encoder. The method is loaded only if ``num_novel`` is not 0.
    """
    method = load(config.method) if num_novel else None
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also seed the generators of CUDA.
        torch.default_generator.manual_seed(seed)
        return UnoModel(config.model, num_known, num_novel, method)


def num_heads(config: Config) -> int:
    """Return the number of cluster heads of the run's method.

    It is ``model.num_heads`` for a method with UNO's projection heads, and 1 for any
    other method.

    Raises:
        ConfigError: The method cannot be loaded.
    """
    return config.model.num_heads if load(config.method).has_projection_heads else 1


@torch.inference_mode()
def forward(model: UnoModel, images: Tensor, config: Config) -> Logits:
    """Compute the logits of images for evaluation and prediction, without gradient.

    The center crop of each image is used, without random augmentation. Its side is
    ``augment.large.size``, or that of the image if this is smaller.

    Args:
        model: The model, in eval mode.
        images: One of three, on any device: uint8 images (B, 3, S, S); or features of
            their center crops, float (B, D); or cached features (B, 1 + V, D), which
            hold those of the center crop and then those of V random views.
        config: The configuration of the run.

    Returns:
        The outputs of :meth:`UnoModel.forward` for the center crops as one view (V =
        1), on the model's device: cosines of all heads, features and projections.
    """
    assert not model.training
    side = min(config.augment.large.size, images.shape[-1])
    images = images.to(model.known.weight.device, non_blocking=True)
    if images.ndim < 4:
        return model([images if images.ndim == 2 else images[:, 0]])
    return model([eval_view(images, side, config.data.mean, config.data.std)])


def features_of(model: UnoModel, images: Tensor | RowBlocks, config: Config) -> Tensor:
    """Compute the encoder's features of the center crops of images, in batches.

    Args:
        model: The model, in eval mode.
        images: One of three: uint8 images (N, 3, S, S), N >= 1; or features of their
            center crops (N, D); or cached features (N, 1 + V, D), which hold those of
            the center crop and then those of V random views.
        config: The configuration of the run.

    Returns:
        Features, float32 (N, D), on the model's device. Features that are passed are
        only moved and converted.
    """
    if images.ndim < 4:
        plain = images[:, 0] if images.ndim == 3 else images[:]
        return plain.float().to(model.known.weight.device)
    parts = images.split(config.train.eval_batch_size)
    return torch.cat(
        [forward(model, part, config).features[0].float() for part in parts]
    )
