"""Read the files that a hyperparameter search (a sweep of ``uno tune``) has written.

Only this module knows the layout of the directory of a sweep::

    sweep.yaml                   what is searched and how: the same command continues
                                 only a sweep that matches
    trials/0007/trial.json       the searched values of a trial
    trials/0007/epochs.jsonl     one line an epoch, written by the trial
    trials/0007/failure.json     why it failed, written by the trial if it still could
    trials/0007/result.json      written last, by the driver: finished, stopped or
                                 failed
    trials/0007/logged.json      how many of its epochs were sent, and to which loggers
    trials/0007/<fold>/          its checkpoints; deleted with the result
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

SETTINGS, LOGGED = "sweep.yaml", "logged.json"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"


class PartStorage(Storage):
    """A folder in the directory of a sweep, writable while the sweep's lock is held.

    Args:
        whole: The directory of the sweep, with the token of its lock.
        name: The path of the folder, relative to the directory of the sweep.
    """

    def __init__(self, whole: ClaimedStorage, name: str) -> None:
        super().__init__(whole.below(name))
        self._whole = whole

    def check(self) -> None:
        """Check before a write that the lock of the sweep is still held.

        Raises:
            StorageError: The lock file of the sweep is missing, or another command has
                taken the lock.
        """
        self._whole.check()


@dataclass
class Trial:
    """One configuration that a sweep trains and scores, and its results so far.

    Attributes:
        index: The number of the trial, from 0. Trial 0 is the configuration that the
            user gave.
        overrides: The values of the searched settings, by dotted key such as
            ``objective.epsilon``.
        epochs: The results of each epoch in order, the lines of ``epochs.jsonl``:
            ``epoch`` from 1, ``score``, ``loss`` and more by name.
        status: ``finished`` (all epochs are trained), ``stopped`` (early stopping ended
            it) or ``failed``; None if it has not ended.
        reason: Why the trial failed; "" if it has not.
    """

    index: int
    overrides: dict[str, Any]
    epochs: list[dict[str, Any]] = field(default_factory=list)
    status: str | None = None
    reason: str = ""

    @property
    def _last(self) -> dict[str, Any]:
        """The results of the last epoch that was trained and scored, by name.

        If there is none yet, these are ``epoch`` 0 and ``score`` NaN.
        """
        return self.epochs[-1] if self.epochs else {"epoch": 0, "score": math.nan}

    @property
    def last_epoch(self) -> int:
        """The number of epochs that this trial has trained and scored, 0 if none."""
        return int(self._last["epoch"])

    @property
    def score(self) -> float:
        """The score of this trial after its last epoch, the mean over folds.

        A higher score is better. It is NaN if no epoch has ended.
        """
        return float(self._last["score"])

    @property
    def standard_error(self) -> float:
        """The binomial standard error of this trial's score after its last epoch.

        The score is an accuracy or an agreement, and is taken as the share of right
        rows among the ``rows`` rows that were scored. One right and one wrong row are
        added, so that the error of a perfect score is not 0 (Agresti & Coull 1998). The
        error is 0 before the first epoch has ended.
        """
        rows = self._last.get("rows", 0)
        share = (self.score * rows + 1) / (rows + 2)
        return math.sqrt(share * (1 - share) / rows) if rows else 0.0


def trial_name(index: int) -> str:
    """Return the path of a trial's folder in the directory of a sweep: ``trials/0007``.

    Args:
        index: The number of the trial.
    """
    return f"trials/{index:04d}"


NEEDED = ("space", "epochs", "config")  # names in the settings of every sweep


def read_settings(storage: Storage) -> Mapping[str, Any]:
    """Read ``sweep.yaml``, the settings with which a sweep was begun.

    Args:
        storage: The directory of the sweep.

    Returns:
        The content of the file by name: ``score`` (the name of the score), ``search``
        (how values are chosen), ``space`` (the search space), ``config`` (the searched
        configuration), ``epochs`` (of a trial) and more.

    Raises:
        ConfigError: There is no such file, it is damaged, or it is of something else.
    """
    if not storage.exists(SETTINGS):
        raise ConfigError(
            f"{storage.uri} is not the directory of a sweep: it has no {SETTINGS}"
        )
    path = storage.path(SETTINGS)
    settings = parse_yaml(storage.read(SETTINGS, MAX_STATE_BYTES), path)
    if lacking := [name for name in NEEDED if name not in settings]:
        raise ConfigError(
            f"{path} is not of a sweep of uno tune, or is damaged: it has no"
            f" {', '.join(lacking)}"
        )
    return settings


def read_epochs(storage: Storage, index: int) -> list[dict[str, Any]]:
    """Read the results of each epoch of a trial from its file ``epochs.jsonl``.

    Args:
        storage: The directory of the sweep.
        index: The number of the trial.

    Returns:
        The results by name (``epoch``, ``score``, ``loss`` and more) of each of the
        epochs 1, 2, 3 and so on. The list ends before the first line that is damaged or
        out of order. It is empty if there is no such file.
    """
    lines = enumerate(
        read_journal(storage, f"{trial_name(index)}/epochs.jsonl"), start=1
    )
    return [
        line
        for _, line in takewhile(lambda pair: pair[1].get("epoch") == pair[0], lines)
    ]


def read_trial(storage: Storage, index: int) -> Trial | None:
    """Read a trial of a sweep with the results that it has so far.

    Args:
        storage: The directory of the sweep.
        index: The number of the trial.

    Returns:
        The trial: its number, its hyperparameter values, the results of its epochs, and
        how it ended. None if no values have been chosen for it yet, or the file that
        holds them is damaged. A damaged ``result.json`` counts as missing.
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
    """Read all trials of a sweep that have values, in the order of their numbers.

    Trials whose hyperparameter values have not been chosen yet are left out.

    Args:
        storage: The directory of the sweep.
    """
    numbers = sorted(int(name) for name in storage.list("trials") if name.isdigit())
    found = (read_trial(storage, number) for number in numbers)
    return [trial for trial in found if trial is not None]


def ranking(trials: list[Trial]) -> list[Trial]:
    """Return the finished and early-stopped trials with a finite score, the best first.

    A trial with more epochs comes before one with fewer, because scores after different
    numbers of epochs cannot be compared. With as many epochs, the higher score after
    the last epoch comes first, and with equal scores the lower number. Failed and
    unfinished trials are left out.

    Args:
        trials: The trials of a sweep, in any order. The list is not changed.
    """
    sound = [
        t for t in trials if t.status in (FINISHED, STOPPED) and math.isfinite(t.score)
    ]
    return sorted(sound, key=lambda t: (-t.last_epoch, -t.score, t.index))


def best_trial(trials: list[Trial]) -> Trial | None:
    """Return the trial whose configuration a sweep recommends, or None.

    It is the trial with the highest score of those that have trained all epochs. But
    trial 0, the configuration that the user gave, is preferred if it has trained all
    epochs, too, and its score is at most one standard error of the highest score lower
    (the rule of Breiman et al. 1984).

    Args:
        trials: All trials of the sweep, in any order.

    Returns:
        The trial; None if no trial has trained all epochs with a finite score.
    """
    finished = [trial for trial in ranking(trials) if trial.status == FINISHED]
    if not finished:
        return None
    limit = finished[0].score - finished[0].standard_error
    return next(
        (trial for trial in finished if trial.index == 0 and trial.score >= limit),
        finished[0],
    )
