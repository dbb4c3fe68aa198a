"""Tables of the paper as `titans repro` has repeated them: our number, the paper's below it."""

from collections.abc import Callable
from dataclasses import replace

from titans_lm.report.section import Result, Section, commits, linked
from titans_lm.report.spread import written
from titans_lm.report.table import Column, Table

FORMAT = "titans-lm repro 1"
Line = tuple[Result, bool]
"""A model of a table, and whether the line is the paper's."""
NOT_MEASURED, NOT_THERE = "not measured", "–"


def heading(result: Result) -> str:
    """Name the table and the scale."""
    paper = result["paper"]
    return f"Repeated: {paper['title'].lower()} ({paper['where']} of {paper['source']}, scale {result['scale']})"


def source(result: Result, link: str) -> list[str]:
    """List the commands and machines that the tables came from."""
    return [f"{linked(result, link)}, {step_line(step)}" for step in result["steps"]]


def step_line(step: Result) -> str:
    """Say what a step measured, and by which command, where and when."""
    h = step["hardware"]
    where = f" on {h['processor']}, {h['cores']} cores; {commits(step, h)}, {h['date']}" if h else ""
    size = f"; {step['parameters']:,} parameters each" if step["parameters"] else ""
    return f"{step['measures']}: `{step['command']}`{where}{size}"


def tables(result: Result) -> list[Table]:
    """Give the tables, with how their setting differs from the paper's below the last."""
    *first, last = (table(part, result["paper"]["digits"]) for part in result["tables"])
    shown = f" Paper: {result['paper']['group']}." if result["paper"]["group"] else ""
    differs = "\n".join(f"- {one}" for one in result["differs"])
    return [*first, replace(last, said=f"How the setting differs from the paper's.{shown}\n\n{differs}")]


def table(part: Result, digits: int) -> Table:
    """Lay out two lines for each model, ours and the paper's, where the paper has any number."""
    has_paper = any(column["paper_column"] for column in part["columns"])

    def cell(place: int, own_digits: int) -> Callable[[Line], str]:
        def write(line: Line) -> str:
            found = line[0]["cells"][place]
            return number(found["paper"], digits) if line[1] else ours(found["ours"], own_digits)

        return write

    return Table(
        title=part["title"],
        columns=[
            Column("model", lambda line: "" if line[1] else line[0]["title"]),
            Column("", lambda line: "paper" if line[1] else "ours"),
            *(Column(one["title"], cell(place, one["digits"])) for place, one in enumerate(part["columns"])),
        ],
        rows=[(row, paper) for row in part["rows"] for paper in ((False, True) if has_paper else (False,))],
    )


def ours(found: Result | None, digits: int) -> str:
    """Write a number of ours, with its spread where there are several seeds."""
    return NOT_MEASURED if found is None else written(found, f",.{digits}f")


def number(value: float | None, digits: int) -> str:
    """Write a number of the paper with the digits of its table."""
    return NOT_THERE if value is None else f"{value:.{digits}f}"


SECTION = Section(topic=lambda _: "reproduction", heading=heading, tables=tables, source=source, format=FORMAT)
