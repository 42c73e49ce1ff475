"""The method "clustering", the default for a frozen encoder: cluster its features.

:func:`uno.clustering.frozen.discover_clusters` finds the clusters. Everything happens
before the first step: the adapter takes the space in which the clusters were found, and
the prototypes become the directions of the clusters' means. If steps are asked for,
they continue from there by the unified objective.
"""

import torch
from torch import Tensor, nn

from uno import distributed
from uno.clustering.frozen import MAX_DIRECTIONS, discover_clusters
from uno.clustering.initialization import training_features
from uno.clustering.num_classes import pairs_of_one_class
from uno.config import Config
from uno.data.stream import TrainData
from uno.errors import ConfigError
from uno.heads import unit
from uno.method import Method
from uno.methods.common import require_every_class, set_prototypes_
from uno.model import UnoModel
from uno.objective import unified_objective
from uno.steps import Batch, Loss, TrainState


class SpaceAdapter(nn.Module):
    """An affine map of unit features that is not trained.

    It is a :class:`uno.clustering.frozen.FeatureSpace` as a module.

    Attributes:
        width: The number of coordinates.
    """

    def __init__(self, num_features: int) -> None:
        """Create a map that keeps the first coordinates of a feature of length one.

        This is the map before the clusters are known: the mean is zero, and the
        directions are the first axes.

        Args:
            num_features: The number of features. If it exceeds ``MAX_DIRECTIONS``
                (256), only that many coordinates are kept.
        """
        super().__init__()
        self.width = min(num_features, MAX_DIRECTIONS)
        # On the meta device torch.eye imports PyTorch's compiler, which takes seconds.
        directions = torch.zeros(num_features, self.width).fill_diagonal_(1)
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("directions", directions)

    def forward(self, features: Tensor) -> Tensor:
        """Map features to coordinates in the space in which the clusters were found.

        Features are scaled to length one, the mean is subtracted, and the result is
        multiplied by the matrix of directions (whitening and principal directions).
        Autocast does not apply.

        Args:
            features: Features of the encoder, (N, D).

        Returns:
            Coordinates (N, ``width``), in float32.
        """
        mean, directions = self.get_buffer("mean"), self.get_buffer("directions")
        with torch.autocast(features.device.type, enabled=False):
            return (unit(features) - mean) @ directions


class ClusteringMethod(Method):
    """Clustering of a frozen encoder's features, before the first step of training.

    The adapter takes the space in which the clusters were found, and the prototypes
    become the directions of the clusters' means.
    """

    name = "clustering"
    supports_gcd = True
    trains = False

    def build_adapter(self, num_features: int) -> SpaceAdapter:
        """Build the map from features to the coordinates that are clustered.

        Until :meth:`initialize` sets it, the map scales a feature to length one and
        keeps at most its first ``MAX_DIRECTIONS`` (256) coordinates.

        Args:
            num_features: The number of features of the encoder.
        """
        return SpaceAdapter(num_features)

    def initialize(
        self, config: Config, model: UnoModel, train: TrainData
    ) -> dict[str, Tensor]:
        """Cluster the training features, and set the model's adapter and prototypes.

        The features are those of a sample of the training rows, see
        :func:`uno.clustering.initialization.training_features`. All workers call this;
        rank 0 clusters.

        Args:
            config: The configuration of the run.
            model: The network. Its adapter and the prototypes of all known and novel
                classes are changed in place.
            train: The training data.

        Returns:
            Tensors that the checkpoint keeps. "agreement" (A,) has for each of A = 8
            other clusterings of the same rows the share of the compared unlabeled rows,
            0 to 1, on which it agrees with this one, see
            :func:`uno.clustering.frozen.measure_agreement`; it is empty if there are
            too few rows. "similar", float64 (n, 3), has the pairs of novel classes that
            may be parts of one class: their indices among the novel classes, from 0,
            and how much their nearest neighbors mix, see
            :func:`uno.clustering.num_classes.pairs_of_one_class`. "counts", int64 (3,),
            has the numbers of sampled unlabeled rows, of known classes and of novel
            classes.

        Raises:
            ConfigError: The sampled unlabeled rows are not more than the clusters: the
                novel classes, in the GCD setting the known ones, too. Or no labeled or
                no unlabeled image of the sample, or no labeled image of one of the
                known classes, can be read.
        """
        sample = training_features(config, model, train)
        require_every_class(config, sample, train.num_known)
        labeled, labels, unlabeled = sample
        gcd, num_novel = config.data.setting == "gcd", train.num_novel
        num_clusters = num_novel + train.num_known * gcd
        if len(unlabeled) <= num_clusters:
            raise ConfigError(
                f"method {self.name} needs more unlabeled rows than {num_clusters}"
                f" clusters, not {len(unlabeled)}"
            )

        def compute() -> dict[str, Tensor]:
            """Cluster the features, and return the result as tensors by name.

            They are "mean" (D,) and "directions" (D, P) of the space, "prototypes" of
            all known and novel classes in it, (C_l + C_u, P), and "agreement" and
            "similar" as the method returns them.
            """
            result = discover_clusters(
                labeled, labels, unlabeled, num_novel, gcd, config.seed
            )
            return {
                "mean": result.space.mean,
                "directions": result.space.directions,
                "prototypes": result.prototypes,
                "agreement": result.agreement,
                "similar": pairs_of_one_class(
                    result, labeled, labels, unlabeled, gcd, config.seed
                ),
            }

        result = distributed.compute_on_rank0(compute, model.known.weight.device)
        with torch.no_grad():
            model.adapter.mean.copy_(result["mean"])
            model.adapter.directions.copy_(result["directions"])
        set_prototypes_(model, result["prototypes"])
        return {
            "agreement": result["agreement"],
            "similar": result["similar"],
            "counts": torch.tensor([len(unlabeled), train.num_known, num_novel]),
        }

    def loss(self, state: TrainState, batch: Batch, config: Config) -> Loss:
        """Compute UNO's unified objective of a batch.

        Training continues from the clusters with this loss, if discovery has epochs.
        The prototypes of the model are scaled to length one first, in place. All
        workers call this.

        Args:
            state: The state of training, with the model.
            batch: The views of this worker's rows, labeled rows first.
            config: The configuration of the run.

        Returns:
            The total loss, and the loss of the only head, (1,).
        """
        return unified_objective(state, batch, config)

    def can_be_recorded(self, config: Config) -> bool:
        """Return True: every training step launches the same kernels."""
        return True


METHOD = ClusteringMethod()
