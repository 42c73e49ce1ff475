"""Choose the hyperparameters of each trial of a search (a sweep), for Ray Tune.

The result of each trial is recorded here, too. The values of a random trial depend on
the space, the seed and its number only. A sweep that was ended at any moment, or is
given more trials, therefore continues as if it had never stopped. Optuna is told the
earlier results. Trial 0 is always the given configuration, so that the winner is
compared with it.
"""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from ray.tune import Stopper
from ray.tune.schedulers import AsyncHyperBandScheduler, FIFOScheduler
from ray.tune.search import Searcher

from tune import records, spaces
from tune.records import FAILED, FINISHED, STOPPED, Trial
from tune.spaces import Space
from tune.trial import SweepOptions
from uno.data.files import Storage
from uno.data.output import read_mapping
from uno.errors import StorageError

REDUCTION = 3  # ASHA: at each rung one of this many trials continues


class OptunaSampler:
    """The TPE sampler of Optuna, which learns from the scores of earlier trials.

    For a setting with a list of choices, Optuna sees the position in the list instead
    of the choice, because neighboring choices are alike. If several trials run at a
    time, the values depend on the order in which trials end.

    Args:
        space: The search space.
        seed: The seed of the sampler.
    """

    def __init__(self, space: Space, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=5, constant_liar=True
        )
        self.study = optuna.create_study(sampler=sampler, direction="maximize")
        self._domains = {domain.key: domain for domain in space}
        self._distributions = {
            key: _optuna_distribution(domain) for key, domain in self._domains.items()
        }
        self._asked = dict[int, Any]()

    def draw(self, index: int) -> dict[str, Any]:
        """Return the values of a new trial by dotted key.

        Optuna chooses them by the scores of the trials that have ended, and at random
        for the first ones. They are remembered under the number for :meth:`tell`.

        Args:
            index: The number of the trial.
        """
        trial = self.study.ask(self._distributions)
        self._asked[index] = trial
        return {
            key: domain.choices[trial.params[key]]
            if domain.choices
            else trial.params[key]
            for key, domain in self._domains.items()
        }

    def tell(self, trial: Trial) -> None:
        """Tell Optuna that a trial has ended, with its score or its failure.

        A trial without a finite score counts as failed. A trial whose values Optuna has
        not drawn is added to its data, if the search space contains these values, and
        is otherwise ignored.

        Args:
            trial: The trial, with its values, status and score.
        """
        import optuna

        failed = trial.status == FAILED or not math.isfinite(trial.score)
        states = optuna.trial.TrialState
        state = states.FAIL if failed else states.COMPLETE
        score = None if failed else trial.score
        if trial.index in self._asked:
            self.study.tell(self._asked.pop(trial.index), score, state=state)
            return
        with suppress(ValueError):  # the values are outside the space
            params = {
                key: domain.choices.index(spaces.frozen(trial.overrides[key]))
                if domain.choices
                else trial.overrides[key]
                for key, domain in self._domains.items()
            }
            past = optuna.trial.create_trial(
                params=params,
                distributions=self._distributions,
                value=score,
                state=state,
            )
            self.study.add_trial(past)


def _optuna_distribution(domain: spaces.Domain) -> Any:
    """Return Optuna's distribution for the values of one searched setting.

    Args:
        domain: The values that the setting may take, choices or a range.

    Returns:
        For a range, a uniform distribution on its scale: of numbers, their logarithms
        or whole numbers. For choices, a uniform distribution of their positions, 0 to
        the number of choices minus 1.
    """
    from optuna.distributions import FloatDistribution, IntDistribution

    if domain.choices:
        return IntDistribution(0, len(domain.choices) - 1)
    low, high = domain.ends
    if domain.scale == "int":
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log=domain.scale == "log")


class SweepSearcher(Searcher):
    """The searcher that hands the trials without a result to Ray Tune.

    It also writes the file ``result.json`` of each trial that ends.

    Args:
        storage: The directory of the sweep.
        options: The options of the sweep.
        num_epochs: The number of epochs of a trial.
        on_end: Is called with each trial that has ended.
        stopping: Returns whether the sweep was asked to stop. Trials that end then were
            interrupted, and get no result.

    Attributes:
        missing: The numbers of the trials without a result that have not been started
            yet.
        storage_error: Why a trial could not write its files, or None. No further trial
            is then started.
    """

    def __init__(
        self,
        storage: Storage,
        options: SweepOptions,
        num_epochs: int,
        on_end: Callable[[Trial], None],
        stopping: Callable[[], bool],
    ) -> None:
        super().__init__(metric="score", mode="max")
        self._storage, self._options, self._num_epochs = storage, options, num_epochs
        self._on_end, self._stopping = on_end, stopping
        self._optuna = (
            OptunaSampler(options.space, options.config.seed)
            if options.search == "optuna"
            else None
        )
        self._given = spaces.current(options.space, options.config)
        self._points = (
            spaces.grid(options.space, self._given) if options.search == "grid" else []
        )
        begun = {trial.index: trial for trial in records.read_trials(storage)}
        self._begun, self._running = begun, dict[str, int]()
        self.storage_error: str | None = None
        self.missing = [
            i for i in range(options.trials) if i not in begun or not begun[i].status
        ]
        for trial in begun.values():
            if self._optuna is not None and trial.status:
                self._optuna.tell(trial)

    def set_search_properties(
        self, metric: Any, mode: Any, config: Any, **spec: Any
    ) -> bool:
        """Accept the search properties that Ray Tune passes, without using them.

        Returns:
            True, which tells Ray Tune that they were accepted.
        """
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        """Return the next trial to start, as Ray Tune's configuration of it.

        It is taken from the list ``missing``. The hyperparameter values of a new trial
        are chosen and written to its ``trial.json``. A trial that was begun by an
        earlier command keeps its values. A ``failure.json`` of the trial is deleted.

        Args:
            trial_id: Ray Tune's id for the trial.

        Returns:
            ``{"index": number of the trial}``, or ``Searcher.FINISHED``, a constant of
            Ray Tune, if no trial is left.
        """
        if not self.missing:
            return Searcher.FINISHED
        index = self.missing.pop(0)
        name = records.trial_name(index)
        if index not in self._begun:
            self._storage.write(
                f"{name}/trial.json",
                json.dumps({"overrides": self._values(index)}, indent=1).encode(),
            )
        self._storage.delete(f"{name}/failure.json")
        self._running[trial_id] = index
        return {"index": index}

    def values_drawn(self) -> list[dict[str, Any]]:
        """Return the values of trials to run that are known before any of them runs.

        The trials to run are those without a result. In a random or grid search the
        values of all of them are known. With Optuna they are known of trial 0 and of
        the trials that an earlier command has begun.

        Returns:
            For each such trial its values by dotted key, first those of the trials
            that an earlier command has begun.
        """
        begun = [self._begun[i].overrides for i in self.missing if i in self._begun]
        new = [i for i in self.missing if i not in self._begun]
        known = [i for i in new if i == 0 or self._optuna is None]
        return begun + [self._values(i) for i in known]

    def _values(self, index: int) -> dict[str, Any]:
        """Return the hyperparameter values of a new trial, by dotted key.

        Trial 0 has the values of the given configuration. The others are drawn at
        random, taken from the grid, or chosen by Optuna, as ``--search`` says.

        Args:
            index: The number of the trial.
        """
        if index == 0:
            return self._given
        if self._optuna is not None:
            return self._optuna.draw(index)
        if self._points:
            return self._points[index - 1]
        return spaces.draw(self._options.space, self._options.config.seed, index)

    def on_trial_complete(
        self, trial_id: str, result: Any = None, error: bool = False
    ) -> None:
        """Record how a trial ended, when Ray Tune says so.

        The trial's ``result.json`` is written with the status ``finished``, ``stopped``
        (early stopping ended it) or ``failed``, its checkpoints are deleted, Optuna is
        told, if it chooses the values, and ``on_end`` is called. A trial has failed if
        it has written a ``failure.json``, or if its process died although the sweep was
        not asked to stop. Nothing is recorded of a trial that was interrupted, because
        the sweep was asked to stop, or that has trained no epoch. If a trial could not
        write its files, nothing is recorded of it, ``storage_error`` is set, and no
        further trial is started.

        Args:
            trial_id: Ray Tune's id of the trial.
            result: Ray Tune's last result, which is not used.
            error: Whether the trial ended with an error.
        """
        if trial_id not in self._running:
            return
        index = self._running.pop(trial_id)
        name, trial = (
            records.trial_name(index),
            records.read_trial(self._storage, index),
        )
        assert trial is not None
        failure = read_mapping(self._storage, f"{name}/failure.json") or {}
        # The storage failed, and not the configuration.
        if failure.get("kind") == StorageError.__name__:
            self.storage_error = failure["reason"]
            self.missing.clear()
            return
        complete = trial.last_epoch >= self._num_epochs
        if failure or (error and not self._stopping()):
            trial.status, trial.reason = (
                FAILED,
                failure.get("reason", "the process died (out of memory?)"),
            )
        elif error or (not complete and (self._stopping() or not trial.epochs)):
            return
        else:
            trial.status = FINISHED if complete else STOPPED
        result = {"status": trial.status, "epochs": trial.last_epoch}
        result |= {"score": trial.score} if trial.epochs else {}
        result |= {"reason": trial.reason} if trial.reason else {}
        self._storage.write(
            f"{name}/result.json", json.dumps(result, indent=1).encode()
        )
        # Checkpoints of a trial that has ended are not needed.
        for entry in self._storage.list(name):
            if entry.startswith(("fold", "real", "pretrain-")):
                self._storage.delete(f"{name}/{entry}")
        if self._optuna is not None:
            self._optuna.tell(trial)
        self._on_end(trial)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Save nothing, because the files in the sweep's directory are all state.

        Args:
            checkpoint_path: The path that Ray Tune gives, which is not used.
        """

    restore = save


class Interruption(Stopper):
    """A stopper of Ray Tune that ends all trials once the user has asked to stop.

    Args:
        stopping: Returns whether the sweep was asked to stop.
    """

    def __init__(self, stopping: Callable[[], bool]) -> None:
        self._stopping = stopping

    def __call__(self, *trial: Any) -> bool:
        """Return whether to end a trial: whether the sweep was asked to stop.

        Args:
            *trial: Ray Tune's id and result of the trial, which are not used.
        """
        return self._stopping()

    stop_all = __call__
    __getstate__ = SweepSearcher.__getstate__


def scheduler(
    options: SweepOptions, num_epochs: int, ended: Sequence[Trial]
) -> FIFOScheduler:
    """Return Ray Tune's scheduler for the early stopping of a sweep.

    It is ASHA (Li et al., 2020), or one that stops no trial. ASHA is told the scores of
    the epochs of all trials that have ended without failing.

    Args:
        options: The options of the sweep.
        num_epochs: The number of epochs of a trial that is not stopped.
        ended: The trials that an earlier command has ended.
    """
    if options.scheduler == "none":
        return FIFOScheduler()
    asha = AsyncHyperBandScheduler(
        time_attr="epoch",
        metric="score",
        mode="max",
        max_t=num_epochs,
        grace_period=options.grace_period(num_epochs),
        reduction_factor=REDUCTION,
    )
    for trial in (trial for trial in ended if trial.status != FAILED and trial.epochs):
        # Schedulers read no other attribute of a trial.
        past: Any = SimpleNamespace(trial_id=f"earlier-{trial.index}")
        asha.on_trial_add(None, past)
        for epoch in trial.epochs:
            asha.on_trial_result(
                None, past, {"epoch": epoch["epoch"], "score": epoch["score"]}
            )
        asha.on_trial_remove(None, past)
    return asha
