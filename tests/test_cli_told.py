"""What commands say beside their results: shares, times, and what is not as it was asked for."""

import io
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from cli_cases import titans
from titans_lm.cli import parse
from titans_lm.commands.show import check_files
from titans_lm.train.device import asked_threads
from titans_lm.train.progress import CountReport, ProgressReport
from titans_lm.train.run import load_tokenizer
from titans_lm.train.settings import LanguageSettings

TINY = [
    *("--steps", 1, "--seq-len", 16, "--batch-size", 2, "--eval-bytes", 100, "--model.hidden-size", 16),
    *("--model.num-hidden-layers", 1, "--model.memory-expansion", 1, "--model.segment-len", 16, "--model.window", 16),
]


def test_a_part_held_out_that_is_far_from_what_was_asked_is_told(tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text("a word or two. " * (2000 if number == 5 else 10))
    args = ["prepare", folder, "--out", tmp_path / "out", "--held-out", "0.3"]
    code, out, _ = titans(capsys, *args, "--json", tmp_path / "p.json")
    found = json.loads((tmp_path / "p.json").read_text())
    share = found["held_out_tokens"] / (found["held_out_tokens"] + found["train_tokens"])
    told = f"{share:.1%} of the tokens are held out, and not the 30.0% asked for"
    assert (code, told in out) == (0, not 0.15 <= share <= 0.6), out
    assert not 0.15 <= share <= 0.6, "one document is nearly all of it"
    even = tmp_path / "even.txt"
    even.write_text("a word or two.\n" * 900)
    assert "asked for" not in titans(capsys, "prepare", even, "--out", tmp_path / "even")[1]


def test_bits_are_told_per_byte_from_the_first_step_to_the_last(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}").write_text("the cat sat on the mat and the dog sat on the log\n" * 30)
    args = ["prepare", tmp_path / "texts", "--out", tmp_path / "data", "--train-bpe", 270, "--held-out", 0.5]
    assert titans(capsys, *args)[0] == 0
    code, out, err = titans(capsys, "train", tmp_path / "data", "--out", tmp_path / "run", *TINY)
    assert code == 0, err
    counts = json.loads((tmp_path / "data" / "tokens.json").read_text())["splits"]["train"]
    per_token = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["bits_per_token"]
    ratio = sum(shard["bytes"] for shard in counts) / sum(shard["tokens"] for shard in counts)
    assert ratio > 1.5
    assert f"  {per_token / ratio:.3f} bits/byte  " in err
    assert "bits per token" not in out + err
    assert "held-out bits per byte" in out


def test_a_file_that_is_no_text_is_trained_on_with_a_note(tmp_path, capsys):
    (tmp_path / "x.bin").write_bytes(bytes(range(256)) * 20)
    code, _, err = titans(capsys, "train", tmp_path / "x.bin", "--out", tmp_path / "run", *TINY)
    assert code == 0, err
    assert "note: x.bin holds zero bytes, so it may be no text; it is read byte by byte, as it was named" in err


def test_a_bar_of_eighty_columns_is_whole():
    console = Console(width=80, force_terminal=True, record=True, file=io.StringIO())
    progress = ProgressReport(console=console)
    progress.bytes_per_token = 1.0
    with progress.start(100_000):
        progress.update({"step": 12_345, "loss": 1.234, "bits_per_token": 1.78, "tokens_per_second": 123_456.0})
    shown = console.export_text()
    for part in ("training", "12345/100000", "1.780 bits/byte", "123,456 tokens/s"):
        assert part in shown
    assert "…" not in shown


def test_reading_says_its_share_and_the_time_that_is_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("titans_lm.train.progress.QUIET_SECONDS", 0.0)
    (tmp_path / "text").write_text("a line of a text\n" * 40)
    titans(capsys, "train", tmp_path / "text", "--out", tmp_path / "run", *TINY, "--quiet")
    args = ["read", tmp_path / "text", "--model", tmp_path / "run", "--out", tmp_path / "m.memory", "--piece-len", 100]
    code, _, err = titans(capsys, *args)
    assert code == 0, err
    lines = [line for line in err.splitlines() if line.startswith("reading: ")]
    assert lines[0].endswith("%")
    assert all(" %" not in line and "%, " in line for line in lines[1:])
    assert lines[-1].endswith("100%, 0 seconds left")


def test_the_time_that_is_left_counts_bytes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("titans_lm.train.progress.time.monotonic", lambda: now[0])
    report = CountReport(quiet=True, title="reading").start(1_000_000)
    assert report._share(200_000, 10.0) == "  20%"
    assert report._share(400_000, 20.0 + 590.0) == "  40%, 30 minutes left"
    assert CountReport(quiet=True, title="reading").start()._share(5, 1.0) == ""


def test_a_model_of_a_task_says_that_its_ids_are_no_text(tmp_path, capsys):
    args = [
        *("evaluate", "needle", "--models", "lmm", "--steps", 1, "--rates", 1e-3, "--seeds", 0, "--sizes", "0x1"),
        *("--test-sizes", "0x1", "--examples", 2, "--batch-size", 2, "--model.hidden-size", 16, "--quiet"),
        *("--model.num-hidden-layers", 1, "--out", tmp_path / "out"),
    ]
    assert titans(capsys, *args)[0] == 0
    run = tmp_path / "out" / "runs" / "lmm-seed0"
    code, _, err = titans(capsys, "generate", run)
    assert code == 2
    assert "a model of a task's own ids, which are no text; expected one that titans train made, or test it" in err
    assert f"titans evaluate TASK --models again={run} --steps 0" in err


def test_a_model_of_a_task_in_a_tokenizer_keeps_that(tmp_path, capsys):
    (tmp_path / "text").write_text("a line of a text\n" * 40)
    titans(capsys, "train", tmp_path / "text", "--out", tmp_path / "text-run", *TINY, "--quiet")
    args = [
        *("evaluate", "needle", "--models", "lmm", "--steps", 1, "--rates", 1e-3, "--seeds", 0, "--sizes", "0x1"),
        *("--test-sizes", "0x1", "--examples", 2, "--batch-size", 2, "--model.hidden-size", 16, "--quiet"),
        *("--model.num-hidden-layers", 1, "--task.tokenizer", tmp_path / "text-run" / "model", "--out", tmp_path / "o"),
    ]
    assert titans(capsys, *args)[::2] == (0, "")
    run = tmp_path / "o" / "runs" / "lmm-seed0"
    assert len(load_tokenizer(run)) == 259
    assert titans(capsys, "generate", run, "--max-new-tokens", 2, "--prompt", "x")[0] == 0


def test_sizes_are_written_with_units_where_they_are_tokens():
    found = parse(["evaluate", "reread", "x", "--distances", "0", "1K", "2M", "--context", "2K"]).what
    assert (found.distances, found.context) == ((0, 1024, 2 * 2**20), 2048)
    found = parse(["evaluate", "perplexity", "x", "--stretch", "4K", "--near", "0", "4K", "--far", "4096", "16K"]).what
    assert (found.stretch, found.near, found.far) == (4096, (0, 4096), (4096, 16_384))


@pytest.mark.parametrize(("value", "threads"), [("3", 3), ("", None), ("4,2", None), ("0", None)])
def test_threads_of_benchmarks_are_those_of_the_environment(monkeypatch, value, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert asked_threads() == threads


def test_lm_eval_does_not_wait_for_a_hub_that_does_not_answer(monkeypatch):
    harness = pytest.importorskip("titans_lm.lm_eval")
    monkeypatch.setattr(harness.huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(harness.datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(harness, "getproxies", dict)

    def refused(*_args, **_named):
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "create_connection", refused)
    with harness._kept_alone_without_a_network():
        assert harness.huggingface_hub.constants.HF_HUB_OFFLINE
        assert harness.datasets.config.HF_HUB_OFFLINE
    assert not harness.huggingface_hub.constants.HF_HUB_OFFLINE


def test_what_is_written_by_default_lies_below_runs():
    assert str(parse(["surprise", "x", "--model", "y"]).out) == "runs/surprise"
    assert str(parse(["genomics", "predict", "x", "y"]).what.out) == "runs/classes.tsv"
    assert LanguageSettings().out is None


def test_a_device_may_be_given_twice_and_a_file_may_not(tmp_path):
    device, file = Path(os.devnull), tmp_path / "file"
    check_files(SimpleNamespace(json=device, save_memory=device))
    with pytest.raises(ValueError, match=r"given as save-memory too; expected a name of its own"):
        check_files(SimpleNamespace(json=file, save_memory=file))


@pytest.mark.parametrize("command", ["generate", "ask", "read", "surprise"])
def test_a_memory_that_is_none_is_told_before_a_model_is_loaded(command, tmp_path, capsys, monkeypatch):
    def load_model(*_args):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("titans_lm.train.run.load_model", load_model)
    text, none = tmp_path / "text", tmp_path / "none.memory"
    text.write_text("Mary is in the kitchen.\n")
    args = {
        "generate": ["pretrained:facts", "--memory", none],
        "ask": ["Where is Mary?", "--memory", none],
        "read": [text, "--model", "pretrained:facts", "--onto", none, "--out", tmp_path / "out"],
        "surprise": [text, "--model", "pretrained:facts", "--memory", none, "--out", tmp_path / "out"],
    }[command]
    code, _, err = titans(capsys, command, *args)
    assert code == 2
    assert "none.memory', which does not exist; expected a file that `titans read` has written" in err
    text.rename(none)
    code, _, err = titans(capsys, command, *(args if command in ("generate", "ask") else [none, *args[1:]]))
    assert code == 2
    assert "which is no memory file" in err
