"""The person at the keyboard: what they see while a run works, and how they stop it.
Driver only.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar, copy_context
from typing import Any, TextIO

from tqdm import tqdm

from uno.errors import Interrupted, printable
from uno.text import plural

PARTS = {
    "epoch": "epoch {epoch}/{epochs}",
    "step": "step {step}/{total_steps}",
    "loss": "loss {loss:.3f}",
    "lr": "lr {lr:.4f}",
    "images_per_s": "{images_per_s:,.0f} images/s",
    "data_wait": "waits for data {data_wait:.0%}",
    "slow_rank": "slow rank {slow_rank}",
}
PACE = {  # in lines, for which a bar has no room
    "images_per_s_per_device": "{images_per_s_per_device:,.0f} images/s a device",
    "rank_ms_max": (
        "ranks {rank_ms_min:.0f} ms, {rank_ms_median:.0f} ms, {rank_ms_max:.0f} ms"
    ),
    "grad_norm": "gradient {grad_norm:.3g}",
    "peak_memory_gb": "{peak_memory_gb:.1f} GB",
}


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
READING_S = 10.0  # between two lines
SILENT = ContextVar("SILENT", default=False)


@contextmanager
def suppress_output(silent: bool = True) -> Iterator[None]:
    """If ``silent``, no bar and no line but warnings."""
    token = SILENT.set(silent)
    try:
        yield
    finally:
        SILENT.reset(token)


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line, above a bar; what cannot be encoded or would steer a terminal is
    escaped.
    """
    if SILENT.get() and not line.startswith("warning: "):
        return
    stream = stream or sys.stdout
    shown = printable(line, kept="\n\t")
    encoding = stream.encoding or "ascii"
    tqdm.write(shown.encode(encoding, "backslashreplace").decode(encoding), file=stream)
    stream.flush()


def in_main_thread() -> bool:
    """Return whether this thread may handle signals."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def on_stop(request: Callable[[], object], line: str | None = None) -> Iterator[None]:
    """Say ``line`` and call ``request`` at SIGTERM, Ctrl-C and SIGHUP; a second one
    interrupts at once. A SIGHUP that is ignored (nohup) stays so. Python handles
    signals in the main thread: in another one they stay as they are.
    """
    if not in_main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        for each in old:
            signal.signal(each, signal.default_int_handler)
        if number == signal.SIGHUP:
            output_closed()  # with the terminal
        if line is not None:
            with suppress(OSError):
                print_line(line)
        request()

    hung_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    taken = [number for number in STOP_SIGNALS if number != signal.SIGHUP or hung_up]
    old = {number: signal.signal(number, handle) for number in taken}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def interrupt_on_signal(line: str) -> Iterator[None]:
    """Raise Interrupted with ``line`` at those signals, at the end at the latest:
    libraries swallow some.
    """
    asked = threading.Event()

    def stop() -> None:
        asked.set()
        raise Interrupted(line)

    with on_stop(stop):
        yield
    if asked.is_set():
        raise Interrupted(line)


@contextmanager
def reading() -> Iterator[Callable[[int], None]]:
    """While a large table is read, a line every ten seconds; call it with the number
    of rows at the end.
    """
    start, done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(READING_S):
            print_line(f"reading the data: {time.monotonic() - start:.0f} s")

    def total(num: int) -> None:
        if (spent := time.monotonic() - start) > READING_S:
            print_line(
                f"read {plural(num, 'image')} in {spent:.0f} s ({num / spent:,.0f}"
                " images/s)"
            )

    threading.Thread(
        target=copy_context().run, args=(tell,), name="uno-reading", daemon=True
    ).start()
    try:
        yield total
    finally:
        done.set()


def described(metrics: Mapping[str, Any], in_a_bar: bool = False) -> str:
    """A line of metrics in words."""
    texts = PARTS if in_a_bar else PARTS | PACE
    parts = (
        text.format(**metrics)
        for key, text in texts.items()
        if metrics.get(key) is not None
    )
    return "  ".join([metrics["phase"], *parts])


class Progress(AbstractContextManager["Progress"]):
    """Shows metric dicts: phase, epoch, epochs, step, total_steps, loss, lr,
    images_per_s.

    On a terminal and in a notebook a live bar on stderr, one for each phase; elsewhere
    a plain line at every ``interval``-th step, but none within ``seconds`` of the one
    before, and at a phase's end. A phase whose steps have no such rhythm says
    ``every_s`` how many seconds lie between two lines.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval: int = 1,
        seconds: float = 0.0,
    ) -> None:
        self._stream, self._clock = stream or sys.stderr, clock
        self._interval, self._seconds = interval, seconds
        self._phase: str | None = None
        self._bar: tqdm[Any] | None = None
        self._silent = SILENT.get()
        # it redraws a line after \\r
        in_notebook = type(self._stream).__module__.startswith("ipykernel")
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
        parts = [described(metrics, self._live)]
        if step > self._first[0]:
            eta_s = (now - self._first[1]) / (step - self._first[0]) * (total - step)
            parts.append(f"ETA {tqdm.format_interval(round(eta_s))}")
        if self._live:
            if self._bar is None:
                layout = "{desc}  {percentage:3.0f}% |{bar}|"
                self._bar = tqdm(
                    total=total,
                    file=self._stream,
                    ascii=True,
                    dynamic_ncols=True,
                    bar_format=layout,
                )
            self._bar.n = step
            self._bar.set_description_str("  ".join(parts))
        elif step == total or (
            (step % self._interval == 0 or "every_s" in metrics)
            and now - self._shown >= metrics.get("every_s", self._seconds)
        ):
            self._shown = now
            print_line("  ".join(parts), self._stream)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __exit__(self, *_: object) -> None:
        self.close()


def output_closed() -> bool:
    """Whether nobody reads our output: a closed pipe, a terminal hung up. What is
    left then goes nowhere.
    """
    gone = False
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # not a file
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if poll.poll(0):  # POLLERR or POLLHUP: nobody holds the other end
                gone = True
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return gone
