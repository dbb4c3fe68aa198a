"""The command line, run inside the test's own process."""

import os
from pathlib import Path

from titans_lm.cli import main


def environment():
    """Variables of a process of its own that runs this package as its users do."""
    source = Path(__file__).resolve().parent.parent / "src"
    return {**os.environ, "PYTHONPATH": str(source), "TITANS_TYPECHECK": "0"}


def titans(capsys, *args):
    """Run the command in this process; its exit code and what it wrote."""
    capsys.readouterr()
    code = 0
    try:
        main([str(arg) for arg in args])
    except SystemExit as stop:
        code = stop.code or 0
    out, err = capsys.readouterr()
    return code, out, err
