"""What a person sees while a run trains: one live bar on a terminal, plain lines elsewhere. Driver only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from tqdm import tqdm


def say_left_out(bad: Sequence[Mapping[str, str]]) -> None:
    """One line where images could not be read, in commands that write no list of them."""
    if bad:
        first = f"{bad[0]['id']} ({bad[0]['reason']})"
        say(f"warning: {len(bad)} unreadable images are left out, the first: {first}")


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line, above the bar where there is one.

    What the stream cannot encode and what would steer a terminal (a class name may hold anything) is escaped.
    """
    stream = stream or sys.stdout
    shown = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in line)
    encoding = stream.encoding or "ascii"
    tqdm.write(shown.encode(encoding, "backslashreplace").decode(encoding), file=stream)
    stream.flush()


class Progress:
    """Shows metric dicts: phase, epoch, epochs, step, total_steps, loss, lr, images_per_s.

    On a terminal a live bar on stderr, one for each phase; elsewhere one plain line per call.
    Usable as a context manager, and as the callback of a worker's reports.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._phase: str | None = None
        self._start = (0, 0.0)  # step and time of a phase's first metrics, not of step 0: a run may resume
        self._bar: tqdm[Any] | None = None

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """Show the newest metrics of a phase."""
        if metrics["phase"] != self._phase:
            self.close()
            self._phase = metrics["phase"]
            self._start = (metrics["step"], self._clock())
        if not self.live:
            say("  ".join(_parts(metrics, self._eta_s(metrics))), self._stream)
            return
        if self._bar is None:
            layout = "{desc}  {percentage:3.0f}% |{bar}|"
            self._bar = tqdm(
                total=metrics["total_steps"],
                file=self._stream,
                ascii=True,
                dynamic_ncols=True,
                bar_format=layout,
            )
        self._bar.n = metrics["step"]
        self._bar.set_description_str("  ".join(_parts(metrics, self._eta_s(metrics))))

    @property
    def live(self) -> bool:
        """Whether this is a bar on a terminal, which takes any number of updates."""
        return self._stream.isatty()

    def say(self, line: str) -> None:
        """Print a line on stdout without breaking the bar."""
        say(line)

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

    def _eta_s(self, metrics: Mapping[str, Any]) -> float | None:
        step, seconds = self._start
        done = metrics["step"] - step
        if done <= 0:
            return None
        return (self._clock() - seconds) / done * (metrics["total_steps"] - metrics["step"])


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
