"""titans surprise: a page, a plot and JSON lines, all or nothing, and a summary."""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from cli_cases import titans
from model_cases import small_config, wake
from report.surprise_cases import HOSTILE, TOKENIZER, Page, as_text, made_up, relative
from titans_lm.data.tokenizer import BOS, EOS, encode_document
from titans_lm.report.plots import png
from titans_lm.report.surprise.files import lines_of, most_surprising, surprise_figure, write_surprise
from titans_lm.report.surprise.text import by_piece
from titans_lm.streaming import Reader, load_memory, save_memory
from titans_lm.surprise import PARTS, measure_surprise
from titans_lm.train.fresh import byte_model
from titans_lm.train.run import load_model

TEXT = "Der Löwe schläft.\nSein Fuß ruht.\n".encode() * 6
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def saved(path: Path, architecture: str) -> Path:
    model = byte_model(small_config(architecture))
    wake(model)
    model.save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), "mac")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "löwe.txt"
    path.write_bytes(TEXT)
    return path


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_command_writes_a_page_a_plot_and_lines(
    folder: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "new" / "out", tmp_path / "report.json"
    code, said, _ = titans(capsys, "surprise", file, "--model", folder, "--out", out, "--json", report)
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == ["surprise.html", "surprise.jsonl", "surprise.png"]
    model = load_model(folder, "cpu")
    expected = measure_surprise(model, encode_document(TEXT, eos=False))
    found = records(out / "surprise.jsonl")
    assert [record["position"] for record in found] == list(range(len(TEXT) + 1))
    assert [record["token"] for record in found] == [BOS, *TEXT]
    assert found[0]["text"] == "<bos>"
    assert found[0]["bits"] is None
    assert found[6]["text"] == "\\xc3"
    np.testing.assert_allclose([record["bits"] for record in found[1:]], expected.bits[1:], rtol=1e-5)
    for what in PARTS:
        np.testing.assert_allclose([record[what] for record in found], expected.part(what), rtol=1e-5)
    assert (out / "surprise.png").read_bytes().startswith(SIGNATURE)
    page = Page((out / "surprise.html").read_text(encoding="utf-8"))
    np.testing.assert_allclose(
        relative(page.data, "past"), by_piece(expected.summary("past"), as_text(TEXT).starts), rtol=1e-3
    )
    assert f"{folder} (mac)" in page.text("header")
    result = json.loads(report.read_text())
    assert (result["tokens"], result["tokens_on_page"]) == (len(TEXT) + 1,) * 2
    assert result["bits_per_token"] == pytest.approx(float(expected.bits[1:].mean()), abs=1e-4)
    assert result["html_bytes"] == (out / "surprise.html").stat().st_size
    assert f"tokens: {len(TEXT) + 1}" in said
    for place in result["most_surprising"]:
        assert place["context"] in said


def test_quiet_is_quiet_and_files_are_replaced(
    folder: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--model", folder, "--out", tmp_path / "out", "--quiet"]
    assert titans(capsys, "surprise", file, *settings) == (0, "", "")
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert titans(capsys, "surprise", file, *settings, "--piece-len", 7, "--max-tokens", 40) == (0, "", "")
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(first)
    page = Page((tmp_path / "out" / "surprise.html").read_text(encoding="utf-8"))
    assert page.data["tokens"] == 40
    assert len(records(tmp_path / "out" / "surprise.jsonl")) == len(TEXT) + 1


def test_a_text_after_a_book(folder: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model(folder, "cpu")
    reader = Reader(model, TOKENIZER)
    reader.read(b"It was the best of times.")
    save_memory(reader.memory, tmp_path / "book.memory", model)
    args = ["surprise", file, "--model", folder, "--memory", tmp_path / "book.memory", "--out", tmp_path / "out"]
    assert titans(capsys, *args, "--quiet")[0] == 0
    ids = np.array([EOS, BOS, *TEXT])
    expected = measure_surprise(model, ids, memory=load_memory(tmp_path / "book.memory", model))
    found = records(tmp_path / "out" / "surprise.jsonl")
    assert [record["token"] for record in found] == ids.tolist()
    np.testing.assert_allclose([record["forgotten"] for record in found], expected.part("forgotten"), rtol=1e-5)
    np.testing.assert_allclose([record["bits"] for record in found], expected.bits, rtol=1e-5)
    alone = measure_surprise(model, ids)
    assert np.abs(alone.part("momentary") - expected.part("momentary")).max() > 1e-3
    assert "book.memory, 26 tokens" in (tmp_path / "out" / "surprise.html").read_text(encoding="utf-8")


def test_a_mistake_is_one_line_and_writes_nothing(
    folder: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, out = saved(tmp_path / "plain", "segment"), tmp_path / "out"
    (tmp_path / "empty").write_bytes(b"")
    cases = (
        ([file, "--model", plain], "without memory; expected a stack with lmm, mac, mag, mal or tnt in it"),
        ([file, "--model", tmp_path / "none"], "which does not exist"),
        ([tmp_path / "none", "--model", folder], "which is not there; expected a file to read"),
        ([tmp_path, "--model", folder], "which is a folder"),
        ([tmp_path / "empty", "--model", folder], "which is empty"),
        ([file, "--model", folder, "--max-tokens", 0], "got max_tokens=0; expected an integer of at least 1"),
        ([file, "--model", folder, "--piece-len", 0], "got piece_len=0"),
        ([file, "--model", folder, "--memory", tmp_path / "none"], "which does not exist"),
    )
    for args, message in cases:
        code, said, error = titans(capsys, "surprise", *args, "--out", out, "--quiet")
        assert (code, said) == (2, ""), message
        assert error.startswith("titans: error: ")
        assert error.count("\n") == 1
        assert message in error
    assert not out.exists()
    code, _, error = titans(capsys, "surprise", file, "--model", folder, "--out", file, "--quiet")
    assert (code, "surprise.html, which cannot be written; expected the name of a file" in error) == (2, True)


def test_a_disk_that_fails_leaves_the_old_files(folder: Path, file: Path, tmp_path: Path) -> None:
    model, out = load_model(folder, "cpu"), tmp_path / "out"
    write_surprise(model, TOKENIZER, file, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titans_lm.report.surprise.files._short", lambda value: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_surprise(model, TOKENIZER, file, out)
    after = {path.name: path.read_bytes() for path in out.iterdir()}
    assert after.keys() == before.keys()
    assert after["surprise.jsonl"] == before["surprise.jsonl"]


def test_lines_hold_any_text_and_no_number_that_json_lacks() -> None:
    text = as_text(HOSTILE)
    found = made_up(text)
    found.blocks[0][3, 0, 0], found.blocks[1][4, 1, 1] = np.nan, np.inf
    lines = list(lines_of(found, text))
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in lines)
    read = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
    assert [record["token"] for record in read] == text.ids.tolist()
    assert read[3]["momentary"][0][0][0] is None
    assert read[4]["momentary"][1][1][1] is None


def test_the_plot_is_a_picture_of_any_length_and_name() -> None:
    for data in (b"ab", b"some text " * 400):
        text = as_text(data, "名前 $x^$ \\frac{ <é>.txt")
        figure = surprise_figure(made_up(text), text.name)
        picture = png(figure)
        assert picture.startswith(SIGNATURE)
        pixels = imread(BytesIO(picture))
        assert pixels[..., :3].std() > 0.01, "something is drawn"
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "momentary surprise",
        "past surprise",
        "forgotten",
        "bits of the model",
    ]
    assert figure.get_suptitle() == "?? $x^$ \\frac{ <é>.txt"
    assert max(len(line.get_xdata()) for axes in figure.axes for line in axes.lines) == 1500


def test_the_most_surprising_stand_apart_and_in_their_context() -> None:
    text = as_text(b"0123456789" * 20)
    found = made_up(text)
    for size in found.blocks:
        size[:] = 1.0
        size[0] = 100.0
        size[50:53] = [[[7.0]], [[9.0]], [[8.0]]]
        size[90] = 5.0
    first, second, *rest = most_surprising(found, text, 4)
    assert (first["position"], first["text"], first["momentary"]) == (51, "0", 9.0)
    assert first["context"] == f"{text_before(50)}[0]123456789012"
    assert (second["position"], second["momentary"]) == (90, 5.0)
    assert all(place["momentary"] == 1.0 for place in rest)
    assert all(abs(place["position"] - 51) >= 24 for place in [second, *rest])


def text_before(count: int) -> str:
    return ("0123456789" * 20)[count - 32 : count]


def test_help_names_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = titans(capsys, "surprise", "--help")
    assert code == 0
    for name in ("surprise.html", "--memory", "--max-tokens", "--model"):
        assert name in said
