"""The console: printed lines, progress bars, and signals that stop a run.

Only the process that runs the command uses this module, not Ray's workers.
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

METRIC_TEXTS = {
    "epoch": "epoch {epoch}/{epochs}",
    "step": "step {step}/{total_steps}",
    "loss": "loss {loss:.3f}",
    "lr": "lr {lr:.4f}",
    "images_per_s": "{images_per_s:,.0f} images/s",
    "data_wait": "waits for data {data_wait:.0%}",
    "slow_rank": "slow rank {slow_rank}",
}
"""Format of each metric by name, for lines and progress bars."""
MORE_METRIC_TEXTS = {
    "images_per_s_per_device": "{images_per_s_per_device:,.0f} images/s a device",
    "rank_ms_max": (
        "ranks {rank_ms_min:.0f} ms, {rank_ms_median:.0f} ms, {rank_ms_max:.0f} ms"
    ),
    "grad_norm": "gradient {grad_norm:.3g}",
    "peak_memory_gb": "{peak_memory_gb:.1f} GB",
}
"""Format of more metrics by name, for lines. A progress bar has no room for them."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
READING_S = 10.0  # seconds after which reading the data is announced
SILENT = ContextVar("SILENT", default=False)
"""Whether only warnings are printed, and no progress is shown."""


@contextmanager
def suppress_output(silent: bool = True) -> Iterator[None]:
    """Suppress progress bars, and printed lines that are no warnings, in the block.

    This holds for :func:`print_line`, and for each :class:`Progress` that is made
    inside the block.

    Args:
        silent: Whether to do so. If False, the block prints as usual, also inside
            another block that suppresses output.
    """
    token = SILENT.set(silent)
    try:
        yield
    finally:
        SILENT.reset(token)


def print_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line, above the progress bar if there is one.

    Characters that the stream cannot encode, and unprintable characters other than tabs
    and line ends, such as control characters, are escaped. Inside
    :func:`suppress_output` only warnings are printed. The stream is flushed.

    Args:
        line: The text. A warning begins with "warning: ".
        stream: The stream to print to; None for the standard output.
    """
    if SILENT.get() and not line.startswith("warning: "):
        return
    stream = stream or sys.stdout
    shown = printable(line, kept="\n\t")
    encoding = stream.encoding or "ascii"
    tqdm.write(shown.encode(encoding, "backslashreplace").decode(encoding), file=stream)
    stream.flush()


def in_main_thread() -> bool:
    """Return whether this is the main thread, the only one that can handle signals."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def on_stop(request: Callable[[], object], line: str | None = None) -> Iterator[None]:
    """Call a function at the first SIGTERM, SIGINT (Ctrl-C) or SIGHUP inside the block.

    A second signal raises KeyboardInterrupt. A SIGHUP that is ignored (nohup) stays
    ignored. One that arrives redirects stdout and stderr to nowhere if the terminal is
    gone (:func:`output_closed`). Outside the main thread the signals are handled as
    before, because Python handles signals in the main thread alone. At the end the
    former handlers are restored.

    Args:
        request: Takes no argument and asks the work to stop. It runs in the signal
            handler, so an exception that it raises appears in the block.
        line: A line to print when the signal arrives, before the request. None prints
            nothing.
    """
    if not in_main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        """Call ``request`` at the first signal, and let the next one interrupt.

        The arguments are those that Python passes to a signal handler.
        """
        for each in old:
            signal.signal(each, signal.default_int_handler)
        if number == signal.SIGHUP:
            output_closed()  # the terminal is gone, so printing would fail
        if line is not None:
            with suppress(OSError):
                print_line(line)
        request()

    hung_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    taken = [number for number in STOP_SIGNALS if number != signal.SIGHUP or hung_up]
    old = {number: signal.getsignal(number) for number in taken}
    try:
        for number in taken:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def interrupt_on_signal(line: str) -> Iterator[None]:
    """Raise Interrupted if a signal asks to stop inside the block.

    The signals are SIGTERM, SIGINT (Ctrl-C) and SIGHUP, and only the main thread
    handles them, see :func:`on_stop`. A library may swallow the exception that the
    signal raises. It is then raised again at the end of the block.

    Args:
        line: The text of the exception, one line for the user.

    Raises:
        Interrupted: A signal has arrived inside the block.
    """
    asked = threading.Event()

    def stop() -> None:
        """Note the request and raise Interrupted."""
        asked.set()
        raise Interrupted(line)

    with on_stop(stop):
        yield
    if asked.is_set():
        raise Interrupted(line)


@contextmanager
def announce_reading() -> Iterator[None]:
    """Print that the data is being read, if the block takes more than ten seconds.

    The line "reading the data" is printed after ten seconds, by another thread. At the
    end of such a block a second line says how long it took, unless it raised an error.
    """
    start = time.monotonic()
    announce = threading.Timer(
        READING_S, copy_context().run, [print_line, "reading the data"]
    )
    announce.daemon = True
    announce.start()
    try:
        yield
    finally:
        announce.cancel()
    if (spent := time.monotonic() - start) > READING_S:
        print_line(f"the data was read in {spent:.0f} s")


def format_metrics(metrics: Mapping[str, Any], in_a_bar: bool = False) -> str:
    """Format a line of metrics, such as "discover  epoch 5/60  loss 0.300".

    Args:
        metrics: Values by name. ``phase`` is required and comes first. The others
            follow in the order of :data:`METRIC_TEXTS` and :data:`MORE_METRIC_TEXTS`.
            Names that are in neither of them are left out, and so are values of None.
        in_a_bar: Whether the text is for a progress bar, which has no space for
            :data:`MORE_METRIC_TEXTS`.
    """
    texts = METRIC_TEXTS if in_a_bar else METRIC_TEXTS | MORE_METRIC_TEXTS
    parts = (
        text.format(**metrics)
        for key, text in texts.items()
        if metrics.get(key) is not None
    )
    return "  ".join([metrics["phase"], *parts])


class Progress(AbstractContextManager["Progress"]):
    """Show the progress of training and of other work on the console.

    On a terminal and in a notebook, this is a live bar for each phase. Elsewhere it is
    plain lines: one at every ``interval``-th step, or every ``every_s`` seconds if the
    metrics have this key, and one at the end of a phase. An object that is made inside
    :func:`suppress_output` shows nothing.

    Args:
        stream: Where to show it; None for stderr.
        clock: Returns the time in seconds.
        interval: Steps between two plain lines.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval: int = 1,
    ) -> None:
        self._stream, self._clock = stream or sys.stderr, clock
        self._interval = interval
        self._phase: str | None = None
        self._bar: tqdm[Any] | None = None
        self._silent = SILENT.get()
        # a notebook redraws a line after a carriage return, as a terminal does
        in_notebook = type(self._stream).__module__.startswith("ipykernel")
        self._live = in_notebook or self._stream.isatty()

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """Show the newest metrics of a phase, and estimate the time that is left.

        The first call of a phase shows no such time.

        Args:
            metrics: ``phase`` (str), ``step`` and ``total_steps`` (int) are required.
                ``epoch``, ``epochs``, ``loss``, ``lr``, ``images_per_s`` and the other
                names of :data:`METRIC_TEXTS` are shown if they are there and not None,
                and in plain lines also those of :data:`MORE_METRIC_TEXTS`. ``every_s``
                is the least number of seconds between two plain lines.
        """
        if self._silent:
            return
        step, total, now = metrics["step"], metrics["total_steps"], self._clock()
        if metrics["phase"] != self._phase:
            self.close()
            self._phase = metrics["phase"]
            self._first = step, now  # a resumed run does not begin at step 0
            self._shown = now
        parts = [format_metrics(metrics, self._live)]
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
            now - self._shown >= metrics["every_s"]
            if "every_s" in metrics
            else step % self._interval == 0
        ):
            self._shown = now
            print_line("  ".join(parts), self._stream)

    def close(self) -> None:
        """Close the progress bar, if there is one, and leave it on the terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __exit__(self, *_: object) -> None:
        """Close the bar."""
        self.close()


def count_items(
    show: Callable[[dict[str, Any]], None], phase: str, every_s: float
) -> Callable[[int, int], None]:
    """Return a function that shows how many items of some work are done, and the speed.

    Args:
        show: Takes a line of metrics, a dict with the values "phase", "step" (finished
            items), "total_steps" (all items), "images_per_s" (items per second, None at
            first) and "every_s". A :class:`Progress` is such a function.
        phase: The name of the work, such as "predict".
        every_s: The least number of seconds between two plain lines.

    Returns:
        A function that takes the number of finished items and of all items, and calls
        ``show``. Its first call tells how many items were finished before this command;
        the speed counts only items that were finished after it.
    """
    first: list[tuple[int, float]] = []

    def show_count(done: int, total: int) -> None:
        """Show the numbers of items, and the speed since the first call."""
        now = time.monotonic()
        first[:] = first or [(done, now)]
        num_before, start = first[0]
        speed = None
        if done > num_before:
            speed = (done - num_before) / max(now - start, 1e-9)
        metrics = {"phase": phase, "step": done, "total_steps": total}
        show(metrics | {"images_per_s": speed, "every_s": every_s})

    return show_count


def output_closed() -> bool:
    """Return whether nobody reads stdout, or nobody reads stderr, any more.

    This is so after a pipe was closed or a terminal hung up. Both streams are tested
    now. A stream without a reader is redirected to the null device, so that everything
    that is written to it afterwards is discarded without an error. A stream without a
    file descriptor counts as read.
    """
    gone = False
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # not a file
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if poll.poll(0):  # POLLERR or POLLHUP: nobody holds the other end
                gone = True
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), stream.fileno())
    return gone
