"""Tables of the paper on the page of results, as `titans repro` has repeated them: our number, the paper's below it."""

from typing import Any

from titans_lm.report.spread import written

Result = dict[str, Any]
FORMAT = "titans-lm repro 1"
NOT_MEASURED, NOT_THERE = "not measured", "–"


def heading(result: Result) -> str:
    """Name the table and the scale."""
    paper = result["paper"]
    return f"Repeated: {paper['title'].lower()} ({paper['where']} of {paper['source']}, scale {result['scale']})"


def section(result: Result, link: str, table: Any) -> list[str]:
    """Lay out the tables of a file, with the commands and machines that they came from; `table` writes Markdown."""
    lines = [f"## {heading(result)}", "", f"[{result['file']}]({link}/{result['file']}):", ""]
    lines += [f"- {_step(step)}" for step in result["steps"]]
    lines += ["", "How the setting differs from the paper's:", "", *(f"- {one}" for one in result["differs"])]
    shown = f" Paper: {result['paper']['group']}." if result["paper"]["group"] else ""
    lines += ["", f"Ours with the standard deviation over seeds.{shown}"]
    for part in result["tables"]:
        head, body = rows(part, result["paper"]["digits"])
        lines += ["", *([part["title"], ""] if part["title"] else []), *table(head, body)]
    return lines


def rows(table: Result, digits: int) -> tuple[list[str], list[list[str]]]:
    """Give the head of a table and two lines for each model, ours and the paper's."""
    columns, body = table["columns"], []
    has_paper = any(column["paper_column"] for column in columns)
    for row in table["rows"]:
        mine = [ours(cell["ours"], column["digits"]) for cell, column in zip(row["cells"], columns, strict=True)]
        body.append([row["title"], "ours", *mine])
        if has_paper:
            body.append(["", "paper", *(number(cell["paper"], digits) for cell in row["cells"])])
    return ["model", "", *(column["title"] for column in columns)], body


def ours(found: Result | None, digits: int) -> str:
    """Write a number of ours, with its spread where there are several seeds."""
    return NOT_MEASURED if found is None else written(found, f",.{digits}f")


def number(value: float | None, digits: int) -> str:
    """Write a number of the paper with the digits of its table."""
    return NOT_THERE if value is None else f"{value:.{digits}f}"


def commits(result: Result, hardware: Result) -> str:
    """Name the commit that numbers were made at, or all where their runs are of several."""
    names = result.get("commits") or [hardware["commit"]]
    return f"commit{'s' * (len(names) > 1)} {', '.join(names)}"


def _step(step: Result) -> str:
    h = step["hardware"]
    where = f" on {h['processor']}, {h['cores']} cores; {commits(step, h)}, {h['date']}" if h else ""
    size = f"; {step['parameters']:,} parameters each" if step["parameters"] else ""
    return f"{step['measures']}: `{step['command']}`{where}{size}"
