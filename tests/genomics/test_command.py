"""titans genomics: from a file to classes, as a user types it."""

import csv
import json
import shlex
from pathlib import Path

import numpy as np
import pytest

from cli_cases import titans
from genomics.genomics_cases import letters, write_table
from titans_lm.cli import parse
from titans_lm.commands.measure import genomics_command
from titans_lm.genomics.predict import load_classifier
from titans_lm.genomics.settings import EvaluateSettings

SMALL = shlex.split(
    "--model.hidden-size 16 --model.num-attention-heads 2 --model.num-hidden-layers 1 --model.intermediate-size 16 "
    "--model.chunk-size 8 --model.num-persistent 1 --batch-size 8 --warmup-steps 1 --lr 1e-2 --device cpu"
)


@pytest.fixture
def dna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_table(tmp_path / "dna.tsv", letters())


def fasta(path: Path, rows: list[tuple[str, str]]) -> Path:
    path.write_text("".join(f">s{number}\n{text}\n" for number, (text, _) in enumerate(rows)))
    return path


def test_from_fasta_to_classes(dna: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = titans(capsys, "genomics", "train", dna, "--out", "run", "--steps", 6, "--held-out", 0.25, *SMALL)
    assert code == 0, err
    assert "% of the part held out are right; model in run/model" in out
    assert "30 sequences to train on, 10 to choose by: box 20, plain 20" in err
    unseen = fasta(dna.parent / "new.fa", letters(5, seed=9))
    code, out, err = titans(capsys, "genomics", "predict", "run", unseen, "--out", "new.tsv", "--json", "new.json")
    assert code == 0, err
    assert out.startswith("5 sequences: box ")
    assert out.endswith("classes in new.tsv\n")
    with open("new.tsv") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [row["name"] for row in rows] == ["s0", "s1", "s2", "s3", "s4"]
    tokens = [[("ACGT").index(letter) for letter in text] for text, _ in letters(5, seed=9)]
    expected = load_classifier(Path("run"), "cpu").probabilities([np.array(row, np.uint8) for row in tokens])
    for row, told in zip(rows, expected, strict=True):
        assert row["label"] == ("box", "plain")[int(told.argmax())]
        assert [float(row["p_box"]), float(row["p_plain"])] == pytest.approx(told, abs=1e-5)
    told = json.loads(Path("new.json").read_text())
    assert sum(told["predicted"].values()) == 5
    assert "accuracy" not in told


def test_predictions_of_a_file_with_classes(dna: Path, capsys: pytest.CaptureFixture[str]) -> None:
    titans(capsys, "genomics", "train", dna, "--out", "run", "--baseline", "kmer-nb", "--k", 2, "--quiet")
    code, out, _ = titans(
        capsys, "genomics", "predict", "run", dna, "--out", "told.tsv", "--plot", "told.png", "--json", "told.json"
    )
    told = json.loads(Path("told.json").read_text())
    assert code == 0
    assert f"{100 * told['accuracy']:.1f} % are right" in out
    assert told["accuracy"] > 0.8
    assert sum(map(sum, told["confusion"])) == 40
    assert Path("told.png").read_bytes().startswith(b"\x89PNG")
    plain = write_table(dna.parent / "plain.tsv", [row for row in letters() if row[1] == "plain"])
    assert titans(capsys, "genomics", "predict", "run", plain, "--out", "o.tsv", "--json", "plain.json")[0] == 0
    alone = json.loads(Path("plain.json").read_text())
    assert alone["confusion"] == [[0, 0], told["confusion"][1]], "a class is known by its name"


def test_pre_train_train_and_go_on(dna: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [*SMALL, "--steps", 4, "--quiet"]
    unlabelled = fasta(dna.parent / "all.fa", letters(12, seed=3))
    assert titans(capsys, "genomics", "pretrain", unlabelled, "--out", "pre", *small)[0] == 0
    words = [
        "genomics",
        "train",
        dna,
        "--out",
        "run",
        "--pretrained",
        "pre",
        "--steps",
        4,
        "--device",
        "cpu",
        "--quiet",
    ]
    assert titans(capsys, *words) == (0, "", "")
    code, _, err = titans(capsys, *words)
    assert code == 2
    assert "already; choose another folder, or resume the run" in err
    assert titans(capsys, *words, "--resume")[0] == 0


def test_evaluate(dna: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "genomics", "evaluate", dna, "--out", "out", "--models", "cnn", "kmer-nb:k=2", "--folds", 2, "--seeds", 0,
        "--json", "numbers.json", "--steps", 2, "--cnn-channels", 4, "--device", "cpu",
    ]  # fmt: skip
    code, out, err = titans(capsys, *words)
    assert code == 0, err
    assert "40 sequences: box 20, plain 20" in out
    assert "k-mer naive Bayes, k 2" in out
    assert "p of McNemar" in out
    assert out.endswith("numbers and plots in out, first of all out/results.json\n")
    result = json.loads(Path("numbers.json").read_text())
    assert result == json.loads(Path("out/results.json").read_text())
    again = parse(shlex.split(result["command"])[1:]).what
    assert (again.models, again.folds, again.train.steps) == (("cnn", "kmer-nb:k=2"), 2, 2)


def test_the_command_line_of_settings_is_the_command() -> None:
    settings = EvaluateSettings(data=Path("my dna.tsv"), folds=4, models=("lmm", "cnn"))
    written = genomics_command(settings)
    assert written == "titans genomics evaluate 'my dna.tsv' --models lmm cnn --folds 4"
    parsed = parse(shlex.split(written)[1:]).what
    assert (parsed.data, parsed.folds, parsed.models) == (settings.data, 4, ("lmm", "cnn"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "dna.tsv"], "got no data or no run; expected titans genomics train DATA --out FOLDER"),
        (["train", "none.tsv", "--out", "r"], "got 'none.tsv', which does not exist"),
        (["evaluate"], "got no data; expected titans genomics evaluate DATA"),
        (["evaluate", "dna.tsv", "--models", "lnm"], "did you mean 'lmm'?"),
        (["predict", "r"], "got no model or no data"),
        (["predict", "r", "dna.tsv", "--out", "o.tsv"], "got the model 'r', which is no folder"),
        (
            ["predict", "r", "dna.tsv", "--out", "."],
            "got --out ., which cannot be written; expected the name of a file",
        ),
        (["predict", "r", "dna.tsv", "--out", "dna.tsv"], "got --out dna.tsv, which holds the sequences"),
        (["predict", "r", "dna.tsv", "--out", "o.tsv", "--plot", "o.tsv"], "got 'o.tsv' for out and plot"),
        (["predict", "r", "dna.tsv", "--out", "o.tsv", "--plot", "."], "got --plot ., which cannot be written"),
        (["train", "dna.tsv", "--out", "r", "--k", "12"], "got k=12; expected 1 to 8"),
        (["train", "bad.tsv", "--out", "r"], "got 'X' at position 2 of the sequence 'line 3'"),
    ],
)
def test_mistakes_are_one_line(dna: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    (dna.parent / "bad.tsv").write_text("seq\tlabel\nACGT\t0\nAXG\t1\n")
    code, out, err = titans(capsys, "genomics", *words)
    assert (code, out) == (2, "")
    assert err.startswith("titans: error: ")
    assert err.count("\n") == 1
    assert said in err
    assert not (dna.parent / "r").exists()


def test_predictions_that_cannot_be_made(dna: Path, capsys: pytest.CaptureFixture[str]) -> None:
    titans(capsys, "genomics", "train", dna, "--out", "run", "--baseline", "kmer-nb", "--quiet")
    other = write_table(dna.parent / "other.tsv", [("ACGT", "box"), ("AC", "bax")])
    code, _, err = titans(capsys, "genomics", "predict", "run", other, "--out", "o.tsv")
    assert code == 2
    assert "got the class 'bax' in the data; expected those of the classifier, box, plain" in err
    unlabelled = fasta(dna.parent / "new.fa", letters(2))
    code, _, err = titans(capsys, "genomics", "predict", "run", unlabelled, "--out", "o.tsv", "--plot", "o.png")
    assert code == 2
    assert "which has no classes to compare with" in err
    assert not Path("o.tsv").exists()
