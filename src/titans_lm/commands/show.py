"""What commands say: results for reading and for files."""

import sys
from pathlib import Path
from typing import Any


def lines_of(value: dict[str, Any], indent: str = "") -> list[str]:
    """Lay out a result for reading; what is None or an empty list is left out."""
    lines = []
    for name, part in value.items():
        label = f"{indent}{name.replace('_', ' ') if name.isidentifier() else name}"  # a file's name stays as it is
        if isinstance(part, dict):
            lines += [label, *lines_of(part, f"{indent}  ")]
        elif part is not None and part != []:
            if isinstance(part, bool):
                part = "yes" if part else "no"
            shown = f"{part:,}" if isinstance(part, int) else part
            shown = (
                ", ".join(f"{p:,}" if isinstance(p, int) else str(p) for p in part) if isinstance(part, list) else shown
            )
            lines.append(f"{label}: {shown}")
    return lines


def write_result(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        from titans_lm.train.files import write_json

        write_json(path, result)


def show(result: dict[str, Any]) -> None:
    for line in lines_of(result):
        say(line)


def say(text: str) -> None:
    write(f"{text}\n")


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
