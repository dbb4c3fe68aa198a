import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from bench.bench_cases import OP, check_once, measured, streamed, work_here
from titans_lm import ops
from titans_lm.bench import gate, registry, run
from titans_lm.bench.kinds import model_cases, op_cases, stream_cases, tnt, training
from titans_lm.bench.peers import comparisons
from titans_lm.bench.registry import Case, Place, allocators, benchmark, benchmarks, subjects
from titans_lm.bench.run import Bench, file_name, kinds, run_bench
from titans_lm.bench.settings import (
    AllSettings,
    BenchSettings,
    ModelSettings,
    OpsSettings,
    PeersSettings,
    ScalingSettings,
    TNTSettings,
    TrainingSettings,
)
from titans_lm.train.device import commit, hardware
from titans_lm.train.options import written_command

CASE = Case(label="op", kind="op", mode="forward", case=OP, allocator="tuned")


def make_bench(settings=None, said=None):
    return Bench(settings or BenchSettings(quick=True, repeats=1), "cpu", (said if said is not None else []).append)


def answers(monkeypatch, speeds):
    """Let workers answer with these speeds in turn; what was asked for comes back as a list."""
    if speeds:
        check_once(monkeypatch)
    asked, speeds = [], iter(speeds)

    def ask(request, case, timeout, threads):
        asked.append((case.label, case.allocator, request))
        found = next(speeds)
        return found if isinstance(found, dict) else measured(found)

    monkeypatch.setattr(run, "ask", ask)
    return asked


def test_a_case_runs_in_a_process_of_its_own():
    said = []
    row = make_bench(BenchSettings(quick=True, repeats=1, threads=1), said).measure(CASE)
    assert row["tokens_per_second"] > 0
    assert (row["label"], row["allocator"], row["threads"], row["case"]) == ("op", "tuned", 1, OP)
    assert said[0].startswith("op, forward, tuned allocator: ")
    assert "% of matmul" in said[0]


def test_a_case_that_fails_is_a_row_that_says_why(monkeypatch):
    work_here(monkeypatch)
    row = make_bench().measure(Case(label="op", kind="op", mode="forward", case={**OP, "depth": 9}))
    assert row["error"].startswith("ValueError: got memory_depth=9")
    assert "tokens_per_second" not in row


def test_a_worker_that_dies_is_a_row_that_says_why(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'out of memory' >&2\nexit 9\n")
    python.chmod(0o755)
    row = make_bench().measure(Case(label="x", kind="peer_layer", case={}, python=python))
    assert row["error"] == "the worker ended with code 9: out of memory"


def test_a_worker_that_takes_too_long_is_a_row_that_says_so(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 30\n")
    python.chmod(0o755)
    settings = BenchSettings(quick=True, timeout=0.2)
    row = make_bench(settings).measure(Case(label="x", kind="peer_layer", case={}, python=python))
    assert row["error"] == "stopped after 0 seconds"


def test_workers_have_the_allocator_of_their_case_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    python = tmp_path / "python"
    told = '{"error": "\'"$(env | grep ^MALLOC_ | sort | tr "\\n" " ")"\'"}'
    python.write_text(f"#!/bin/sh\necho '{told}'\n")
    python.chmod(0o755)
    found = [
        make_bench().measure(Case(label="x", kind="peer_layer", case={}, python=python, allocator=name))["error"]
        for name in ("default", "tuned")
    ]
    assert found[0].strip() == ""
    assert [part.split("=")[0] for part in found[1].split()] == [
        "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_",
    ]  # fmt: skip


def test_sides_take_turns_and_ratios_are_by_round(monkeypatch):
    """Both sides get slower from round to round; their ratio does not."""
    asked = answers(monkeypatch, [100, 50, 10, 6, 1, 0.25])
    cases = [Case(label=label, kind="op", case={}) for label in ("a", "b")]
    a, b = make_bench(BenchSettings(rounds=3)).compare("title", cases)
    assert [label for label, *_ in asked] == ["a", "b"] * 3
    assert a["against"]["b"]["rounds"] == pytest.approx([2, 10 / 6, 4])
    assert a["against"]["b"]["median"] == pytest.approx(2)
    assert b["against"]["a"]["median"] == pytest.approx(0.5)
    assert (a["tokens_per_second"], a["rounds"], a["comparison"]) == (10, 3, "title")
    assert a["seconds"]["max"] == pytest.approx(1.0)
    assert a["peak_memory_bytes"] == int(1e8)


def test_a_side_that_fails_in_any_round_has_no_ratio(monkeypatch):
    answers(monkeypatch, [1, 1, 1, {"error": "no"}])
    cases = [Case(label=label, kind="op", case={}) for label in ("a", "b")]
    a, b = make_bench(BenchSettings(rounds=2)).compare("title", cases)
    assert (a["against"], b["against"], b["error"]) == ({}, {}, "no")


def test_an_op_that_is_wrong_is_not_reported(tmp_path, monkeypatch):
    def wrong(call):
        o, state, surprise = ops.BACKENDS["chunked"](call)
        return o * (1.0 + 1e-7), state, surprise

    monkeypatch.setitem(ops.BACKENDS, "auto", wrong)
    asked = answers(monkeypatch, [])
    with pytest.raises(ValueError, match=r"the op is wrong: o differs by a share of 1.0e-07 .*nothing is measured"):
        run_bench(OpsSettings(quick=True, out=tmp_path / "out", device="cpu"), print)
    assert asked == []
    assert list(tmp_path.iterdir()) == []


def test_wrong_gradients_are_found_too(monkeypatch):
    def wrong(call):
        theta = tuple(1.001 * x - (0.001 * x).detach() for x in call.theta)
        return ops.BACKENDS["chunked"](replace(call, theta=theta))

    monkeypatch.setitem(ops.BACKENDS, "auto", wrong)
    with pytest.raises(ValueError, match="gradient of theta"):
        gate.check_op(torch.device("cpu"))


def test_wrong_decoding_is_found_too(monkeypatch):
    def wrong(call):
        o, state, surprise = ops.BACKENDS["chunked"](call)
        return o + 1e-6 * (call.q.shape[1] == 1), state, surprise

    monkeypatch.setitem(ops.BACKENDS, "auto", wrong)
    with pytest.raises(ValueError, match="o, token by token, differs"):
        gate.check_op(torch.device("cpu"))


def test_the_check_covers_what_is_measured():
    found = gate.check_op(torch.device("cpu"))
    assert found["largest_difference"] <= 1e-9
    measured_cases = op_cases(OpsSettings())
    for name in ("depth", "forget_to"):
        checked = {{**gate.BASE, **case}[name] for case in gate.CASES}
        assert {case.case[name] for case in measured_cases} <= checked


def test_the_file_has_a_header_and_the_rows(tmp_path, monkeypatch):
    settings = OpsSettings(quick=True, out=tmp_path, device="cpu", modes=("decode",), threads=1)
    asked = answers(monkeypatch, [5.0] * 100)
    said = []
    result = run_bench(settings, said.append)
    written = json.loads((tmp_path / "ops.json").read_text())
    assert written == json.loads(json.dumps(result))
    assert [path.name for path in tmp_path.iterdir()] == ["ops.json"]
    assert (written["format"], written["what"], written["quick"]) == ("titans-lm bench 1", "ops", True)
    assert written["command"].startswith("titans bench ops ")
    assert written["check"]["cases"] == len(gate.CASES)
    assert written["settings"]["modes"] == ["decode"]
    assert len(written["rows"]) == len(asked) == len(said) - 2
    head = written["hardware"]
    assert head["memory_bytes"] > 1e8
    assert head["versions"]["torch"] == torch.__version__
    assert {"processor", "cores", "gpus", "commit", "date", "system", "allocators"} <= head.keys()


def test_ctrl_c_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    check_once(monkeypatch)
    monkeypatch.setattr(run, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_bench(OpsSettings(quick=True, out=tmp_path, device="cpu"), lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_lengths_end_where_one_does_not_fit(tmp_path, monkeypatch):
    rows = [measured(1.0), {"error": "RuntimeError: can't allocate memory"}]
    asked = answers(monkeypatch, rows)
    settings = ScalingSettings(lengths=(1024, 512, 2048), stream_tokens=0, out=tmp_path, device="cpu")
    found = run_bench(settings, lambda _: None)
    assert [row["label"] for row in found["rows"]] == ["1 × 512", "1 × 1,024"]
    assert {allocator for _, allocator, _ in asked} == {"tuned"}
    assert "error" in found["rows"][-1]


def test_streams_run_for_every_model(tmp_path, monkeypatch):
    monkeypatch.setattr("titans_lm.bench.kinds.length_cases", lambda *_: [])
    found = [streamed(1.5, 0.5), streamed(1.0, 0.9), streamed(1.1, 1.4)]
    asked = answers(monkeypatch, found * 2)
    settings = ScalingSettings(out=tmp_path, device="cpu", stream_models=("mac", "lmm"), rounds=3)
    rows = run_bench(settings, lambda _: None)["rows"]
    tokens = [(label, request["case"]["tokens"]) for label, _, request in asked]
    assert tokens == [("mac", 10**6)] * 3 + [("lmm", 10**6)] * 3
    for row in rows:
        assert (row["memory_ratio"], row["throughput_ratio"]) == (1.1, 0.9), "medians of the rounds"
        assert [each["memory_ratio"] for each in row["rounds"]] == [1.5, 1.0, 1.1]


def test_a_stream_that_fails_in_one_round_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr("titans_lm.bench.kinds.length_cases", lambda *_: [])
    answers(monkeypatch, [streamed(1.0, 1.0), {"error": "no memory"}])
    settings = ScalingSettings(out=tmp_path, device="cpu", stream_models=("mac",), rounds=2)
    assert run_bench(settings, lambda _: None)["rows"][0]["error"] == "no memory"


def test_everything_is_every_kind_with_its_own_sizes():
    parts = kinds(AllSettings(threads=1, peers_env=Path("/env")))
    assert list(parts) == ["ops", "model", "peers", "scaling", "tnt", "training"]
    assert all((part.threads, part.repeats, part.rounds) == (1, 2, 2) for part in parts.values())
    assert parts["peers"].peers_env == Path("/env")
    assert parts["ops"].lengths == OpsSettings().lengths
    assert kinds(ModelSettings()) == {"model": ModelSettings()}


def test_the_command_is_one_that_gives_the_settings():
    settings = PeersSettings(cases=("mac", "layer"), threads=2, quick=True, peers_env=Path("/a b"))
    assert written_command("bench", "peers", settings=settings) == (
        "titans bench peers --threads 2 --quick --peers-env '/a b' --cases mac layer"
    )


def test_one_size_is_varied_at_a_time():
    cases = op_cases(OpsSettings(modes=("forward",)))
    shapes = [json.dumps(case.case) + case.allocator for case in cases]
    assert len(shapes) == len(set(shapes))
    assert {case.case["chunk"] for case in cases} == {1, 4, 16, 64, 256}
    assert {case.case["heads"] * case.case["width"] for case in cases if case.label.startswith("D ")} == {384}
    assert [case.case["tokens"] for case in cases if case.label in ("C 1", "C 4")] == [256, 256]


def test_every_model_is_measured_in_training_reading_and_decoding():
    cases = model_cases(ModelSettings(models=("mac",), contexts=(10, 20)))
    assert [(case.mode, case.case.get("context")) for case in cases] == [
        ("train", None), ("prefill", None), ("decode", 10), ("decode", 20),
    ]  # fmt: skip


def test_a_layer_of_tnt_stands_beside_plain_ones_of_its_chunk_and_of_long_chunks():
    (found,) = tnt(TNTSettings(widths=(32,), shards=(512,), tokens=1024), Place("cpu", print))
    assert found.title == "4 heads of 8, 1 × 1,024"
    assert [case.label for case in found.cases] == ["LMM, chunk 8", "LMM, chunk 64", "TNT, local chunk 8, shard 512"]
    assert {case.allocator for case in found.cases} == {"tuned"}
    with pytest.raises(ValueError, match="got hidden_size=66"):  # before the first width is measured
        next(tnt(TNTSettings(widths=(64, 66)), Place("cpu", print)))


def test_models_of_one_size_are_trained_in_turn_by_the_names_of_compare():
    (found,) = training(TrainingSettings(models=("lmm", "lmm:key_degree=2,memory_depth=1")), Place("cpu", print))
    assert found.title == "1,240,000 parameters, 2 × 1,024"
    assert [case.label for case in found.cases] == ["lmm", "lmm:key_degree=2,memory_depth=1"]
    assert {(case.kind, case.mode) for case in found.cases} == {("model", "train")}
    with pytest.raises(ValueError, match="got 'key_degre'"):
        next(training(TrainingSettings(models=("lmm", "lmm:key_degre=2")), Place("cpu", print)))


def test_on_a_gpu_the_allocator_is_torchs_own():
    assert allocators("cpu") == ("default", "tuned")
    assert allocators("cuda:0") == ("default",)
    assert (file_name("ops", "cpu", "float32"), file_name("ops", "cuda:1", "bf16")) == (
        "ops.json", "ops-cuda-bf16.json",
    )  # fmt: skip


def test_the_commit_is_known_or_said_to_be_unknown(monkeypatch):
    monkeypatch.setattr("titans_lm.train.device.commit", commit.__wrapped__)
    assert hardware()["commit"]
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent / "nothing"))
    assert hardware()["commit"] == "unknown"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OpsSettings(repeats=0), "repeats=0"),
        (lambda: OpsSettings(chunks=()), r"got chunks=\(\); expected one or more"),
        (lambda: OpsSettings(lengths=(64, 64)), "each once"),
        (lambda: OpsSettings(heads=(0,)), "heads=0"),
        (lambda: OpsSettings(modes=("froward",)), "did you mean 'forward'"),
        (lambda: ModelSettings(models=("lama",)), "did you mean 'llama'"),
        (lambda: PeersSettings(allocators=("tunned",)), "did you mean 'tuned'"),
        (lambda: TrainingSettings(models=()), "expected one or more"),
        (lambda: TrainingSettings(models=("lmm", "lmm")), "each once"),
        (lambda: ScalingSettings(stream_tokens=-1), "stream_tokens=-1"),
        (lambda: ScalingSettings(stream_models=("llama",)), "stream_models='llama'"),
        (lambda: BenchSettings(threads=0), "threads=0"),
        (lambda: BenchSettings(timeout=0.0), "timeout=0.0"),
        (lambda: BenchSettings(memory_limit=-1.0), "memory_limit=-1.0"),
    ],
)
def test_settings_that_will_not_do(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_new_benchmark_is_one_decorated_function(tmp_path, monkeypatch):
    """It gets the rows of its cases back, is part of all of them, and may change the header of its file."""

    @dataclass(frozen=True, kw_only=True)
    class SleepingSettings(BenchSettings):
        """A benchmark of the tests."""

    monkeypatch.setattr(registry, "BENCHMARKS", dict(benchmarks()))
    got = []

    @benchmark("sleeping", SleepingSettings)
    def sleeping(settings, at):
        got.append((yield Case(label="nap", kind="op", case=OP)))
        return {"check": {"more": 1}}

    answers(monkeypatch, [4.0])
    found = run_bench(SleepingSettings(out=tmp_path, device="cpu", rounds=1), lambda _: None)
    assert found["rows"] == got
    assert (got[0]["label"], got[0]["tokens_per_second"]) == ("nap", 4.0)
    assert (found["what"], found["check"]["more"], found["check"]["cases"]) == ("sleeping", 1, len(gate.CASES))
    assert (tmp_path / "sleeping.json").is_file()
    assert "sleeping" in kinds(AllSettings())


def test_every_kind_of_case_has_a_subject():
    sides = [side for _, cases in comparisons(PeersSettings(), Path("python"), "cpu") for side in cases]
    cases = [*op_cases(OpsSettings()), *model_cases(ModelSettings()), *stream_cases(ScalingSettings())]
    assert {case.kind for case in [*sides, *cases] if case.python is None} <= subjects().keys()
