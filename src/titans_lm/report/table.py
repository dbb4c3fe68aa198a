"""Tables for a terminal."""


def aligned(head: list[str], body: list[list[str]], *, left: int = 1) -> list[str]:
    """Lay out a table for a terminal: the first columns to the left, numbers to the right; Markdown's ** go."""
    cells = [[cell.replace("**", "") for cell in row] for row in [head, *body]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
