"""Which groups of workers that failed are started again."""

from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.worker_group.poll import (
    WorkerGroupPollStatus,
    WorkerStatus,
)

from pipelines.failures import EndWhenHopeless, Preempted
from uno.errors import ConfigError, Interrupted, NumericsError, StorageError


def death(raised=None, lost=None):
    """What Ray Train tells of a group in which one rank raised an error or was lost,
    and another rank lost its connection.
    """
    peer = RuntimeError(
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4711"
    )
    ended = lost or UserExceptionWithTraceback(raised, "")
    errors = {0: UserExceptionWithTraceback(peer, ""), 1: ended}
    workers = {
        rank: WorkerStatus(running=False, error=error) for rank, error in errors.items()
    }
    return WorkerGroupPollStatus(workers).errors


def lost(preempted=False):
    text = "its node has died\nwith more lines"
    error = RayActorError("1f", text, preempted=preempted)
    return death(lost=WorkerHealthCheckFailedError("health check failed", error))


@pytest.fixture
def rules():
    """``rules(*deaths)`` are the messages of groups that end so, each with the number
    of steps that were saved before it.
    """

    def tell(*deaths):
        progress, messages = [], SimpleNamespace(put=sent.append)
        end = EndWhenHopeless(lambda: progress[-1], messages)
        for saved, errors in deaths:
            progress.append(saved)
            end.after_exception(None, errors)
        return sent

    sent = []
    return tell


@pytest.mark.parametrize(
    ("errors", "kind", "says"),
    [
        (lost(), Interrupted, "keep dying .*node has died.; they may be out of memory"),
        (death(ValueError("a bug")), ValueError, "a bug"),
        (death(RuntimeError("no connection to a server")), RuntimeError, "a server"),
        (death(StorageError("AWS Error SLOW_DOWN")), StorageError, "SLOW_DOWN"),
    ],
    ids=["lost", "bug", "own connection", "slow"],
)
def test_a_dead_group_is_replaced_but_three_without_a_checkpoint_are_the_end(
    rules, errors, kind, says
):
    found = rules((0, errors), (0, errors), (6, errors), (6, errors), (7, errors))
    assert [name for name, _ in found] == ["lost"] * 5
    with pytest.raises(kind, match=says) as caught:
        rules(*[(7, errors)] * 3)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("errors", [death(Preempted("step 4")), lost(preempted=True)])
def test_a_group_may_be_preempted_any_number_of_times(rules, errors):
    assert rules(*[(0, errors)] * 7) == []


@pytest.mark.parametrize(
    "error", [ConfigError("x"), NumericsError("x"), StorageError("x")]
)
def test_what_the_user_must_act_on_is_not_tried_again(rules, error):
    with pytest.raises(type(error)):
        rules((0, death(error)))
