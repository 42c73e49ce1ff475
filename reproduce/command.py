"""Declare the command ``uno reproduce``, which repeats a table of the paper.

:mod:`reproduce.tables` does the work. The two are apart so that ``--help`` does not
import PyTorch.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import PositiveInt

from pipelines.options import Argument, Command, parse, switch
from reproduce.experiments import DATA_OPTIONS, build, names

RUNNER = Literal["auto", "processes", "ray"]


def _describe_table(name: str) -> str:
    """Return the names of a table's data sets and rows, as a paragraph of the help.

    The data sets of the scale ``small`` come first, then those of the scale ``full``,
    then the rows of both scales.

    Args:
        name: The name of the table.
    """
    small, full = (build(name, scale) for scale in ("small", "full"))
    sets, large = (
        ", ".join(benchmark.key for benchmark in table.benchmarks)
        for table in (small, full)
    )
    rows = ", ".join(
        dict.fromkeys(row.key for table in (small, full) for row in table.rows)
    )
    return f"{name}: data sets {sets}; full: {large}; rows {rows}."


REPRODUCE = Command(
    "reproduce",
    {
        "TABLE": Argument(f"{', '.join(names())}."),
        "--scale": Argument(
            "small is for two CPU cores.", Literal["small", "full"], "small"
        ),
        "--seeds": Argument(
            "Runs of each row; default: 3, extensions: 8, rotation: 5.",
            PositiveInt | None,
        ),
        "--output": Argument(
            "Default: runs/reproduce-TABLE (-full); for Ray a shared one.", str | None
        ),
        **{
            f"--{option}": Argument(f"{text}.", str | None)
            for option, text in DATA_OPTIONS.items()
        },
        "--datasets": Argument("Only these data sets of the table.", list[str], ()),
        "--rows": Argument("Only these rows, and the reference row.", list[str], ()),
        "--parallel": Argument(
            "Cells at a time; default: cores / threads, or the GPUs.",
            PositiveInt | None,
        ),
        "--runner": Argument(
            "auto: Ray where RAY_ADDRESS is set or there are several GPUs.",
            RUNNER,
            "auto",
        ),
        "--dry-run": switch("List the cells and their cost; the data may be missing."),
    },
    "changes",
    text="""
The other options hold for every cell (--discover.epochs 100, --recipe v2, --device cuda); what a row of the
table changes has priority. Finished cells are read, not repeated; a larger --seeds adds to them.

On your own images, with the options of uno discover: uno reproduce sota --data DIR --known-classes FILE
--model.encoder timm:NAME --weights FILE. With a frozen encoder (the preset photos) all cells share one set of
features. A row that does not apply is left out, and the table has the reason.

What --datasets and --rows choose from:

"""  # noqa: E501
    + "\n\n".join(map(_describe_table, names())),
)


def main(argv: Sequence[str]) -> int:
    """Run the missing cells (training runs) of a paper's table, and write the table.

    With ``--dry-run`` the missing cells are only listed.

    Args:
        argv: The arguments after ``uno reproduce``.

    Returns:
        The exit code 0. A failed cell raises an error after the table is written.
    """
    options = parse(argv, REPRODUCE)
    from reproduce import tables

    return tables.main(options, argv)
