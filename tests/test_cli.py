import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import titans_lm
from cli_cases import titans
from forks import start_titans
from titans_lm.checks import is_mistake
from titans_lm.cli import COMMANDS, _help_of, main, parse
from titans_lm.commands.show import kinds_in, options_in
from titans_lm.train.run import load_model, resolve_model
from titans_lm.train.settings import LanguageSettings

SMALL = [
    *("--seq-len", "32", "--batch-size", "2", "--eval-bytes", "200", "--warmup-steps", "1"),
    *("--model.hidden-size", "16", "--model.num-hidden-layers", "1", "--model.memory-expansion", "1"),
    *("--model.segment-len", "16", "--model.window", "16", "--model.num-persistent", "2"),
]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"".join(b"line %d of a text, not too short\n" % i for i in range(60)))
    return path


def process(*args, **settings):
    src = Path(__file__).resolve().parent.parent / "src"
    return subprocess.Popen(
        [sys.executable, *map(str, args)],
        env=os.environ | {"PYTHONPATH": str(src)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def test_training_writing_and_describing_a_model(tmp_path, text, capsys):
    run, report = tmp_path / "run", tmp_path / "train.json"
    code, out, err = titans(capsys, "train", text, "--out", run, "--steps", 3, *SMALL, "--json", report)
    assert code == 0
    result = json.loads(report.read_text())
    assert f"held-out bits per byte {result['held_out_bits_per_byte']:.4f} after 3 steps" in out
    assert "training 3/3  loss" in err
    assert result["settings"]["model"]["hidden_size"] == 16

    report = tmp_path / "generate.json"
    args = ["generate", run, "--prompt", "line 7", "--max-new-tokens", 9, "--seed", 1]
    code, out, err = titans(capsys, *args, "--json", report)
    assert (code, err) == (0, "")
    written = json.loads(report.read_text())
    assert out == written["text"] + "\n"
    assert written["prompt_tokens"] == 7
    assert titans(capsys, *args, "--quiet")[1] == out

    report = tmp_path / "info.json"
    code, out, err = titans(capsys, "info", run, "--json", report)
    assert (code, err) == (0, "")
    found = json.loads(report.read_text())
    assert found["parameters"] == result["parameters"]
    assert f"parameters: {result['parameters']:,}" in out
    assert "layers.*.memory" in out
    assert [found[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")] == [16, 1, 259]
    assert found["training"]["step"] == 3
    assert found["training"]["held_out_bits_per_byte"] == result["held_out_bits_per_byte"]
    assert len(found["state_bytes_by_layer"]) == 1


def test_quiet_is_quiet(tmp_path, text, capsys):
    args = ["train", text, "--out", tmp_path / "run", "--steps", 1, *SMALL, "--quiet"]
    assert titans(capsys, *args) == (0, "", "")


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["info"]], ids=" ".join)
def test_a_screen_that_is_closed_or_full_is_no_bug(capsys, monkeypatch, args):
    monkeypatch.setattr(sys, "stdout", None)
    assert titans(capsys, *args)[0] == 0
    sys.stdout.close()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = titans(capsys, *args)
    assert (code, err) == (2, "titans: error: standard output: No space left on device\n")


def test_nothing_comes_from_a_standard_input_that_is_closed(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = titans(capsys, "ask", "-", "Where is Mary?")
    sys.stdin.close()
    assert (code, "got nothing on standard input; expected some text" in err) == (2, True)


def test_a_prompt_can_be_a_file_of_any_bytes(tmp_path, text, capsys):
    titans(capsys, "train", text, "--out", tmp_path / "run", "--steps", 1, *SMALL, "--quiet")
    (tmp_path / "prompt").write_bytes(b"\xff\x00")
    report = tmp_path / "x.json"
    args = ["generate", tmp_path / "run", "--prompt-file", tmp_path / "prompt", "--max-new-tokens", 2]
    code, _, err = titans(capsys, *args, "--json", report)
    assert (code, err) == (0, "")
    assert json.loads(report.read_text())["prompt_tokens"] == 3


def test_info_without_a_model_names_versions(capsys):
    code, out, err = titans(capsys, "info")
    assert (code, err) == (0, "")
    assert "torch: " in out
    assert "python: " in out


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_explains_every_command(capsys, command):
    code, out, err = titans(capsys, *filter(None, [command]), "--help")
    assert (code, err) == (0, "")
    for name in [command] if command else COMMANDS:
        assert name in out


@pytest.mark.parametrize("args", [[], ["help"], ["--help"], ["-h"]])
def test_without_a_command_the_commands_are_listed(capsys, args):
    code, out, err = titans(capsys, *args)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == list(COMMANDS)


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version(capsys, option):
    assert titans(capsys, option) == (0, f"titans-lm {titans_lm.__version__}\n", "")


@pytest.mark.parametrize("words", ["train", "evaluate mqar", "genomics train", "forecast evaluate", "compare"])
def test_a_short_help_has_what_people_change_and_says_how_to_see_the_rest(capsys, words):
    short, whole = (titans(capsys, *words.split(), option)[1] for option in ("--help", "--help-all"))
    few, every = options_in(short), options_in(whole)
    assert few < every
    assert len(few) <= 24
    assert {"--out", "--json"} <= few
    assert short.rstrip().endswith(f"titans {words} --help-all shows all {len(every)} settings")
    assert "None" not in whole
    assert titans(capsys, "help", *words.split())[1] == short


def test_help_waits_for_nothing_heavy():
    code = """
import sys
from titans_lm.cli import main
try:
    main(["train", "--help"])
except SystemExit as stop:
    assert not stop.code
heavy = {"torch", "transformers", "numpy", "matplotlib", "rich"} & set(sys.modules)
assert not heavy, heavy
"""
    with process("-c", code) as done:
        out, err = done.communicate(timeout=60)
    assert done.returncode == 0, err
    assert "--model.architecture" in out


def test_settings_come_from_defaults_then_a_file_then_the_command_line(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('lr = 0.5\nsteps = 7\nstateful = true\ndata = "here"\n[model]\narchitecture = "lmm"\n')
    command = parse(["train", "--config", str(path), "--steps", "9", "--model.memory-depth", "1"])
    assert (command.lr, command.steps, command.stateful, command.data) == (0.5, 9, True, "here")
    assert (command.model.architecture, command.model.memory_depth) == ("lmm", 1)
    assert command.model.hidden_size == LanguageSettings().model.hidden_size
    assert parse(["train", "there", f"--config={path}", "--no-stateful"]).data == "there"
    assert not parse(["train", "there", f"--config={path}", "--no-stateful"]).stateful


KINDS = [
    f"{name} {kind}".strip()
    for name in COMMANDS
    for kind in ([""] if "what" not in COMMANDS[name][0].__dataclass_fields__ else kinds_in(_help_of(name)))
]


@pytest.mark.parametrize("words", KINDS)
def test_one_thing_has_one_name_in_every_command(words):
    options = options_in(_help_of(words))
    assert not [one for one in options if one.startswith(("--train.", "--net.", "--store", "--run", "--fast"))]
    assert "--config" in options or words.startswith("memory ")
    trains = words in ("train", "compare", "forecast train", "genomics evaluate", "evaluate mqar")
    assert not trains or {"--model.hidden-size", "--batch-size", "--device", "--out", "--json"} <= options


def test_a_file_sets_the_defaults_of_a_kind_by_the_names_of_the_command_line(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("steps = 5\nrates = [0.1]\n[model]\nhidden_size = 32\n[train]\nbatch_size = 3\n")
    found = parse(["evaluate", "mqar", "--config", str(path), "--gate-l1", "0.5"]).what
    assert (found.rates, found.train.steps, found.train.batch_size, found.train.gate_l1) == ((0.1,), 5, 3, 0.5)
    assert found.train.model.hidden_size == 32
    assert parse(["evaluate", "mqar", f"--config={path}", "--steps", "7"]).what.train.steps == 7
    path.write_text('model = "mac"\nepochs = 3\n[net.backbone]\nhidden_size = 16\n')
    found = parse(["forecast", "train", "x.csv", "--config", str(path)]).what
    assert (found.model, found.train.epochs, found.net.backbone.hidden_size) == ("mac", 3, 16)
    found = parse(["forecast", "train", "x.csv", "--model", "mac", "--model.hidden-size", "16", "--epochs", "3"]).what
    assert (found.model, found.train.epochs, found.net.backbone.hidden_size) == ("mac", 3, 16)


def test_blocks_of_a_stack_come_from_the_command_line(capsys):
    command = parse(["train", "x", "--model.layer-types", "sliding", "lmm", "sliding", "--stateful"])
    assert command.model.blocks == ("sliding", "lmm", "sliding")
    assert command.model.architecture == "hybrid"
    code, _, err = titans(capsys, "train", "x", "--model.layer-types", "lmm", "lmm", "mac", "mac")
    assert code == 2
    assert "got layer_types of 4 blocks and num_hidden_layers=3" in err


def test_a_run_is_taken_up_with_its_own_settings(tmp_path, text, capsys):
    run = tmp_path / "run"
    titans(capsys, "train", text, "--out", run, "--steps", 2, *SMALL, "--quiet")
    code, out, _ = titans(capsys, "train", "--resume", run, "--steps", 4)
    assert code == 0
    assert "after 4 steps" in out
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()][-1] == 4


def test_a_run_that_came_to_nothing_is_no_success(tmp_path, text, capsys):
    code, out, err = titans(capsys, "train", text, "--out", tmp_path / "run", "--steps", 2, "--lr", 1e30, *SMALL)
    assert code == 1
    assert "held-out bits per byte are nan after 2 steps; give a lower --lr" in err
    assert "go on with" not in out


def test_a_run_is_not_taken_up_for_fewer_steps(tmp_path, text, capsys):
    run = tmp_path / "run"
    titans(capsys, "train", text, "--out", run, "--steps", 2, *SMALL, "--quiet")
    code, _, err = titans(capsys, "train", "--resume", run, "--steps", 1)
    assert code == 2
    assert f"got steps=1 for the run {run}, which has taken 2; expected as many or more" in err
    assert json.loads((run / "settings.json").read_text())["steps"] == 2


MISTAKES = {
    "no such command": (["trian"], "got the command 'trian'; did you mean 'train'?"),
    "no such kind": (["evaluate", "mqr"], "got 'mqr' behind titans evaluate; did you mean 'mqar'?"),
    "no kind": (["evaluate"], "got no word for what to do; expected one of perplexity, reread, mqar"),
    "no command": (["--steps", "3"], "got '--steps' and no command; expected a command first"),
    "another's word": (["train", "x", "--epochs", "3"], "got the unknown option --epochs; perhaps you meant --steps"),
    "another's option": (["generate", "x", "--max-tokens", "3"], "perhaps you meant --max-new-tokens (titans generate"),
    "an option's former place": (["compare", "x", "--train.steps", "3"], "perhaps you meant --steps (titans compare"),
    "a former place, and a choice": (["compare", "x", "--train.lr", "3"], "perhaps you meant --rates (titans compare"),
    "a former name of sizes": (
        ["forecast", "train", "x", "--net.backbone.hidden-size", "3"],
        "perhaps you meant --model.hidden-size (titans forecast train",
    ),
    "a former name of a folder": (["serve", "x", "--store", "y"], "perhaps you meant --out (titans serve"),
    "a former name of a look": (["demo", "--fast"], "perhaps you meant --quick (titans demo"),
    "steps of what has epochs": (["forecast", "train", "x", "--steps", "3"], "perhaps you meant --epochs"),
    "nothing like it": (["info", "--zzz", "3"], "titans info has none that is like it (titans info --help"),
    "unknown command": (["trian"], "did you mean 'train'?"),
    "no data": (["train"], "got no data"),
    "an empty name": (["train", ""], "got '', which does not exist; expected a file, a folder"),
    "missing data": (["train", "/nowhere"], "'/nowhere', which does not exist"),
    "unknown option": (
        ["train", "x", "--learning-rat", "1"],
        "got the unknown option --learning-rat; perhaps you meant --lr",
    ),
    "almost an option": (["train", "x", "--warmup-step", "1"], "perhaps you meant --warmup-steps"),
    "no number": (["train", "x", "--lr", "fast"], "got --lr fast; expected a number"),
    "wrong number": (["train", "x", "--lr", "-1"], "got lr=-1.0; expected a finite number of at least 0"),
    "wrong choice": (
        ["train", "x", "--model.architecture", "mad"],
        "got --model.architecture mad; did you mean 'mal'?",
    ),
    "wrong block": (["train", "x", "--model.layer-types", "lmm", "slidng"], "slidng"),
    "wrong pair": (["train", "x", "--model.hidden-size", "3"], "got hidden_size=3 and num_attention_heads="),
    "missing file": (["train", "x", "--config", "/nowhere.json"], "'/nowhere.json', which does not exist"),
    "another kind of file": (
        ["train", "x", "--config", __file__],
        "which is not json: Expecting value: line 1 column 1 (char 0); expected a .json or .toml",
    ),
    "a folder of settings": (["train", "x", "--config", "{tmp}"], "which is a folder; expected a .json or .toml file"),
    "almost all that is there": (["train", "stdlibb"], "did you mean 'stdlib'?"),
    "almost bytes": (["prepare", "{tmp}/short", "--out", "{tmp}/x", "--tokenizer", "bytess"], "did you mean 'bytes'?"),
    "a file for a folder": (["prepare", "{tmp}/short", "--out", "{tmp}/short"], "where a file is in the way"),
    "one option meant": (["train", "x", "--memory-deth", "1"], "perhaps you meant --model.memory-depth (titans train"),
    "an empty memory file": (["memory", "show", "{tmp}/empty"], "damaged or not whole (it has 0 bytes)"),
    "a base that is none": (["retrofit", "{tmp}", "x", "--out", "{tmp}/x"], "a folder without a config.json"),
    "unknown key": (["train", "x", "--config", "{tmp}/bad.json"], "unknown setting 'step'"),
    "no run": (["train", "--resume", "{tmp}"], "holds no settings.json"),
    "a run in another folder": (["train", "--resume", "{tmp}", "--out", "{tmp}/x"], "a run goes on in its own folder"),
    "no model": (["generate"], "got no model"),
    "no reader": (["read", "x"], "got no --model or no --out"),
    "nothing to look at": (["surprise", "--model", "{tmp}"], "got no FILE or no --model"),
    "nobody to look": (["surprise", "x"], "got no FILE or no --model"),
    "no memory file": (["memory", "verify", "{tmp}/none"], "which does not exist"),
    "two models": (["generate", "{tmp}", "--model", "y"], "expected one of them"),
    "a memory over a file": (
        ["generate", "{tmp}", "--memory", "m", "--save-memory", __file__],
        "which exists; expected",
    ),
    "no memory to save": (["generate", "{tmp}", "--save-memory", "x"], "got --save-memory without --memory"),
    "missing model": (["generate", "/nowhere"], "'/nowhere', which does not exist"),
    "wrong folder": (["generate", "{tmp}"], "neither a run nor a saved model"),
    "a file": (["info", "{tmp}/bad.json"], "which is a file"),
    "missing prompt": (["generate", "{tmp}", "--prompt-file", "/nowhere"], "/nowhere: No such file"),
    "two prompts": (["generate", "{tmp}", "--prompt-file", "a", "--prompt", "b"], "expected one of them"),
    "empty text": (["train", "{tmp}/empty"], "got no text"),
    "short text": (["train", "{tmp}/short"], "give more text or a smaller seq_len"),
    "steps of another place": (
        ["forecast", "train", "x", "--train.steps", "3"],
        "got the unknown option --train.steps; perhaps you meant --epochs (titans forecast train",
    ),
    "another library's folder": (["train", "x", "--output-dir", "y"], "perhaps you meant --out (titans train"),
    "a seed of many": (["compare", "x", "--seed", "1"], "perhaps you meant --seeds (titans compare"),
    "nothing like an old option": (["generate", "x", "--epochs", "3"], "titans generate has none that is like it"),
    "no whole number": (["train", "x", "--steps", "1K"], "got --steps 1K; expected a whole number (titans train"),
    "no size": (["evaluate", "reread", "x", "--distances", "0", "1X"], "got --distances 0 1X; expected values"),
    "no value": (["train", "x", "--steps"], "got --steps with no value, or too few; expected 1 behind it"),
    "wrong precision": (["read", "x", "--precision", "half"], "got --precision half; expected one of bfloat16, exact"),
    "a word too many": (["info", "a", "b"], "got b, for which there is no place; expected an option before"),
    "a file to show": (["memory", "show"], "got no FILE; expected one (titans memory show"),
    "no kind of measurement": (["bench"], "got no word for what to do; expected one of ops, model"),
    "a file before the kind": (
        ["evaluate", "--config", "{tmp}/bad.json", "mqar"],
        "got --config before what to do; expected the word for that first",
    ),
    "two separators": (
        ["forecast", "train", "x", "--out", "y", "--table.decimal", ","],
        "got decimal=',' with separator=','; expected . or , and not the separator",
    ),
    "no decimal point": (["forecast", "predict", "x", "y", "--table.decimal", ";"], "got decimal=';'; expected . or ,"),
    "numbers over a text": (["train", "{tmp}/short", "--json", "{tmp}/short"], "short, which is given as data too"),
    "numbers over a memory": (["read", "x", "--out", "{tmp}/x", "--json", "{tmp}/x"], "/x, which is given as out too"),
    "numbers over what is read": (["ask", "{tmp}/short", "Q", "--json", "{tmp}/short"], "given as a file to read too"),
    "a number with commas": (["train", "x", "--seed", "4294967296"], "from 0 to 4,294,967,295 (titans train"),
    "no device": (["train", "{tmp}/short", "--device", "tpu9"], "got device='tpu9'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_two(tmp_path, capsys, name):
    (tmp_path / "bad.json").write_text('{"step": 3}')
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(b"a few bytes")
    args, message = MISTAKES[name]
    code, out, err = titans(capsys, *(arg.replace("{tmp}", str(tmp_path)) for arg in args))
    assert code == 2
    assert out == ""
    assert err.startswith("titans: error: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.json", "empty", "short"]


def test_a_run_is_never_overwritten(tmp_path, text, capsys):
    args = ["train", text, "--out", tmp_path / "run", "--steps", 1, *SMALL, "--quiet"]
    assert titans(capsys, *args)[0] == 0
    code, _, err = titans(capsys, *args)
    assert code == 2
    assert "choose another folder, or resume the run" in err


def test_a_run_whose_checkpoints_are_all_damaged_is_a_mistake_that_names_one(tmp_path, text, capsys):
    """One before it that is whole is gone on from (tests/train/test_run.py)."""
    run = tmp_path / "run"
    titans(capsys, "train", text, "--out", run, "--steps", 2, "--save-every", 1, *SMALL, "--quiet")
    oldest, newest = (run / "checkpoints" / f"step-00000{step}" for step in (1, 2))
    kept = (oldest / "trainer.pt").read_bytes()
    for folder in (oldest, newest):
        (folder / "trainer.pt").write_bytes(b"not a checkpoint")
    code, _, err = titans(capsys, "train", "--resume", run, "--steps", 3, "--quiet")
    assert code == 2
    assert f"{newest / 'trainer.pt'} is damaged" in err
    (oldest / "trainer.pt").write_bytes(kept)
    assert titans(capsys, "train", "--resume", run, "--steps", 3, "--quiet")[0] == 0


def test_bugs_keep_their_traceback(monkeypatch):
    def broken(_):
        int("not raised by name in our own code")

    monkeypatch.setitem(COMMANDS, "info", (COMMANDS["info"][0], broken))
    with pytest.raises(ValueError, match="invalid literal"):
        main(["info"])


def test_a_mistake_is_told_from_a_bug():
    def error_of(function):
        try:
            function()
        except (ValueError, OSError) as error:
            return error

    assert is_mistake(error_of(lambda: resolve_model("/nowhere")))
    assert is_mistake(error_of(lambda: Path("/nowhere").read_bytes()))
    assert not is_mistake(error_of(lambda: int("x")))
    assert not is_mistake(ValueError("never raised"))
    assert not is_mistake(OSError("about no file"))


def test_diverging_is_told_in_a_line(tmp_path, text, capsys, monkeypatch):
    from titans_lm.train import losses

    monkeypatch.setattr(losses, "token_loss", lambda logits, targets: logits.sum() * float("nan"))
    args = ["train", text, "--out", tmp_path / "run", "--steps", 9, "--max-skipped", 2, *SMALL, "--quiet"]
    code, _, err = titans(capsys, *args)
    assert code == 1
    assert err.startswith("titans: 2 steps in a row")
    assert err.count("\n") == 1


def long_training(run, text):
    """The command of a long run."""
    return ["train", text, "--out", run, "--steps", 100_000, "--save-every", 2, *SMALL, "--quiet"]


def wait_until_under_way(run, alive):
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 90
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
        assert alive(), "it has ended"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_leaves_a_model_and_a_run_that_goes_on(tmp_path, text, capsys):
    """SIGTERM does the same (tests/train/test_loop.py)."""
    run = tmp_path / "run"
    running = process("-m", "titans_lm.cli", *long_training(run, text))
    wait_until_under_way(run, lambda: running.poll() is None)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, "")
    assert err.count("\n") == 1
    assert err.startswith("titans: stopped after step ")
    assert err.endswith(f"go on with: titans train --resume {run}\n")
    step = int(err.split()[4].rstrip(";"))
    assert resolve_model(run).name == f"step-{step:06d}"
    assert load_model(run).num_parameters() > 1000
    assert titans(capsys, "train", "--resume", run, "--steps", step + 2, "--quiet") == (0, "", "")


def test_kill_leaves_the_last_checkpoint(tmp_path, text, capsys):
    run = tmp_path / "run"
    running = start_titans(tmp_path / "streams", *long_training(run, text))
    wait_until_under_way(run, running.process.is_alive)
    running.process.kill()
    assert running.ended() == -signal.SIGKILL
    saved = resolve_model(run)
    step = int(saved.name.removeprefix("step-"))
    assert step >= 2
    assert titans(capsys, "train", "--resume", run, "--steps", step + 2, "--quiet") == (0, "", "")
