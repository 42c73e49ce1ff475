"""RS+: rank statistics with incremental learning (Han et al., ICLR 2020, Sec. 3.3; code
AutoNovel, ``--IL``).

The known head grows by C_u outputs, and what the cluster head of :mod:`uno.methods.rs`
says of an unlabeled row is the row's pseudo-label for this joint head. The joint head
classifies all C classes.

Known constants, from the authors' code: the pseudo-label's cross-entropy weighs 0.05
times the ramp of the consistency; consistency 5 over 50 of 200 epochs (CIFAR10), 25
over 300 of 400 (CIFAR100). ImageNet's are not in their code: those of RS stand in. Both
heads here are cosines: the joint head is the known prototypes and C_u more, which the
authors start as random rows with a low bias. Task-aware accuracy here is that of the
joint head's novel outputs, one model for all protocols; the authors report the cluster
head's there. k and what else differs: :mod:`uno.methods.rs`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uno.config import Config
from uno.heads import Prototypes
from uno.methods import Method, rs
from uno.methods.method import NovelHead, forward_two_views
from uno.state import TrainState
from uno.steps import Batch, update_

INCREMENT = 0.05
CIFAR100 = {"consistency_weight": 25.0, "rampup": 0.75}
SETTINGS = {**rs.SETTINGS, "cifar100_20": CIFAR100, "cifar100_50": CIFAR100}


def joint_head(num_novel: int, num_features: int) -> nn.Module:
    """The joint head's novel prototypes, and the cluster head as its auxiliary part."""
    return NovelHead(num_novel, num_features, Prototypes(1, num_novel, num_features))


def step(state: TrainState, batch: Batch, config: Config, lr: float) -> Tensor:
    """The loss of RS on joint and cluster head + rising cross-entropy of
    pseudo-labels. Returns (1,).
    """
    num_labeled, tau = len(batch.labels), config.objective.temperature
    known, novel, features = forward_two_views(state, batch)
    clusters = state.model.novel.auxiliary(features.flatten(0, 1))[0].unflatten(
        0, (2, -1)
    )
    joint = torch.cat([known, novel], dim=-1)  # (2, B, C)
    increment = incremental_loss(joint[:, num_labeled:], clusters[0, num_labeled:], tau)
    ranked = rs.loss(state, batch.labels, config, joint, clusters, features)
    return update_(state, ranked + INCREMENT * rs.ramp(state, config) * increment, lr)


def incremental_loss(joint: Tensor, clusters: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of the joint head with the cluster head's decision under view 0 as
    the label.

    Cosines of unlabeled rows: joint (V, B_u, C_l + C_u), clusters (B_u, C_u); mean over
    views and rows.
    """
    num_known = joint.shape[-1] - clusters.shape[-1]
    labels = num_known + clusters.argmax(dim=-1)
    return F.cross_entropy(joint.flatten(0, 1) / temperature, labels.repeat(len(joint)))


METHOD = Method("rs_plus", step, joint_head, config=rs.Constants, settings=SETTINGS)
