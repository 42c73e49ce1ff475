"""SIGTERM and Ctrl-C: the work ends in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pipelines.console import say


@contextmanager
def on_stop(request: Callable[[], None], line: str | None = None) -> Iterator[None]:
    """Say ``line`` and call ``request`` at SIGTERM and SIGINT; a second SIGINT interrupts at once.

    Nothing happens outside the main thread, where Python takes no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        if line is not None:
            say(line)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        request()

    old = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
