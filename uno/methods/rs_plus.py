"""The discovery method RS+: rank statistics with incremental learning.

It is that of Han et al., ICLR 2020, Sec. 3.3. The code is AutoNovel with ``--IL``. The
known head grows by C_u outputs to a joint head, which classifies all C classes. The
cluster of an unlabeled row under the cluster head of :mod:`uno.methods.rs` is the row's
pseudo-label for the joint head.

Known constants, from the authors' code: the cross-entropy of pseudo-labels has the
weight 0.05 times the ramp of the consistency; the consistency is 5 over 50 of 200
epochs (CIFAR10), 25 over 300 of 400 (CIFAR100). Those of ImageNet are not in their
code, so those of RS are used. Both heads here are cosines: the joint head is the known
prototypes and C_u more, which the authors start as random rows with a low bias.
Task-aware accuracy here is that of the joint head's novel outputs, one model for all
protocols. The authors report that of the cluster head there. For k and other
differences see :mod:`uno.methods.rs`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from uno.config import Config
from uno.heads import NovelHead, Prototypes
from uno.method import Method
from uno.methods import rs
from uno.methods.common import forward_two_views, sigmoid_rampup
from uno.steps import Batch, TrainState

INCREMENT = 0.05
CIFAR100 = {"consistency_weight": 25.0, "rampup": 0.75}
SETTINGS = {**rs.SETTINGS, "cifar100_20": CIFAR100, "cifar100_50": CIFAR100}


class RsPlus(Method):
    """RS+: RS with a joint head over all classes, which learns pseudo-labels.

    The pseudo-label of an unlabeled row is its most probable cluster under the cluster
    head of RS.
    """

    name = "rs_plus"
    constants = rs.Constants
    constants_of_preset = SETTINGS

    def build_head(
        self, num_novel: int, num_features: int, is_frozen: bool
    ) -> NovelHead:
        """Build the novel outputs of the joint head, and the cluster head as auxiliary.

        Both have C_u prototypes. The joint head, which classifies all classes, consists
        of the known prototypes and the created ones. The cluster head makes the
        pseudo-labels.

        Args:
            num_novel: The number of novel classes C_u.
            num_features: The number of features.
            is_frozen: Whether the encoder is frozen, which does not matter here.
        """
        cluster_head = Prototypes(1, num_novel, num_features)
        return NovelHead(num_novel, num_features, cluster_head)

    def loss(self, state: TrainState, batch: Batch, config: Config) -> Tensor:
        """Compute the loss of RS, plus the cross-entropy of pseudo-labels.

        The labeled rows train the joint head, and the pairs of unlabeled rows the
        cluster head: :func:`uno.methods.rs.rank_loss`. Both heads must give equal
        outputs for two views. The pseudo-labels come from view 0, for both views. Their
        weight is 0.05 times a factor that rises to 1 within the first share ``rampup``
        of the phase. The prototypes of the model are scaled to length one first, in
        place. All workers call this.

        Args:
            state: The state of training, with the model.
            batch: The views of this worker's rows, labeled rows first.
            config: The configuration of the run.

        Returns:
            The loss, a scalar.
        """
        num_labeled, tau = len(batch.labels), config.objective.temperature
        known, novel, features = forward_two_views(state, batch)
        cosines = state.model.novel.auxiliary(features.flatten(0, 1))  # (1, 2 B, C_u)
        clusters = cosines[0].unflatten(0, (2, -1))
        joint = torch.cat([known, novel], dim=-1)  # (2, B, C)
        pseudo_label_loss = incremental_loss(
            joint[:, num_labeled:], clusters[0, num_labeled:], tau
        )
        ranked = rs.rank_loss(state, batch.labels, config, joint, clusters, features)
        ramp = sigmoid_rampup(state.progress, config.method_options.rampup)
        return ranked + INCREMENT * ramp * pseudo_label_loss


def incremental_loss(joint: Tensor, clusters: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of the joint head with pseudo-labels.

    The pseudo-label of a row is its most probable cluster under the cluster head, as
    the novel output of the same number. Only ``joint`` gets a gradient.

    Args:
        joint: Cosines of unlabeled rows under the joint head, (V, B_u, C_l + C_u).
        clusters: Their cosines under the cluster head in view 0, (B_u, C_u).
        temperature: The divisor of the cosines of the joint head.

    Returns:
        A scalar, the mean over views and rows.
    """
    num_known = joint.shape[-1] - clusters.shape[-1]
    labels = num_known + clusters.argmax(dim=-1)
    return F.cross_entropy(joint.flatten(0, 1) / temperature, labels.repeat(len(joint)))


METHOD = RsPlus()
