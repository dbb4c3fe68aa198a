"""The demo from the command line to the last file: small, on text that tries to be HTML."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

from titans_lm.cli import main
from titans_lm.demo.run import one_thread
from titans_lm.demo.settings import DemoSettings, full_plan, quick_plan
from titans_lm.evaluate.accuracy import sliding_reach

SCRIPT = '<script src="http://example.org/x.js">alert("&")</script>'
LINE = f"{SCRIPT} é €\x07 <img src=x onerror=alert(1)>\n".encode()
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


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for i in range(12):
        (folder / f"<b>{i}.txt").write_bytes(LINE * (6 + i))
    return folder


@pytest.fixture(scope="module")
def demo(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a demo, with a copy of its numbers beside it."""
    out = tmp_path_factory.mktemp("demo") / "out"
    main(
        ["demo", "--quick", "--data", str(texts), "--out", str(out), "--json", str(out.parent / "copy.json"), "--quiet"]
    )
    return out


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
    assert (demo / "model" / "model.safetensors").is_file()


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


def test_what_was_read_is_shown_as_text(page: Page, results: dict[str, Any]) -> None:
    assert results["reading"]["document"].startswith("<b>")
    assert f"The start of {results['reading']['document']}" in page.text
    assert SCRIPT in page.text
    assert "b" not in {tag for tag, _ in page.elements}
    assert "\\x07" in page.text


def test_every_shown_character_has_numbers(page: Page) -> None:
    notes = [attrs["data-note"] for _, attrs in page.elements if "data-note" in attrs]
    assert len(notes) > 200
    assert all(re.fullmatch(r"‖∇ℓ‖ \d+\.\d\d × median   ·   \d+\.\d\d bits", str(note)) for note in notes)
    shades = {word for _, attrs in page.elements if "data-note" in attrs for word in str(attrs["class"]).split()}
    assert {f"s0-{i}" for i in range(16)} <= shades


def test_the_page_says_what_the_numbers_say(page: Page, results: dict[str, Any]) -> None:
    assert len(results["findings"]) >= 7
    for finding in results["findings"]:
        assert finding in page.text.replace("\u00a0", " ")
    held_out = results["language"]["held_out"]
    for part in ("with_memory", "reset", "without"):
        assert f"{held_out[part]['bits_per_byte']:.3f}" in page.text
    for name in ("torch", "python", "processor"):
        assert str(results["environment"][name]) in page.text


def test_the_comparison_is_fair(results: dict[str, Any]) -> None:
    for a, b in (("recall", "window"), ("language", "no_memory")):
        memory, other = results[a]["memory"], results[a][b]
        assert abs(memory["parameters"] / other["parameters"] - 1.0) < 0.01
        assert memory["steps"] == other["steps"] == memory["planned_steps"]
        assert memory["tokens"] == other["tokens"]
        assert [point["step"] for point in memory["curve"]] == list(range(1, memory["steps"] + 1))
    held_out = results["language"]["held_out"]
    bytes_read = {held_out[name]["bytes"] for name in ("with_memory", "reset", "without")}
    assert len(bytes_read) == 1
    first = [held_out[name]["by_position"][0]["bits_per_token"] for name in ("with_memory", "reset")]
    assert first[0] == pytest.approx(first[1], abs=1e-5), "there is nothing to remember in the first segment"


def test_a_slow_machine_trains_less_and_says_so(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["demo", "--quick", "--data", str(texts), "--out", str(tmp_path / "out"), "--minutes", "0.1"]
    main(args)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    language = results["language"]
    assert (language["memory"]["steps"], language["memory"]["planned_steps"]) == (2, 6)
    assert language["no_memory"]["steps"] == 2
    out, err = capsys.readouterr()
    assert "trained for 2 of 6 steps" in out
    assert "trained for 2 of 6 steps" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert all(finding in out for finding in results["findings"])
    assert "train recall, memory 6/6" in err
    # The folder of an earlier demo is used again, and only that.
    before = (tmp_path / "out" / "report.html").stat().st_mtime_ns
    main([*args, "--quiet"])
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "out" / "report.html").stat().st_mtime_ns > before


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    for out, message in ((tmp_path, "holds other files"), (tmp_path / "file", "is a file")):
        (tmp_path / "file").write_text("mine")
        with pytest.raises(SystemExit) as stop:
            main(["demo", "--quick", "--out", str(out)])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "model").is_dir()


def test_the_model_writes_on(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", str(demo), "--prompt", "def ", "--max-new-tokens", "3", "--seed", "0"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("plan", [full_plan(0), quick_plan(0)], ids=["full", "quick"])
def test_the_windows_cannot_bridge_the_gap(plan: Any) -> None:
    """And the models of a comparison differ in their memory alone."""
    recall, language = plan.recall, plan.language
    assert recall.window.window < recall.gap
    assert sliding_reach(recall.window) <= recall.gap
    for a, b in ((recall.memory, recall.window), (language.memory, language.no_memory)):
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_persistent"):
            assert getattr(a, name) == getattr(b, name)
        assert b.attention_conv_size == a.conv_size
        assert not b.has_memory
        assert a.has_memory
    assert language.memory.segment_len == language.no_memory.segment_len


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
    with pytest.raises(ValueError, match="minutes"):
        DemoSettings(minutes=0.0)
    with pytest.raises(ValueError, match="seed"):
        DemoSettings(seed=-1)
