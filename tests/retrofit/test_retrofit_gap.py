"""`titans evaluate gap`: the share of what a window costs that an adapter wins back, by row and window."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from retrofit.retrofit_cases import SINKS, WINDOW, base_of, with_memory
from titans_lm.backbone import frozen_memory
from titans_lm.cli import main
from titans_lm.commands.measure import command_line
from titans_lm.data.tokenizer import VOCAB_SIZE, byte_tokenizer
from titans_lm.experiments.gap import run_gap
from titans_lm.experiments.reading_settings import GapSettings
from titans_lm.report.gap import SECTION, tables
from titans_lm.retrofit import FULL, Reach, load, save

ROWS, LENGTH = 4, 40


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = tmp_path_factory.mktemp("gap")
    base_of(vocab_size=VOCAB_SIZE).float().save_pretrained(path / "base")
    base = type(base_of()).from_pretrained(path / "base")
    for name, trained in (("one", True), ("none", False)):
        save(with_memory(base, trained=trained), path / name)
        byte_tokenizer().save_pretrained(path / name)
    for book in ("first.txt", "second.txt"):
        (path / "books").mkdir(exist_ok=True)
        (path / "books" / book).write_text(" ".join(f"{n * n} ships of {book} sailed on day {n}." for n in range(20)))
    return GapSettings(
        models=(str(path / "one"), str(path / "none")), text=(path / "books",), rows=ROWS, seq_len=LENGTH,
        windows=(WINDOW, 12), out=path / "out", device="cpu", quiet=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def result(settings):
    return run_gap(settings, command_line(settings), lambda _: None)


def test_the_share_is_that_of_the_logits(settings, result):
    assert (result["what"], result["command"]) == ("gap", command_line(settings))
    model = load(settings.models[0])
    tokens = [(settings.text[0] / book).read_bytes() for book in ("first.txt", "second.txt")]
    rows = [list(text[start : start + LENGTH + 1]) for text in tokens for start in (0, len(text) - LENGTH - 1)]
    for place, window in enumerate(settings.windows):
        found = result["models"][0]["windows"][place]
        costs = []
        for row in rows:
            ids = torch.tensor([row])
            reaches = FULL, Reach(window, SINKS, memory=False), Reach(window, SINKS)
            with torch.no_grad():
                logits = [model(ids[:, :-1], reach=reach).logits[0, window:] for reach in reaches]
                with frozen_memory(model):
                    logits.append(model(ids[:, :-1], reach=reaches[-1]).logits[0, window:])
            costs.append([float(F.cross_entropy(one, ids[0, 1 + window :])) for one in logits])
        full, windowed, ours, frozen = np.array(costs).mean(0)
        told = [found[name]["mean"] for name in ("full", "windowed", "ours", "frozen")]
        assert told == pytest.approx([full, windowed, ours, frozen], rel=1e-6)
        assert abs(windowed - ours) > 1e-4
        assert frozen == pytest.approx(windowed, rel=1e-6), "without LoRA, an empty memory that is frozen adds nothing"
        share = (told[1] - told[2]) / (told[1] - told[0])
        assert found["share"]["mean"] == pytest.approx(share, rel=1e-9)
        assert found["low"] <= share <= found["high"]
        untrained = result["models"][1]["windows"][place]
        assert untrained["share"]["mean"] == pytest.approx(0.0, abs=1e-6)
    assert result["models"][0]["window"] == WINDOW


def test_the_table_has_a_row_for_every_adapter_and_window(result):
    (table,) = tables(result)
    assert [row[2] for row in table.body] == ["8", "12*"] * 2
    assert {"share", "frozen"} <= set(table.head)
    assert SECTION.heading(result)


def test_what_is_done_is_not_done_again(settings, result, monkeypatch):
    monkeypatch.setattr("titans_lm.retrofit.cache.nats", None)
    again = run_gap(settings, "again", lambda _: None)
    assert again["models"] == result["models"]


def test_the_command(settings, tmp_path, capsys):
    args = ["evaluate", "gap", settings.models[0], "--text", str(settings.text[0]), "--rows", "2", "--seq-len", "30"]
    main([*args, "--out", str(tmp_path), "--device", "cpu", "--json", str(tmp_path / "told.json")])
    assert "share" in capsys.readouterr().out
    assert json.loads((tmp_path / "told.json").read_bytes())["models"][0]["windows"][0]["rows"] == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models": ()}, "got no model or no text"),
        ({"windows": (40,)}, "got a window of 40 and rows of 40; expected longer rows"),
        ({"seq_len": 10_000}, "expected longer books, or fewer or shorter rows"),
        ({"base": True, "seq_len": 10_000}, "without an adapter; expected a model of titans retrofit"),
    ],
)
def test_mistakes_are_told(settings, tmp_path, changes, said):
    if changes.pop("base", False):
        base = settings.out.parent / "base"
        byte_tokenizer().save_pretrained(base)
        changes = {**changes, "models": (str(base),)}
    with pytest.raises(ValueError, match=said):
        run_gap(dataclasses.replace(settings, out=tmp_path, **changes), "wrong", lambda _: None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"rows": 1}, "got rows=1"), ({"windows": (0,)}, "got windows=0"), ({"windows": (4, 4)}, "each once")],
)
def test_settings_that_cannot_be(changes, said):
    with pytest.raises(ValueError, match=said):
        GapSettings(**changes)
