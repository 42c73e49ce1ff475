"""Read the directory of a sweep. Only this module knows the layout.

::

    sweep.yaml                   what is searched and how: the same command continues
                                 only a sweep that matches
    features.npy                 features larger than memory, which trials map; deleted
                                 at the end
    trials/0007/trial.json       the searched values of a trial
    trials/0007/epochs.jsonl     one line an epoch, written by the trial
    trials/0007/failure.json     why it failed, written by the trial if it still could
    trials/0007/result.json      written last, by the driver: finished, stopped or
                                 failed
    trials/0007/<fold>-seed<n>/  its checkpoints; deleted with the result
    pretrain/<hash>/             a pretraining, shared by the trials that do not change
                                 it
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from uno.config import parse_yaml
from uno.data.files import Storage
from uno.data.output import read_mapping
from uno.errors import ConfigError
from uno.limits import MAX_STATE_BYTES
from uno.runs.journal import read_journal
from uno.runs.lock import ClaimedStorage

SETTINGS = "sweep.yaml"
FEATURES_FILE = "features.npy"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"


class PartStorage(Storage):
    """A directory in a sweep's directory, writable as long as the sweep's lock is held.

    Args:
        whole: The directory of the sweep.
        name: The path below it.
    """

    def __init__(self, whole: ClaimedStorage, name: str) -> None:
        super().__init__(whole.below(name))
        self._whole = whole

    def check(self) -> None:
        """Raise an error unless the lock of the sweep is still held."""
        self._whole.check()


@dataclass
class Trial:
    """One configuration of a sweep, and its results.

    Attributes:
        index: Its number, from 0.
        overrides: The searched values by dotted key.
        epochs: The results of each epoch.
        status: ``finished``, ``stopped`` or ``failed``; None if it has not ended.
        reason: Why it failed, or "".
    """

    index: int
    overrides: dict[str, Any]
    epochs: list[dict[str, Any]] = field(default_factory=list)
    status: str | None = None
    reason: str = ""

    @property
    def _last(self) -> dict[str, Any]:
        """The results of the last epoch; epoch 0 with the score NaN without any."""
        return self.epochs[-1] if self.epochs else {"epoch": 0, "score": math.nan}

    @property
    def last_epoch(self) -> int:
        """The number of epochs that were trained and scored."""
        return int(self._last["epoch"])

    @property
    def score(self) -> float:
        """The score after the last epoch; NaN without an epoch."""
        return float(self._last["score"])

    @property
    def spread(self) -> float:
        """The standard deviation of the score over seeds; NaN with one seed."""
        return float(self._last.get("spread", math.nan))

    @property
    def standard_error(self) -> float:
        """The standard error of the score, if the score is a share of rows, else 0.

        One right row and one wrong row are added (Agresti & Coull 1998).
        """
        rows = self._last.get("rows", 0)
        share = (self.score * rows + 1) / (rows + 2)
        return math.sqrt(share * (1 - share) / rows) if rows else 0.0


def trial_name(index: int) -> str:
    """Return the path of a trial's directory below that of the sweep."""
    return f"trials/{index:04d}"


def read_settings(storage: Storage) -> Mapping[str, Any]:
    """Read ``sweep.yaml``.

    Raises:
        ConfigError: There is no such file, or it is damaged.
    """
    if not storage.exists(SETTINGS):
        raise ConfigError(
            f"{storage.uri} is not the directory of a sweep: it has no {SETTINGS}"
        )
    return parse_yaml(storage.read(SETTINGS, MAX_STATE_BYTES), storage.path(SETTINGS))


def read_epochs(storage: Storage, index: int) -> list[dict[str, Any]]:
    """Read the results of a trial's epochs 1, 2, 3 and so on.

    They end before a line that is damaged or out of order.

    Args:
        storage: The directory of the sweep.
        index: The number of the trial.
    """
    lines = enumerate(
        read_journal(storage, f"{trial_name(index)}/epochs.jsonl"), start=1
    )
    return [
        line
        for _, line in takewhile(lambda pair: pair[1].get("epoch") == pair[0], lines)
    ]


def read_trial(storage: Storage, index: int) -> Trial | None:
    """Read a trial with the results that it has so far.

    Args:
        storage: The directory of the sweep.
        index: The number of the trial.

    Returns:
        None if the values of the trial have not been drawn.
    """
    names = (f"{trial_name(index)}/{part}.json" for part in ("trial", "result"))
    tree, result = (read_mapping(storage, name) or {} for name in names)
    if "overrides" not in tree:
        return None
    epochs = read_epochs(storage, index)
    return Trial(
        index, tree["overrides"], epochs, result.get("status"), result.get("reason", "")
    )


def read_trials(storage: Storage) -> list[Trial]:
    """Read all trials whose values have been drawn, in the order of their numbers."""
    found = (
        read_trial(storage, int(name))
        for name in storage.list("trials")
        if name.isdigit()
    )
    return [trial for trial in found if trial is not None]


def ranking(trials: list[Trial]) -> list[Trial]:
    """Return the finished and stopped trials with a finite score, the best first.

    Trials with more epochs come first, because scores after different numbers of epochs
    cannot be compared.
    """
    sound = [
        t for t in trials if t.status in (FINISHED, STOPPED) and math.isfinite(t.score)
    ]
    return sorted(sound, key=lambda t: (-t.last_epoch, -t.score, t.index))


def best_trial(trials: list[Trial]) -> Trial | None:
    """Return the best of the finished trials, or None without any.

    Trial 0, the given configuration, wins unless another trial is better by more than
    one standard error (the rule of Breiman et al. 1984).
    """
    finished = [trial for trial in ranking(trials) if trial.status == FINISHED]
    if not finished:
        return None
    limit = finished[0].score - finished[0].standard_error
    return next(
        (trial for trial in finished if trial.index == 0 and trial.score >= limit),
        finished[0],
    )
