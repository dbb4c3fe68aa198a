"""The demo from the command line to the last file: small, with models that know nothing, on text that is like HTML."""

import dataclasses
import functools
import json
import re
import shlex
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

import titans_lm
from shipped_cases import ship
from titans_lm import ask
from titans_lm.backbone import frozen_memory
from titans_lm.cli import main
from titans_lm.demo import search
from titans_lm.demo.run import begin_folder, check_folder, one_thread
from titans_lm.demo.settings import DemoSettings, full_plan, quick_plan
from titans_lm.evaluate.accuracy import sliding_reach
from titans_lm.evaluate.bits_per_byte import token_bits
from titans_lm.train import shipped

SCRIPT = '<script src="http://example.org/x.js">alert("&")</script>'
NUMBER = "The secret number of old house is 1234567.\n"
LINE = f"{SCRIPT} é €\x07 <img src=x onerror=alert(1)>\n".encode()
SHORT = functools.partial(ask.answer, max_new_tokens=4)  # a model that knows nothing goes on and on
URL = re.compile(r"url\((?!#)|@import|javascript:", re.IGNORECASE)


class Page(HTMLParser):
    """Elements with their attributes, and the text outside of style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "input", "br", "path", "use"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in {"path", "use"}:
            assert self.open.pop() == tag, "elements are closed in order"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


@pytest.fixture(scope="module", autouse=True)
def _shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = ship(tmp_path_factory.mktemp("weights"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped, "FOLDER", folder)
        yield


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a demo on a text and facts of one's own, with a copy of its numbers beside it."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "<b>.txt").write_bytes(LINE * 16)
    (folder / "facts.txt").write_text(f"Peter went to the cellar.\n{NUMBER}")
    given = ["--text", folder / "<b>.txt", "--facts", folder / "facts.txt", "--json", folder / "copy.json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "answer", SHORT)
        main(["demo", "--quick", "--out", str(folder / "out"), "--seed", "5", "--quiet", *map(str, given)])
    return folder / "out"


@pytest.fixture(scope="module")
def page(demo: Path) -> Page:
    return Page((demo / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def results(demo: Path) -> dict[str, Any]:
    return json.loads((demo / "results.json").read_text())


def test_everything_is_there(demo: Path, results: dict[str, Any]) -> None:
    assert {path.name for path in demo.iterdir()} == set(results["files"].values())
    assert json.loads((demo.parent / "copy.json").read_text()) == results
    for picture in demo.glob("*.png"):
        assert imread(picture).shape[1] > 900
    text = (demo / "text.txt").read_text()
    assert NUMBER.strip() in text
    assert SCRIPT in text


def test_the_page_needs_nothing_but_itself(page: Page, demo: Path) -> None:
    assert page.open == []
    assert {"script", "link", "img", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.elements} == set()
    for tag, attrs in page.elements:
        for name, value in attrs.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in {"src", "srcset", "action", "data"}, (tag, name)
            assert "href" not in name or str(value).startswith("#"), (tag, value)
            assert not name.startswith("xmlns")
            assert name != "style" or not URL.search(str(value))
    styles = re.findall(r"<style[^>]*>(.*?)</style>", (demo / "report.html").read_text(encoding="utf-8"), re.DOTALL)
    assert styles
    assert not any(URL.search(style) or "http" in style for style in styles)


def test_what_was_read_is_shown_as_text(page: Page) -> None:
    assert "<b>.txt were read" in page.text
    assert "b" not in {tag for tag, _ in page.elements}


def test_the_page_says_what_the_numbers_say(page: Page, results: dict[str, Any]) -> None:
    assert len(results["findings"]) >= 7
    for finding in results["findings"]:
        assert finding in page.text.replace("\u00a0", " ")
    for name in ("torch", "python", "processor"):
        assert str(results["environment"][name]) in page.text
    assert [one["question"] for one in results["search"]["asked"]] == [
        "Where is Peter?",
        "What is the secret number of old house?",
    ]
    assert all(one["question"] in page.text for one in results["search"]["asked"])
    assert results["search"]["words_that_are_spelled"] == ["Peter", "cellar", "old", "house"]


def test_a_book_model_reads_the_start_of_the_text(demo: Path, page: Page, results: dict[str, Any]) -> None:
    opening = results["opening"]
    model, tokenizer = titans_lm.pretrained("books")
    ids = tokenizer((demo / "opening.txt").read_text(encoding="utf-8")).input_ids
    assert opening["tokens"] == opening["bytes"] == len(ids)
    bits = token_bits(model, [np.array([tokenizer.bos_token_id, *ids])], reset_every=64)
    assert opening["bits_per_byte"]["reset"] == pytest.approx(float(bits[0].mean()), rel=1e-5)
    with frozen_memory(model):
        bits = token_bits(model, [np.array([tokenizer.bos_token_id, *ids])])
    assert opening["bits_per_byte"]["frozen"] == pytest.approx(float(bits[0].mean()), rel=1e-5)
    assert len(set(opening["bits_per_byte"].values())) == 3
    assert len((demo / "surprise.jsonl").read_text().splitlines()) == 1 + len(ids)
    assert opening["before"] in page.text


def test_the_comparison_is_fair(results: dict[str, Any]) -> None:
    memory, other = results["recall"]["memory"], results["recall"]["window"]
    assert abs(memory["parameters"] / other["parameters"] - 1.0) < 0.01
    assert memory["steps"] == other["steps"] == memory["planned_steps"]
    assert memory["tokens"] == other["tokens"]
    assert [point["step"] for point in memory["curve"]] == list(range(1, memory["steps"] + 1))


def test_what_is_drawn_is_asked_from_memory_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "answer", SHORT)
    monkeypatch.setattr("titans_lm.train.progress.QUIET_SECONDS", 0.0)
    args = ["demo", "--quick", "--tokens", "1500", "--out", str(tmp_path / "out"), "--seed", "5"]
    main(args)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    page = Page((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    assert "titans demo --seed 5 --tokens 1500 --quick" in page.text
    found = results["search"]
    assert found["tokens"] > 1500
    assert [reading["files"] for reading in found["readings"]] == [
        ["facts-1.memory", "facts.memory"],
        ["needles.memory"],
    ]
    assert [sum(one["kind"] == kind for one in found["asked"]) for kind in ("place", "number")] == [8, 4]
    out, err = capsys.readouterr()
    assert all(finding in out for finding in results["findings"])
    assert "train recall, memory 6/6" in err
    read = [line for line in err.splitlines() if re.fullmatch(r"reading with .* MiB  \d+%(, \d+ seconds left)?", line)]
    assert len(read) > 4
    assert {line.partition(": ")[0] for line in read} == {f"reading with pretrained:{n}" for n in ("facts", "needles")}
    for command in results["next"][:2]:
        assert f"  {command}" in out
        main([*shlex.split(command)[1:], "--max-new-tokens", "4"])
        said = capsys.readouterr().out.strip()
        asked = [one for one in found["asked"] if one["question"] in command][-1]
        assert said.rstrip(".") == asked["answers"]["memory"]
    # The folder of an earlier demo is used again, and only that.
    before = (tmp_path / "out" / "report.html").stat().st_mtime_ns
    main([*args, "--quiet"])
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "out" / "report.html").stat().st_mtime_ns > before
    again = json.loads((tmp_path / "out" / "results.json").read_text())["search"]
    assert again["facts"] == found["facts"]


def test_numbers_that_no_model_answers_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "shipped_names", lambda: ["facts"])
    (tmp_path / "facts.txt").write_text(f"Peter went to the cellar.\n{NUMBER}")
    with pytest.raises(ValueError, match=r"got numbers in .*, and no pretrained:needles to answer them"):
        search.make_hidden(DemoSettings(facts=tmp_path / "facts.txt"), quick_plan(3).search, 3)


@pytest.mark.parametrize("window", [40, 2048])
def test_who_knows_the_last_tokens_alone_knows_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """Also where a part of the text is shorter."""
    fed: list[list[int]] = []
    monkeypatch.setattr(search, "answer", SHORT)
    monkeypatch.setattr(search.Reader, "feed", lambda self, rows: fed.append(list(rows[0])))
    settings = DemoSettings(out=tmp_path, tokens=1500, seed=3)
    plan = dataclasses.replace(quick_plan(3).search, window=window)
    hidden = search.make_hidden(settings, plan, 3)
    search.search(settings, plan, hidden, 3, quiet=True)
    tokenizer = titans_lm.pretrained("facts")[1]
    read = [tokenizer("".join(hidden.parts[: part + 1])).input_ids for part in range(len(hidden.parts))]
    assert fed[: len(read)] == [ids[-window:] for ids in read]
    assert len(fed[0]) == min(window, hidden.ends[0])


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    for out, message in ((tmp_path, "holds other files"), (tmp_path / "file", "is a file")):
        (tmp_path / "file").write_text("mine")
        with pytest.raises(SystemExit) as stop:
            main(["demo", "--quick", "--out", str(out)])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "model").is_dir()
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "results.json").write_text('{"format": "titans-lm bench 1"}')
    with pytest.raises(ValueError, match="holds other files"):
        check_folder(tmp_path / "task")
    check_folder(tmp_path / "new")
    begin_folder(tmp_path / "new")
    (tmp_path / "new" / "text.txt").touch()
    check_folder(tmp_path / "new")  # one that was stopped is begun again


@pytest.mark.parametrize("plan", [full_plan(0), quick_plan(0)], ids=["full", "quick"])
def test_the_windows_cannot_bridge_the_gap(plan: Any) -> None:
    """And the models of a comparison differ in their memory alone."""
    recall = plan.recall
    assert recall.window.window < recall.gap
    assert sliding_reach(recall.window) <= recall.gap
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_persistent"):
        assert getattr(recall.memory, name) == getattr(recall.window, name)
    assert recall.window.attention_conv_size == recall.memory.conv_size
    assert not recall.window.has_memory
    assert recall.memory.has_memory


def test_the_threads_of_the_caller_are_left_as_they_were() -> None:
    """The demo computes with one, so that its numbers do not depend on the machine's cores."""
    torch.set_num_threads(2)
    try:
        with one_thread():
            inside = torch.get_num_threads()
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(1)
    assert (inside, after) == (1, 2)


def test_settings_that_will_not_do() -> None:
    with pytest.raises(ValueError, match="tokens"):
        DemoSettings(tokens=10)
    with pytest.raises(ValueError, match="seed"):
        DemoSettings(seed=-1)
