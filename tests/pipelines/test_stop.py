"""Signals: who handles them, and for how long."""

import signal
import subprocess
import sys
from types import SimpleNamespace

from pipelines import ray_env
from pipelines.console import on_stop


def test_ray_does_not_take_sigterm_from_us(monkeypatch):
    """Ray installs a handler that ends the process with code 15 and no line. Kills: predict and estimate that
    leave that way, a handler that stays after its block.
    """
    before = signal.getsignal(signal.SIGTERM)

    def init(**_):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))

    ray = SimpleNamespace(is_initialized=lambda: False, init=init, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in ray_env.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    asked = []
    with on_stop(lambda: asked.append(1)), ray_env.connect():
        signal.raise_signal(signal.SIGTERM)
    assert asked == [1] and signal.getsignal(signal.SIGTERM) is before


ENDED_IN_A_CALLBACK = """
import signal, sys, time, weakref
from pipelines.worker import quiet_exit

quiet_exit()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))  # as Ray's handler does
thing = type("Thing", (), {})()
kept = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))  # Python swallows what this raises
del thing
time.sleep(60)
"""


def test_an_exit_in_a_callback_is_asked_again_without_a_traceback():
    done = subprocess.run(
        [sys.executable, "-c", ENDED_IN_A_CALLBACK], capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stderr) == (3, "")
