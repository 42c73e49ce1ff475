"""``uno tune``: its own few options, and those of ``uno discover`` for the configuration around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from pipelines import options
from pipelines.options import PRINT_CONFIG, Argument, Command, switch
from tune import spaces
from tune.score import FOLDS, SCORES
from tune.sweep import SweepOptions, run_sweep
from uno.config import about, dump_yaml

TUNE = Command(
    "tune",
    {
        **PRINT_CONFIG,
        "--space": Argument(f"{', '.join(spaces.SPACES)}, or a YAML file.", str, "uno"),
        "--trials": Argument("Configurations to try.", PositiveInt, 16),
        "--search": Argument("How they are chosen.", Literal["random", "optuna"], "random"),
        "--score": Argument(
            "What trials are compared by: folds (known classes hidden in turn), loss, agreement; oracle uses "
            "the true labels and is for research only.",
            Literal[*SCORES],
            FOLDS,
        ),
        "--folds": Argument("Sets of hidden classes in each trial.", PositiveInt, 2),
        "--hide": Argument("Classes a fold hides; default: the novel share of all classes.", int | None),
        "--seeds": Argument("Runs of each configuration; the score is their mean.", PositiveInt, 1),
        "--concurrent": Argument("Trials at a time; default: all the cluster holds.", PositiveInt | None),
        "--grace-epochs": Argument(
            "Epochs before a trial may be stopped; default: a sixth.", PositiveInt | None
        ),
        "--reduction": Argument("At each rung one of so many goes on.", Annotated[int, Field(ge=2)], 3),
        "--no-stopping": switch("Run every trial to its last epoch."),
    },
    output="runs/tune-{preset}-seed{seed}",
    text="""
The other options make the configuration that is searched around, as for uno discover. Trial 0 is that
configuration as it is. The same command again continues a sweep that was stopped or killed; a larger
--trials adds trials. `uno discover --config DIR/best.yaml` runs the winner.
""",
)


def parse(argv: Sequence[str]) -> tuple[SweepOptions, bool]:
    """Options of ``uno tune ARGV...``, and whether only the configuration is to be printed.

    Raises:
        ConfigError: an unknown option, a value out of range, or a space that does not fit the schema.
        SystemExit: after ``--help``.
    """
    parsed = options.parse(argv, TUNE)
    own, config = parsed.own, parsed.config
    grace = own.grace_epochs or max(1, config.discover.epochs // 6)
    asha = None if own.no_stopping else {"grace_epochs": grace, "reduction": own.reduction}
    given = {key: value for key, value in parsed.given.items() if about(key).scope != "place"}
    given |= {"preset": config.preset, "recipe": config.recipe}
    sweep = SweepOptions(
        config, given, spaces.load_space(own.space, config), own.space, own.trials, own.search, own.score,
        own.folds, own.hide, own.seeds, own.concurrent, asha,
    )  # fmt: skip
    return sweep, own.print_config


def main(argv: Sequence[str]) -> int:
    """Run or continue a sweep; returns the exit code."""
    sweep, print_config = parse(argv)
    if print_config:
        print(dump_yaml(sweep.config), end="")
        return 0
    return run_sweep(sweep)
