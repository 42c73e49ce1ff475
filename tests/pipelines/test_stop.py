"""Signals: who handles them, and for how long."""

import signal
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
