"""A discovery method in one file, after SimGCD (Wen et al., ICCV 2023).

    cd examples
    uno discover --data digits --method my_method:METHOD \\
        --distill.entropy-weight 1

A method of your own has everything that a built-in method has: pretraining,
checkpoints, metrics, ``uno predict``, the report, its section in YAML files and in
``--help``, and its fields in spaces of ``uno tune``.
"""

from torch import Tensor

from uno.config import Config, Section, field
from uno.distributed import mean_with_grad
from uno.method import Method
from uno.methods.common import forward_two_views
from uno.steps import Batch, TrainState, labeled_loss


class Constants(Section):
    """The options of the method, ``--distill.NAME`` on the command line."""

    target_temperature: float = field(
        0.05, "Softmax temperature of the targets.", gt=0, le=1
    )
    entropy_weight: float = field(
        2.0, "Weight of the entropy of the mean prediction.", ge=0, le=100
    )


class Distill(Method):
    """Self-distillation between two views of an image."""

    name = "distill"
    constants = Constants

    def loss(self, state: TrainState, batch: Batch, config: Config) -> Tensor:
        """Compute the loss of one batch, a scalar.

        It is the cross-entropy of the labeled rows, plus the cross-entropy of each
        unlabeled view with the sharpened prediction of the other view, minus the
        weighted entropy of the mean prediction, which keeps all clusters in use.
        """
        constants, tau = config.method_options, config.objective.temperature
        known, novel, _ = forward_two_views(state, batch)
        unlabeled = novel[:, len(batch.labels) :]  # (2, B_u, C_u) cosines
        log_p = (unlabeled / tau).log_softmax(dim=-1)
        sharpened = (unlabeled.detach() / constants.target_temperature).softmax(dim=-1)
        targets = sharpened.flip(0)
        # over the rows of all workers
        mean = mean_with_grad(log_p.exp().mean(dim=(0, 1)))
        entropy = -(mean * mean.log()).sum()
        distillation = -(targets * log_p).sum(dim=-1).mean()
        supervised = labeled_loss(known, batch.labels, tau)
        return supervised + distillation - constants.entropy_weight * entropy


METHOD = Distill()
