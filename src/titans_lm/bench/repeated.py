"""Names of the renderer of the paper's tables where `titans repro` looks for them."""

from titans_lm.report.paper import FORMAT, NOT_MEASURED, number, table
from titans_lm.report.sources import Result, commits

__all__ = ["FORMAT", "NOT_MEASURED", "commits", "number", "rows"]


def rows(part: Result, digits: int) -> tuple[list[str], list[list[str]]]:
    """Give the head of a table and its lines, ours and the paper's."""
    laid = table(part, digits)
    return laid.head, laid.body
