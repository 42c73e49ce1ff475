"""The person at the keyboard: what they see while a command works, and how they stop it. Driver only."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line, above the bar where there is one.

    What the stream cannot encode and what would steer a terminal (a class name may hold anything) is escaped.
    """
    stream = stream or sys.stdout
    shown = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in line)
    encoding = stream.encoding or "ascii"
    tqdm.write(shown.encode(encoding, "backslashreplace").decode(encoding), file=stream)
    stream.flush()


def say_left_out(bad: Sequence[Mapping[str, str]]) -> None:
    """One line where images could not be read, in commands that write no list of them."""
    if bad:
        first = f"{bad[0]['id']} ({bad[0]['reason']})"
        say(f"warning: {len(bad)} unreadable images are left out, the first: {first}")


@contextmanager
def on_stop(request: Callable[[], None], line: str | None = None) -> Iterator[None]:
    """Say ``line`` and call ``request`` at SIGTERM and Ctrl-C; a second Ctrl-C interrupts at once.

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


class Progress:
    """Shows metric dicts: phase, epoch, epochs, step, total_steps, loss, lr, images_per_s.

    On a terminal a live bar on stderr, one for each phase; elsewhere a plain line at every ``interval``-th
    step and at a phase's end.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic, interval: int = 1
    ) -> None:
        self._stream, self._clock, self._interval = stream or sys.stderr, clock, interval
        self._phase: str | None = None
        self._start = (0, 0.0)  # step and time of a phase's first metrics, not of step 0: a run may resume
        self._bar: tqdm[Any] | None = None

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """Show the newest metrics of a phase."""
        step, total = metrics["step"], metrics["total_steps"]
        if metrics["phase"] != self._phase:
            self.close()
            self._phase = metrics["phase"]
            self._start = (step, self._clock())
        text = "  ".join(_parts(metrics, self._eta_s(step, total)))
        if not self.live:
            if step % self._interval == 0 or step == total:
                say(text, self._stream)
            return
        if self._bar is None:
            layout = "{desc}  {percentage:3.0f}% |{bar}|"
            self._bar = tqdm(
                total=total, file=self._stream, ascii=True, dynamic_ncols=True, bar_format=layout
            )
        self._bar.n = step
        self._bar.set_description_str(text)

    @property
    def live(self) -> bool:
        """Whether this is a bar on a terminal, which takes any number of updates."""
        return self._stream.isatty()

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Progress:
        """The progress itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the bar."""
        self.close()

    def _eta_s(self, step: int, total: int) -> float | None:
        first, seconds = self._start
        return (self._clock() - seconds) / (step - first) * (total - step) if step > first else None


def _parts(metrics: Mapping[str, Any], eta_s: float | None) -> list[str]:
    """``discover``, ``epoch 12/60``, ``step 132/660``, ``loss 1.234``, ... for the keys that are there."""
    formats = {
        "epoch": "epoch {epoch}/{epochs}",
        "step": "step {step}/{total_steps}",
        "loss": "loss {loss:.3f}",
        "lr": "lr {lr:.4f}",
        "images_per_s": "{images_per_s:,.0f} images/s",
    }
    parts = [str(metrics["phase"])]
    parts += [text.format(**metrics) for key, text in formats.items() if metrics.get(key) is not None]
    return parts if eta_s is None else [*parts, f"ETA {_clock_time(eta_s)}"]


def _clock_time(seconds: float) -> str:
    """``0:41``, ``12:05`` or ``1:02:03``."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
