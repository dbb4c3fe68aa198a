"""Training: the best step is kept, a run goes on where it stopped, what is saved is what was trained."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genomics.genomics_cases import letters, sequences, tiny_fit, tiny_model, words_of, write_table
from titans_lm.genomics.batches import held_out, with_targets
from titans_lm.genomics.fit import bits_per_nucleotide, pretrain_on_file, train_classifier, train_on_file
from titans_lm.genomics.model import NucleotideModel, make_network, nucleotide_loss
from titans_lm.genomics.predict import Classifier, load_classifier, load_nucleotides, save_classifier, save_nucleotides
from titans_lm.genomics.records import Sequences, reverse_complement
from titans_lm.genomics.settings import GenomicsFit, PretrainSettings, SharedFit, TrainSettings
from titans_lm.train.options import plain_settings
from titans_lm.train.run import RunFolder

SHORT = {"steps": 16, "eval_every": 4}


def settings(folder: Path, **changes: Any) -> TrainSettings:
    fit = tiny_fit(**changes)
    shared = {one.name: getattr(fit, one.name) for one in fields(GenomicsFit)}
    return TrainSettings(data=write_table(folder / "dna.tsv", letters()), out=folder / "run", **shared)


def parts(count: int = 40) -> tuple[Sequences, Sequences]:
    return held_out(sequences(letters(count)), 0.25, 0)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainSettings, dict[str, Any]]:
    told = settings(tmp_path_factory.mktemp("train"), steps=40, eval_every=10)
    return told, train_on_file(told)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainSettings, dict[str, Any]]:
    told = settings(tmp_path_factory.mktemp("short"), **SHORT)
    return told, train_on_file(told)


def test_it_learns_what_can_be_learned(done) -> None:
    told, result = done
    assert result["classes"] == {"box": 20, "plain": 20}
    assert (result["train_sequences"], result["validation_sequences"], result["cut_sequences"]) == (30, 10, 0)
    assert result["validation"]["accuracy"] == result["validation_accuracy"] >= 0.8, "a box has a G in it"
    assert np.sum(result["validation"]["confusion"]) == 10
    assert json.loads((told.out / "result.json").read_text())["best_step"] == result["best_step"]
    assert (told.out / "confusion.png").read_bytes().startswith(b"\x89PNG")


def test_the_model_is_that_of_the_best_step(done) -> None:
    told, result = done
    looks = [line for line in RunFolder(told.out).metrics.read() if "validation_accuracy" in line]
    assert [line["step"] for line in looks] == [10, 20, 30, 40]
    best = max(looks, key=lambda line: (line["validation_accuracy"], -line["validation_loss"]))
    assert (result["best_step"], result["validation_accuracy"]) == (best["step"], best["validation_accuracy"])
    _, valid = parts()
    found = load_classifier(told.out, "cpu").probabilities(valid.tokens)
    assert (found.argmax(1) == valid.labels).mean() == best["validation_accuracy"]
    loss = -np.log(found[np.arange(10), valid.labels]).mean()
    assert loss == pytest.approx(best["validation_loss"], rel=1e-5)


def test_a_look_is_in_the_precision_of_the_prediction(tmp_path: Path) -> None:
    """Whatever the precision of training is."""
    RunFolder.create(tmp_path / "run", {})
    train, valid = parts()
    fit = tiny_fit(baseline="cnn", precision="bfloat16", steps=20, eval_every=20)
    classifier, _ = train_classifier(fit, train, valid, tmp_path / "run")
    [look] = [line for line in RunFolder(tmp_path / "run").metrics.read() if "validation_loss" in line]
    found = classifier.probabilities(valid.tokens)
    assert look["validation_loss"] == pytest.approx(-np.log(found[np.arange(10), valid.labels]).mean(), rel=1e-6)


def test_measuring_leaves_the_mode_as_it_was() -> None:
    fit = tiny_fit()
    network, model = make_network(fit, 2), NucleotideModel(tiny_model())
    for training in (True, False):
        network.train(training)
        model.train(training)
        Classifier(fit, ("a", "b"), network).probabilities(parts()[1].tokens)
        bits_per_nucleotide(model, parts()[1].tokens, 4)
        assert (network.training, model.training) == (training, training)
        assert network.head.training is training


@pytest.mark.parametrize("baseline", ["kmer-nb", None])
def test_no_sequence_has_no_probabilities(tmp_path: Path, baseline: str | None) -> None:
    RunFolder.create(tmp_path / "run", {})
    classifier, _ = train_classifier(tiny_fit(baseline=baseline), *parts(), tmp_path / "run")
    with pytest.raises(ValueError, match="got no sequences; expected at least one"):
        classifier.probabilities([])


def test_of_a_genome_no_more_is_held_out_than_can_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import titans_lm.genomics.fit as module

    fit = {"model": tiny_model(), "steps": 1, "warmup_steps": 0, "batch_size": 4, "device": "cpu", "max_length": 16}
    told = PretrainSettings(data=write_table(tmp_path / "dna.tsv", letters()), out=tmp_path / "pre", **fit)
    monkeypatch.setattr(module, "MOST_HELD_OUT", 3)
    result = pretrain_on_file(told)
    assert (result["held_out_pieces"], result["pieces"] > 60) == (3, True)


def test_patience_ends_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import titans_lm.genomics.fit as module

    same = {"validation_accuracy": 0.5, "validation_loss": 1.0}
    monkeypatch.setattr(module, "_validate", lambda *_: same)
    RunFolder.create(tmp_path / "run", {})
    _, told = train_classifier(tiny_fit(steps=20, patience=2), *parts(), tmp_path / "run")
    assert (told["best_step"], told["steps"]) == (2, 6), "after the looks at 4 and 6"
    _, again = train_classifier(tiny_fit(steps=20, patience=2), *parts(), tmp_path / "run")
    assert (again["best_step"], again["steps"]) == (2, 6), "one that was stopped before it said so ends as it had"


@pytest.mark.parametrize("place", [6, 8], ids=["between looks", "at a look"])
def test_a_run_that_was_stopped_goes_on(short, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    import titans_lm.genomics.fit as module

    told = settings(tmp_path, **SHORT)
    fit, look, looks = module.fit, module._validate, []
    monkeypatch.setattr(module, "_validate", lambda *args: looks.append(1) or look(*args))

    def stopping(*args: Any, on_step: Any, **more: Any) -> Any:
        def interrupt(record: dict[str, Any]) -> bool:
            if record["step"] == place:
                os.kill(os.getpid(), signal.SIGINT)
            return on_step(record)

        return fit(*args, on_step=interrupt, **more)

    with monkeypatch.context() as patch:
        patch.setattr(module, "fit", stopping)
        with pytest.raises(
            KeyboardInterrupt, match=f"stopped after step {place}; the same command with --resume goes on"
        ):
            train_on_file(told)
    with pytest.raises(ValueError, match="holds a run that is not finished"):
        load_classifier(told.out, "cpu")
    with pytest.raises(ValueError, match=r"which holds .* already; choose another folder, or resume the run"):
        train_on_file(told)
    other = settings(tmp_path, **{**SHORT, "steps": 17})
    with pytest.raises(ValueError, match="which was begun with steps=16 and not 17"):
        train_on_file(replace(other, resume=True))
    result = train_on_file(replace(told, resume=True))
    assert result["validation"] == short[1]["validation"]
    assert result["best_step"] == short[1]["best_step"]
    assert len(looks) == 4, "at 4, 8, 12 and 16, each once"
    model, before = (load_classifier(run, "cpu").core.state_dict() for run in (told.out, short[0].out))
    assert all(torch.equal(model[name], before[name]) for name in before), "bit for bit"


@pytest.mark.parametrize("baseline", ["kmer-nb", "kmer-lr"])
def test_counted_words_are_judged_by_a_fit_that_has_not_seen_the_part(tmp_path: Path, baseline: str) -> None:
    """Classes by chance: words of four tell every sequence that was learned, and none that was not."""
    rows = [(text, str(number // 2 % 2)) for number, (text, _) in enumerate(letters(60, seed=3))]
    told = settings(tmp_path, baseline=baseline, k=4)
    write_table(told.data, rows)
    result = train_on_file(told)
    train, valid = held_out(sequences(rows), 0.25, 0)
    if baseline == "kmer-lr":
        assert result["validation"]["accuracy"] == result["validation_accuracy"]
    else:
        counts = np.array([np.bincount(words_of(row, 4), minlength=256) for row in train.tokens])
        likely = np.log([counts[train.labels == number].sum(0) + 1.0 for number in (0, 1)])
        likely -= np.log(np.exp(likely).sum(1, keepdims=True))
        odds = np.log(np.bincount(train.labels) / len(train))
        guessed = [(likely[:, words_of(row, 4)].sum(1) + odds).argmax() for row in valid.tokens]
        assert result["validation"]["accuracy"] == np.mean(guessed == valid.labels)
    saved = load_classifier(told.out, "cpu").probabilities(valid.tokens).argmax(1)
    assert np.mean(saved == valid.labels) > result["validation"]["accuracy"], "the saved one has learned them"


def test_a_finished_run_that_is_resumed_stays_what_it_is(tmp_path: Path) -> None:
    told = settings(tmp_path)
    first = train_on_file(told)
    weights = (told.out / "model" / "model.safetensors").read_bytes()
    again = train_on_file(replace(told, resume=True))
    assert (again["best_step"], again["validation"]) == (first["best_step"], first["validation"])
    assert (told.out / "model" / "model.safetensors").read_bytes() == weights


OWN = {"word_size": 3, "see_length": True}


@pytest.mark.parametrize(
    ("baseline", "own"),
    [("cnn", {}), ("kmer-nb", {}), ("kmer-lr", {}), ("length", {}), (None, {}), (None, OWN)],
)
def test_a_saved_classifier_is_the_one_that_was_trained(tmp_path: Path, baseline: str | None, own: dict) -> None:
    train, valid = parts()
    RunFolder.create(tmp_path / "run", {})
    classifier, told = train_classifier(tiny_fit(baseline=baseline, **own), train, valid, tmp_path / "run")
    loaded = load_classifier(tmp_path / "run" / "model", "cpu")
    assert loaded.settings == classifier.settings
    assert loaded.classes == ("box", "plain")
    assert loaded.parameters() == classifier.parameters()
    np.testing.assert_array_equal(loaded.probabilities(valid.tokens), classifier.probabilities(valid.tokens))
    assert ("steps" in told) == (baseline in ("cnn", None))


def test_probabilities_come_in_the_order_of_the_sequences() -> None:
    fit = tiny_fit()
    classifier = Classifier(fit, ("a", "b"), make_network(fit, 2))
    rows = list(parts()[0].tokens)
    found = classifier.probabilities(rows, batch_size=7)
    for row, told in zip(rows, found, strict=True):
        np.testing.assert_allclose(classifier.probabilities([row])[0], told, atol=1e-6)
    np.testing.assert_allclose(found.sum(1), 1.0)


def test_both_strands_are_the_mean_of_each() -> None:
    fit = tiny_fit(both_strands=True)
    classifier = Classifier(fit, ("a", "b"), make_network(fit, 2))
    rows = list(parts()[0].tokens)[:6]
    other = [reverse_complement(row) for row in rows]
    one, two = (classifier.probabilities(each, both_strands=False) for each in (rows, other))
    np.testing.assert_allclose(classifier.probabilities(rows), 0.5 * (one + two))
    np.testing.assert_allclose(classifier.probabilities(other), classifier.probabilities(rows))


def test_pre_training_then_classes(tmp_path: Path) -> None:
    path = write_table(tmp_path / "dna.tsv", letters())
    fit = {"model": tiny_model(), "steps": 6, "warmup_steps": 1, "batch_size": 4, "lr": 1e-2, "device": "cpu"}
    told = PretrainSettings(data=path, out=tmp_path / "pre", max_length=16, word_size=3, **fit)
    result = pretrain_on_file(told)
    assert result["steps"] == 6
    assert result["pieces"] + result["held_out_pieces"] > 40, "longer sequences are cut"
    assert 1.0 < result["held_out_bits_per_nucleotide"] < 2.2
    with pytest.raises(ValueError, match="already; choose another folder, or resume the run"):
        pretrain_on_file(told)
    assert pretrain_on_file(replace(told, resume=True))["held_out_bits_per_nucleotide"] == pytest.approx(
        result["held_out_bits_per_nucleotide"]
    )
    RunFolder.create(tmp_path / "run", {})
    train, valid = parts()
    frozen = tiny_fit(pretrained=tmp_path / "pre", lr=0.0, model=tiny_model())
    classifier, _ = train_classifier(frozen, train, valid, tmp_path / "run")
    before = load_nucleotides(tmp_path / "pre").encoder.state_dict()
    after = classifier.core.encoder.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert classifier.settings.word_size == 3, "sizes are those of the model that it starts from"
    RunFolder.create(tmp_path / "other", {})
    with pytest.raises(ValueError, match="got settings of the model beside pretrained="):
        train_classifier(tiny_fit(pretrained=tmp_path / "pre", word_size=5), train, valid, tmp_path / "other")
    with pytest.raises(ValueError, match="holds a nucleotides model; expected the run of titans genomics train"):
        load_classifier(tmp_path / "pre", "cpu")
    with pytest.raises(ValueError, match="holds a classifier model; expected the run of titans genomics pretrain"):
        load_nucleotides(tmp_path / "run")


def test_pre_training_on_the_part_that_is_trained_on(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", {})
    train, valid = parts()
    fit = tiny_fit(pretrain_steps=3, lr=1e-3)
    classifier, told = train_classifier(fit, train, valid, tmp_path / "run")
    assert told["steps"] == 4
    assert json.loads((tmp_path / "run" / "pretrain" / "settings.json").read_text())["steps"] == 3
    assert classifier.probabilities(valid.tokens).shape == (10, 2)


def test_pre_training_needs_two_pieces(tmp_path: Path) -> None:
    path = tmp_path / "one.fa"
    path.write_text(">a\nACGTACGT\n")
    told = PretrainSettings(data=path, out=tmp_path / "pre", model=tiny_model())
    with pytest.raises(ValueError, match="got 1 pieces of 1024 nucleotides; expected at least two"):
        pretrain_on_file(told)
    with pytest.raises(ValueError, match="got no data or no run; expected titans genomics pretrain"):
        pretrain_on_file(PretrainSettings())


def test_bits_are_the_mean_over_nucleotides_and_not_over_batches() -> None:
    model = NucleotideModel(tiny_model())
    rows = [row for row in parts()[0].tokens]
    found = bits_per_nucleotide(model, rows, 4)
    whole = float(nucleotide_loss(model, with_targets(rows))[1]["bits_per_token"])
    assert found == pytest.approx(whole, rel=1e-5)


def test_nothing_broken_is_loaded(tmp_path: Path) -> None:
    fit = tiny_fit()
    folder = save_classifier(tmp_path / "model", Classifier(fit, ("a", "b"), make_network(fit, 2)))
    config = json.loads((folder / "config.json").read_text())
    assert config["settings"] == json.loads(json.dumps(plain_settings(fit)))
    for change, said in [
        (
            {"classes": ["a", "b", "c"]},
            "the weights in .* do not fit this",
        ),
        ({"format": "titans-lm genomics 9"}, "holds no model of sequences in the format 'titans-lm genomics 1'"),
    ]:
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match=said):
            load_classifier(folder, "cpu")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json, which is not JSON"):
        load_classifier(folder, "cpu")
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"the weights in .* cannot be read"):
        load_classifier(folder, "cpu")
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="which holds no saved model; expected the run of titans genomics train"):
        load_classifier(empty, "cpu")
    with pytest.raises(ValueError, match="which is no folder; expected the run of titans genomics pretrain"):
        load_nucleotides(tmp_path / "none")
    save_nucleotides(tmp_path / "model", NucleotideModel(tiny_model()))
    assert isinstance(load_nucleotides(tmp_path / "model"), NucleotideModel), "an older model goes"


def test_data_that_cannot_be_trained_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got no data or no run; expected titans genomics train DATA --out FOLDER"):
        train_on_file(TrainSettings())
    path = tmp_path / "a.fa"
    path.write_text(">a\nACGT\n>b\nAC\n")
    with pytest.raises(ValueError, match="got 2 sequences without classes"):
        train_on_file(TrainSettings(data=path, out=tmp_path / "run"))
    assert not (tmp_path / "run").exists(), "nothing is left behind"


@pytest.mark.parametrize(("kind", "train"), [(TrainSettings, train_on_file), (PretrainSettings, pretrain_on_file)])
def test_one_process_alone_trains(
    tmp_path: Path, kind: Any, train: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="got WORLD_SIZE=2, several processes; expected one: models of sequences"):
        train(kind(data=write_table(tmp_path / "dna.tsv", letters()), out=tmp_path / "run"))
    assert not (tmp_path / "run").exists(), "two processes would begin it"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"k": 9}, "got k=9; expected 1 to 8"),
        ({"cnn_kernel": 4}, "got cnn_kernel=4; expected an odd number"),
        ({"baseline": "cn"}, "got baseline='cn'; did you mean 'cnn'"),
        ({"pooling": "max"}, "got pooling='max'"),
        ({"crop": "middle"}, "got crop='middle'"),
        ({"max_length": -1}, "got max_length=-1; expected an integer of at least 0"),
        ({"held_out": 0.0}, "got held_out=0.0; expected a number from 0.001 to 0.5"),
        ({"embed_dropout": 1.0}, "got embed_dropout=1.0"),
        ({"both_strands": 1}, "got both_strands=1; expected True or False"),
        ({"patience": 3, "eval_every": 0}, "got patience=3 with eval_every=0"),
        ({"parallel": "fsdp"}, "got parallel='fsdp' for a model of sequences"),
        ({"pretrained": Path("x"), "baseline": "cnn"}, "got pretrained with pretrain_steps or a baseline"),
        ({"pretrain_steps": 1, "baseline": "cnn"}, "got pretrain_steps with baseline='cnn'"),
        ({"parameters": 0}, "got parameters=0"),
    ],
)
def test_settings_that_will_not_do(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tiny_fit(**changes)


def test_settings_of_pre_training_that_will_not_do() -> None:
    with pytest.raises(ValueError, match="got max_length=1; expected an integer of at least 2"):
        PretrainSettings(max_length=1)
    with pytest.raises(ValueError, match="got parallel='fsdp' for a model of sequences"):
        PretrainSettings(parallel="fsdp")


def test_settings_that_no_command_line_has_are_checked_too() -> None:
    with pytest.raises(ValueError, match="got baseline='cn'; did you mean 'cnn'"):
        SharedFit(baseline="cn")
