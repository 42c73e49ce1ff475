"""The sweep's directory: the only place that knows its file names.

::

    sweep.yaml                        what is searched and how: the same command continues only what matches
    features.npy                      features larger than memory, which trials map; deleted at the end
    trials/0007/trial.json            the searched values of a trial
    trials/0007/epochs.jsonl          one line an epoch, written by the trial
    trials/0007/failure.json          why it failed, written by the trial, if it still could
    trials/0007/result.json           written last, by the driver: finished, stopped or failed
    trials/0007/<fold>-seed<n>/       its checkpoints; deleted with the result
    pretrain/<hash>/                  a pretraining, shared by the trials that do not change it
"""  # noqa: E501

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from uno.config import parse_yaml
from uno.data.files import Storage
from uno.data.output import find_mapping
from uno.errors import ConfigError
from uno.limits import MAX_STATE_BYTES
from uno.runs.journal import read_journal
from uno.runs.lock import ClaimedStorage

SETTINGS = "sweep.yaml"
FEATURES_FILE = "features.npy"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"


class PartStorage(Storage):
    """A directory below a sweep's, writable as long as the sweep's claim holds."""

    def __init__(self, whole: ClaimedStorage, name: str) -> None:
        super().__init__(whole.below(name))
        self._whole = whole

    def check(self) -> None:
        """Raise an error unless the sweep's claim holds."""
        self._whole.check()


@dataclass
class Trial:
    """One configuration: its searched values, a dict per epoch, and how it ended
    (None: not yet).
    """

    index: int
    overrides: dict[str, Any]
    epochs: list[dict[str, Any]] = field(default_factory=list)
    status: str | None = None
    reason: str = ""

    @property
    def _last(self) -> dict[str, Any]:
        return self.epochs[-1] if self.epochs else {"epoch": 0, "score": math.nan}

    @property
    def last_epoch(self) -> int:
        """Epochs trained and scored."""
        return int(self._last["epoch"])

    @property
    def score(self) -> float:
        """Score after the last epoch; NaN where there is none."""
        return float(self._last["score"])

    @property
    def spread(self) -> float:
        """Standard deviation of the score over seeds; NaN with one seed."""
        return float(self._last.get("spread", math.nan))

    @property
    def standard_error(self) -> float:
        """Standard error of the score, with one row right and one wrong added (Agresti
        & Coull 1998); 0 where the score is no share of rows.
        """
        rows = self._last.get("rows", 0)
        share = (self.score * rows + 1) / (rows + 2)
        return math.sqrt(share * (1 - share) / rows) if rows else 0.0


def trial_name(index: int) -> str:
    """Directory of a trial."""
    return f"trials/{index:04d}"


def read_settings(storage: Storage) -> Mapping[str, Any]:
    """``sweep.yaml``; ConfigError where there is none, or it is damaged."""
    if not storage.exists(SETTINGS):
        raise ConfigError(
            f"{storage.uri} is not the directory of a sweep: it has no {SETTINGS}"
        )
    return parse_yaml(storage.read(SETTINGS, MAX_STATE_BYTES), storage.path(SETTINGS))


def read_epochs(storage: Storage, index: int) -> list[dict[str, Any]]:
    """The epochs a trial has scored, 1, 2, 3, ...; a line cut short by a kill ends
    them.
    """
    lines = enumerate(
        read_journal(storage, f"{trial_name(index)}/epochs.jsonl"), start=1
    )
    return [
        line
        for _, line in takewhile(lambda pair: pair[1].get("epoch") == pair[0], lines)
    ]


def read_trial(storage: Storage, index: int) -> Trial | None:
    """A trial whose values have been drawn, as far as it got."""
    names = (f"{trial_name(index)}/{part}.json" for part in ("trial", "result"))
    tree, result = (find_mapping(storage, name) or {} for name in names)
    if "overrides" not in tree:
        return None
    epochs = read_epochs(storage, index)
    return Trial(
        index, tree["overrides"], epochs, result.get("status"), result.get("reason", "")
    )


def read_trials(storage: Storage) -> list[Trial]:
    """All trials whose values have been drawn, by index."""
    found = (
        read_trial(storage, int(name))
        for name in storage.list("trials")
        if name.isdigit()
    )
    return [trial for trial in found if trial is not None]


def ranking(trials: list[Trial]) -> list[Trial]:
    """Best first, without failed ones: by epochs survived, as scores of different
    epochs do not compare.
    """
    sound = [
        t for t in trials if t.status in (FINISHED, STOPPED) and math.isfinite(t.score)
    ]
    return sorted(sound, key=lambda t: (-t.last_epoch, -t.score, t.index))


def best_trial(trials: list[Trial]) -> Trial | None:
    """The best of the finished trials. Trial 0, the given configuration, wins unless
    another is better by more than a standard error (the rule of Breiman et al. 1984).
    """
    finished = [trial for trial in ranking(trials) if trial.status == FINISHED]
    if not finished:
        return None
    limit = finished[0].score - finished[0].standard_error
    return next(
        (trial for trial in finished if trial.index == 0 and trial.score >= limit),
        finished[0],
    )
