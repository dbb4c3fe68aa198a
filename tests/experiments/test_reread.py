"""`titans evaluate reread`: what is measured is what is said, nothing is read twice, and mistakes are told."""

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cli_cases import titans
from model_cases import small_config, wake
from titans_lm.cli import parse
from titans_lm.commands.measure import command_line
from titans_lm.data.curriculum import RereadCurriculum
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.evaluate.documents import Encoder, books
from titans_lm.evaluate.reread import Drawing, draw_passages, reread
from titans_lm.evaluate.stream import reader_for
from titans_lm.experiments.reading import READINGS
from titans_lm.experiments.reading_settings import RereadSettings
from titans_lm.experiments.reread import FILE, run_reread
from titans_lm.report.page import render_results, without_folders
from titans_lm.report.plots import draw
from titans_lm.report.reread import places, plot, tables
from titans_lm.report.table import screen
from titans_lm.report.text import reread as returning
from titans_lm.train.checkpoint import save_model
from titans_lm.train.fresh import byte_model
from titans_lm.train.options import plain_settings
from titans_lm.train.run import load_model
from titans_lm.train.settings import LanguageSettings


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
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[RereadSettings, dict[str, Any]]:
    place = tmp_path_factory.mktemp("models")
    for name in ("held", "others"):
        (place / name).mkdir()
        for index in range(2):
            text = " ".join(f"{name}{place * place % 97}" for place in range(20 + index))
            (place / name / f"{name}{index}.txt").write_text(text)
    models = {name: saved(place / name, name.rstrip("012"), int(name[-1])) for name in ("lmm0", "lmm1", "llama0")}
    settings = RereadSettings(
        models=tuple(f"{name.rstrip('012')}={path}" for name, path in models.items()), text=(place / "held",),
        between=(place / "others",), lengths=(6, 9), distances=(0, 8, 40), passages=4, rows=2, max_len=40,
        out=place / "out", quiet=True,
    )  # fmt: skip
    return settings, run_reread(settings, command_line(settings), lambda _: None)


def test_every_number_is_what_the_models_do(done: Any) -> None:
    settings, result = done
    lmm, llama = result["models"]
    assert [(one["carries"], one["memory"], len(one["runs"])) for one in (lmm, llama)] == [
        (True, True, 2),
        (False, False, 1),
    ]
    for model, indices in ((lmm, (0, 1)), (llama, (2,))):
        for told in model["lengths"]:
            length, distances = told["length"], [one["distance"] for one in told["distances"]]
            drawing = Drawing(length, 4, 2, 40)
            drawn = list(draw_passages(books(settings.text), books(settings.between), Encoder(None), drawing))
            bits = []
            for index in indices:
                one = load_model(settings.named()[index].path, "cpu")
                reading = reader_for(one, piece_len=7, max_len=40)
                bits.append(np.concatenate([reread(one, each, distances, reading) for each in drawn], axis=-1))
            assert [part.shape[-1] for part in bits] == [told["passages"]] * len(bits)
            for place, found in enumerate(told["distances"]):
                gains = [(part[0, place] - part[1, place]) / length for part in bits]
                means = [float(gain.mean()) for gain in gains]
                assert found["gain"]["mean"] == pytest.approx(np.mean(means), abs=1e-5)
                sd = np.std(means, ddof=1) if len(means) > 1 else None
                assert found["gain"]["sd"] == (None if sd is None else pytest.approx(sd, abs=1e-5))
                assert min(np.mean(gains, axis=0)) - 1e-5 <= found["low"] <= found["gain"]["mean"] <= found["high"]
                assert found["unread"]["mean"] - found["read"]["mean"] == pytest.approx(found["gain"]["mean"], abs=1e-6)


def test_attention_is_measured_within_its_length(done: Any) -> None:
    _, result = done
    lmm, llama = result["models"]
    assert [part["left_out"] for part in lmm["lengths"]] == [[], []]
    assert [part["left_out"] for part in llama["lengths"]] == [[40], [40]]
    assert (lmm["state_bytes"]["length"], llama["state_bytes"]["length"]) == (58, 40)
    assert lmm["state_bytes"]["total"] > lmm["state_bytes"]["memory"] > 0
    assert llama["state_bytes"]["memory"] is None


def test_a_passage_that_never_fits_is_left_out(done: Any, tmp_path: Path) -> None:
    settings, _ = done
    short = dataclasses.replace(settings, models=settings.models[1:], max_len=16, out=tmp_path / "out")
    result = run_reread(short, "short", lambda _: None)
    [lmm, llama] = result["models"]
    assert [part["left_out"] for part in llama["lengths"]] == [[8, 40], [0, 8, 40]]
    assert [len(part["distances"]) for part in lmm["lengths"] + llama["lengths"]] == [3, 3, 1, 0]
    shown = "\n".join(screen(tables(result)))
    assert "–" in shown
    plot(result)


def test_what_a_number_came_from_is_beside_it(done: Any) -> None:
    settings, result = done
    assert (result["what"], result["seed"], result["command"]) == ("reread", 0, command_line(settings))
    assert parse(shlex.split(result["command"])[1:]).what == dataclasses.replace(settings, quiet=False)
    assert result["hardware"]["commit"]
    assert json.loads((settings.out / FILE).read_text()) == result


def test_nothing_is_read_twice(done: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, result = done
    files = sorted((settings.out / READINGS).glob("*.json"))
    assert len(files) == 3 * 2
    [gone] = [file for file in files if file.name.startswith("llama-6-")]
    gone.unlink()
    import titans_lm.experiments.reread as module

    read: list[list[int]] = []

    def counted(model: Any, drawn: Any, distances: list[int], *args: Any, **more: Any) -> Any:
        read.append(distances)
        return reread(model, drawn, distances, *args, **more)

    monkeypatch.setattr(module, "reread", counted)
    monkeypatch.setattr("titans_lm.experiments.runner.commit", lambda: "later")
    again = run_reread(settings, "again", lambda _: None)
    assert read == [[0, 8], [0, 8]], "both groups of passages"
    assert again["commits"] == [result["hardware"]["commit"], "later"]
    assert [one["lengths"][1] for one in again["models"]] == [one["lengths"][1] for one in result["models"]]
    run_reread(dataclasses.replace(settings, models=settings.models[:1], lengths=(9,), seed=1), "s", lambda _: None)
    assert read[2:] == [[0, 8, 40]] * 2, "other passages are read anew"


def test_the_page_and_the_screen_say_it(done: Any, tmp_path: Path) -> None:
    settings, result = done
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "again.json").write_text(json.dumps(result))
    written = render_results(tmp_path / "results", tmp_path / "results.md")
    assert tmp_path / "results" / "again.png" in written
    page, shown = (tmp_path / "results" / "long-context.md").read_text(), "\n".join(screen(tables(result)))
    assert "## What a model remembers of a passage that it has read once\n" in page
    assert without_folders(command_line(settings)) in page
    assert "](./again.png)" in page
    for model in result["models"]:
        for part in model["lengths"]:
            for one in part["distances"]:
                interval = f"[{one['low']:+.3f}, {one['high']:+.3f}]"
                assert all(f"{one['gain']['mean']:.3f}" in text and interval in text for text in (page, shown))
    assert "of at most 40 tokens, and distances that do not fit are left out" in page
    assert f"{result['models'][0]['state_bytes']['total']:,} (" in page


def test_the_plot_has_a_panel_a_length_and_a_line_a_model(done: Any) -> None:
    _, result = done
    drawn = plot(result)
    assert [panel.title for panel in drawn.panels] == ["passage of 6 tokens", "passage of 9 tokens"]
    lmm, llama = drawn.panels[0].lines
    assert (lmm.dashed, llama.dashed, len(lmm.x), len(llama.x)) == (False, True, 3, 2)
    assert lmm.spread is not None
    assert llama.band is not None
    assert [axes.get_title("left") for axes in draw(drawn).axes] == [panel.title for panel in drawn.panels]
    assert places([0, 256, 1024, 4096]) == [6.0, 8.0, 10.0, 12.0]
    assert places([0]) == [0.0]


def test_the_page_of_a_comparison_says_how_passages_returned() -> None:
    taught = LanguageSettings(reread=RereadCurriculum(first_steps=200, share=0.5, passages=(64, 128)))
    first = "the first 200 steps in sequences of 256 with returning passages"
    assert returning(plain_settings(taught)) == f" ({first}, 50 % of the later sequences with a passage twice)"
    assert returning(plain_settings(LanguageSettings())) == returning({}) == ""


def test_the_command(done: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, _ = done
    args = ["evaluate", "reread", settings.named()[0].path, "--text", settings.text[0] / "held0.txt", "--between",
            settings.between[0], "--lengths", "6", "--distances", "0", "9", "--passages", "2", "--rows", "2", "--out",
            tmp_path]  # fmt: skip
    code, out, err = titans(capsys, *args, "--json", tmp_path / "copy.json")
    assert (code, err) == (0, "")
    assert "lmm0 (" in out
    assert "passages of 6: gain " in out
    assert json.loads((tmp_path / "copy.json").read_text())["models"][0]["lengths"][0]["passages"] == 2
    assert titans(capsys, *args, "--quiet")[1] == ""


MISTAKES = [
    ({"models": ()}, "got no model, no text or nothing between"),
    ({"between": ()}, "got no model, no text or nothing between"),
    ({"between": (Path("/nowhere"),)}, "does not exist"),
    ({"lengths": (1,)}, "got lengths=1; expected an integer of at least 2"),
    ({"lengths": (9, 6)}, "got lengths=(9, 6); expected one or more, rising"),
    ({"distances": ()}, "got distances=(); expected one or more, rising"),
    ({"distances": (8, 8)}, "got distances=(8, 8)"),
    ({"passages": 3}, "got passages=3 and rows=2; expected passages in full groups of rows"),
    ({"rows": 1}, "got rows=1; expected an integer of at least 2"),
    ({"context": -1}, "context=-1"),
    ({"lengths": (900,)}, "got 2 passages of 900 tokens from 'held0.txt', which has"),
    ({"distances": (0, 99_999)}, "got a distance of 99,999 tokens between two readings and other books of"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_mistakes_are_told(done: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    settings, _ = done
    with pytest.raises(ValueError, match=re.escape(message)):
        run_reread(dataclasses.replace(settings, out=tmp_path / "out", **changes), "wrong", lambda _: None)
    assert not (tmp_path / "out" / FILE).exists()


def test_a_book_is_not_read_between_its_own_passages(done: Any, tmp_path: Path) -> None:
    settings, _ = done
    same = dataclasses.replace(settings, between=(*settings.between, settings.text[0] / "held1.txt"), out=tmp_path)
    with pytest.raises(ValueError, match=r"held1.txt' as text and as between; expected other books between"):
        run_reread(same, "wrong", lambda _: None)
