"""`titans train RECIPE`: where settings come from, what is said without data, and what training would take."""

import json
from pathlib import Path

import pytest

from cli_cases import titans
from recipes.recipe_cases import estimate_of, settings_of
from titans_lm.cli import parse
from titans_lm.recipes.find import recipe_as_option, recipe_hint, recipe_names
from titans_lm.train.options import plain_settings

SMALL = [
    *("--seq-len", "32", "--batch-size", "2", "--eval-bytes", "200", "--warmup-steps", "1", "--steps", "2"),
    *("--model.hidden-size", "16", "--model.num-hidden-layers", "1", "--model.intermediate-size", "32"),
    *("--model.segment-len", "16", "--model.num-persistent", "2", "--device", "cpu"),
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_recipe_lies_below_a_config_file_and_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text("seq_len = 64\nsteps = 5\n[model]\nmemory_depth = 1\n")
    command = parse(["train", "tiny-mag", "notes.txt", "--config", "more.toml", "--steps", "9", "--model.window", "64"])
    recipe = settings_of("tiny-mag")
    assert (command.recipe, command.data) == ("tiny-mag", "notes.txt")
    assert (command.steps, command.seq_len, command.lr, command.vocab_size) == (9, 64, recipe.lr, 259)
    model = command.model
    assert (model.architecture, model.memory_depth, model.window) == ("mag", 1, 64)
    assert model.intermediate_size == recipe.model.intermediate_size


def test_a_recipe_is_named_in_three_ways(tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text('recipe = "tiny-mal"\n')
    first = parse(["train", "tiny-mal", "notes.txt", "--quiet"])
    assert parse(["train", "notes.txt", "--recipe", "tiny-mal", "--quiet"]) == first
    third = parse(["train", "notes.txt", "--config", "more.toml", "--quiet"])
    assert (third.recipe, third.model) == (first.recipe, first.model)
    assert parse(["train", "tiny-mal"]).data is None


def test_without_a_recipe_nothing_changes(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    for words in (["train", "books"], ["train", "stdlib", "--quiet"], ["train", "--quiet", "x"], ["train"]):
        assert recipe_as_option(words) == words
        assert parse(words).recipe is None


def test_a_recipe_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_bytes(b"".join(b"line %d of a text, not too short\n" % i for i in range(60)))
    code, out, _ = titans(capsys, "train", "tiny-mac", "text.txt", "--run", "run", *SMALL, "--json", "x.json")
    assert code == 0
    assert "after 2 steps" in out
    saved = json.loads((tmp_path / "run" / "settings.json").read_text())
    recipe = plain_settings(settings_of("tiny-mac"))
    assert [saved[name] for name in ("lr", "vocab_size", "clip")] == [
        recipe[name] for name in ("lr", "vocab_size", "clip")
    ]
    assert saved["model"]["memory_expansion"] == recipe["model"]["memory_expansion"]
    assert titans(capsys, "train", "--resume", "run", "--steps", 3, "--quiet")[0] == 0


def test_a_dry_run_says_what_training_would_take_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = titans(capsys, "train", "170m-lmm", "--dry-run", "--json", "x.json")
    assert (code, err) == (0, "")
    found, expected = json.loads((tmp_path / "x.json").read_text()), estimate_of("170m-lmm")
    assert found["recipe"] == "170m-lmm"
    assert found["settings"] == plain_settings(settings_of("170m-lmm"))
    assert {name: found[name] for name in expected} == expected
    assert f"lmm: {expected['parameters']:,} parameters" in out
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert titans(capsys, "train", "tiny-lmm", "--dry-run", "--quiet") == (0, "", "")


def test_a_dry_run_needs_no_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["train", "--dry-run", "--model.architecture", "sliding", "--peak-tflops", "1", "--utilisation", "0.5"]
    code, out, err = titans(capsys, *args)
    assert (code, err) == (0, "")
    assert "vocabulary of 259" in out
    assert "1 TFLOP/s and training reaches 0.5 of that" in out


MISTAKES = {
    "no data for bytes": (["train", "tiny-mac"], "got the recipe 'tiny-mac' and no data; expected a file, a folder"),
    "what to give for bytes": (["train", "tiny-mac"], "titans train tiny-mac stdlib"),
    "no data for tokens": (["train", "170m-mac"], "expected a folder of text in 32000 token ids: titans prepare hf:"),
    "what to give for tokens": (["train", "170m-mac"], "--out DIR, then titans train 170m-mac DIR"),
    "another tokenizer": (["train", "170m-mac", "text"], "got vocab_size=32000 and data of 259 token ids"),
    "almost a recipe": (["train", "170m-mc"], "'170m-mc', which does not exist; expected a file, a folder, the word"),
    "almost, so which": (["train", "170m-mc"], "did you mean '170m-mac'?"),
    "almost a recipe, dry": (["train", "170m-mc", "--dry-run"], "did you mean '170m-mac'?"),
    "almost a recipe and data": (["train", "170m-mc", "text"], "neither a recipe nor data; did you mean '170m-mac'?"),
    "almost an option's recipe": (
        ["train", "--recipe", "170m-mc"],
        "got the recipe '170m-mc'; did you mean '170m-mac'?",
    ),
    "nothing like a recipe": (["train", "/nowhere"], "recipes are named SIZE-ARCHITECTURE with 1.3b, 170m"),
    "too late": (["train", "--dry-run", "170m-mac"], "in the place of data; expected it first: titans train 170m-mac"),
    "two recipes": (["train", "tiny-mac", "--recipe", "tiny-mag"], "got the recipe 'tiny-mac' and --recipe"),
    "a recipe to resume": (["train", "tiny-mac", "--resume", "run"], "and --resume run; a run goes on with its own"),
    "no speed": (["train", "tiny-mac", "--dry-run", "--peak-tflops", "0"], "got peak_tflops=0.0"),
    "no such share": (["train", "tiny-mac", "--dry-run", "--utilisation", "5"], "got utilisation=5.0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_that_says_what_to_give(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("some text to train on\n" * 50)
    args, message = MISTAKES[name]
    code, out, err = titans(capsys, *args)
    assert (code, out) == (2, "")
    assert err.startswith("titans: error: ")
    assert err.count("\n") == 1
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_every_recipe_is_its_own_nearest() -> None:
    for name in recipe_names():
        assert recipe_hint(name) == f"did you mean {name!r}?"
