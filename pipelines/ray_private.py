"""Use the parts of Ray that are not documented.

Their names may change with any version. Each function says what happens without its
name. The rest of this package imports Ray's public API only.
"""

import inspect
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NODE = "ray.io/node-id"  # the label of each node with its id
# The fallback if the requested node has left: any node.
ELSEWHERE = [{"label_selector": dict[str, str]()}]
GONE = (ImportError, AttributeError, TypeError)  # raised by a name that has moved


def raised(error: Exception) -> BaseException | None:
    """Return what the training loop of a worker has raised, without Ray's wrapper.

    None if Ray itself reports the loss of the worker. ``UserCallback.after_exception``
    gets the wrapper, which has no public name.
    """
    return getattr(error, "_base_exc", None)


def quiet_pools() -> None:
    """Suppress an error line that Ray's core prints for each pool of Ray Data.

    Each process that starts a pool prints it, because the actors of the pool may
    restart with arguments that are in Ray's store (ray-project/ray#53727). This must be
    called before connecting. Without the private name the line is seen.
    """

    def leave_out(printed: dict[str, Any]) -> None:
        printed["lines"] = [
            line for line in printed["lines"] if "ray/issues/53727" not in line
        ]

    with suppress(*GONE):
        from ray._private.ray_logging import (
            global_worker_stdstream_dispatcher as dispatcher,
        )

        dispatcher.remove_handler(leave_out.__name__)
        # The handler that prints comes after this one.
        dispatcher.handlers.insert(0, (leave_out.__name__, leave_out))


def first_without_cpu(own: str) -> dict[str, Any]:
    """Return a ``map_batches`` argument: the first process of a pool takes no CPU.

    That process runs on the node ``own``, or elsewhere if the node has left. Ray 2.64
    drops the argument. Without it the result is empty, and processes that find no free
    CPU wait for those of other executions.
    """
    import ray

    first = iter(
        [{"num_cpus": 0, "label_selector": {NODE: own}, "fallback_strategy": ELSEWHERE}]
    )
    name = "ray_remote_args_fn"
    has = name in inspect.signature(ray.data.Dataset.map_batches).parameters
    return {name: lambda: next(first, {})} if has else {}


@contextmanager
def cluster_of_helpers() -> Iterator[None]:
    """Tell Ray Train's own helpers the address of the cluster inside the block.

    A helper gives the CPUs of workers back whose controller died. It looks for the
    cluster by the processes of this machine, and fails where a second cluster runs. It
    inherits ``RAY_ADDRESS`` only if a private set of names has it.
    """
    import ray

    with suppress(*GONE):
        from ray.train.v2._internal import constants

        constants.ENV_VARS_TO_PROPAGATE.add("RAY_ADDRESS")
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    try:
        yield
    finally:
        os.environ.pop("RAY_ADDRESS")
        if before is not None:
            os.environ["RAY_ADDRESS"] = before


def current_cluster() -> str | None:
    """Return the ``host:port`` of the cluster that ``ray start`` started here.

    It is read from the file in which Ray's own commands find it; None without one.
    """
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    with suppress(OSError):
        return (
            Path(folder, "ray", "ray_current_cluster")
            .read_text(encoding="utf-8")
            .strip()
            or None
        )
    return None


def job_variables() -> set[str]:
    """Return the names of the environment variables of a submitted job.

    Ray refuses a driver that sets one of them again. The result is empty outside a job.
    """
    with suppress(ValueError, *GONE):
        job: Any = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
        return set((job.get("runtime_env") or {}).get("env_vars") or {})
    return set()
