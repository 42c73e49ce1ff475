"""Choose the hyperparameters of each trial of a search (a sweep), for Ray Tune.

The result of each trial is recorded, too. The values of a random trial depend on the
space, the seed and its number only. A sweep that was ended at any moment, or is given
more trials, therefore continues as if it had never stopped. Other searchers are told
the earlier results. Trial 0 is always the given configuration, so that the winner is
compared with it.
"""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ray import tune as ray_tune
from ray.tune import Stopper
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
)
from ray.tune.search import Searcher

from tune import records, spaces
from tune.records import FAILED, FINISHED, STOPPED, Trial
from tune.spaces import Space
from tune.trial import SweepOptions
from uno.data.files import Storage
from uno.data.output import read_mapping
from uno.errors import ConfigError, StorageError, one_line
from uno.imports import import_object
from uno.session.console import print_line


class OtherSearcher:
    """A searcher of Ray Tune, such as Optuna's, that is asked for the values of trials.

    It is TPE of Optuna, or the searcher that the ``package.module:factory`` of
    ``--search`` returns. For a setting with a list of choices, the searcher sees the
    position in the list instead of the choice, because neighboring choices are alike.
    If several trials run at a time, its values depend on the order in which trials end.

    Args:
        name: The value of ``--search``: ``optuna`` or ``package.module:factory``.
        space: The search space.
        seed: The seed of Optuna.

    Raises:
        ConfigError: The searcher cannot be made, or cannot search this space.
    """

    def __init__(self, name: str, space: Space, seed: int) -> None:
        self._name, self._domains = name, {domain.key: domain for domain in space}
        self._asked, self._said = set[str](), False
        problem = f"--search {name}"
        try:
            self._searcher = (
                _optuna_searcher(seed)
                if name == "optuna"
                else import_object("--search", name)()
            )
            if not isinstance(self._searcher, Searcher):
                kind = type(self._searcher).__name__
                raise ConfigError(
                    f"{problem} returns {kind}, not a ray.tune.search.Searcher"
                )
            drawn = {
                key: _ray_distribution(domain) for key, domain in self._domains.items()
            }
            if not self._searcher.set_search_properties("score", "max", drawn):
                own = "a space of its own; leave it, metric and mode to uno tune"
                raise ConfigError(f"{problem} returns a searcher that has {own}")
        except ConfigError:
            raise
        # For example, a package is missing, or the searcher does not support a domain.
        except Exception as error:
            raise ConfigError(
                f"{problem}: {one_line(error) or type(error).__name__}"
            ) from None

    def values(self, index: int) -> dict[str, Any] | str | None:
        """Return the values that the searcher chooses for a new trial, by dotted key.

        The searcher is one of Ray Tune, such as Optuna's. It learns later how this
        trial ends.

        Args:
            index: The number of the trial.

        Returns:
            The values; None if the searcher has no values now, and the constant
            ``Searcher.FINISHED`` of Ray Tune if it will never have any again.
        """
        found = self._searcher.suggest(str(index))
        if found is None or found == Searcher.FINISHED:
            return found
        self._asked.add(str(index))
        return {
            key: _value_of_number(domain, found[key])
            for key, domain in self._domains.items()
        }

    def report(self, index: int, result: dict[str, Any]) -> None:
        """Tell the searcher the score of one epoch of a trial that goes on.

        Nothing is told of a trial for which the searcher did not choose the values.

        Args:
            index: The number of the trial.
            result: Ray Tune's result of the epoch, with ``score``.
        """
        if str(index) in self._asked:
            self._searcher.on_trial_result(str(index), result)

    def tell(self, trial: Trial) -> None:
        """Tell the searcher that a trial has ended, with its score or its failure.

        A trial for which the searcher did not choose the values is added to the
        searcher's data if the search space contains these values. If the searcher
        cannot do that, a note is printed once.

        Args:
            trial: The trial, with its values, status and score.
        """
        failed = trial.status == FAILED or not math.isfinite(trial.score)
        if (name := str(trial.index)) in self._asked:
            self._asked.remove(name)
            result = (
                None
                if failed
                else {"score": trial.score, "training_iteration": trial.last_epoch}
            )
            return self._searcher.on_trial_complete(name, result, error=failed)
        with suppress(ValueError, TypeError):  # the values are outside the space
            point = {
                key: (
                    domain.choices.index(spaces.frozen(trial.overrides[key]))
                    if domain.choices
                    else trial.overrides[key]
                )
                for key, domain in self._domains.items()
            }
            try:
                self._searcher.add_evaluated_point(
                    point, math.nan if failed else trial.score, error=failed
                )
            except NotImplementedError:
                if not self._said:
                    print_line(
                        f"note: --search {self._name} cannot be told of trials that it"
                        " did not draw"
                    )
                self._said = True


def _optuna_searcher(seed: int) -> Searcher:
    """Return Ray Tune's searcher for the TPE sampler of Optuna.

    Args:
        seed: The seed of the sampler.

    Raises:
        ConfigError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise ConfigError("--search optuna needs: pip install optuna") from None
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return OptunaSearch(
        sampler=optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=5, constant_liar=True
        )
    )


def _ray_distribution(domain: spaces.Domain) -> Any:
    """Return Ray Tune's distribution for the values of one searched setting.

    Args:
        domain: The values that the setting may take, choices or a range.

    Returns:
        For a range, a uniform distribution on its scale: of numbers, their logarithms
        or whole numbers. For choices, a uniform distribution of their positions, 0 to
        the number of choices minus 1.
    """
    low, high = (0, len(domain.choices) - 1) if domain.choices else domain.ends
    if domain.choices or domain.scale == "int":
        return ray_tune.randint(low, high + 1)
    return (ray_tune.loguniform if domain.scale == "log" else ray_tune.uniform)(
        low, high
    )


def _value_of_number(domain: spaces.Domain, number: Any) -> Any:
    """Return the value of a setting for the number that a searcher has chosen.

    The number was drawn from the distribution of :func:`_ray_distribution`.

    Args:
        domain: The values that the setting may take.
        number: A value of the range, or the position of a choice.
    """
    if domain.choices:
        return domain.choices[int(number)]
    return int(number) if domain.scale == "int" else float(number)


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
        own = options.search in ("random", "grid")
        self._asked = (
            None
            if own
            else OtherSearcher(options.search, options.space, options.config.seed)
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
            if self._asked is not None and trial.status:
                self._asked.tell(trial)

    def set_search_properties(
        self, metric: Any, mode: Any, config: Any, **spec: Any
    ) -> bool:
        """Accept the search properties that Ray Tune passes, without using them.

        Returns:
            True, which tells Ray Tune that they were accepted.
        """
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Return the next trial to start, as Ray Tune's configuration of it.

        The hyperparameter values of a new trial are chosen and written to its
        ``trial.json``. A trial that was begun by an earlier command keeps its values.

        Args:
            trial_id: Ray Tune's id for the trial.

        Returns:
            ``{"index": number of the trial}``; None if the searcher of ``--search`` has
            no values for the trial now; ``Searcher.FINISHED``, a constant of Ray Tune,
            if no trial is left or that searcher will have no values again.
        """
        if not self.missing:
            return Searcher.FINISHED
        index = self.missing[0]
        name = records.trial_name(index)
        if index not in self._begun:
            overrides = self._values(index)
            if not isinstance(overrides, dict):
                return overrides
            self._storage.write(
                f"{name}/trial.json",
                json.dumps({"overrides": overrides}, indent=1).encode(),
            )
        self._storage.delete(f"{name}/failure.json")
        self._running[trial_id] = self.missing.pop(0)
        return {"index": index}

    def values_drawn(self) -> list[dict[str, Any]]:
        """Return the values of trials to run that are known before any of them runs.

        The trials to run are those without a result. In a random or grid search the
        values of all of them are known. With another searcher, such as Optuna's, they
        are known of trial 0 and of the trials that an earlier command has begun.

        Returns:
            For each such trial its values by dotted key.
        """
        begun = [self._begun[i].overrides for i in self.missing if i in self._begun]
        new = [i for i in self.missing if i not in self._begun]
        drawn = (self._values(i) for i in new if i == 0 or self._asked is None)
        return begun + [values for values in drawn if isinstance(values, dict)]

    def _values(self, index: int) -> dict[str, Any] | str | None:
        """Return the hyperparameter values of a new trial, by dotted key.

        Trial 0 has the values of the given configuration. The others are drawn at
        random, taken from the grid, or chosen by another searcher, as ``--search``
        says.

        Args:
            index: The number of the trial.

        Returns:
            The values; None or ``Searcher.FINISHED`` if that other searcher has none,
            see :meth:`OtherSearcher.values`.
        """
        if index == 0:
            return self._given
        if self._asked is not None:
            return self._asked.values(index)
        space, seed = self._options.space, self._options.config.seed
        return (
            self._points[index - 1] if self._points else spaces.draw(space, seed, index)
        )

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Pass the score of one epoch on to the searcher of ``--search``, if any.

        A random or grid search has no such searcher, and nothing is done.

        Args:
            trial_id: Ray Tune's id of the trial.
            result: Ray Tune's result of the epoch, with ``score``.
        """
        if self._asked is not None and trial_id in self._running:
            self._asked.report(self._running[trial_id], result)

    def on_trial_complete(
        self, trial_id: str, result: Any = None, error: bool = False
    ) -> None:
        """Record how a trial ended, when Ray Tune says so.

        The trial's ``result.json`` is written with the status ``finished``, ``stopped``
        (early stopping ended it) or ``failed``, its checkpoints are deleted, and the
        searcher of ``--search`` is told. Nothing is recorded of a trial that was
        interrupted, because the sweep was asked to stop. If a trial could not write its
        files, nothing is recorded of it, and no further trial is started.

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
            if "-seed" in entry or entry.startswith("pretrain-"):
                self._storage.delete(f"{name}/{entry}")
        if self._asked is not None:
            self._asked.tell(trial)
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


class EarlierTrial:
    """A trial that an earlier command has run, as Ray Tune's schedulers take it.

    It has only the attribute that they read.

    Args:
        index: The number of the trial.
    """

    def __init__(self, index: int) -> None:
        self.trial_id = f"earlier-{index}"


def scheduler(
    options: SweepOptions, num_epochs: int, ended: Sequence[Trial]
) -> FIFOScheduler:
    """Return Ray Tune's scheduler for the early stopping of a sweep.

    It is ASHA (Li et al., 2020) if ``options.asha`` is set, the median rule (Golovin et
    al., 2017) if ``options.median`` is set, and else one that stops no trial. It is
    told the scores of the epochs of all trials that have ended without failing.

    Args:
        options: The options of the sweep, with the rule and its grace period, the
            number of epochs before a trial may be stopped.
        num_epochs: The number of epochs of a trial that is not stopped.
        ended: The trials that an earlier command has ended.
    """
    by: dict[str, Any] = {"time_attr": "epoch", "metric": "score", "mode": "max"}
    rule = options.asha or options.median
    if rule is None:
        return FIFOScheduler()
    grace = min(rule["grace_epochs"], num_epochs)
    found: Any
    if options.asha:
        found = AsyncHyperBandScheduler(
            **by,
            max_t=num_epochs,
            grace_period=grace,
            reduction_factor=rule["reduction"],
        )
    else:  # no trial is paused, because it would report its epochs again
        found = MedianStoppingRule(**by, grace_period=grace, min_time_slice=math.inf)
    for trial in (trial for trial in ended if trial.status != FAILED and trial.epochs):
        past: Any = EarlierTrial(trial.index)
        found.on_trial_add(None, past)
        for epoch in trial.epochs:
            found.on_trial_result(
                None, past, {"epoch": epoch["epoch"], "score": epoch["score"]}
            )
        found.on_trial_remove(None, past)
    return found
