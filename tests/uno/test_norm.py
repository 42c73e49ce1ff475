"""Norms over the rows of two workers, which are two threads here; gloo's are in test_collectives."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm as TorchNorm

from tests.uno import kernels
from uno import collectives
from uno.errors import ConfigError
from uno.norm import GlobalNorm, with_global_norms


@pytest.fixture
def two(monkeypatch):
    """``two(function)`` -> [function(0), function(1)], which meet in every collective."""
    own, here, slots = threading.local(), threading.Barrier(2), [None, None]

    def exchange(tensor):
        slots[own.rank] = tensor.clone()
        here.wait(60)
        found = list(slots)
        here.wait(60)
        return found

    def gather(parts, tensor, *_, **__):
        for part, found in zip(parts, exchange(tensor), strict=True):
            part.copy_(found)

    def sum_(tensor, *_, **__):
        return tensor.copy_(sum(exchange(tensor)))

    monkeypatch.setattr(collectives, "world", lambda: (getattr(own, "rank", 0), 2))
    monkeypatch.setattr(collectives, "sum_", sum_)
    monkeypatch.setattr(dist, "all_gather", gather)
    monkeypatch.setattr(dist, "all_reduce", sum_)
    for kernel in kernels.ALL:
        monkeypatch.setattr(torch, kernel.__name__, kernel)

    def run(function):
        def as_rank(rank):
            own.rank = rank
            return function(rank)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(as_rank, range(2)))

    return run


def fresh(shape):
    norm = nn.BatchNorm2d(3) if len(shape) == 4 else nn.BatchNorm1d(3)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(2))
    return norm


def seen(norm, rows, out):
    values = [out.detach(), rows.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var]
    return [value.clone() for value in values]


@pytest.mark.parametrize("shape", [(12, 3, 2, 2), (12, 3)])
def test_two_workers_norm_as_one_and_as_torchs(two, shape):
    """Output, gradients and running statistics of a step. Kills: statistics of a worker's own rows, gradients
    without the other worker's sums, the wrong number of rows, running statistics without the other's.
    """
    generator = torch.Generator().manual_seed(1)
    whole, gradient = (torch.randn(shape, generator=generator).mul(3).add(5) for _ in range(2))
    rows, norm = whole.clone().requires_grad_(), fresh(shape)
    out = norm(rows)
    out.backward(gradient)
    expected = seen(norm, rows, out)
    group = SimpleNamespace(_get_backend_name=lambda: "gloo")

    def step(kind):
        def of_rank(rank):
            own = whole.chunk(2)[rank].clone().requires_grad_()
            norm = with_global_norms(fresh(shape))
            if kind == "torch":
                kept = norm.weight, norm.bias, norm.running_mean, norm.running_var
                out = TorchNorm.apply(own, *kept, norm.eps, norm.momentum, group, 2)
            else:
                out = norm(own)
            out.backward(gradient.chunk(2)[rank])
            return seen(norm, own, out)

        return two(of_rank)

    ours, torchs = step("ours"), step("torch")
    for first, second in zip(ours, torchs, strict=True):
        torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-6)
    pairs = list(zip(*ours, strict=True))
    joined = [torch.cat(pair) for pair in pairs[:2]] + [sum(pair) for pair in pairs[2:4]]
    joined += [pair[0] for pair in pairs[4:]]
    torch.testing.assert_close(joined, expected, atol=2e-6, rtol=1e-5)
    assert all(torch.equal(*pair) for pair in pairs[4:])


def test_a_norm_of_one_worker_and_one_in_eval_mode_is_the_one_it_was(two):
    """Kills: collectives where nothing is to be said, a model with other names or parameters."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    names, x = dict(model.named_parameters()), torch.randn(5, 3, 2, 2)
    expected = model.eval()(x)
    assert with_global_norms(model) is model and isinstance(model[1], GlobalNorm)
    assert dict(model.named_parameters()).keys() == names.keys()
    assert all(a is b for a, b in zip(model.parameters(), names.values(), strict=True))
    assert torch.equal(model(x), expected)
    with pytest.raises(ConfigError, match="momentum None"):
        with_global_norms(nn.BatchNorm1d(3, momentum=None))
