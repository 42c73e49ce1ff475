"""BatchNorm over the whole batch of all workers, on GPUs."""

from typing import Any

import torch
from torch import Tensor, nn

from uno import collectives
from uno.errors import ConfigError


class GlobalNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm whose statistics in training are those of all workers' rows; see :func:`with_global_norms`.

    The kernels and numbers of ``nn.SyncBatchNorm``, for shares of equal size, which a run's are. That one
    looks for empty shares in every layer, for which the host waits until the device has come so far: 63 times
    in a step of CIFAR10. On one worker, and in eval mode, it is the BatchNorm that it was.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Any (B, C, ...)."""

    def forward(self, input: Tensor) -> Tensor:
        """(B, C, ...) on a GPU -> the same shape."""
        if not self.training or collectives.world()[1] == 1:
            return super().forward(input)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        kept = self.running_mean, self.running_var
        return _Normalise.apply(input, self.weight, self.bias, *kept, self.eps, self.momentum)


def with_global_norms(model: nn.Module) -> nn.Module:
    """``model``, whose BatchNorms are :class:`GlobalNorm` from now on: the same modules and parameters.
    ConfigError: one of them has no momentum.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.momentum is None:
                raise ConfigError(
                    "a BatchNorm with momentum None averages over steps, which several GPUs cannot"
                )
            module.__class__ = GlobalNorm
    return model


class _Normalise(torch.autograd.Function):
    """As torch's own, without the mask of empty shares."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor,
        eps: float, momentum: float,
    ) -> Tensor:  # fmt: skip
        input = _dense(input)
        means, inverses = collectives.gather(torch.cat(torch.batch_norm_stats(input, eps))).chunk(2, dim=1)
        counts = torch.full_like(means[:, 0], input.numel() // input.size(1))
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            input, means, inverses, running_mean, running_var, momentum, eps, counts
        )
        ctx.save_for_backward(input, weight, mean, inverse, counts.to(torch.int32))
        return torch.batch_norm_elemt(input, weight, bias, mean, inverse, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse, counts = ctx.saved_tensors
        grad, needed = _dense(grad), ctx.needs_input_grad[:3]
        sum_dy, sum_dy_xmu, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
            grad, input, mean, inverse, weight, *needed
        )
        grad_input = None
        if needed[0]:
            sum_dy, sum_dy_xmu = collectives.sum_(torch.cat([sum_dy, sum_dy_xmu])).chunk(2)
            grad_input = torch.batch_norm_backward_elemt(
                grad, input, mean, inverse, weight, sum_dy, sum_dy_xmu, counts
            )
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _dense(tensor: Tensor) -> Tensor:
    """Contiguous, with the channels first or last: what the kernels read."""
    return tensor if tensor.is_contiguous(memory_format=torch.channels_last) else tensor.contiguous()
