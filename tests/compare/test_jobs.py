"""Processes side by side."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

fcntl = pytest.importorskip("fcntl", reason="locks of POSIX")
PARENT = """
import fcntl, time
from dataclasses import dataclass
from pathlib import Path

from titans_lm.compare.jobs import work


@dataclass(frozen=True)
class Endless:
    folder: Path
    name: str = "endless"
    rate: float = 0.0
    counts: bool = True

    def asked(self):
        return {}

    def begun(self):
        return None

    def train(self):
        with (self.folder / "held").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            (self.folder / "begun").touch()
            time.sleep(600)

    def told(self, result):
        return ""


if __name__ == "__main__":
    here = Path(__file__).parent
    work([Endless(here / name) for name in ("first", "second")], 2, print)
"""


def let_go(path: Path) -> bool:
    """Whether no process holds the lock of a file."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def wait_for(what, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def test_runs_side_by_side_end_with_the_command_that_was_killed(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py"])
    try:
        wait_for(lambda: all((folder / "begun").exists() for folder in folders))
        assert not any(let_go(folder / "held") for folder in folders)
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: all(let_go(folder / "held") for folder in folders), 60.0)
