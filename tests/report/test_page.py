import json
import re
from pathlib import Path

import pytest

from bench.bench_cases import OP, measured
from titans_lm.report.page import MARK, page, plots, read_results, render_results

ROOT = Path(__file__).resolve().parents[2]


def result(what, rows, **changes):
    head = {
        "processor": "a CPU", "cores": 2, "memory_bytes": 8 * 2**30, "gpus": [], "system": "an OS", "commit": "abc",
        "date": "2026-01-01 00:00", "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
    }  # fmt: skip
    made = {
        "format": "titans-lm bench 1", "what": what, "command": f"titans bench {what}", "quick": False,
        "device": "cpu", "dtype": "float32", "threads": 2, "wall_seconds": 60.0, "hardware": head, "rows": rows,
        "file": f"{what}.json",
    }  # fmt: skip
    return {**made, **changes}


def row(label, speed=10.0, **more):
    base = {"label": label, "side": "ours", "kind": "op", "mode": "forward+backward", "case": OP}
    return {**base, "allocator": "tuned", **measured(speed, share_of_matmul=0.5, flops_per_second=5e9), **more}


def found(**kinds):
    return {kind: kinds.get(kind, []) for kind in ("peers", "ops", "model", "scaling")}


def peers(**changes):
    title, peer = "Layer of width 384, 1 head", "titans-pytorch NeuralMemory"
    ours = row("our op", 20.0, comparison=title, against={peer: {"median": 1.25, "rounds": [1.25]}})
    return result("peers", [ours, row(peer, 16.0, comparison=title, side="titans-pytorch", against={})], **changes)


def scaling():
    rows = [row(f"1 × {T:,}", 1e3, case={**OP, "rows": 1, "tokens": T}) for T in (2048, 65_536)]
    rows.append({"label": "1 × 131,072", "kind": "op", "mode": "forward+backward", "case": OP, "error": "no memory"})
    windows = [{"tokens": i * 10, "tokens_per_second": 5.0, "memory_bytes": 2**20} for i in (1, 2, 3)]
    stream = {"label": "mac", "kind": "stream", "mode": "", "case": {"tokens": 30}, "tokens_per_second": 5.0}
    return result("scaling", [*rows, {**stream, "windows": windows, "memory_ratio": 1.0, "throughput_ratio": 1.0}])


def cells(text, start):
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_is_what_the_committed_numbers_give():
    folder = ROOT / "docs" / "results" / "bench"
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == page(read_results(folder), "results/bench")


def test_plots_of_the_committed_numbers_are_there():
    folder = ROOT / "docs" / "results" / "bench"
    assert {f"{name}.png" for name in plots(read_results(folder))} == {path.name for path in folder.glob("*.png")}


def test_no_two_sections_have_one_heading():
    """A heading that several files would have names the file, others do not."""
    text = page(read_results(ROOT / "docs" / "results" / "bench"), "results/bench")
    heads = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert len(set(heads)) == len(heads)
    assert "Associative recall (MQAR): symbols 512 (mqar-128)" in heads
    assert "Associative recall (MQAR): updates 48" in heads


def test_nothing_measured_is_said():
    text = page(found(), "x")
    assert text.startswith(MARK)
    assert text.count("Not measured yet") == 4


def test_a_comparison():
    text = page(found(peers=[peers()]), "x")
    assert cells(text, "our op") == ["our op", "20", "50 %", "19", "1.22", "1.25"]
    assert "### Layer of width 384, 1 head: forward + backward, tuned allocator" in text
    assert "[peers.json](x/peers.json): `titans bench peers` on a CPU, 2 threads, float32, 8 GiB" in text


def test_forward_alone_has_a_table_of_its_own():
    """Measured with other allocators in between, under the same title."""
    both, tuned, alone = peers(), peers(), peers()
    for made, changes in (
        (both, {"allocator": "default"}),
        (tuned, {}),
        (alone, {"mode": "forward", "allocator": "default"}),
    ):
        made["rows"] = [{**r, **changes} for r in made["rows"]]
    text = page(found(peers=[{**both, "rows": [*both["rows"], *tuned["rows"], *alone["rows"]]}]), "x")
    assert text.count("### Layer of width 384") == 3
    assert text.count("| our op |") == text.count("× titans-pytorch NeuralMemory |") == 3
    assert "### Layer of width 384, 1 head: forward, default allocator" in text


def test_a_gpu_has_a_column_with_its_name():
    head = {**peers()["hardware"], "gpus": ["A GPU"]}
    gpu = peers(device="cuda", hardware=head, file="peers-cuda-float32.json")
    gpu["rows"] = [{**line, "tokens_per_second": 9999.0, "allocator": "default"} for line in gpu["rows"][:1]]
    text = page(found(peers=[peers(), gpu]), "x")
    assert "A GPU, float32, tokens/s |" in text
    assert cells(text, "our op")[-1] == "9,999"
    assert cells(text, "titans-pytorch NeuralMemory")[-1] == "not measured"


def test_a_row_that_failed_says_why():
    text = page(found(scaling=[scaling()]), "x")
    assert cells(text, "1 × 131,072")[1:3] == ["failed: no memory", "–"]
    assert cells(text, "mac") == ["mac", "30", "5", "1", "1.000", "1.000"]


def test_models_have_a_line_each():
    rows = [
        row("mac", 100.0, kind="model", mode="train", case={"tokens": 1}, parameters=1234),
        row("mac", 200.0, kind="model", mode="prefill", case={"tokens": 1}),
        row("mac", 50.0, kind="model", mode="decode", case={"context": 100}),
        {"label": "mac", "kind": "model", "mode": "decode", "case": {"context": 1000}, "error": "too long"},
    ]
    line = cells(page(found(model=[result("model", rows)]), "x"), "mac")
    assert line == ["mac", "1,234", "100", "95", "200", "191", "20.00", "failed: too long"]


def test_tiny_sizes_are_no_measurement():
    quick = peers(quick=True)
    assert "no measurement of speed" in page(found(peers=[quick]), "x")


def test_rendering_writes_the_page_and_the_plots(tmp_path):
    folder, docs = tmp_path / "numbers", tmp_path / "docs" / "results.md"
    folder.mkdir()
    (folder / "scaling.json").write_text(json.dumps(scaling()))
    written = render_results(folder, docs)
    names = ["results.md", "scaling-speed.png", "scaling-memory.png", "scaling-stream.png"]
    assert [path.name for path in written] == names
    assert (folder / "scaling-speed.png").read_bytes().startswith(b"\x89PNG")
    for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", docs.read_text()):
        assert (docs.parent / link).is_file()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "which is not JSON"),
        ("[]", "no result of a benchmark"),
        ('{"format": "titans-lm demo 1"}', "no result of a benchmark"),
    ],
)
def test_files_of_others_are_refused(tmp_path, content, message):
    (tmp_path / "ops.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_results(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="which is no folder"):
        read_results(tmp_path / "nothing")


def test_paths_of_a_machine_are_not_shown():
    text = page(found(peers=[peers(command="titans bench peers --out /tmp/res --peers-env /home/me/peers/env")]), "x")
    assert "`titans bench peers --out res --peers-env peers/env` on a CPU" in text
    assert "](guides/bench.md)" in text
