"""The one Ray cluster of the test lane ``ray``, and its undisturbed run; everything
else runs without Ray.
"""

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from uno.data import files
from uno.session.console import in_main_thread

# assertions are rewritten once, not in every process and run: 5 s each
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
NUM_CPUS = 4  # logical; the machine may have two
# a node whose agent finds it taken takes no jobs, for as long as it lives
AGENT_PORT = 52365

# The same inputs every time; ``--hypothesis-profile long`` tries many others.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=1_000)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """No test depends on weights that the user has downloaded. A script's ``&`` and
    nohup have signals ignored, here and in child processes.
    """
    os.environ["TORCH_HOME"] = "/nonexistent"
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == signal.SIG_IGN and in_main_thread():
            signal.signal(number, usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray's own deprecation and resource warnings are not ours to turn into errors."""
    for item in items:
        if item.get_closest_marker("ray"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests in one process: its finished run is trained once."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


@pytest.fixture(autouse=True)
def no_connections_of_other_tests() -> None:
    """No test sees what another one has stored in pyarrow's file system in memory."""
    files._connect.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the features that the user keeps; child processes
    inherit this.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def no_cluster_of_another_test() -> Iterator[None]:
    """The address of a Ray cluster, which a backend sets, ends with its test."""
    before = {"RAY_ADDRESS": os.environ.get("RAY_ADDRESS")}
    yield
    _set(before)


@pytest.fixture(scope="session", autouse=True)
def quick_maps() -> Iterator[Any]:
    """Draw the maps of reports at the first two coordinates: t-SNE takes seconds.

    Yields the function that is replaced, for ``real_maps``. Child processes compute
    their maps.
    """
    from sklearn.manifold import TSNE

    original = TSNE.fit_transform
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TSNE, "fit_transform", lambda self, points: points[:, :2])
        yield original


@pytest.fixture
def real_maps(quick_maps: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute maps by t-SNE in this test."""
    monkeypatch.setattr("sklearn.manifold.TSNE.fit_transform", quick_maps)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """The ``ray`` module, connected to a private cluster: no token of the user's, no
    other cluster's address.
    """
    from pipelines import ray_env

    # short: socket paths hold 107 characters
    folder = tempfile.mkdtemp(prefix="uno-ray-", dir="/tmp")
    changed = {
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "disabled",
        "RAY_ADDRESS": None,
        **ray_env.ENVIRONMENT,
    }
    before = {name: os.environ.get(name) for name in changed}
    _set(changed)
    import ray

    wait_until_free(AGENT_PORT)
    ray.init(
        address="local",
        num_cpus=NUM_CPUS,
        include_dashboard=True,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        _temp_dir=folder,
    )
    yield ray
    ray.shutdown()
    _set(before)
    time.sleep(0.5)  # the last processes still write their logs
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def short(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two workers and 72 steps of discovery."""
    from pipelines import cli
    from tests.pipelines.small import SHORT

    output = tmp_path_factory.mktemp("short") / "run"
    assert cli.main(["demo", *SHORT, "--output", str(output)]) == 0
    return output


@pytest.fixture(scope="session")
def two(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two workers and 240 steps of discovery, that disturbed ones are
    compared with.
    """
    from pipelines import cli
    from tests.pipelines.small import LONG

    output = tmp_path_factory.mktemp("two") / "run"
    assert cli.main(["demo", *LONG, "--output", str(output)]) == 0
    return output


def wait_until_free(port: int, seconds: float = 180) -> None:
    """Returns once nothing listens there: agents outlive the cluster of an earlier
    test by some seconds.
    """
    end = time.monotonic() + seconds
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                return
            except OSError:
                assert time.monotonic() < end, (
                    f"port {port} is taken: Ray jobs cannot be tested"
                )
        time.sleep(0.2)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
