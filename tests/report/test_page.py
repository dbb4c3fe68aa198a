import json
import re
from pathlib import Path

import numpy as np
import pytest

from bench.bench_cases import OP, measured
from titans_lm.evaluate.positions import bounds
from titans_lm.report import reread
from titans_lm.report.books import bounds_told
from titans_lm.report.page import MARK, pages, plots, read_results, render_results
from titans_lm.report.section import is_earlier, status
from titans_lm.report.text import said, verdict

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


def speed(**kinds):
    """The page of speed, with these results alone."""
    return pages(found(**kinds), "x")["speed"]


@pytest.fixture(scope="module")
def committed():
    return read_results(ROOT / "docs" / "results" / "bench")


@pytest.fixture(scope="module")
def written(committed):
    return pages(committed, "bench")


def test_the_pages_are_what_the_committed_numbers_give(written):
    docs = ROOT / "docs"
    assert {path.stem for path in (docs / "results").glob("*.md")} == written.keys() - {""}
    for topic, text in written.items():
        path = docs / "results" / f"{topic}.md" if topic else docs / "results.md"
        assert path.read_text(encoding="utf-8") == text


def test_plots_of_the_committed_numbers_are_there(committed):
    folder = ROOT / "docs" / "results" / "bench"
    assert {f"{name}.png" for name in plots(committed)} == {path.name for path in folder.glob("*.png")}


def test_what_a_run_changed_about_a_model_is_in_the_table_and_no_line(committed, written):
    labels = [line.label for line in plots(committed)["mqar"].lines]
    assert {"LMM", "MAC", "MAG", "MAL", "hybrid"} <= set(labels)
    assert not any("gating" in label or "DeltaNet" in label for label in labels)
    assert "| **MAC, gating mix** | mqar-joined |" in written["recall"]


def test_every_committed_file_stands_on_one_page_with_its_command(committed, written):
    text = "".join(written.values())
    for result in (one for results in committed.values() for one in results):
        assert text.count(f"<small>[{result['file']}](bench/{result['file']})") == len(result.get("steps", [1]))


def test_no_two_sections_of_a_page_have_one_heading_and_each_begins_with_its_status(written):
    for topic, text in written.items():
        parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
        heads = [part.partition("\n")[0] for part in parts]
        assert len(set(heads)) == len(heads)
        assert all(part.split("\n")[2].startswith("Status: ") for part in parts), topic


def test_no_page_holds_a_path_of_a_machine_or_claims_todays_sizes_for_older_ones(committed, written):
    text = "".join(written.values())
    assert not re.search(r"(?<![\w.])/(work|home|tmp|root)/", text)
    drawn = [plot.title for plot in plots(committed).values()]
    assert not any("/" in title for title in drawn)
    for result in committed["compare"] + committed["task"]:
        shaped = all("shape" in one for one in result["contenders"])
        names = {one["name"].partition(":")[0] for one in result["contenders"]}
        changed = names & {"lmm", "hybrid", "tnt", "delta-net", "gated-delta-net"}
        todays = shaped and ("memory_reads_embeddings" in result["settings"]["train"]["model"] or not changed)
        assert status(result).startswith("current" if todays else "earlier defaults")


def test_a_result_of_several_steps_is_as_old_as_the_last():
    days = [{"hardware": {"date": f"2026-0{month}-01 10:00"}} for month in (2, 3, 1)]
    assert status({"scale": "tiny", "steps": days}) == "scale tiny, 2026-03-01"


def test_results_of_earlier_defaults_stand_on_their_own_page_alone(committed, written):
    for result in committed["compare"] + committed["task"]:
        pages_of = [topic for topic, text in written.items() if f"(bench/{result['file']})" in text]
        assert (pages_of == ["earlier"]) == status(result).startswith("earlier defaults"), result["file"]
    assert not any("earlier defaults" in text for topic, text in written.items() if topic not in ("", "earlier"))


def test_further_runs_of_a_task_are_rows_of_one_table(written):
    """The first in full with its plot; of the others a row for each changed setting."""
    further = [line for line in written["earlier"].splitlines() if line.startswith("| model | run | steps |")]
    sizes = [head.strip("| ").split(" | ")[6:] for head in further]
    assert sizes == [["64:4", "64:16", "128:32", "256:64", "512:128"], ["96:8", "192:16", "384:32"]]
    assert "| **LMM, memory depth 1, chunk size 16** | mqar-beyond | 200 |" in written["earlier"]
    assert "| **LMM, no induction init** | mqar-start | 100 |" in written["earlier"]


def test_nothing_measured_is_said():
    text = pages(found(), "x")
    assert text.keys() == {""}
    assert text[""].startswith(MARK)
    assert "nothing is measured yet" in text[""]


def test_a_comparison_of_texts_names_models_with_fewer_seeds_and_rates():
    """The stored one was joined from runs of one model each."""
    told = said(json.loads((ROOT / "docs/results/bench/compare-5m.json").read_text()))
    assert "(0.012 not for Transformer++ with short convolution, MAG, MAC)" in told
    assert "3 seeds (of Transformer++ with short convolution 1, LMM 2, Gated DeltaNet 2, MAG 1, MAL 1" in told


def test_a_comparison_of_texts_says_what_stateful_models_are_measured_by():
    told = said(json.loads((ROOT / "docs/results/bench/compare-gates.json").read_text()))
    assert "Held out, stateful models carry their state; others begin anew every 512 tokens." in told
    result = json.loads((ROOT / "docs/results/bench/compare-5m.json").read_text())
    assert "stateful models carry" not in said(result)
    result["contenders"][0]["runs"][0]["tokens"] -= 1
    assert f"reads up to {result['contenders'][1]['runs'][0]['tokens']:,} tokens" in said(result)


def test_books_that_gave_no_passage_are_not_counted():
    result = json.loads((ROOT / "docs/results/bench/reread.json").read_text())
    groups = result["settings"]["passages"] // result["settings"]["rows"]
    told = reread.said({**result, "documents": result["documents"] * 50})
    assert f"passages of each length from {groups} held-out books" in told


def test_a_folder_is_what_it_holds():
    ours = {"name": "runs/a", "test_bits_per_byte": {"mean": 2.0}}
    other = {"name": "llama", "test_bits_per_byte": {"mean": 2.5}}
    assert verdict([{**ours, "kind": "mac"}, other]).startswith("**runs/a has the lowest mean**")
    assert verdict([{**ours, "kind": "gpt2"}, other]) == ""


@pytest.mark.parametrize(("books", "told"), [(1, "no interval"), (3, "smallest and the largest"), (4, "95 %")])
def test_bounds_over_few_books_are_their_ends(books, told):
    assert told in bounds_told(books)
    draws = np.arange(1.0, books + 1)[None]
    assert (bounds(draws, lambda total: total, 0) == (books, books * books)) == (books < 4)


def test_a_comparison():
    text = speed(peers=[peers()])
    assert cells(text, "our op") == ["our op", "", "20", "50 %", "19", "1.22", "1.25"]
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
    text = speed(peers=[{**both, "rows": [*both["rows"], *tuned["rows"], *alone["rows"]]}])
    assert text.count("### Layer of width 384") == 3
    assert text.count("| our op |") == text.count("× titans-pytorch NeuralMemory |") == 3
    assert "### Layer of width 384, 1 head: forward, default allocator" in text


def test_a_gpu_has_a_column_with_its_name():
    head = {**peers()["hardware"], "gpus": ["A GPU"]}
    gpu = peers(device="cuda", hardware=head, file="peers-cuda-float32.json")
    gpu["rows"] = [{**line, "tokens_per_second": 9999.0, "allocator": "default"} for line in gpu["rows"][:1]]
    text = speed(peers=[peers(), gpu])
    assert "A GPU, float32, tokens/s |" in text
    assert cells(text, "our op")[-1] == "9,999"
    assert cells(text, "titans-pytorch NeuralMemory")[-1] == "not measured"


def test_models_in_turn_on_a_gpu_have_a_section_with_its_name():
    cpu = result("training", [row("mac", 20.0, comparison="5M", against={})])
    head = {**cpu["hardware"], "gpus": ["A GPU"]}
    gpu = {**cpu, "device": "cuda", "dtype": "bf16", "hardware": head, "file": "training-cuda-bf16.json"}
    gpu["rows"] = [row("lmm", 9999.0, comparison="5M", against={}), row("sliding", 3.0, comparison="5M", against={})]
    text = pages({**found(), "training": [cpu, gpu]}, "x")["speed"]
    assert "## Training steps\n" in text
    alone = text.partition("## Training steps, A GPU, bf16\n")[2]
    assert [line.split("|")[2].strip() for line in alone.splitlines() if line.startswith("| 5M")] == ["lmm", "sliding"]


def test_a_row_that_failed_says_why():
    text = speed(scaling=[scaling()])
    assert cells(text, "1 × 131,072")[1:3] == ["failed: no memory", "–"]
    assert cells(text, "mac") == ["mac", "30", "5", "1", "1.000", "1.000"]


def test_models_have_a_line_each():
    rows = [
        row("mac", 100.0, kind="model", mode="train", case={"tokens": 1}, parameters=1234),
        row("mac", 200.0, kind="model", mode="prefill", case={"tokens": 1}),
        row("mac", 50.0, kind="model", mode="decode", case={"context": 100}),
        {"label": "mac", "kind": "model", "mode": "decode", "case": {"context": 1000}, "error": "too long"},
    ]
    line = cells(speed(model=[result("model", rows)]), "mac")
    assert line == ["mac", "1,234", "100", "95", "200", "191", "20.00", "failed: too long"]


def test_tiny_sizes_are_no_measurement():
    quick = peers(quick=True)
    assert "no measurement of speed" in speed(peers=[quick])


def test_rendering_writes_the_page_and_the_plots(tmp_path):
    folder, docs = tmp_path / "numbers", tmp_path / "docs" / "results.md"
    folder.mkdir()
    (folder / "scaling.json").write_text(json.dumps(scaling()))
    files = render_results(folder, docs)
    names = ["results.md", "speed.md", "scaling-speed.png", "scaling-memory.png", "scaling-stream.png"]
    assert [path.name for path in files] == names
    assert (folder / "scaling-speed.png").read_bytes().startswith(b"\x89PNG")
    page = docs.parent / "results" / "speed.md"
    for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
        assert (page.parent / link).is_file()
    assert "| [Speed and memory](results/speed.md) |" in docs.read_text()
    before = [path.read_bytes() for path in files]
    assert [path.read_bytes() for path in render_results(folder, docs)] == before, "the same every time"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "which is not JSON"),
        ('{"what": "\xe9"}', "which is not JSON"),
        ("[]", "no result of a benchmark"),
        ('{"format": "titans-lm demo 1"}', "no result of a benchmark"),
        ('{"format": "titans-lm bench 1", "what": ["ops"]}', "no result of a benchmark"),
        ('{"format": "titans-lm bench 1", "what": "heads"}', "of kind 'heads', which no page shows"),
        (
            '{"format": "titans-lm bench 1", "what": "ops"}',
            r"ops.json, .* lacks a part: KeyError\('device'\); expected",
        ),
        ('{"format": "titans-lm bench 1", "what": "gap", "models": []}', "of kind 'gap' that lacks a part"),
    ],
)
def test_files_of_others_are_refused(tmp_path, content, message):
    (tmp_path / "ops.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        read_results(tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="which is no folder"):
        read_results(tmp_path / "nothing")


def test_paths_of_a_machine_are_not_shown():
    text = speed(peers=[peers(command="titans bench peers --out /tmp/res --peers-env /home/me/peers/env")])
    assert "`titans bench peers --out res --peers-env peers/env` on a CPU" in text
    assert "](guides/bench.md)" in pages(found(), "x")[""]


def test_which_defaults_a_result_is_of():
    """Sizes by the MLP alone are of before D43; memories behind a block that read x alone are of before D56."""

    def made(*names: str, told: bool = True) -> dict:
        model = {"memory_reads_embeddings": True} if told else {}
        contenders = [{"name": name, "shape": {}} for name in names]
        return {"parameters_asked_for": 9, "contenders": contenders, "settings": {"train": {"model": model}}}

    assert not is_earlier(made("lmm:chunk_size=4", "mac"))
    assert not is_earlier(made("mac", "sliding", "mamba2", told=False))
    for name in ("lmm", "hybrid:memory_depth=1", "gated-delta-net", "tnt"):
        assert is_earlier(made("sliding", name, told=False))
    unshaped = made("mac")
    del unshaped["contenders"][0]["shape"]
    assert is_earlier(unshaped)
    assert not is_earlier({"contenders": [{"name": "lmm"}]}), "nothing was matched"
