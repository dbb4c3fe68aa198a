import json

import pytest

from bench.bench_cases import check_once, measured
from cli_cases import titans
from titans_lm.bench import run
from titans_lm.bench.registry import benchmarks
from titans_lm.bench.settings import AllSettings, OpsSettings, PeersSettings
from titans_lm.cli import parse


@pytest.fixture(autouse=True)
def _checked(monkeypatch):
    check_once(monkeypatch)


def test_every_kind_has_its_own_settings():
    command = parse(["bench", "ops", "--lengths", "4", "8", "--threads", "1", "--quick"]).what
    assert command == OpsSettings(lengths=(4, 8), threads=1, quick=True)
    assert parse(["bench", "peers", "--cases", "mac"]).what == PeersSettings(cases=("mac",))
    assert parse(["bench", "all"]).what == AllSettings()


def test_what_came_out_is_told_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "ask", lambda *_: measured(7.0))
    args = ["bench", "model", "--quick", "--models", "mac", "--out", tmp_path / "out", "--device", "cpu"]
    code, out, err = titans(capsys, *args, "--json", tmp_path / "x.json")
    assert (code, err) == (0, "")
    assert "mac, train: 7 tokens/s" in out
    assert json.loads((tmp_path / "x.json").read_text()) == json.loads((tmp_path / "out" / "model.json").read_text())
    assert titans(capsys, *args, "--quiet") == (0, "", "")


def test_rendering_from_the_command(tmp_path, capsys):
    (tmp_path / "numbers").mkdir()
    args = ["bench", "render", "--results", tmp_path / "numbers", "--docs", tmp_path / "page.md"]
    assert titans(capsys, *args) == (0, f"{tmp_path / 'page.md'}\n", "")


def test_ctrl_c_ends_with_a_line(tmp_path, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "ask", interrupted)
    args = ["bench", "ops", "--quick", "--out", tmp_path / "out", "--device", "cpu", "--quiet"]
    assert titans(capsys, *args) == (130, "", "titans: interrupted\n")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], f"expected one of {', '.join([*benchmarks(), 'all', 'render'])}"),
        (["opps"], "opps"),
        (["ops", "--chunk", "4"], "perhaps you meant --chunks"),
        (["ops", "--chunks", "0"], "got chunks=0; expected an integer of at least 1"),
        (["ops", "--dtype", "f16"], "f16"),
        (["ops", "--device", "tpu9"], "got device='tpu9'"),
        (["model", "--models", "lama"], "did you mean 'llama'?"),
        (["model", "--models", "lmm", "lmm"], "got models=('lmm', 'lmm'); expected one or more, each once"),
        (["render", "--results", "/nowhere"], "which is no folder"),
        (["ops", "--config", "x.toml"], "got the settings file 'x.toml', which does not exist"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(tmp_path, capsys, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = titans(capsys, "bench", *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("titans: error: ")
    assert message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["model", "--models", "llama", "--width", "30", "--contexts", "10"], "got hidden_size=30"),
        (["tnt", "--heads", "3"], "got hidden_size=64 and num_attention_heads=3"),
        (["tnt", "--chunk", "6"], "shard"),
    ],
)
def test_sizes_that_make_no_model_are_found_before_anything_is_measured(tmp_path, capsys, monkeypatch, args, message):
    monkeypatch.setattr(run, "ask", lambda *_: pytest.fail("something was measured"))
    code, _, err = titans(capsys, "bench", *args, "--out", tmp_path, "--device", "cpu")
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_found_before_the_work(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, _, err = titans(capsys, "bench", "ops", "--quick", "--out", tmp_path / "file", "--device", "cpu", "--quiet")
    assert (code, err) == (2, f"titans: error: {tmp_path / 'file'}: File exists\n")
