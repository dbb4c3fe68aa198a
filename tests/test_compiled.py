"""Decoding through a compiled graph, in a process of its own: see compiled_decoding.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("compiled_decoding.py")


@pytest.mark.slow
def test_compiled_decoding_in_a_process_without_checks() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--show-capture=no", str(CASES)]
    environment = {**os.environ, "TITANS_TYPECHECK": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
