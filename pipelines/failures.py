"""Decide whether a group of workers that failed is started again.

Ray Train starts groups again and waits for their nodes. The rules here end a run that
no other group could continue. This module imports Ray, so it is imported only after
:func:`pipelines.ray_env.connect`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ray.exceptions import RayActorError
from ray.train import UserCallback

from pipelines import ray_private
from uno.data.files import Storage, is_transient
from uno.errors import Interrupted, UnoError
from uno.runs import PHASES
from uno.runs.checkpoint import checkpoint_steps

MAX_DEATHS = 3


class Preempted(Exception):
    """Workers saved a checkpoint because one of their nodes is about to leave."""


class EndWhenHopeless(UserCallback):
    """The two rules by which a run with Ray Train ends with an error.

    An error of this program that the user must act on ends it at once. Three deaths in
    a row without a new checkpoint end it, too. A preempted group counts as no death.
    Ray Train calls this in its controller, and an error that is raised here ends the
    run.

    Args:
        progress: Returns a number that grows with every checkpoint. It is called in
            Ray Train's controller.
        messages: The queue of :class:`pipelines.train.Messages`, or None. It gets
            ``("lost", line)`` for each group that is replaced.
    """

    def __init__(self, progress: Callable[[], int], messages: Any = None) -> None:
        self._progress, self._messages = progress, messages
        self._saved, self._deaths = -1, 0

    def after_exception(
        self, run_context: Any, worker_exceptions: Mapping[int, Exception]
    ) -> None:
        """Raise an error if no other group could continue the run.

        Args:
            run_context: Ray Train's description of the run, which is not used.
            worker_exceptions: The exceptions of workers, by rank.

        Raises:
            UnoError: The user must act, or workers keep dying.
            Exception: Another error of a worker occurred three times.
        """
        lost = [e for e in worker_exceptions.values() if ray_private.raised(e) is None]
        raised = [
            error
            for each in worker_exceptions.values()
            if (error := ray_private.raised(each)) is not None
        ]
        if any(isinstance(error, Preempted) for error in raised) or any(
            map(was_preempted, lost)
        ):
            return
        own = [error for error in raised if isinstance(error, UnoError)]
        # A dead rank makes the others fail, too.
        others = [error for error in raised if not is_lost_connection(error)]
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
        if self._messages is not None:
            why = "a worker process or its node was lost" if is_loss else text
            self._messages.put(("lost", why))


def is_lost_connection(error: BaseException) -> bool:
    """Return whether a rank failed because another rank has ended."""
    return isinstance(error, RuntimeError) and "connection" in str(error).lower()


def was_preempted(error: Exception) -> bool:
    """Return whether a worker died because its node was taken away after a notice."""
    failure = getattr(error, "health_check_failure", error)
    return isinstance(failure, RayActorError) and failure.preempted


def saved_steps(directory: str) -> int:
    """Return the sum of the steps of the newest checkpoints of all phases.

    The sum grows with every checkpoint.

    Args:
        directory: The directory of the checkpoints, a path or URI.
    """
    storage = Storage(directory)
    return sum(max(checkpoint_steps(storage, phase), default=0) for phase in PHASES)
