"""The person at the keyboard: what they see while a command works, and how they stop it. Driver only."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

from tqdm import tqdm

PARTS = {
    "epoch": "epoch {epoch}/{epochs}", "step": "step {step}/{total_steps}", "loss": "loss {loss:.3f}",
    "lr": "lr {lr:.4f}", "images_per_s": "{images_per_s:,.0f} images/s",
}  # fmt: skip


SILENT = ContextVar("SILENT", default=False)


@contextmanager
def silence(silent: bool = True) -> Iterator[None]:
    """If ``silent``, no bar and no line but warnings."""
    token = SILENT.set(silent)
    try:
        yield
    finally:
        SILENT.reset(token)


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line, above a bar; what cannot be encoded or would steer a terminal is escaped."""
    if SILENT.get() and not line.startswith("warning: "):
        return
    stream = stream or sys.stdout
    shown = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in line)
    encoding = stream.encoding or "ascii"
    tqdm.write(shown.encode(encoding, "backslashreplace").decode(encoding), file=stream)
    stream.flush()


def in_main_thread() -> bool:
    """Whether this thread may handle signals."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def on_stop(request: Callable[[], object], line: str | None = None) -> Iterator[None]:
    """Say ``line`` and call ``request`` at SIGTERM and Ctrl-C; a second Ctrl-C interrupts at once. Python
    handles signals in the main thread: in another one they stay as they are.
    """
    if not in_main_thread():
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


class Progress(AbstractContextManager["Progress"]):
    """Shows metric dicts: phase, epoch, epochs, step, total_steps, loss, lr, images_per_s.

    On a terminal and in a notebook a live bar on stderr, one for each phase; elsewhere a plain line at every
    ``interval``-th step, but none within ``seconds`` of the one before, and at a phase's end. A phase whose
    steps have no such rhythm says ``every_s`` how many seconds lie between two lines.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic, interval: int = 1,
        seconds: float = 0.0,
    ) -> None:  # fmt: skip
        self._stream, self._clock = stream or sys.stderr, clock
        self._interval, self._seconds = interval, seconds
        self._phase: str | None = None
        self._bar: tqdm[Any] | None = None
        self._silent = SILENT.get()
        in_notebook = type(self._stream).__module__.startswith("ipykernel")  # it redraws a line after \\r
        self._live = in_notebook or self._stream.isatty()

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """Show the newest metrics of a phase."""
        if self._silent:
            return
        step, total, now = metrics["step"], metrics["total_steps"], self._clock()
        if metrics["phase"] != self._phase:
            self.close()
            self._phase = metrics["phase"]
            self._first = step, now  # not step 0: a run may resume
            self._shown = now
        parts = [metrics["phase"]]
        parts += [text.format(**metrics) for key, text in PARTS.items() if metrics.get(key) is not None]
        if step > self._first[0]:
            eta_s = (now - self._first[1]) / (step - self._first[0]) * (total - step)
            parts.append(f"ETA {tqdm.format_interval(round(eta_s))}")
        if self._live:
            if self._bar is None:
                layout = "{desc}  {percentage:3.0f}% |{bar}|"
                self._bar = tqdm(
                    total=total, file=self._stream, ascii=True, dynamic_ncols=True, bar_format=layout
                )
            self._bar.n = step
            self._bar.set_description_str("  ".join(parts))
        elif step == total or (
            (step % self._interval == 0 or "every_s" in metrics)
            and now - self._shown >= metrics.get("every_s", self._seconds)
        ):
            self._shown = now
            say("  ".join(parts), self._stream)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __exit__(self, *_: object) -> None:
        self.close()
