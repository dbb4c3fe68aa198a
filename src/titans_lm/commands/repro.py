"""titans repro: the tables and figures of the paper, at three scales."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from titans_lm.commands.show import Configured


@dataclass(frozen=True, kw_only=True)
class Repro(Configured):
    """Run a table or figure of the paper at a scale that fits, with the paper's numbers beside ours.

    Begin with `titans repro table5 --scale tiny --dry-run`; without a table, those that there are are listed. Stopped,
    the same command goes on.
    """

    table: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[TABLE]")] = None
    """table1 to table5, or figure6 to figure9."""
    scale: Literal["tiny", "small", "paper"] = "tiny"
    """tiny: two CPU cores. small: one GPU. paper: commands with their parameters and tokens are printed."""
    data: str | None = None
    """What to train on, as titans train takes it; the Python library's source if not set. For paper, tokens. For table3
    and table4 the folder of their data sets, which are not fetched."""
    test: Path | None = None
    """Text that decides, or that facts are hidden in to decide; not in the data. A file of torch if not set."""
    local: Path | None = None
    """Folder of questions (titans evaluate lm-eval --local) that the models of table 1 are asked."""
    out: Path | None = None
    """Folder of all runs and of repro.json; by default runs/repro/TABLE-SCALE."""
    dry_run: bool = False
    """Show the commands with their parameters and tokens, and run none."""


def run_repro(command: Repro) -> None:
    from titans_lm.repro.plans import list_tables, make_plan

    if command.table is None:
        command.say("\n".join(["titans repro TABLE --scale tiny|small|paper, where TABLE is one of", *list_tables()]))
        return

    from titans_lm.repro.run import FILE, run_plan
    from titans_lm.repro.show import plain_plan, plan_lines, result_lines

    plan = make_plan(
        command.table, command.scale, out=command.out, data=command.data, test=command.test, questions=command.local
    )
    if command.dry_run or not plan.runs:
        if command.json is not None:  # parameters are counted on models, which takes seconds
            command.write(plain_plan(plan))
        if not command.quiet:
            command.say("\n".join(plan_lines(plan)))
        return
    result = run_plan(plan, command.say, quiet=command.quiet)
    command.write(result)
    command.say("\n".join(["", *result_lines(result), "", f"numbers in {plan.out / FILE}"]))
