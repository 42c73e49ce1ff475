"""Let several ranks train together: process group, collectives, DDP and stopping.

Outside a process group every collective returns its input, or computes locally.
"""

import inspect
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from uno.errors import Interrupted, StorageError, one_line

# of a collective; a rank that is this late counts as lost
TIMEOUT = timedelta(minutes=10)
STOP_CHECK_S = 2.0  # seconds between two checks of rank 0 whether to stop
GPU_VOTE_STEPS = 10  # steps between two votes of the ranks on GPUs whether to stop
VOTE_S = 0.5  # seconds between two votes on whether all ranks have finished
# Texts of gloo and NCCL for a lost connection or a late rank.
LOST = re.compile(
    r"connection (closed|reset|refused|was (closed|reset))|closed by peer|broken pipe"
    r"|timed out|timeout|remote process exit|ncclRemoteError|communicator was aborted"
    r"|socket closed|network is unreachable|no route to host",
    re.IGNORECASE,
)

in_group = dist.is_initialized if dist.is_available() else bool  # bool() is False


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank, and the number of ranks.

    The rank is the number of this process in the process group, from 0. Without a group
    the result is (0, 1).
    """
    return (dist.get_rank(), dist.get_world_size()) if in_group() else (0, 1)


def rendezvous_store() -> Any:
    """Return the ``torch.distributed`` store of the ranks that torchrun has started.

    The ranks exchange their addresses through it. The environment variables of the
    launcher (``MASTER_ADDR``, ``RANK`` and others) say where it is.
    """
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://"))[0]


@contextmanager
def join_group(
    store: Any, device: torch.device, rank: int, world_size: int
) -> Iterator[None]:
    """Join the process group of all ranks that share a store, for a ``with`` block.

    The backend is NCCL on GPUs, and gloo on the CPU. The group is destroyed at the end,
    if the block raises no error.

    Args:
        store: The ``torch.distributed`` store of all ranks.
        device: The device of this rank.
        rank: The number of this process in the group, from 0.
        world_size: The number of processes in the group.

    Raises:
        Interrupted: The connection to another rank is lost, or a rank is 10 minutes
            late (:data:`TIMEOUT`), when the group is joined, in the block, or when the
            group is destroyed. Any other error, such as that of a collective with
            tensors of different sizes, is raised as it is: the same command would end
            in it again.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT
        )
        yield
        dist.destroy_process_group()
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        # The brackets hold source files of gloo and addresses.
        reason = re.sub(r"\[\S*\] ?", "", one_line(error))[:120]
        raise Interrupted(
            f"rank {rank} of {world_size} lost another ({reason}); the same command"
            " resumes"
        ) from None


def is_lost_rank(error: Exception) -> bool:
    """Tell whether an error says that another rank is gone or late.

    Gloo raises plain RuntimeErrors, and NCCL raises ``DistBackendError``, for lost
    connections and for mistakes alike. Only the text tells them apart. The errors of a
    store and of a socket mean that its process is gone, or that it did not answer.

    Returns:
        True for a ``DistNetworkError`` or ``DistStoreError``. True for a
        ``DistBackendError``, or an error that names gloo, if its text matches
        :data:`LOST`, such as "connection reset" or "timed out". Otherwise False.
    """
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    text = str(error)
    of_backend = isinstance(error, dist.DistBackendError) or "gloo" in text.lower()
    return of_backend and LOST.search(text) is not None


def gather_rows(tensor: Tensor, dim: int) -> Tensor:
    """Concatenate the tensors of all workers along a dimension, in rank order.

    It takes one collective, so all workers must call this. The tensors must have equal
    shapes. No gradient flows through the collective.

    Args:
        tensor: This worker's tensor.
        dim: The dimension along which to concatenate.

    Returns:
        The tensor of all workers, the same on every worker. Outside a process group it
        is ``tensor`` itself, with its gradient.
    """
    if not in_group():
        return tensor
    parts = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for _ in range(rank_and_world()[1])
    ]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim=dim)


def gather_rows_with_grad(tensor: Tensor, dim: int) -> Tensor:
    """Concatenate the tensors of all workers along a dimension, with gradient.

    The backward pass adds up the gradients that all workers' losses have for a row. If
    each worker's loss is a mean over pairs (own row, any row), and gradients are
    averaged over workers, the result is the gradient of the mean over all pairs. All
    workers must call this.

    Args:
        tensor: This worker's tensor, which has the same shape on every worker.
        dim: The dimension along which to concatenate.

    Returns:
        The tensor of all workers in rank order, the same on every worker. Outside a
        process group it is ``tensor`` itself.
    """
    return _GatherRows.apply(tensor, dim) if in_group() else tensor


def mean_with_grad(tensor: Tensor) -> Tensor:
    """Return the mean of the workers' tensors, element by element, with gradient.

    The backward pass adds up the gradients that all workers' losses have for this
    worker's tensor. All workers must call this. Outside a process group ``tensor``
    itself is returned.

    Args:
        tensor: This worker's tensor, which has the same shape on every worker.
    """
    return (
        gather_rows_with_grad(tensor.unsqueeze(0), 0).mean(dim=0)
        if in_group()
        else tensor
    )


class _GatherRows(torch.autograd.Function):
    """The autograd function of :func:`gather_rows_with_grad`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int) -> Tensor:
        """Concatenate the workers' tensors along ``dim``, in rank order."""
        ctx.dim = dim
        return gather_rows(tensor, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient for this worker's tensor, and None for ``dim``.

        Args:
            ctx: The context of autograd, with ``dim``.
            grad: This worker's gradient for the concatenated tensor. The gradients of
                all workers are added up.
        """
        # Autograd may use ``grad`` elsewhere, too, so the sum replaces a copy.
        total = all_reduce_sum_(grad.clone(memory_format=torch.contiguous_format))
        return local_shard(total, ctx.dim), None


def local_shard(tensor: Tensor, dim: int) -> Tensor:
    """Return this worker's part of a tensor with the rows of all workers.

    It undoes :func:`gather_rows`. The part is a view without a copy; outside a process
    group it is the whole tensor. There is no communication.

    Args:
        tensor: The tensor with the rows of all workers, in rank order.
        dim: The dimension of the rows. Every worker has equally many.
    """
    rank, world_size = rank_and_world()
    return tensor.chunk(world_size, dim=dim)[rank]


def all_reduce_sum_(tensor: Tensor) -> Tensor:
    """Replace a tensor by its sum over all workers, in place, and return it.

    All workers must call this. Outside a process group the tensor stays as it is.

    Args:
        tensor: This worker's tensor, which has the same shape and type on every worker.
    """
    if in_group():
        dist.all_reduce(tensor)
    return tensor


def gather_objects(value: Any) -> list[Any]:
    """Return the value of each rank, in the order of ranks, on every rank.

    All ranks call this. The host waits for the values. Outside a process group the list
    has this process's value alone.

    Args:
        value: A small value of plain Python types, which is sent as bytes.
    """
    values = [value] * rank_and_world()[1]
    if in_group():
        dist.all_gather_object(values, value)
    return values


def broadcast_from_rank0(tensor: Tensor) -> Tensor:
    """Return rank 0's tensor on every worker.

    All workers must call this. Outside a process group ``tensor`` is returned, made
    contiguous.

    Args:
        tensor: On rank 0 the tensor to send. On other workers a tensor of the same
            shape and type, whose values do not matter. It may be overwritten.
    """
    tensor = tensor.contiguous()
    if in_group():
        dist.broadcast(tensor, 0)
    return tensor


class RankTask(NamedTuple):
    """A computation that one rank does, and that all ranks need the result of.

    It may take longer than a collective waits.

    Attributes:
        num_rows: The length of the result.
        run: Returns the result, int64 (num_rows,) on the CPU. With several ranks it
            runs in a thread, and must not call a collective.
    """

    num_rows: int
    run: Callable[[], Tensor]


def run_tasks(tasks: Sequence[RankTask], device: torch.device) -> list[Tensor]:
    """Divide tasks among the ranks, and return all results on every rank.

    Rank r of W computes the tasks r, r + W, r + 2W and so on, one after the other. All
    ranks call this. With several ranks the tasks run in a thread. An error of a task
    ends the tasks of its rank, and is raised on this rank alone, after all ranks have
    finished theirs. The other ranks then wait for its results.

    Args:
        tasks: The same tasks on every rank.
        device: The device of this rank, on which ranks exchange tensors.

    Returns:
        The result of each task, int64 (num_rows,) on the CPU, in the order of
        ``tasks``.
    """
    rank, world_size = rank_and_world()
    sizes = [task.num_rows for task in tasks]
    results = [torch.zeros(size, dtype=torch.int64) for size in sizes]

    def work() -> None:
        """Compute the tasks of this rank, and store their results."""
        for number in range(rank, len(tasks), world_size):
            results[number] = tasks[number].run()

    if world_size == 1 or not tasks:
        work()
        return results
    _work_together(work, device)
    of_all_ranks = all_reduce_sum_(torch.cat(results).to(device))
    return list(of_all_ranks.cpu().split(sizes))


def compute_on_rank0(
    function: Callable[[], dict[str, Tensor]], device: torch.device
) -> dict[str, Tensor]:
    """Compute tensors on rank 0, and return them on every rank.

    All ranks call this. An error of the function is raised on rank 0 alone; the other
    ranks then wait for the tensors.

    Args:
        function: Returns the tensors by name. Only rank 0 calls it, in a thread if
            there are several ranks. It may take longer than a collective waits, and
            must not call a collective.
        device: The device of this rank, on which ranks exchange tensors.

    Returns:
        The tensors by name, on the CPU; in one process as ``function`` returned them.
    """
    rank, world = rank_and_world()
    if world == 1:
        return function()
    content = [b""]

    def work() -> None:
        """Compute the tensors, and store them as bytes in ``content``."""
        layout = torch.contiguous_format
        content[0] = safetensors.torch.save(
            {name: t.clone(memory_format=layout) for name, t in function().items()}
        )

    _work_together(work if rank == 0 else lambda: None, device)
    dist.broadcast_object_list(content, device=device)
    return safetensors.torch.load(content[0])


def _work_together(work: Callable[[], None], device: torch.device) -> None:
    """Call a function on every rank, and return when all ranks have finished it.

    The function runs in a thread. Meanwhile the ranks vote every half second whether
    all have finished, so that none waits in a collective for longer than its timeout.
    An error of the function is raised after the last vote.

    Args:
        work: The function of this rank, without arguments and result. It must not call
            a collective. A rank that has nothing to do passes one that does nothing.
        device: The device of this rank, on which ranks exchange tensors.
    """
    with ThreadPoolExecutor(
        1, "uno-jobs", torch.set_num_threads, (torch.get_num_threads(),)
    ) as pool:
        future = pool.submit(work)
        while True:
            is_busy = torch.tensor([float(not future.done())], device=device)
            if not float(all_reduce_sum_(is_busy)):
                break
            wait([future], VOTE_S)
        future.result()


def barrier(device: torch.device) -> None:
    """Wait until all workers have called this; outside a process group do nothing.

    Args:
        device: The device of this rank, on which ranks exchange tensors.
    """
    if in_group():
        float(all_reduce_sum_(torch.zeros(1, device=device)))


class GroupWorker:
    """One rank of a process group that trains together.

    It is the base class of workers of torchrun and of Ray Train. A subclass sets the
    attributes, defines :meth:`asked_to_stop`, and adds the method ``report``.

    Attributes:
        rank: The number of this process in the group, from 0.
        world_size: The number of processes in the group.
        device: The device of this rank.
    """

    rank: int
    world_size: int
    device: torch.device
    _next_stop_check = 0.0  # time.monotonic()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call in training: ``model`` itself, or its DDP wrapper.

        With one rank it is ``model`` itself. With several ranks DDP averages gradients
        over them. On GPUs, batch normalization then uses the statistics of the batch of
        all ranks: its layers in ``model`` are replaced. The CPU has no kernels for
        that. In both cases buffers, such as running statistics, are not sent between
        ranks.

        Args:
            model: The model, on the device of this rank.
        """
        if self.world_size == 1:
            return model
        devices = None
        if self.device.type == "cuda":
            model, devices = (
                nn.SyncBatchNorm.convert_sync_batchnorm(model),
                [self.device],
            )
        # Running statistics are rank 0's (or equal, with SyncBatchNorm) and need not
        # travel.
        ddp = nn.parallel.DistributedDataParallel
        # torch 2.15 has renamed the option
        renamed = "forward_sync_buffers" in inspect.signature(ddp).parameters
        options: dict[str, Any] = {
            "forward_sync_buffers" if renamed else "broadcast_buffers": False
        }
        return ddp(model, device_ids=devices, gradient_as_bucket_view=True, **options)

    def asked_to_stop(self) -> bool:
        """Return whether somebody has asked this training to stop.

        A subclass must define this. Only rank 0 calls it, at most every two seconds.

        Raises:
            StorageError: The storage that would have the request cannot be read. The
                caller takes this error for "no request".
        """
        raise NotImplementedError

    def should_stop(self, step: int) -> bool:
        """Return whether training should stop now, with the same answer on all ranks.

        Rank 0 looks for a request, see :meth:`asked_to_stop`, but at most every two
        seconds; otherwise its answer is no. The ranks share this answer by a sum:
        before every step on the CPU, and before every tenth step on a GPU, because this
        waits for the GPU. Before other steps the answer is False. All ranks must call
        this.

        Args:
            step: The number of steps that are done.
        """
        if self.device.type != "cpu" and step % GPU_VOTE_STEPS:
            return False
        vote = torch.tensor(int(self._is_stop_requested()), device=self.device)
        return bool(all_reduce_sum_(vote).item())

    def _is_stop_requested(self) -> bool:
        """Return whether this rank has found a request to stop the training.

        Only rank 0 looks for a request, by calling :meth:`asked_to_stop` of the
        subclass, at most every two seconds. The result is False on other ranks, less
        than two seconds after the last call, and if that call raises a StorageError.
        """
        if self.rank > 0 or time.monotonic() < self._next_stop_check:
            return False
        self._next_stop_check = time.monotonic() + STOP_CHECK_S
        with suppress(StorageError):  # the next checkpoint raises this error again
            return self.asked_to_stop()
        return False
