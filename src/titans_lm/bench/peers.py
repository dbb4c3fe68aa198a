"""`titans bench peers`: our op, layer and model beside titans-pytorch and blocks of transformers, in turn."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from titans_lm.bench.kinds import model_case
from titans_lm.bench.registry import Case, Cases, Comparison, Place, allocators, benchmark
from titans_lm.bench.settings import ONE_HEAD, PAPER, PEER, PeersSettings

TRAIN = "forward+backward"
VERSIONS = "import importlib.metadata as m; print(m.version('torch'), m.version('titans-pytorch'))"
Sides = tuple[str, list[Case]]
"""A title, and what takes turns below it."""


@benchmark("peers", PeersSettings)
def peers(settings: PeersSettings, at: Place) -> Cases:
    """Make the peer's environment if need be, and let the sides take turns.

    ValueError where the peer cannot be installed; among other benchmarks its rows then say why, and ours are measured.
    """
    missing = None
    try:
        python, versions = peer_python(settings.peers_env, at.say)
    except ValueError as error:
        if at.alone:
            raise
        python, versions, missing = settings.peers_env, {}, str(error)
    for title, cases in comparisons(settings, python, at.device):
        yield Comparison(title, [replace(case, missing=missing) if case.python else case for case in cases])
    return {"peers": versions}


def comparisons(s: PeersSettings, python: Path, device: str) -> list[Sides]:
    """List what is compared with what: layer, exact and mac with every allocator, the rest with the last one."""
    makers = {
        "layer": (partial(layer, TRAIN), partial(layer, "forward")),
        "paper": (paper,),
        "exact": (exact,),
        "mac": (mac,),
        "generation": (generation,),
    }
    every = allocators(device, s.allocators)
    found = []
    for name in s.cases:
        for make in makers[name]:
            title, cases = make(s.quick, python)
            for allocator in every if name in ("layer", "exact", "mac") else every[-1:]:
                found.append((title, [replace(case, allocator=allocator) for case in cases]))
    return found


def layer(mode: str, quick: bool, python: Path) -> Sides:
    """One head over the whole width, chunk 64: the setting that titans-pytorch's README begins with."""
    case = {**ONE_HEAD, "rows": 2, "tokens": 4096, **({"width": 16, "chunk": 8, "tokens": 32} if quick else {})}
    return (
        f"Layer of width {case['width']}, 1 head, chunk {case['chunk']}, 2 × {case['tokens']:,}",
        [
            Case(label="our op", kind="op", mode=mode, case=case),
            Case(label="our layer", kind="layer", mode=mode, case={**case, "layer": "memory"}),
            their_layer("titans-pytorch NeuralMemory", case, mode, python, chunk_size=case["chunk"]),
        ],
    )


def paper(quick: bool, _: Path) -> Sides:
    """The paper's form beside blocks of transformers of the same width."""
    case = {**PAPER, "rows": 2, "tokens": 4096, **({"width": 8, "chunk": 8, "tokens": 32} if quick else {})}
    width = case["width"] * case["heads"]
    block = {**case, "width": width, "ffn": 32 if quick else 1024}
    blocks = (("our layer", "memory", "ours"), ("Llama block", "llama", "transformers"),
              ("Mamba2 block", "mamba2", "transformers"))  # fmt: skip
    return (
        f"{case['heads']} heads of {case['width']}, chunk {case['chunk']}, 2 × {case['tokens']:,}",
        [
            Case(label="our op", kind="op", mode=TRAIN, case=case),
            *(
                Case(label=label, kind="layer", mode=TRAIN, case={**block, "layer": name}, side=side)
                for label, name, side in blocks
            ),
        ],
    )


def exact(quick: bool, python: Path) -> Sides:
    """The rule of the paper token by token: the only setting of titans-pytorch that computes it, and ours."""
    case = {**ONE_HEAD, "rows": 1, "tokens": 128, **({"width": 16, "tokens": 32} if quick else {})}
    return (
        f"The exact rule, width {case['width']}, 1 head, 1 × {case['tokens']}",
        [
            Case(label="our op, chunk 16", kind="op", mode=TRAIN, case={**case, "chunk": 16}),
            Case(label="our op, chunk 1", kind="op", mode=TRAIN, case={**case, "chunk": 1}),
            their_layer("titans-pytorch, chunk 1, batch 16", case, TRAIN, python, chunk_size=1, batch_size=16),
        ],
    )


def mac(quick: bool, python: Path) -> Sides:
    case = {**model_case("mac", quick), "rows": 4, "tokens": 64 if quick else 1024}
    return (
        f"MAC model of width {case['width']}, {case['layers']} blocks, training step 4 × {case['tokens']:,}",
        [
            *(
                Case(label=f"our MAC, chunk {chunk}", kind="model", mode="train", case={**case, "chunk": chunk})
                for chunk in ((8, 16) if quick else (16, 64))
            ),
            their_model(case, "train", python),
        ],
    )


def generation(quick: bool, python: Path) -> Sides:
    sizes = {"prompt": 16, "tokens": 4} if quick else {"prompt": 128, "tokens": 256}
    case = {**model_case("mac", quick), "rows": 1, **sizes}
    # compiling takes its time and says nothing in a try-out
    compiled = [] if quick else [
        Case(label=f"our MAC, {how}, compiled", kind="model", mode=mode, case={**case, "compiled": True})
        for how, mode in (("generate()", "generate"), ("plain loop", "loop"))
    ]  # fmt: skip
    return (
        f"MAC model, {case['tokens']} tokens after a prompt of {case['prompt']}",
        [
            Case(label="our MAC, generate()", kind="model", mode="generate", case=case),
            Case(label="our MAC, plain loop", kind="model", mode="loop", case=case),
            *compiled,
            their_model(case, "generate", python),
        ],
    )


def their_layer(label: str, case: dict[str, Any], mode: str, python: Path, **own: int) -> Case:
    """Their NeuralMemory at the same sizes, with settings of its own."""
    theirs = {name: case[name] for name in ("width", "heads", "rows", "tokens")} | own
    return Case(label=label, kind="peer_layer", mode=mode, case=theirs, side="titans-pytorch", python=python)


def their_model(case: dict[str, Any], mode: str, python: Path) -> Case:
    """Their MAC transformer at the same sizes, with the settings of its README otherwise."""
    theirs = {**case, "longterm": 16}
    label = "titans-pytorch MAC transformer"
    return Case(label=label, kind="peer_model", mode=mode, case=theirs, side="titans-pytorch", python=python)


def peer_python(folder: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, str]]:
    """Return the interpreter of the peer's environment, made where it is missing, and the versions in it.

    torch comes first and alone, in our version, so that the peer's requirements leave it as it is. ValueError where
    the environment cannot be made (no registry within reach, say) or holds other versions.
    """
    folder = folder.expanduser().resolve()
    python = folder / "bin" / "python"
    wanted = {"torch": version("torch").partition("+")[0], "titans-pytorch": PEER.partition("==")[2]}
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
