"""``uno tune``: its own few options, and those of ``uno discover`` for the configuration around them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from tune import spaces
from tune.score import FOLDS, SCORES
from tune.sweep import SweepOptions, run_sweep
from uno.config import dump_yaml
from uno.errors import ConfigError

NOT_GIVEN_ON = ("output", "compute")
"""Sections of the command line that ``best.yaml`` leaves out: they say where a run happens."""

EPILOG = """\
All options of uno discover hold for the configuration that is searched around: --data, --preset, --seed,
--config FILE, --objective.epsilon ... (uno discover --help). Trial 0 is that configuration as it is. The same
command again continues a sweep that was stopped or killed; a larger --trials adds trials. `uno discover
--config DIR/best.yaml` runs the winner.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser() -> argparse.ArgumentParser:
    """The options that are not fields of the configuration."""
    new = _Parser(
        prog="uno tune", description="Search hyper-parameters with Ray Tune.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = new.add_argument
    add("--space", default="uno", help=f"{', '.join(spaces.SPACES)}, or a YAML file (default: uno)")
    add("--trials", type=int, default=16, help="configurations to try (default: 16)")
    add("--search", default="random", choices=("random", "optuna"), help="default: random")
    add(
        "--score", default=FOLDS, choices=tuple(SCORES),
        help="what trials are compared by: folds (default: known classes hidden in turn), loss, agreement; "
        "oracle uses the true labels and is for research only",
    )  # fmt: skip
    add("--folds", type=int, default=2, help="sets of hidden classes in each trial (default: 2)")
    add(
        "--hide",
        type=int,
        default=None,
        help="classes a fold hides (default: the novel share of all classes)",
    )
    add(
        "--seeds",
        type=int,
        default=1,
        help="runs of each configuration; the score is their mean (default: 1)",
    )
    add(
        "--concurrent",
        type=int,
        default=None,
        help="trials at a time (default: as many as the cluster holds)",
    )
    add(
        "--grace-epochs",
        type=int,
        default=None,
        help="epochs before a trial may be stopped (default: a sixth)",
    )
    add("--reduction", type=int, default=3, help="at each rung one of so many goes on (default: 3)")
    add("--no-stopping", action="store_true", help="run every trial to its last epoch")
    return new


def parse(argv: Sequence[str]) -> tuple[SweepOptions, bool]:
    """Options of ``uno tune ARGV...``, and whether only the configuration is to be printed.

    Raises:
        ConfigError: an unknown option, a value out of range, or a space that does not fit the schema.
        SystemExit: after ``--help``.
    """
    from pipelines import options

    own, rest = parser().parse_known_args(argv)
    parsed = options.parse(rest, "tune")
    if parsed.dry_run:
        raise ConfigError("uno tune has no --dry-run; try --trials 1 --discover.epochs 1")
    config = parsed.config
    asha = None
    if not own.no_stopping:
        grace = own.grace_epochs if own.grace_epochs is not None else max(1, config.discover.epochs // 6)
        if grace < 1 or own.reduction < 2:
            raise ConfigError("--grace-epochs must be at least 1 and --reduction at least 2")
        asha = {"grace_epochs": grace, "reduction": own.reduction}
    given = {
        key: value
        for key, value in options.overrides(rest, "tune").items()
        if key.partition(".")[0] not in NOT_GIVEN_ON
    }
    given |= {"preset": config.preset, "recipe": config.recipe}
    sweep = SweepOptions(
        config, given, spaces.load_space(own.space, config), own.space, own.trials, own.search, own.score,
        own.folds, own.hide, own.seeds, own.concurrent, asha,
    )  # fmt: skip
    return sweep, parsed.print_config


def main(argv: Sequence[str]) -> int:
    """Run or continue a sweep; returns the exit code."""
    options, print_config = parse(argv)
    if print_config:
        print(dump_yaml(options.config), end="")
        return 0
    return run_sweep(options)
