"""What a GPU's kernels of a norm over several workers compute, written from the equations: the CPU has none.

x (B, C, ...) -> of each channel the mean and 1 / sqrt(variance + eps).
"""

import torch
from torch import Tensor


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _wide(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.ndim - 2))


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x.float(), _dims(x), correction=0)
    return mean, (variance + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    x: Tensor, means: Tensor, inverses: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float,
    eps: float, counts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num = counts.sum()
    share = (counts / num).unsqueeze(1)
    mean = (share * means).sum(dim=0)
    variance = (share * (inverses**-2 - eps + (means - mean) ** 2)).sum(dim=0)
    running_mean.mul_(1 - momentum).add_(momentum * mean)
    running_var.mul_(1 - momentum).add_(momentum * variance * num / (num - 1))
    return mean, (variance + eps).rsqrt()


def batch_norm_elemt(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, eps: float
) -> Tensor:
    return ((x - _wide(mean, x)) * _wide(inverse * weight, x) + _wide(bias, x)).to(x.dtype)


def batch_norm_backward_reduce(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, *needed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sum_dy = grad.float().sum(_dims(x))
    sum_dy_xmu = (grad * (x - _wide(mean, x))).float().sum(_dims(x))
    return sum_dy, sum_dy_xmu, sum_dy_xmu * inverse, sum_dy.clone()


def batch_norm_backward_elemt(
    grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, sum_dy: Tensor,
    sum_dy_xmu: Tensor, counts: Tensor,
) -> Tensor:  # fmt: skip
    num = counts.sum()
    centred = (x - _wide(mean, x)) * _wide(inverse**2 * sum_dy_xmu / num, x)
    return ((grad - _wide(sum_dy / num, x) - centred) * _wide(inverse * weight, x)).to(x.dtype)


ALL = (
    batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt, batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)  # fmt: skip
