"""`titans bench kernels` and `titans bench ops --backend triton`, as far as a machine without a GPU can go."""

import json
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from bench.bench_cases import OP, REQUEST, check_once, measured
from cli_cases import titans
from ops.triton_cases import DEVICE
from titans_lm import ops
from titans_lm.bench import gate, run, sides, subjects_op
from titans_lm.bench.gate import check_kernels
from titans_lm.bench.kinds import kernel_shapes
from titans_lm.bench.registry import benchmarks
from titans_lm.bench.run import Bench, kinds
from titans_lm.bench.settings import AllSettings, KernelsSettings, OpsSettings
from titans_lm.bench.sides import CPU, HALF, SIDES, beside_cases, left_out
from titans_lm.report.page import render_results

SMALL = KernelsSettings(widths=(8,), expansions=(0, 2), chunks=(4,), memories=(2,), tokens=12, rounds=1, threads=1)


def test_without_a_gpu_nothing_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = titans(capsys, "bench", "kernels", "--device", "cpu")
    assert (code, out) == (2, "")
    assert err.startswith("titans: error: got device cpu for titans bench kernels; expected a CUDA device")
    assert list(tmp_path.iterdir()) == []


def test_the_kernels_are_a_kind_of_their_own():
    assert list(kinds(SMALL)) == ["kernels"]
    assert "kernels" not in kinds(AllSettings())


def test_the_grid_holds_what_kernels_do():
    shapes = kernel_shapes(KernelsSettings(widths=(64, 128), expansions=(0, 4), chunks=(16, 32, 64), memories=(8,)))
    sizes = {(s["case"]["width"], s["case"]["chunk"], s["case"]["depth"]) for s in shapes}
    assert sizes == {
        (64, 16, 1), (64, 32, 1), (64, 64, 1), (64, 16, 2), (64, 32, 2),
        (128, 16, 1), (128, 32, 1), (128, 16, 2), (128, 32, 2),
    }  # fmt: skip
    assert {s["mode"] for s in shapes} == {"forward", "forward+backward"}
    assert {s["case"]["tokens"] for s in shapes} == {4096}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"expansions": ()}, "got expansions=.*one or more, each once"), ({"expansions": (-1,)}, "got expansions=-1"),
        ({"memories": (0,)}, "got memories=0"), ({"tokens": 0}, "got tokens=0"),
        ({"modes": ("all",)}, "got modes='all'"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_will_not_do(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **wrong)


def test_kernels_are_checked_before_they_are_measured(monkeypatch):
    """In the interpreter, where there is no GPU; then with a kernel that is wrong."""
    shapes = [shape["case"] for shape in kernel_shapes(replace(SMALL, modes=("forward",)))]
    assert 0 < check_kernels(shapes, str(DEVICE), tokens=5) <= 1e-3
    right = ops.BACKENDS["triton"]

    def wrong(*args: Any, **settings: Any) -> Any:
        o, state, surprise = right(*args, **settings)
        return 1.01 * o, state, surprise

    monkeypatch.setitem(ops.BACKENDS, "triton", wrong)
    with pytest.raises(ValueError, match=r"the kernels are wrong: o differs by a share of 1\.0e-02"):
        check_kernels(shapes[:1], str(DEVICE), tokens=5)


def test_both_backends_are_measured_in_turn(tmp_path, monkeypatch):
    """On a GPU that is made up, with workers on which kernels take half of the time."""
    monkeypatch.setattr(gate, "check_kernels", lambda cases, device: 1e-6)
    speeds = {"chunked": 10.0, "triton": 20.0}
    monkeypatch.setattr(run, "ask", lambda request, case, *_: measured(speeds[case.case["backend"]]))
    said: list[str] = []
    settings = replace(SMALL, out=tmp_path / "out", dtype="bf16")
    bench = Bench(settings, "cpu", said.append)
    result = bench.run("kernels", benchmarks()["kernels"], {"cases": 1})
    assert said[0] == "the kernels agree with the chunked backend within 1e-06"
    assert [row["label"] for row in result["rows"]] == ["chunked", "triton"] * 4
    assert result["rows"][1]["against"]["chunked"]["median"] == 2.0
    assert result["check"] == {"cases": 1, "kernels_largest_difference": 1e-6}
    written = json.loads(next((tmp_path / "out").iterdir()).read_text())
    assert written["what"] == "kernels"
    page = render_results(tmp_path / "out", tmp_path / "page.md")[1].read_text()
    assert "## The kernels beside the chunked backend" in page
    assert "| forward: 2 memories of 8, linear, C 4 | triton | forward | 20 |" in page


def test_on_a_cpu_it_is_said_what_is_left_out(tmp_path, capsys, monkeypatch):
    check_once(monkeypatch)
    monkeypatch.setattr(run, "ask", lambda *_: measured(7.0))
    args = ["bench", "ops", "--backend", "triton", "--quick", "--out", tmp_path, "--device", "cpu"]
    code, out, err = titans(capsys, *args)
    assert (code, err) == (0, "")
    assert f"triton, T 24, forward: {CPU}" in out
    assert f"Mamba2 (mamba-ssm), T 24, forward+backward: {CPU}" in out
    assert "chunked, torch.compile, T 24, forward: 7 tokens/s" in out
    assert "FlashAttention (torch), T 24, forward: 7 tokens/s" in out
    rows = json.loads((tmp_path / "ops-triton.json").read_text())["rows"]
    assert len(rows) == 2 * len(SIDES) - 1  # a copy has no gradient
    assert sum("error" in row for row in rows) == 8
    page = render_results(tmp_path, tmp_path / "page.md")[1].read_text()
    assert "## The kernels beside others" in page


def test_on_a_gpu_it_is_said_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(sides, "find_spec", lambda name: None)
    reasons = [left_out(side, "cuda") for side in SIDES]
    assert reasons[0] == 'left out: triton is not installed (pip install "titans-lm[kernels]")'
    assert reasons[1:3] == [None, None]
    assert reasons[3] == "left out: fla is not installed (pip install flash-linear-attention)"
    assert reasons[5] == "left out: mamba_ssm is not installed (pip install mamba-ssm)"
    assert reasons[6:] == [None, None]
    monkeypatch.setattr(sides, "find_spec", lambda name: name)
    assert [left_out(side, "cuda") for side in SIDES] == [None] * len(SIDES)


def test_on_a_gpu_flash_attention_takes_no_float32():
    every = {dtype: beside_cases(OpsSettings(dtype=dtype), "cuda") for dtype in ("float32", "bf16")}
    cases = [[case for case in found if case.case.get("peer") == "flash-attention"] for found in every.values()]
    assert [{case.missing for case in each} for each in cases] == [{HALF}, {None}]


def test_lengths_are_those_asked_for_and_2k_to_64k_on_a_gpu():
    def lengths(settings: OpsSettings, device: str) -> list[int]:
        return sorted({case.case["tokens"] for case in beside_cases(settings, device)})

    assert lengths(OpsSettings(), "cuda:0") == [2048, 4096, 8192, 16_384, 32_768, 65_536]
    assert lengths(OpsSettings(), "cpu") == [512, 2048, 8192]
    assert lengths(OpsSettings(lengths=(64,)), "cuda:0") == [64]


@pytest.mark.parametrize("mode", ["forward", "forward+backward"])
@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_a_case_names_its_backend(backend, mode, monkeypatch):
    seen = []
    right = ops.BACKENDS[backend]
    monkeypatch.setitem(ops.BACKENDS, backend, lambda *a, **s: (seen.append(backend), right(*a, **s))[1])
    request = {**REQUEST, "mode": mode, "case": {**OP, "tokens": 9, "rows": 1, "heads": 1, "backend": backend}}
    subjects_op.build(request, DEVICE).step()
    assert seen == [backend]


def test_a_compiled_case_runs_what_was_compiled(monkeypatch):
    seen = []

    def compiled(function):
        return lambda *args: (seen.append(1), function(*args))[1]

    monkeypatch.setattr(torch, "compile", compiled)
    subjects_op._compiled.cache_clear()
    case = {**OP, "backend": "chunked", "compiled": True}
    ready = subjects_op.build({**REQUEST, "mode": "forward", "case": case}, torch.device("cpu"))
    ready.step()
    ready.step()
    subjects_op._compiled.cache_clear()
    assert seen == [1, 1]


SIZE = {"rows": 2, "tokens": 12, "heads": 2, "width": 8}


def peer(name: str, mode: str) -> Any:
    return sides.build({**REQUEST, "mode": mode, "case": {**SIZE, "peer": name}}, torch.device("cpu"))


@pytest.mark.parametrize(("name", "mode"), [("flash-attention", "forward"), ("copy", "forward")])
def test_what_runs_on_a_cpu_too(name, mode):
    ready = peer(name, mode)
    ready.step()
    assert ready.tokens == 24


def test_attention_is_causal_attention(monkeypatch):
    draw = sides.Draw(SIZE, torch.float32, torch.device("cpu"))
    got = sides.flash_attention(draw)()
    q, k, v = (x.transpose(1, 2) for x in draw.leaves)
    mask = torch.ones(12, 12).tril().log()
    expected = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5 + mask, dim=-1) @ v
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("name", "module", "function", "shapes"),
    [
        (
            "gated-delta-rule", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule",
            [(2, 12, 2, 8)] * 3 + [(2, 12, 2)] * 2,
        ),
        (
            "ttt-linear", "fla.ops.ttt", "chunk_ttt_linear",
            [(2, 12, 2, 8)] * 3 + [(2, 8), (2, 8), (2, 12, 2, 1)],
        ),
        (
            "mamba2", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined",
            [(2, 12, 2, 8), (2, 12, 2), (2,), (2, 12, 1, 128), (2, 12, 1, 128)],
        ),
    ],
)  # fmt: skip
def test_peers_are_given_what_they_document(name, module, function, shapes, monkeypatch):
    """Stand-ins for packages that need a GPU: shapes as they document them, and a gradient for every input."""
    seen = []

    def stand_in(*args: Any, **_: Any) -> Any:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        seen.append([tuple(x.shape) for x in tensors])
        total = args[0] + sum(x.sum() for x in tensors[1:]).to(args[0].dtype)
        return total if name == "mamba2" else (total, None)

    fake = ModuleType(module)
    setattr(fake, function, stand_in)
    parts = module.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    monkeypatch.setitem(sys.modules, module, fake)
    peer(name, "forward+backward").step()
    peer(name, "forward").step()
    assert all(found == shapes for found in seen)
    assert len(seen) == 3
