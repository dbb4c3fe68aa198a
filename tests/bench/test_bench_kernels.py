"""`titans bench kernels`, as far as a machine without a GPU can go."""

import json
from dataclasses import replace
from typing import Any

import pytest

from bench.bench_cases import OP, REQUEST, measured
from cli_cases import titans
from ops.triton_cases import DEVICE
from titans_lm import ops
from titans_lm.bench import gate, run, subjects_op
from titans_lm.bench.gate import check_kernels
from titans_lm.bench.kinds import kernel_shapes
from titans_lm.bench.registry import benchmarks
from titans_lm.bench.run import Bench, kinds
from titans_lm.bench.settings import AllSettings, KernelsSettings
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


@pytest.mark.parametrize("mode", ["forward", "forward+backward"])
@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_a_case_names_its_backend(backend, mode, monkeypatch):
    seen = []
    right = ops.BACKENDS[backend]
    monkeypatch.setitem(ops.BACKENDS, backend, lambda *a, **s: (seen.append(backend), right(*a, **s))[1])
    request = {**REQUEST, "mode": mode, "case": {**OP, "tokens": 9, "rows": 1, "heads": 1, "backend": backend}}
    subjects_op.build(request, DEVICE).step()
    assert seen == [backend]
