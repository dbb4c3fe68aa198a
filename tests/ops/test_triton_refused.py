"""What the kernels do not do is said, with what they do; and triton is asked for only by those who want it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ops.memory_cases import Case, make_call
from ops.triton_cases import moved
from titans_lm.ops import neural_memory
from titans_lm.ops import triton as support

SOURCES = Path(__file__).resolve().parents[2] / "src"


def run(case: Case, **more: Any) -> None:
    call = moved(make_call(case))
    neural_memory(*call.arguments, **call.settings, backend="triton", **more)


@pytest.mark.parametrize(
    ("case", "got"),
    [
        (Case(depth=3), "a memory of 3 layers"),
        (Case(gates=("head", "channel", "head")), "channel-wise gates"),
        (Case(chunk=65, tokens=2), "chunk_size=65"),
        (Case(width=129, expansion=1, heads=1, tokens=2), "heads of 129 channels"),
        (Case(chunk=33, tokens=2), "a memory of two layers and chunk_size=33"),
        (Case(width=65, expansion=1, heads=1, tokens=2, chunk=33), "heads of 65 channels and chunk_size=33"),
    ],
    ids=str,
)
def test_what_no_kernel_does_is_refused(case: Case, got: str) -> None:
    with pytest.raises(ValueError, match=f'got backend="triton" with {got}; expected a linear memory or one of two'):
        run(case)


def test_the_parts_of_the_surprise_are_refused() -> None:
    with pytest.raises(ValueError, match=r'with return_surprise="parts"; expected .*backend="chunked" does everything'):
        run(Case(), return_surprise="parts")


def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="tensors on cpu; expected a CUDA device, or TRITON_INTERPRET=1"):
        support.check_device(torch.device("cpu"), torch.float32)


def test_double_precision_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    support.check_device(torch.device("cpu"), torch.float64)
    monkeypatch.setattr(support, "interpreted", lambda: False)
    support.check_device(torch.device("cuda"), torch.float32)
    with pytest.raises(ValueError, match="state in float64; expected float32"):
        support.check_device(torch.device("cuda"), torch.float64)


def test_without_triton_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(
        ValueError,
        match=r'got no triton, which .* needs; install it with: pip install "titans-lm\[kernels\]"',
    ):
        run(Case())


def test_triton_is_loaded_for_nobody_else_and_a_cpu_is_refused_where_nobody_asked_for_the_interpreter() -> None:
    """In a fresh process. (`reference` takes its gradients by torch.func, which loads triton for itself.)"""
    code = """
import sys, torch
from titans_lm import MemoryNetwork, MemoryState, neural_memory
x, gate = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1)
state = MemoryState.initial([torch.zeros(1, 4, 4)], 1)
def call(backend):
    neural_memory(x, x, x, gate, gate, gate, state, network=MemoryNetwork(), chunk_size=2, backend=backend)
before = "triton" in sys.modules
call("auto")
call("chunked")
print(before, "triton" in sys.modules)
try:
    call("triton")
except ValueError as error:
    print(error)
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(SOURCES)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    loaded, _, refusal = done.stdout.partition("\n")
    assert loaded == "False False", done.stderr
    assert refusal.startswith('got backend="triton" with tensors on cpu; expected a CUDA device'), done.stderr


def test_tiles_hold_what_they_must() -> None:
    """A tile is a power of two and at least 16, which is what a product of the hardware takes."""
    assert [support.power_of_two(n) for n in (1, 16, 17, 64, 65, 128)] == [16, 16, 32, 64, 128, 128]
    assert support.unsupported([(64, 256), (256, 64)], 32) is None
    assert support.unsupported([(64, 64)], 64) is None
    assert support.unsupported([(128, 512), (512, 128)], 32) is None
