"""The environment of titans-pytorch: a folder of its own, with the same torch as ours, from the registry."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from titans_lm.bench.settings import PEER

VERSIONS = "import importlib.metadata as m; print(m.version('torch'), m.version('titans-pytorch'))"


def peer_python(folder: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, str]]:
    """Return the interpreter of the peer's environment, made where it is missing, and the versions in it.

    torch comes first and alone, in our version, so that the peer's requirements leave it as it is. ValueError where
    the environment cannot be made (no registry within reach, say) or holds other versions.
    """
    folder = folder.expanduser().resolve()
    python = folder / "bin" / "python"
    wanted = {"torch": torch.__version__.partition("+")[0], "titans-pytorch": PEER.partition("==")[2]}
    if not python.is_file():
        say(f"making {folder}: torch {wanted['torch']}, then {PEER}")
        _call([sys.executable, "-m", "venv", str(folder)], folder)
    found = _versions(python)
    if found != wanted:
        for package in (f"torch=={wanted['torch']}", PEER):
            _call([str(python), "-m", "pip", "install", "--quiet", package], folder)
        found = _versions(python)
    if found != wanted:
        raise ValueError(f"got {found or 'no such packages'} in {folder}; expected {wanted}: remove the folder")
    return python, found


def _versions(python: Path) -> dict[str, str]:
    """Read which torch and which peer an environment has, without their builds; empty where one is missing."""
    done = subprocess.run([str(python), "-c", VERSIONS], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {}
    torch_version, peer = done.stdout.split()
    return {"torch": torch_version.partition("+")[0], "titans-pytorch": peer}


def _call(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise ValueError(
            f"could not make the peer's environment in {folder}: {lines[-1] if lines else 'no message'}; expected a "
            f"registry within reach, or --peers-env with a folder that has torch and {PEER} installed"
        )
