"""Decoding, whole modules and training through compiled graphs, in a process of their own: see those files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("names", [("decoding", "training"), ("modules",)], ids="-".join)
def test_compiled_in_a_process_without_checks(names: tuple[str, ...]) -> None:
    files = [str(HERE / f"compiled_{name}.py") for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", *files]
    environment = {**os.environ, "TITANS_TYPECHECK": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
