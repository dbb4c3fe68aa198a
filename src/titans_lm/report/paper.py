"""Tables of the paper as `titans repro` has repeated them: our number, the paper's below it."""

from dataclasses import replace
from functools import partial

from titans_lm.report.section import Result, Section, commits, linked
from titans_lm.report.table import Column, Table, written

FORMAT = "titans-lm repro 1"
Line = tuple[Result, bool]
"""A model of a table, and whether the line is the paper's."""
NOT_MEASURED, NOT_THERE = "not measured", "–"


def heading(result: Result) -> str:
    paper = result["paper"]
    return f"Repeated: {paper['title'].lower()} ({paper['where']} of {paper['source']}, scale {result['scale']})"


def source(result: Result, link: str) -> list[str]:
    """Say of every step what it measured, by which command, where and when."""
    lines = []
    for step in result["steps"]:
        h = step["hardware"]
        where = f" on {h['processor']}, {h['cores']} cores; {commits(step, h)}, {h['date']}" if h else ""
        size = f"; {step['parameters']:,} parameters each" if step["parameters"] else ""
        lines.append(f"{linked(result, link)}, {step['measures']}: `{step['command']}`{where}{size}")
    return lines


def tables(result: Result) -> list[Table]:
    """Give the tables, with how their setting differs from the paper's below the last."""
    *first, last = (table(part, result["paper"]["digits"]) for part in result["tables"])
    shown = f" Paper: {result['paper']['group']}." if result["paper"]["group"] else ""
    differs = "\n".join(f"- {one}" for one in result["differs"])
    return [*first, replace(last, said=f"How the setting differs from the paper's.{shown}\n\n{differs}")]


def table(part: Result, digits: int) -> Table:
    """Lay out two lines for each model, ours and the paper's, where the paper has any number."""
    has_paper = any(column["paper_column"] for column in part["columns"])

    def cell(line: Line, place: int, own_digits: int) -> str:
        found = line[0]["cells"][place]
        if line[1]:
            return number(found["paper"], digits)
        return NOT_MEASURED if found["ours"] is None else written(found["ours"], f",.{own_digits}f")

    return Table(
        title=part["title"],
        columns=[
            Column("model", lambda line: "" if line[1] else line[0]["title"]),
            Column("", lambda line: "paper" if line[1] else "ours"),
            *(
                Column(one["title"], partial(cell, place=place, own_digits=one["digits"]))
                for place, one in enumerate(part["columns"])
            ),
        ],
        rows=[(row, paper) for row in part["rows"] for paper in ((False, True) if has_paper else (False,))],
    )


def number(value: float | None, digits: int) -> str:
    return NOT_THERE if value is None else f"{value:.{digits}f}"


SECTION = Section(topic=lambda _: "reproduction", heading=heading, tables=tables, source=source, format=FORMAT)
