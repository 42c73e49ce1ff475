"""Connect to Ray, and set the environment variables that Ray reads.

This is the only place that sets them. Nothing of Ray may be imported before connecting.
"""

import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from pipelines.workarounds import current_cluster, quiet_pools
from uno.config import Config
from uno.errors import RAY, ConfigError, Interrupted, one_line
from uno.session.console import in_main_thread, print_line
from uno.text import plural

POLL_S = 0.5
END_S = 10.0  # for a function of Ray to end when the connection will be closed
# of a task of Ray Data: Ray rounds what workers take, and may leave a little less than
# one
TASK_CPUS = 0.9
ADDRESS = "RAY_ADDRESS"
T = TypeVar("T")

ENVIRONMENT = {
    # Without this the Train tab of the dashboard is empty.
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # the patch prints every worker line twice
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
RAYS_OWN_WARNING = "ignore:`ExecutionOptions.exclude_resources` is deprecated"
# It is disabled for a private cluster, and not changed for others.
AUTH_MODE = "RAY_AUTH_MODE"


@contextmanager
def connect(
    store_bytes: int | None = None, workers: int = 0, keep_idle: bool = True
) -> Iterator[Any]:
    """Connect to a Ray cluster during a ``with`` block.

    The cluster is that of :func:`cluster_address`. Without one, a private cluster is
    started on this machine and ended with the block. If this process is connected to
    Ray already, that connection is used and left open.

    Variables of :data:`ENVIRONMENT` that are unset in ``os.environ`` are set, and stay;
    without a cluster also ``RAY_AUTH_MODE``, to ``disabled``. The processes of a
    private cluster get a temporary directory, which is deleted at the end. Ctrl-C and
    SIGHUP that came while Ray was starting take effect afterwards.

    Args:
        store_bytes: The size in bytes of the object store of a private cluster; None
            for Ray's default.
        workers: The number of workers in the line that is printed for the user; 0
            prints no line.
        keep_idle: Whether a private cluster keeps idle processes of tasks, one for each
            CPU. Otherwise a process ends a second after its last task.

    Yields:
        The module ``ray``.

    Raises:
        ConfigError: Ray is not installed, the cluster does not answer, or Ray cannot
            start.
        Interrupted: SIGTERM came while Ray was starting.
    """
    address = cluster_address()
    for name, value in (
        ENVIRONMENT if address else ENVIRONMENT | {AUTH_MODE: "disabled"}
    ).items():
        os.environ.setdefault(name, value)
    if workers:
        asked = plural(workers, "worker")
        what = (
            f"requesting {asked} from the Ray cluster at {address}"
            if address
            else f"starting Ray with {asked}"
        )
        print_line(f"{what}; the first step takes about half a minute")
    try:
        import ray
    except ImportError:
        raise ConfigError(
            f"--workers needs Ray: pip install {RAY}, or --workers 0"
        ) from None
    if ray.is_initialized():
        yield ray
        return
    quiet_pools()
    if address:
        check_address(address)
        options: dict[str, Any] = {"address": address}
    else:
        options = {
            "address": "local",
            "include_dashboard": True,
            "object_store_memory": store_bytes,
        }
        if not keep_idle:
            options["_system_config"] = {"num_workers_soft_limit": 0}
    with ExitStack() as until:
        place = dict[str, str]()
        # Ray kills processes that have files there; logs of its sessions are kept as
        # ever
        if not address:
            own = tempfile.TemporaryDirectory(
                prefix="uno-ray-", ignore_cleanup_errors=True
            )
            place = {"RAY_TMPDIR": os.environ.get("RAY_TMPDIR", tempfile.gettempdir())}
            place["TMPDIR"] = until.enter_context(own)
            # The controller of Ray Train warns of an option that only Ray itself sets.
            filters = os.environ.get("PYTHONWARNINGS", "")
            place["PYTHONWARNINGS"] = f"{filters},{RAYS_OWN_WARNING}".lstrip(",")
        late = _start(ray, address, options, place)
        until.callback(ray.shutdown)
        for number in late:
            signal.raise_signal(number)
        yield ray


def _start(
    ray: Any, address: str | None, options: dict[str, Any], variables: dict[str, str]
) -> list[int]:
    """Call ``ray.init``, and keep signals from Ray's processes meanwhile.

    A terminal sends Ctrl-C and SIGHUP to Ray's processes as well, which would end them.
    Ray sets a handler for SIGTERM; if this process had a Python function as its
    handler, that one is set again. Outside the main thread signals are left alone.

    Args:
        ray: The module.
        address: The address of the cluster, for error messages; None for a private
            cluster.
        options: The keyword arguments of ``ray.init``.
        variables: Environment variables that Ray's processes get, and that this process
            has only during the call.

    Returns:
        The numbers of the signals that came meanwhile: SIGINT and SIGHUP. The caller
        raises them again.

    Raises:
        ConfigError: The cluster cannot be reached, or Ray does not start.
        Interrupted: SIGTERM came meanwhile.
    """
    on_term = signal.getsignal(signal.SIGTERM)
    # A terminal sends Ctrl-C and SIGHUP to Ray's processes too, and they die of it; a
    # mask is inherited.
    ours, late = (signal.SIGINT, signal.SIGHUP) if in_main_thread() else (), list[int]()
    handlers = {
        number: signal.signal(number, lambda number, _: late.append(number))
        for number in ours
    }
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ours)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        ray.init(logging_level=logging.WARNING, **options)
        if callable(on_term) and in_main_thread():
            # Ray's handler would end the process without a message.
            signal.signal(signal.SIGTERM, on_term)
    except SystemExit:  # raised by Ray's handler for SIGTERM
        ray.shutdown()
        raise Interrupted("stopped while Ray was starting") from None
    except (ConnectionError, ray.exceptions.AuthenticationError) as error:
        raise ConfigError(
            f"cannot reach the Ray cluster at {address}: {_with_token_advice(error)}"
        ) from None
    except Exception as error:  # Ray has no class for this error
        if "AF_UNIX path length" in str(error):
            problem = (
                "names of Ray's sockets would be too long in the temporary directory"
            )
            raise ConfigError(
                f"{problem}: set TMPDIR to one with a shorter path"
            ) from None
        if address and isinstance(error, RuntimeError | ValueError):
            # another version of Ray or Python, or no HOST:PORT
            ray.shutdown()
            raise ConfigError(
                f"cannot use the Ray cluster at {address}: {one_line(error)}"
            ) from None
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        problem = "Ray did not start within its time limit: this machine is too busy"
        raise ConfigError(f"{problem}; try again, or --workers 0") from None
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return late


def _with_token_advice(error: Exception) -> str:
    """Return the error of a failed connection to a cluster as one line, with advice.

    A missing or wrong token is the usual cause, and Ray's own text does not name it. If
    token authentication is off here, the advice says how to switch it on
    (``RAY_AUTH_MODE=token``) and where the token belongs. If it is on, the advice says
    to check the token file.
    """
    mode = os.environ.get(AUTH_MODE, "")
    if mode.lower() != "token":
        wanted = (
            f"{AUTH_MODE}=token and its token in ~/.ray/auth_token ({AUTH_MODE} is"
            f" {mode or 'unset'})"
        )
        return f"{one_line(error)}; a cluster with tokens needs {wanted}"
    return (
        f"{one_line(error)}; check that ~/.ray/auth_token holds the token of the"
        " cluster"
    )


def cluster_address() -> str | None:
    """Return the address of the running Ray cluster that a command uses, or None.

    It is ``RAY_ADDRESS``, which is set in Ray jobs; no connection to it is tried.
    Otherwise it is a cluster that ``ray start`` has started on this machine, as for
    Ray's own commands, if it accepts a connection within a second. None means that the
    command starts a private cluster on this machine; ``RAY_ADDRESS=local`` asks for
    that.
    """
    given = os.environ.get(ADDRESS)
    if given:
        return None if given == "local" else given
    found = current_cluster()
    return found if found and _connection_error(found, 1) is None else None


def in_thread(
    function: Callable[[], T],
    on_poll: Callable[[], None] = lambda: None,
    end: Callable[[], None] = lambda: None,
) -> T:
    """Call a function in a new thread, wait for it, and return its result.

    It is used for functions of Ray that change signal handlers if they run in the main
    thread.

    Args:
        function: The function. An error that it raises is raised here.
        on_poll: Is called without arguments in the calling thread every half second
            during the wait, and when the function has ended. An error that it raises
            ends the wait. By default nothing is called.
        end: Is called if the wait ends by an error, such as Ctrl-C, to make the
            function end. It then has 10 s. A thread that waits for Ray when the
            connection is closed ends the process by a segmentation fault.
    """
    result: Future[T] = Future()

    def body() -> None:
        """Store the function's result, or its error, for the waiting thread."""
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=body, name="uno-ray", daemon=True).start()
    try:
        while not result.done():
            wait([result], POLL_S)
            on_poll()
    except BaseException:
        end()
        wait([result], END_S)
        raise
    return result.result()


def check_address(address: str) -> None:
    """Check that a Ray cluster accepts connections at an address ``host:port``.

    Ray itself would try for minutes, without a message. An address of another form is
    accepted without a check, except for that of a dashboard.

    Args:
        address: The address, such as ``RAY_ADDRESS`` holds it.

    Raises:
        ConfigError: The address does not accept a connection within 10 s, or it is the
            ``http://`` address of a dashboard, which only ``ray job submit`` takes, or
            a ``ray://`` address of Ray's client.
    """
    if address.startswith("ray://"):
        raise ConfigError(
            f"{ADDRESS}={address}: Ray's client is not supported: use"
            f" {ADDRESS}=HOST:6379 on a node of the cluster, or ray job submit"
        )
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"{ADDRESS}={address} is the dashboard of a cluster: use"
            f" {ADDRESS}=HOST:6379, or submit the command by `ray job submit --address"
            f" {address}`"
        )
    if (error := _connection_error(address, 10)) is not None:
        advice = f"{ADDRESS}=local starts one on this machine"
        raise ConfigError(
            f"no Ray cluster answers at {ADDRESS}={address} ({error}); {advice}"
        )


def _connection_error(address: str, seconds: float) -> Exception | None:
    """Try to connect to an address; return the error, or None if it succeeds.

    An address of another form than ``host:port`` is not tried, and gives None.

    Args:
        address: The address.
        seconds: The longest wait for the connection.
    """
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=seconds).close()
        except (OSError, OverflowError) as error:
            return error
    return None


def worker_resources(config: Config, cluster: dict[str, float]) -> dict[str, float]:
    """Return the resources of a training worker; one CPU is left for Ray Data.

    The amounts of the whole cluster are compared, not of each node, and whether other
    work uses them is not asked.

    Args:
        config: The configuration of the run, with the number of workers, at least 1.
        cluster: The amount of each resource of the whole cluster, by Ray's name of it
            (``CPU``, ``GPU``).

    Returns:
        ``CPU``: ``compute.cpus_per_worker``, by default an equal share of the other
        CPUs, but at most 1. ``GPU``, only if workers use GPUs (see :func:`use_gpu`):
        ``compute.gpus_per_worker``.

    Raises:
        ConfigError: The cluster has too few CPUs or GPUs for all workers.
    """
    workers, total = config.compute.num_workers, cluster.get("CPU", 0)
    cpus = config.compute.cpus_per_worker or min(1.0, (total - 1) / workers)
    if cpus <= 0 or workers * cpus + 1 > total + 1e-6:
        need = (
            f"{plural(workers, 'worker')} of {max(cpus, 0):g} CPUs and one CPU for Ray"
            " Data"
        )
        advice = "use fewer workers or a smaller --compute.cpus-per-worker"
        raise ConfigError(f"{need} need more than the cluster's {total:g}; {advice}")
    if not use_gpu(config, cluster):
        return {"CPU": cpus}
    each, has = config.compute.gpus_per_worker, cluster.get("GPU", 0)
    if workers * each > has:
        raise ConfigError(
            f"{plural(workers, 'worker')} need {workers * each:g} GPUs, the cluster has"
            f" {has:g}"
        )
    return {"CPU": cpus, "GPU": each}


def task_request(config: Config, cluster: dict[str, float]) -> dict[str, float]:
    """Return the resources of a Ray task that computes but is not a training worker.

    Args:
        config: The configuration of the run.
        cluster: The amount of each resource of the whole cluster, by Ray's name of it
            (``CPU``, ``GPU``).

    Returns:
        ``num_cpus``, which is ``compute.cpus_per_worker`` or 1; and ``num_gpus``, which
        is ``compute.gpus_per_worker`` if workers use GPUs (see :func:`use_gpu`), and
        else 0. ``ray.remote`` takes both.

    Raises:
        ConfigError: The cluster has too few CPUs or GPUs for a single task.
    """
    cpus = config.compute.cpus_per_worker or 1
    gpus = config.compute.gpus_per_worker if use_gpu(config, cluster) else 0
    for name, amount, option in (
        ("CPUs", cpus, "--compute.cpus-per-worker"),
        ("GPUs", gpus, "--gpus-per-worker, or use --device cpu"),
    ):
        if (has := cluster.get(name[:-1], 0)) < amount:
            raise ConfigError(
                f"a task needs {amount:g} {name}, the cluster has {has:g}; lower"
                f" {option}"
            )
    return {"num_cpus": cpus, "num_gpus": gpus}


def use_gpu(config: Config, cluster: dict[str, float]) -> bool:
    """Return whether the workers of a run use GPUs.

    If ``compute.device`` is ``cuda`` they do, and if it is ``cpu`` they do not. With
    ``auto`` they do if the cluster has any GPU, unless ``compute.gpus_per_worker`` is
    0.

    Args:
        config: The configuration of the run.
        cluster: The amount of each resource of the whole cluster, by Ray's name of it
            (``CPU``, ``GPU``).

    Raises:
        ConfigError: ``compute.device`` is ``cuda``, and a worker has no GPU.
    """
    compute = config.compute
    if compute.device == "auto":
        return cluster.get("GPU", 0) > 0 and compute.gpus_per_worker > 0
    if compute.device == "cuda" and not compute.gpus_per_worker:
        raise ConfigError("--device cuda needs --gpus-per-worker above 0")
    return compute.device == "cuda"
