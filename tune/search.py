"""Which configuration comes next, and what became of the last one: Ray Tune's view of the sweep's directory.

Values of a random trial depend on (space, seed, index) alone, so a sweep that was killed, or is given more
trials, continues as if it had never stopped. Optuna is told what it has seen before. Trial 0 is always the
configuration as it was given, so that the winner is compared with what everybody would have used.
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
from uno.errors import ConfigError, StorageError


class OptunaSampler:
    """Optuna's TPE; with several trials at a time, reproducible only up to the order in which they end."""

    def __init__(self, space: Space, seed: int) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigError("--search optuna needs: pip install optuna") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._space, self._asked = optuna, space, dict[int, Any]()
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=5, constant_liar=True)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._distributions = {domain.key: self._distribution(domain) for domain in space}

    def values(self, index: int) -> dict[str, Any]:
        """Optuna's proposal for a new trial."""
        self._asked[index] = self._study.ask(self._distributions)
        params = self._asked[index].params
        return {d.key: d.choices[params[d.key]] if d.choices else params[d.key] for d in self._space}

    def tell(self, trial: Trial) -> None:
        """A trial ended; those of an earlier attempt are added, if the space holds their values."""
        states = self._optuna.trial.TrialState
        failed = trial.status == FAILED or not math.isfinite(trial.score)
        value, state = (None, states.FAIL) if failed else (trial.score, states.COMPLETE)
        if trial.index in self._asked:
            self._study.tell(self._asked.pop(trial.index), value, state)
            return
        params = dict(trial.overrides)
        with suppress(ValueError, TypeError):  # outside the space
            for domain in self._space:
                if domain.choices:
                    params[domain.key] = domain.choices.index(spaces.frozen(params[domain.key]))
            create, kinds = self._optuna.trial.create_trial, self._distributions
            self._study.add_trial(create(params=params, distributions=kinds, value=value, state=state))

    def _distribution(self, domain: spaces.Domain) -> Any:
        kinds = self._optuna.distributions
        if domain.choices or domain.scale == "int":  # choices in order: neighbors are alike
            return kinds.IntDistribution(*((0, len(domain.choices) - 1) if domain.choices else domain.ends))
        return kinds.FloatDistribution(*domain.ends, log=domain.scale == "log")


class SweepSearcher(Searcher):
    """Hands out the ``missing`` trials, those without a result, writes the result of each as it ends and
    calls ``on_end`` with it; while ``stopping``, trials that end were only interrupted.
    """

    def __init__(
        self, storage: Storage, options: SweepOptions, num_epochs: int, on_end: Callable[[Trial], None],
        stopping: Callable[[], bool],
    ) -> None:  # fmt: skip
        super().__init__(metric="score", mode="max")
        self._storage, self._options, self._num_epochs = storage, options, num_epochs
        self._on_end, self._stopping = on_end, stopping
        optuna = options.search == "optuna"
        self._sampler = OptunaSampler(options.space, options.config.seed) if optuna else None
        begun = {trial.index: trial for trial in records.read_trials(storage)}
        self._begun, self._running = begun.keys(), dict[str, int]()
        self.storage_error: str | None = None
        self.missing = [i for i in range(options.trials) if i not in begun or not begun[i].status]
        for trial in begun.values():
            if self._sampler is not None and trial.status:
                self._sampler.tell(trial)

    def set_search_properties(self, metric: Any, mode: Any, config: Any, **spec: Any) -> bool:
        """Nothing to set."""
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """The next trial without a result, with the values it was begun with, if it was."""
        if not self.missing:
            return Searcher.FINISHED
        index = self.missing.pop(0)
        name, options = records.trial_name(index), self._options
        self._storage.delete(f"{name}/failure.json")
        if index not in self._begun:
            drawn = spaces.draw(options.space, options.config.seed, index)
            drawn = self._sampler.values(index) if self._sampler and index else drawn
            overrides = drawn if index else spaces.current(options.space, options.config)
            self._storage.write(f"{name}/trial.json", json.dumps({"overrides": overrides}, indent=1).encode())
        self._running[trial_id] = index
        return {"index": index}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """Write ``result.json``: the trial is not run again."""
        if trial_id not in self._running:
            return
        index = self._running.pop(trial_id)
        name, trial = records.trial_name(index), records.read_trial(self._storage, index)
        assert trial is not None
        failure = records.read_json(self._storage, f"{name}/failure.json")
        if failure.get("kind") == StorageError.__name__:  # the disk's fault, not the configuration's
            self.storage_error = failure["reason"]
            self.missing.clear()
            return
        complete = trial.last_epoch >= self._num_epochs
        if failure or (error and not self._stopping()):
            trial.status, trial.reason = FAILED, failure.get("reason", "the process died (out of memory?)")
        elif error or (not complete and (self._stopping() or not trial.epochs)):
            return
        else:
            trial.status = FINISHED if complete else STOPPED
        result = {"status": trial.status, "epochs": trial.last_epoch}
        result |= {"score": trial.score} if trial.epochs else {}
        result |= {"reason": trial.reason} if trial.reason else {}
        self._storage.write(f"{name}/result.json", json.dumps(result, indent=1).encode())
        for entry in self._storage.list(name):  # checkpoints of a trial that has ended serve nobody
            if "-seed" in entry:
                self._storage.delete(f"{name}/{entry}")
        if self._sampler is not None:
            self._sampler.tell(trial)
        self._on_end(trial)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save or to restore: the sweep's directory is the state."""

    restore = save


class Interruption(Stopper):
    """Ends all trials once ``stopping`` says so."""

    def __init__(self, stopping: Callable[[], bool]) -> None:
        self._stopping = stopping

    def __call__(self, *trial: Any) -> bool:
        """Return whether to end a trial, or the sweep."""
        return self._stopping()

    stop_all = __call__
    __getstate__ = SweepSearcher.__getstate__


def scheduler(asha: dict[str, int] | None, num_epochs: int, ended: Sequence[Trial]) -> FIFOScheduler:
    """Asynchronous successive halving (Li et al., 2020), told of earlier trials; None: no stopping."""
    if asha is None:
        return FIFOScheduler()
    halving = AsyncHyperBandScheduler(
        time_attr="epoch", metric="score", mode="max", max_t=num_epochs,
        grace_period=min(asha["grace_epochs"], num_epochs), reduction_factor=asha["reduction"],
    )  # fmt: skip
    for trial in (trial for trial in ended if trial.status != FAILED and trial.epochs):
        past: Any = SimpleNamespace(trial_id=f"earlier-{trial.index}")
        halving.on_trial_add(None, past)
        for epoch in trial.epochs:
            halving.on_trial_result(None, past, {"epoch": epoch["epoch"], "score": epoch["score"]})
        halving.on_trial_remove(None, past)
    return halving
