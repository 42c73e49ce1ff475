"""The discovery method DTC: deep transfer clustering (Han et al., ICCV 2019).

The paper is "Learning to discover novel visual categories via deep transfer
clustering". This is its Pi-model form, the variant that keeps no second memory of rows.

A linear layer reduces the features to C_u dimensions. It starts as their principal
components, and the centers start as k-means of the reduced features. q is the Student-t
similarity to the centers. p sharpens it: p ~ q^2 / sum of q over rows. KL(p || q) is
minimized, and p is updated only from time to time.

Known constants, from the authors' code: 10 epochs of warm-up without consistency, then
100; p is updated at the end of the warm-up, then every 5 epochs (CIFAR100: 30, every
10; ImageNet: 10, then 60); the weight of the squared difference of two views is 10
(ImageNet 100), rising over 5 epochs; k-means has 20 starts. Here the numbers of epochs
are shares of the phase. Both terms are means over rows AND clusters, and only unlabeled
rows train, as in that code.

On cached features of a frozen encoder only the linear layer shapes the features. The
two views are cached ones, and the known head is the means of the classes.

What differs:
- The q of a row is the last one seen in training. The authors predict the whole set
  again.
- The learning rate has one schedule.
- There is only the Pi-model. The authors' code also has temporal ensembles of q, of
  features, or of both.

Labeled rows do not train in discovery. The known head is that of pretraining, on an
encoder that changes, and novel outputs are log-similarities, below every known cosine.
So DTC has no joint classifier: its task-agnostic accuracy and that of known rows are
not comparable with those of other methods.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uno import distributed
from uno.clustering.initialization import set_to_class_means_, training_features
from uno.clustering.kmeans import kmeans, principal_components
from uno.config import Config, Section, field
from uno.data.memory import TrainSet
from uno.data.stream import TrainData
from uno.errors import ConfigError
from uno.heads import unit
from uno.method import Method
from uno.methods.common import forward_two_views, sigmoid_rampup
from uno.model import UnoModel, features_of
from uno.steps import Batch, TrainState

NUM_STARTS = 20
CIFAR100 = {"warmup": 30 / 130, "update_interval": 10 / 130, "rampup": 5 / 130}
IMAGENET = {
    "consistency_weight": 100.0,
    "warmup": 10 / 70,
    "update_interval": 5 / 70,
    "rampup": 5 / 70,
}
SETTINGS = {"cifar100_20": CIFAR100, "cifar100_50": CIFAR100, "imagenet": IMAGENET}


class Constants(Section):
    """Constants of DTC. Shares are shares of the discovery phase."""

    consistency_weight: float = field(
        10.0,
        "Weight of the squared difference of an image's two views.",
        ge=0,
        le=10**4,
    )
    rampup: float = field(
        5 / 110, "Share after warm-up in which that weight rises.", ge=0, le=1
    )
    warmup: float = field(10 / 110, "Share before the targets move.", ge=0, le=1)
    update_interval: float = field(
        5 / 110, "Share between two updates of the targets.", gt=0, le=1
    )


class DistanceHead(nn.Module):
    """A head of log-similarities to centers, the novel head of DTC.

    It computes -log(1 + |W z + b - u_k|^2) of features z and centers u_k. The softmax
    of these is q, the Student-t similarity.

    Attributes:
        reduce: The linear layer W, b from D features to K numbers.
        weight: The centers u_k, (1, K, K).
    """

    def __init__(self, num_novel: int, num_features: int) -> None:
        """Create the head with a random linear layer and random centers.

        Args:
            num_novel: The number of clusters K.
            num_features: The number of features D.

        Raises:
            ConfigError: There are fewer features than clusters.
        """
        super().__init__()
        if num_novel > num_features:
            raise ConfigError(
                f"method dtc reduces features to as many numbers as new classes"
                f" ({num_novel}), but the encoder has only {num_features}; use a wider"
                " encoder, a lower --num-novel, or another --method"
            )
        self.reduce = nn.Linear(num_features, num_novel)
        self.weight = nn.Parameter(torch.randn(1, num_novel, num_novel))  # centers u_k

    def forward(self, features: Tensor) -> Tensor:
        """Compute the log-similarities of features to the K cluster centers.

        Features are reduced to K numbers by the linear layer. The log-similarity to a
        center is -log(1 + squared distance).

        Args:
            features: Features (N, D).

        Returns:
            Log-similarities (1, N, K), at least float32. Their softmax is q.
        """
        reduced = self.reduce(features)
        reduced = reduced.to(torch.promote_types(reduced.dtype, torch.float32))
        squared = (reduced.unsqueeze(1) - self.weight).square().sum(dim=-1)  # (N, K)
        return -squared.log1p().unsqueeze(0)


class Dtc(Method):
    """DTC: clusters learn from their own sharpened assignments of unlabeled rows.

    The novel head reduces features by a linear layer and compares them with centers.
    Its probabilities must also agree for two views. Labeled rows do not train it.
    """

    name = "dtc"
    constants = Constants
    constants_of_preset = SETTINGS
    needs_memory = True

    def build_head(
        self, num_novel: int, num_features: int, is_frozen: bool
    ) -> DistanceHead:
        """Build the novel head, which computes log-similarities to cluster centers.

        Args:
            num_novel: The number of novel classes K.
            num_features: The number of features D.
            is_frozen: Whether the encoder is frozen, which does not matter here.

        Raises:
            ConfigError: There are fewer features than novel classes.
        """
        return DistanceHead(num_novel, num_features)

    def loss(self, state: TrainState, batch: Batch, config: Config) -> Tensor:
        """Compute the loss of DTC for the unlabeled rows of a batch.

        q are the cluster probabilities of a row, and p its sharpened target. The loss
        is KL(p || q) in view 0, plus the squared difference of q under two views with a
        weight. Both are means over rows and clusters. The weight is 0 in the warm-up,
        the first share ``warmup`` of the steps of the phase. After it the weight rises
        to ``consistency_weight`` within the share ``rampup`` of the phase, see
        :func:`uno.methods.common.sigmoid_rampup`.

        The targets p of all unlabeled rows, ``state.extra["targets"]``, are those of
        :meth:`initialize` until the warm-up ends. The first step after it, and then one
        step after each ``update_interval``, a share of all steps of the phase, replace
        them before the loss is computed: by :func:`sharpen` of the stored q of all
        unlabeled rows, ``state.extra["probabilities"]``. Every step, also in the
        warm-up, stores the q of view 0 of the unlabeled rows of all workers there, in
        place, see :func:`store_probabilities_`. Labeled rows take no part. The known
        prototypes of the model are scaled to length one first, in place. All workers
        call this.

        Args:
            state: The state of training, with the model, q and p. q and p are updated.
            batch: The views of this worker's rows, labeled rows first, with the numbers
                of the unlabeled rows (``rows``).
            config: The configuration of the run.

        Returns:
            The loss, a scalar.
        """
        assert batch.rows is not None
        constants: Constants = config.method_options
        warmup = round(constants.warmup * state.total_steps)
        interval = max(1, round(constants.update_interval * state.total_steps))
        if state.step >= warmup and (state.step - warmup) % interval == 0:
            state.extra["targets"] = sharpen(state.extra["probabilities"])
        unlabeled = [view[len(batch.labels) :] for view in batch.views]
        known, novel, _ = forward_two_views(
            state, batch._replace(views=unlabeled, labels=batch.labels[:0])
        )
        log_q = novel.log_softmax(dim=-1)  # (2, B_u, K)
        store_probabilities_(
            state.extra["probabilities"], batch.rows, log_q[0].detach().exp()
        )
        weight = 0.0
        if state.step >= warmup:
            ramp = sigmoid_rampup(state.progress - constants.warmup, constants.rampup)
            weight = constants.consistency_weight * ramp
        targets = state.extra["targets"][batch.rows]
        divergence = F.kl_div(log_q[0], targets, reduction="none").mean()
        untouched = 0 * known.sum()  # DDP waits for a gradient of every parameter
        return divergence + weight * F.mse_loss(*log_q.exp()) + untouched

    @torch.no_grad()
    def initialize(
        self, config: Config, model: UnoModel, train: TrainData
    ) -> dict[str, Tensor]:
        """Initialize the head by principal components and k-means of the features.

        The features are those of the center crops of all unlabeled rows. The linear
        layer of the head becomes their first C_u principal components, with a bias that
        centers them, and its centers become those of k-means in these components, the
        best of 20 starts. With a frozen encoder, the known prototypes also become the
        means of the classes in a sample of labeled rows; rows and means are scaled to
        length one, and a class without a row keeps its prototype. Otherwise the known
        prototypes stay as they are. All workers call this; rank 0 computes the
        components and the centers.

        Args:
            config: The configuration of the run.
            model: The network. Its novel head is changed, and with a frozen encoder its
                known head, too. It is left in training mode.
            train: The training data, in memory.

        Returns:
            "probabilities", the cluster probabilities q under the new head, and
            "targets", the sharpened targets p (:func:`sharpen`), of all unlabeled rows,
            each (N_u, C_u).

        Raises:
            ConfigError: There are fewer unlabeled rows than novel classes, or the
                encoder is frozen and no labeled image can be read.
        """
        assert isinstance(train, TrainSet)
        num_novel, head = train.num_novel, model.novel
        features = features_of(model.eval(), train.unlabeled_images, config)
        if config.model.finetune == "none":  # its weights have no known head
            labeled, labels, _ = training_features(
                config, model, train, with_unlabeled=False
            )
            set_to_class_means_(
                model.known.weight,
                unit(labeled).to(model.known.weight),
                labels.to(features.device),
            )
        model.train()
        if num_novel > len(features):
            raise ConfigError(
                f"method dtc needs as many unlabeled images as new classes"
                f" ({num_novel}), got {len(features)}; add unlabeled images, or lower"
                " --num-novel"
            )

        def compute() -> dict[str, Tensor]:
            """Return the start of the head: a linear layer and centers, by name.

            For K novel classes they are "components", the first K principal directions
            of the features, (K, D); "bias", minus the mean of the features along these
            directions, (K,); and "centers", those of K k-means clusters of the centered
            features along these directions, (K, K).
            """
            centered, _, directions = principal_components(features)
            components = directions[:, :num_novel].T  # (K, D)
            points = (centered @ components.T).cpu()
            return {
                "components": components,
                "bias": -components @ features.double().mean(dim=0),
                "centers": kmeans(points, num_novel, NUM_STARTS, config.seed).centers,
            }

        start = distributed.compute_on_rank0(compute, features.device)
        head.reduce.weight.copy_(start["components"])
        head.reduce.bias.copy_(start["bias"])
        head.weight.copy_(start["centers"][None])
        q = head(features)[0].softmax(dim=-1)
        return {"probabilities": q, "targets": sharpen(q)}


def sharpen(q: Tensor) -> Tensor:
    """Sharpen cluster probabilities q into targets p, as in DEC.

    p is proportional to q^2 / f, where f is the sum of q over rows (Xie et al., 2016,
    Eq. 3).

    Args:
        q: Cluster probabilities (N, K).

    Returns:
        Targets p (N, K). Each row sums to 1.
    """
    p = q.square() / q.sum(dim=0)
    return p / p.sum(dim=1, keepdim=True)


def store_probabilities_(probabilities: Tensor, rows: Tensor, q: Tensor) -> None:
    """Store the cluster probabilities of all workers' rows of a step, in place.

    All workers call this, so that all store the same.

    Args:
        probabilities: The stored probabilities of all unlabeled rows, (N_u, K), which
            are updated. Each number of ``q`` is stored by itself: where one is not
            finite, the stored number stays.
        rows: The indices of this worker's rows among the unlabeled rows, int64 (B_u,).
        q: The cluster probabilities of these rows, (B_u, K).
    """
    rows, q = distributed.gather_rows(rows, 0), distributed.gather_rows(q.float(), 0)
    probabilities[rows] = torch.where(q.isfinite(), q, probabilities[rows])


METHOD = Dtc()
