"""Declare the command ``uno tune``, a hyperparameter search (a sweep), and its options.

:mod:`tune.driver` does the work. The two are apart so that ``--help`` does not import
PyTorch or Ray.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import PositiveInt

from pipelines.options import Argument, Command, parse, switch
from tune import FOLDS, SCORES, spaces

TUNE = Command(
    "tune",
    {
        "--report": switch(
            "Write and print the report of the sweep in --output, as far as it got, and"
            " stop."
        ),
        "--space": Argument(f"{', '.join(spaces.SPACES)}, or a YAML file.", str, "uno"),
        "--trials": Argument(
            "Configurations to try; default: 16, of a grid all.", PositiveInt | None
        ),
        "--search": Argument(
            "How they are chosen: random, grid (all combinations of the space's"
            " choices) or optuna.",
            Literal["random", "grid", "optuna"],
            "random",
        ),
        "--score": Argument(
            "What trials are compared by: folds (known classes hidden in turn) or"
            " agreement of the heads.",
            Literal[*SCORES],
            FOLDS,
        ),
        "--folds": Argument("Sets of hidden classes in each trial.", PositiveInt, 2),
        "--hide": Argument(
            "Classes a fold hides; default: the novel share of all classes.", int | None
        ),
        "--scheduler": Argument(
            "What stops a trial early: asha (at each rung a third continues) or none.",
            Literal["asha", "none"],
            "asha",
        ),
        "--grace-epochs": Argument(
            "Epochs before a trial may stop; default: a sixth.", PositiveInt | None
        ),
    },
    output="runs/tune-{preset}-seed{seed}",
    text="""
The other options make the configuration that is searched around, as for uno discover. Trial 0 is that
configuration unchanged. A trial is one process. --workers N runs at most N trials at once; by default the
cluster decides. The same command again continues a sweep that was stopped or killed; a larger
--trials adds trials. `uno discover --config DIR/best.yaml` runs the best trial.
""",  # noqa: E501
)


def main(argv: Sequence[str]) -> None:
    """Run or continue the sweep of a command line.

    With ``--report`` only the report of a sweep is written and printed, with the
    results so far. A problem raises an error.

    Args:
        argv: The arguments after ``uno tune``.
    """
    options = parse(argv, TUNE)
    from tune import driver

    if options.args.report:
        driver.report_on(str(options.config.output))
    else:
        driver.run_sweep(driver.sweep_options(options))
