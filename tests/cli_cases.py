"""The command line, run inside the test's own process."""

from titans_lm.cli import main


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
