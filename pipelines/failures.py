"""Decide whether Ray Train replaces a group of workers that failed, or the run ends.

Ray Train starts groups again and waits for their nodes. The rules here end a run that
no other group could continue. This module imports Ray, so it is imported only after
:func:`pipelines.ray_env.connect`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ray.exceptions import RayActorError
from ray.train import UserCallback

from uno.data.files import Storage, is_transient
from uno.distributed import is_lost_rank
from uno.errors import Interrupted, UnoError
from uno.runs import PHASES
from uno.runs.checkpoint import checkpoint_steps

MAX_DEATHS = 3


class Preempted(Exception):
    """Workers saved a checkpoint and ended, because one of their nodes will leave."""


class EndWhenHopeless(UserCallback):
    """A callback of Ray Train that ends a run that no new group of workers can finish.

    There are two rules. A :class:`~uno.errors.UnoError` that the user must act on ends
    the run at once. Three failures in a row without a new checkpoint end it, too. A
    preempted group does not count. Ray Train calls this in its controller, and an error
    that is raised here ends the run.

    Args:
        progress: Returns a number that grows with every checkpoint. It is called in Ray
            Train's controller.
        messages: The queue of messages to the driver, see
            :class:`pipelines.train.Messages`. It gets ``("lost", reason)`` for each
            group that is replaced and was not preempted.
    """

    def __init__(self, progress: Callable[[], int], messages: Any) -> None:
        self._progress, self._messages = progress, messages
        self._saved, self._deaths = -1, 0

    def after_exception(
        self, run_context: Any, worker_exceptions: Mapping[int, Exception]
    ) -> None:
        """End the run by an error if no other group of workers could finish it.

        Otherwise this returns, and Ray Train replaces the group that failed. The reason
        is then sent to the driver as ``("lost", reason)``, unless the group was
        preempted: it ended because one of its nodes was taken away after a notice.
        Preempted groups never end the run.

        Args:
            run_context: Ray Train's description of the run, which is not used.
            worker_exceptions: The exceptions of the workers that failed, by rank.

        Raises:
            UnoError: A worker raised this error, and the user must act on it, because
                it is not a passing fault of storage such as a timeout.
            Interrupted: Groups failed three times in a row without a new checkpoint,
                the last time because a worker process or its connection was lost.
            Exception: Groups failed three times in a row without a new checkpoint, the
                last time by this error of a worker's own code.
        """
        lost = [error for error in worker_exceptions.values() if is_of_ray(error)]
        raised = [error for error in worker_exceptions.values() if error not in lost]
        if any(isinstance(error, Preempted) for error in raised) or any(
            map(was_preempted, lost)
        ):
            return
        own = [error for error in raised if isinstance(error, UnoError)]
        # A dead rank makes the others fail, too.
        others = [error for error in raised if not is_lost_rank(error)]
        is_loss = not own and bool(lost or not others)
        error = [*own, *lost, *others, *raised][0]
        if isinstance(error, UnoError) and not is_transient(error):
            raise error
        saved = self._progress()
        self._deaths = 1 if saved > self._saved else self._deaths + 1
        self._saved = saved
        # Ray's errors have many lines, and the first one is enough.
        inner = getattr(error, "health_check_failure", error)
        text = f"{type(inner).__name__}: {inner}".splitlines()[0][:200]
        if self._deaths == MAX_DEATHS:
            if not is_loss:
                raise error
            raise Interrupted(
                f"workers keep dying before a new checkpoint ({text}); they may be out"
                " of memory"
            )
        why = "a worker process or its node was lost" if is_loss else text
        self._messages.put(("lost", why))


def is_of_ray(error: Exception) -> bool:
    """Return whether an error is one of Ray's own, so that Ray has lost the worker.

    Otherwise the code of the worker has raised it.
    """
    return type(error).__module__.partition(".")[0] == "ray"


def was_preempted(error: Exception) -> bool:
    """Return whether a worker died because its node was taken away after a notice.

    Ray marks such a death in its error, a RayActorError with ``preempted``.

    Args:
        error: The error of the worker, as Ray reports it: a RayActorError, or an error
            that has it as the attribute ``health_check_failure``.
    """
    failure = getattr(error, "health_check_failure", error)
    return isinstance(failure, RayActorError) and failure.preempted


def saved_steps(directory: str) -> int:
    """Return the sum over the training phases of the step of the newest checkpoint.

    A phase without a checkpoint counts as 0. The sum grows with every new checkpoint.

    Args:
        directory: The run directory, a path or URI.
    """
    storage = Storage(directory)
    return sum(max(checkpoint_steps(storage, phase), default=0) for phase in PHASES)
