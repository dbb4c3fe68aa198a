"""`titans evaluate perplexity`: what is measured is what is said, nothing is read twice, and mistakes are told."""

import dataclasses
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cli_cases import titans
from model_cases import small_config, wake
from titans_lm.backbone import frozen_memory
from titans_lm.cli import parse
from titans_lm.commands.measure import command_line
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.evaluate.documents import Encoder, books, spans
from titans_lm.evaluate.positions import (
    SpanScore,
    by_position,
    difference,
    difference_in_differences,
    late_minus_early,
    overall,
    score_spans,
)
from titans_lm.evaluate.stream import reader_for
from titans_lm.experiments.books import FILE, run_perplexity
from titans_lm.experiments.reading import READINGS
from titans_lm.experiments.reading_settings import Mode, PerplexitySettings
from titans_lm.report.books import differences, heading, plot, tables
from titans_lm.report.page import render_results, without_folders
from titans_lm.report.table import screen
from titans_lm.train.checkpoint import save_model
from titans_lm.train.fresh import byte_model
from titans_lm.train.run import load_model, load_tokenizer

NEAR, FAR = (64, 128), (128, 256)


def saved(folder: Path, architecture: str, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    if architecture == "llama":
        config = LlamaConfig(
            vocab_size=259, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        )
        model: Any = LlamaForCausalLM(config)
    else:
        model = byte_model(small_config(architecture, num_hidden_layers=1))
        wake(model, 0.1 * (seed + 1))
    folder.mkdir(parents=True)
    save_model(folder, model, byte_tokenizer())
    return folder


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shelf")
    for index in range(3):
        text = " ".join(str((index + 7) ** 3 % (11 + i)) for i in range(260))
        (folder / f"{index}.txt").write_text(text[: 600 + 50 * index])
    return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, shelf: Path) -> tuple[PerplexitySettings, dict[str, Any]]:
    place = tmp_path_factory.mktemp("models")
    models = {name: saved(place / name, name.rstrip("012"), int(name[-1])) for name in ("lmm0", "lmm1", "sliding0")}
    models["llama0"] = saved(place / "llama0", "llama")
    settings = PerplexitySettings(
        models=tuple(f"{name.rstrip('012')}={path}" for name, path in models.items()), text=(shelf,),
        reset_every=(32, 100), stretch=256, near=NEAR, far=FAR, window=64, window_step=32, out=place / "out",
        quiet=True,
    )  # fmt: skip
    return settings, run_perplexity(settings, command_line(settings), lambda _: None)


def scores(settings: PerplexitySettings, index: int, mode: Mode) -> list[SpanScore]:
    """The same by hand."""
    model = load_model(settings.named()[index].path, "cpu")
    sizes = {"window": 64, "window_step": 32}
    reading = reader_for(model, piece_len=50, **sizes)
    found = spans(books(list(settings.text)), Encoder(None), length=256)
    if mode.kind == "off":
        with frozen_memory(model):
            return score_spans(model, found, reading)
    every = mode.every if mode.kind == "reset" else None
    if every is not None and not reading.constant:
        reading = reader_for(model, piece_len=50, window=every, window_step=every)
    return score_spans(model, found, reading, reset_every=every)


def test_every_number_is_what_the_models_do(done: Any) -> None:
    settings, result = done
    lmm, sliding, llama = result["models"]
    assert [one["mode"] for one in lmm["readings"]] == ["on", "reset", "reset", "off"]
    assert [one["mode"] for one in sliding["readings"]] == ["on", "reset", "reset"]
    assert [(one["mode"], one["every"]) for one in llama["readings"]] == [
        ("windows", 64),
        ("reset", 32),
        ("reset", 100),
    ]
    assert [(one["memory"], one["carries"]) for one in result["models"]] == [
        (True, True),
        (False, True),
        (False, False),
    ]
    for model, indices in ((lmm, (0, 1)), (sliding, (2,)), (llama, (3,))):
        for reading in model["readings"]:
            mode = Mode(reading["mode"], reading["every"])
            found = [scores(settings, index, mode) for index in indices]
            bits = [overall(one).bits_per_byte for one in found]
            assert (reading["tokens"], reading["bytes"]) == (overall(found[0]).tokens, overall(found[0]).bytes)
            assert reading["bits_per_byte"]["mean"] == pytest.approx(sum(bits) / len(bits), rel=1e-5)
            assert reading["bits_per_byte"]["seeds"] == len(bits)
            for place, told in enumerate(reading["by_position"]):
                expected = [by_position(one)[place] for one in found]
                assert (told["tokens"], told["bytes"]) == (expected[0].tokens, expected[0].bytes)
                mean = sum(one.bits_per_byte for one in expected) / len(expected)
                assert told["bits_per_byte"]["mean"] == pytest.approx(mean, rel=1e-5)
            whole = late_minus_early([score for one in found for score in one], NEAR, FAR)
            assert whole is not None
            assert reading["far_minus_near"]["value"] == pytest.approx(whole.value, abs=1e-5)
            assert reading["far_minus_near"]["low"] == pytest.approx(whole.low, abs=1e-5)
            assert (whole.books, whole.stretches) == (3, 6)
    assert sum(one["bytes"] for one in lmm["documents"]) == lmm["readings"][0]["bytes"] == 600 + 650 + 700


def test_differences_are_between_readings_of_the_same_tokens(done: Any) -> None:
    settings, result = done
    lmm = result["models"][0]
    assert [(one["mode"], one["minus"]) for one in lmm["differences"]] == [
        ("on", "reset-32"), ("on", "reset-100"), ("on", "off"),
    ]  # fmt: skip
    on = [scores(settings, seed, Mode("on")) for seed in (0, 1)]
    off = [scores(settings, seed, Mode("off")) for seed in (0, 1)]
    told = lmm["differences"][2]
    assert told["overall"]["value"] == pytest.approx(difference([*on[0], *on[1]], [*off[0], *off[1]]).value, abs=1e-5)
    change = difference_in_differences([*on[0], *on[1]], [*off[0], *off[1]], NEAR, FAR)
    assert change is not None
    assert told["change"]["value"] == pytest.approx(change.value, abs=1e-5)
    by_seed = [difference_in_differences(a, b, NEAR, FAR) for a, b in zip(on, off, strict=True)]
    assert told["change"]["by_seed"] == pytest.approx([one.value for one in by_seed if one], abs=1e-5)


def test_what_a_number_came_from_is_beside_it(done: Any) -> None:
    settings, result = done
    assert result["what"] == "perplexity"
    assert result["command"] == command_line(settings)
    assert parse(shlex.split(result["command"])[1:]).what == dataclasses.replace(settings, quiet=False)
    assert result["hardware"]["processor"]
    assert result["hardware"]["commit"]
    assert result["seed"] == 0
    seconds = [json.loads(file.read_text())["seconds"] for file in (settings.out / READINGS).glob("*.json")]
    assert result["wall_seconds"] == pytest.approx(sum(seconds))
    assert "commits" not in result
    for one in result["models"]:
        assert all(reading["commits"] == [result["hardware"]["commit"]] for reading in one["readings"])
    assert json.loads((settings.out / FILE).read_text()) == result


def test_nothing_is_read_twice(done: Any, monkeypatch: pytest.MonkeyPatch, shelf: Path) -> None:
    """What was stopped goes on: readings that are done are kept, the one that is missing is read."""
    settings, result = done
    files = sorted((settings.out / READINGS).glob("*.json"))
    assert len(files) == 4 + 4 + 3 + 3
    [gone] = [file for file in files if file.name.startswith("sliding-on-")]
    gone.unlink()
    import titans_lm.experiments.books as module

    read: list[int | None] = []

    def counted(*args: Any, reset_every: int | None, **more: Any) -> Any:
        read.append(reset_every)
        return score_spans(*args, reset_every=reset_every, **more)

    monkeypatch.setattr(module, "score_spans", counted)
    monkeypatch.setattr("titans_lm.experiments.runner.commit", lambda: "later")
    again = run_perplexity(settings, "again", lambda _: None)
    assert read == [None]
    before = result["hardware"]["commit"]
    assert again["commits"] == [before, "later"], "of the readings that were kept, and of the one that was not"
    assert [one["commits"] for one in again["models"][1]["readings"]] == [["later"], [before], [before]]
    assert json.loads(gone.read_text())["commits"] == ["later"]
    seconds = [json.loads(file.read_text())["seconds"] for file in files]
    assert again["wall_seconds"] == pytest.approx(sum(seconds)), "of the readings, not of the last call"
    kept = [[reading["by_position"] for reading in one["readings"]] for one in again["models"]]
    assert kept == [[reading["by_position"] for reading in one["readings"]] for one in result["models"]]
    run_perplexity(dataclasses.replace(settings, near=(0, 64), batch_size=1), "other questions", lambda _: None)
    assert read == [None], "the same readings answer them"
    run_perplexity(dataclasses.replace(settings, max_tokens=200, models=settings.models[:1]), "less", lambda _: None)
    assert read == [None, None, 32, 100, None], "other text is read anew"


def test_the_page_and_the_screen_say_it(done: Any, tmp_path: Path) -> None:
    settings, result = done
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "books.json").write_text(json.dumps(result))
    written = render_results(tmp_path / "results", tmp_path / "results.md")
    assert tmp_path / "results" / "books.png" in written
    page, shown = (tmp_path / "results" / "language.md").read_text(), "\n".join(screen(tables(result)))
    assert "## Whole books by position: 3 held-out books\n" in page
    assert without_folders(command_line(settings)) in page
    assert "](./books.png)" in page
    for model in result["models"]:
        for reading in model["readings"]:
            cell = f"{reading['bits_per_byte']['mean']:.4f}"
            far = reading["far_minus_near"]
            told = f"{far['value']:+.4f} [{far['low']:+.4f}, {far['high']:+.4f}]"
            assert all(cell in text and told in text for text in (page, shown))
    change = result["models"][0]["differences"][2]["change"]
    assert f"{change['value']:+.4f} [{change['low']:+.4f}, {change['high']:+.4f}] |" in page
    drawn = plot(result)
    assert [(line.dashed, line.dotted) for line in drawn.lines[:4]] == [
        (False, False), (True, False), (True, False), (False, True),
    ]  # fmt: skip
    assert drawn.x_labels == ["0–", "64–", "128–"]


def test_books_without_far_positions_have_no_differences(done: Any) -> None:
    _, result = done
    told = json.loads(json.dumps(result))
    for model in told["models"]:
        for reading in model["readings"]:
            reading["far_minus_near"] = None
    assert differences(told).said.startswith("No span reaches the end of the far positions (128–256)")


def test_a_column_of_differences_is_named_by_what_others_are_subtracted_from(done: Any, tmp_path: Path) -> None:
    settings, result = done
    names = [column.title for column in differences(result).columns]
    assert "on − mode, all positions" in names
    alone = dataclasses.replace(settings, models=settings.models[:1], memory=("reset", "off"), reset_every=(32,))
    found = differences(run_perplexity(dataclasses.replace(alone, out=tmp_path), "alone", lambda _: None))
    assert [column.title for column in found.columns][-2:] == [
        "reset 32 − mode, all positions", "change of reset 32 − mode",
    ]  # fmt: skip


def test_a_model_without_a_memory_has_none_to_freeze(done: Any, tmp_path: Path) -> None:
    settings, _ = done
    off = dataclasses.replace(settings, models=settings.models[3:], memory=("off",), out=tmp_path)
    with pytest.raises(ValueError, match="got memory='off' for a model without a neural memory; expected on or reset"):
        run_perplexity(off, "off", lambda _: None)
    assert not (tmp_path / FILE).exists()


def test_short_books_have_positions_and_no_goal(done: Any, tmp_path: Path) -> None:
    settings, _ = done
    short = dataclasses.replace(settings, models=settings.models[2:3], stretch=None, max_tokens=130, out=tmp_path)
    result = run_perplexity(short, "short", lambda _: None)
    reading = result["models"][0]["readings"][0]
    assert reading["far_minus_near"] is None
    assert [(b["start"], b["tokens"]) for b in reading["by_position"]] == [(0, 192), (64, 192), (128, 6)]
    assert "nothing is said about them" in "\n".join(screen(tables(result)))
    late = run_perplexity(dataclasses.replace(short, skip_tokens=500), "late", lambda _: None)
    assert [one["tokens"] for one in late["models"][0]["documents"]] == [100, 130, 130]
    assert heading(late) == "Whole books by position: 3 held-out books, from token 500 on"
    last = run_perplexity(dataclasses.replace(short, skip_tokens=660), "last", lambda _: None)
    assert [one["tokens"] for one in last["models"][0]["documents"]] == [0, 0, 40]
    assert heading(last) == "Whole books by position: 1 held-out book, from token 660 on"
    assert tables(last)[0].said.startswith("1 book, 130 tokens of each after its first 660, read whole: 1 span")
    both = run_perplexity(dataclasses.replace(short, skip_tokens=610), "both", lambda _: None)
    overall = both["models"][0]["differences"][0]["overall"]
    assert (overall["books"], overall["stretches"]) == (2, 2), "a book of which nothing was read counts for none"
    assert overall["low"] <= overall["value"] <= overall["high"]


def test_a_book_may_have_a_name_that_is_no_text(done: Any, tmp_path: Path) -> None:
    """Names are bytes on Linux: one in Latin-1 is read like any other."""
    settings, _ = done
    book = tmp_path / os.fsdecode(b"caf\xe9.txt")
    book.write_text("some words " * 20)
    one = dataclasses.replace(settings, models=settings.models[:1], text=(book,), stretch=None, out=tmp_path / "out")
    result = run_perplexity(one, "odd", lambda _: None)
    assert [(d["name"], d["tokens"]) for d in result["models"][0]["documents"]] == [(book.name, 220)]
    assert json.loads((tmp_path / "out" / FILE).read_text())["models"][0]["documents"][0]["name"] == book.name


def test_the_command(done: Any, tmp_path: Path, shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, _ = done
    path = settings.named()[2].path
    args = [
        "evaluate",
        "perplexity",
        path,
        "--text",
        shelf / "0.txt",
        shelf / "1.txt",
        "--memory",
        "on",
        "--out",
        tmp_path,
    ]
    code, out, err = titans(capsys, *args, "--json", tmp_path / "copy.json")
    assert (code, err) == (0, "")
    assert f"{path.name} ({path}), on: " in out
    assert f"numbers in {tmp_path / FILE}" in out
    assert json.loads((tmp_path / "copy.json").read_text())["models"][0]["name"] == path.name
    assert titans(capsys, *args, "--quiet")[1] == ""


MISTAKES = [
    ({"models": ()}, "got no model or no text"),
    ({"text": ()}, "got no model or no text"),
    ({"text": (Path("/nowhere"),)}, "does not exist"),
    ({"models": ("a=/nowhere",)}, "'/nowhere', which does not exist"),
    ({"models": ("=x",)}, "expected PATH or NAME=PATH"),
    ({"memory": ()}, "got memory=()"),
    ({"reset_every": (8, 8)}, "each once"),
    ({"reset_every": (0,)}, "reset_every=0"),
    ({"window": 4}, "window=4 and window_step=32"),
    ({"stretch": 0}, "stretch=0"),
    ({"skip_tokens": -1}, "skip_tokens=-1"),
    ({"skip_tokens": 10**6}, "got texts with nothing to predict behind 1,000,000 tokens"),
    ({"near": (0, 100)}, "expected two of 0, 64, 128, 256 and so on"),
    ({"near": (0, 512), "far": (256, 1024)}, "near ones before far ones"),
    ({"far": (16_384, 16_384)}, "near ones before far ones"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_mistakes_are_told(done: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    settings, _ = done
    with pytest.raises(ValueError, match=re.escape(message)):
        run_perplexity(dataclasses.replace(settings, out=tmp_path / "out", **changes), "wrong", lambda _: None)
    assert not (tmp_path / "out" / FILE).exists()
    assert not (tmp_path / "out" / READINGS).exists()


def test_names_say_which_models_belong_together(done: Any, tmp_path: Path) -> None:
    settings, _ = done
    lmm, sliding = settings.named()[0].path, settings.named()[2].path
    other = saved(tmp_path / "lmm0", "lmm", 2)
    with pytest.raises(ValueError, match="several models called 'lmm0'"):
        dataclasses.replace(settings, models=(str(lmm), str(other))).named()
    with pytest.raises(ValueError, match="twice"):
        dataclasses.replace(settings, models=(f"a={lmm}", f"b={lmm}")).named()
    mixed = dataclasses.replace(settings, models=(f"a={lmm}", f"a={sliding}"), out=tmp_path / "out")
    with pytest.raises(ValueError, match="expected seeds of one model under one name"):
        run_perplexity(mixed, "mixed", lambda _: None)
    shutil.copytree(lmm, tmp_path / "words")
    tokenizer = load_tokenizer(lmm)
    tokenizer.eos_token = tokenizer.bos_token
    tokenizer.save_pretrained(tmp_path / "words")
    words = dataclasses.replace(mixed, models=(f"a={lmm}", f"a={tmp_path / 'words'}"))
    with pytest.raises(ValueError, match="with other settings or tokenizers; expected seeds of one model"):
        run_perplexity(words, "words", lambda _: None)
    assert not (tmp_path / "out").exists(), "before anything is read"
