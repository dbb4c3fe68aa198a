"""Cross-validation: every sequence is tested once a seed by models that did not see it, and nothing is done twice."""

import csv
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from genomics.genomics_cases import letters, tiny_fit, tiny_model, write_table
from titans_lm.experiments.models import plain_name
from titans_lm.experiments.runner import run_job
from titans_lm.genomics.batches import folds, held_out
from titans_lm.genomics.evaluate import (
    FILE,
    PREDICTIONS,
    final_jobs,
    model_settings,
    run_evaluation,
    shared_size,
)
from titans_lm.genomics.model import NucleotideModel, fit_baseline
from titans_lm.genomics.predict import corrected_t, mcnemar, save_nucleotides
from titans_lm.genomics.records import Sequences, read_sequences
from titans_lm.genomics.settings import Baseline, EvaluateSettings, GenomicsFit, ReadSettings, small_model
from titans_lm.report.genomics import BASELINES, heading, named, short, tables
from titans_lm.report.page import render_results
from titans_lm.report.table import screen
from titans_lm.train.fresh import count_parameters

MODELS = ("lmm", "cnn", "kmer-nb", "kmer-lr:k=1")
FOLDS = 2


def settings(folder: Path, **changes: Any) -> EvaluateSettings:
    data = write_table(folder / "dna.tsv", letters(36))
    usual = {"models": MODELS, "folds": FOLDS, "seeds": (0, 1), "rates": (1e-3, 1e-2), "tune_steps": 2}
    merged = {**usual, **changes}
    fit = tiny_fit(**({"lr": GenomicsFit().lr} if merged["rates"] else {}))
    return EvaluateSettings(data=data, out=folder / "out", **{"train": fit, **merged})


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[EvaluateSettings, dict[str, Any]]:
    told = settings(tmp_path_factory.mktemp("evaluate"))
    return told, run_evaluation(told, "titans genomics evaluate", lambda _: None)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / PREDICTIONS).open() as file:
        return list(csv.DictReader(file, delimiter="\t"))


def test_every_sequence_is_tested_once_a_seed(done) -> None:
    told, result = done
    rows = table(told.out)
    data = read_sequences(told.data, ReadSettings())
    assert [row["name"] for row in rows] == list(data.names)
    assert [int(row["fold"]) for row in rows] == folds(data, FOLDS, 0).tolist()
    for one in result["contenders"]:
        for seed in told.seeds:
            right = [row["label"] == row[f"{one['name']} seed {seed}"] for row in rows]
            runs = [run for run in one["runs"] if run["seed"] == seed]
            assert [run["fold"] for run in runs] == list(range(FOLDS))
            assert np.mean([run["accuracy"] for run in runs]) == pytest.approx(np.mean(right)), "folds are of one size"
        assert np.sum(one["confusion"]) == 2 * 36
        assert np.trace(one["confusion"]) / 72 == pytest.approx(one["accuracy"]["mean"])
        assert one["accuracy"]["seeds"] == 2
        assert np.mean(one["by_fold"]) == pytest.approx(one["accuracy"]["mean"])


def test_the_file_says_where_it_comes_from(done) -> None:
    told, result = done
    written = json.loads((told.out / FILE).read_text())
    assert written == json.loads(json.dumps(result))
    assert (written["format"], written["what"]) == ("titans-lm bench 1", "genomics")
    assert written["command"] == "titans genomics evaluate"
    assert {"processor", "commit", "versions"} <= written["hardware"].keys()
    parts = [part for one in written["contenders"] for part in [*one["tuning"], *one["runs"]]]
    assert written["wall_seconds"] == pytest.approx(sum(part["wall_seconds"] for part in parts))
    assert all(part["commits"] == [written["hardware"]["commit"]] for part in parts)
    assert (written["sequences"], written["classes"], written["majority"]) == (36, {"box": 18, "plain": 18}, 0.5)
    for name in ("folds.png", "confusion.png"):
        assert (told.out / name).read_bytes().startswith(b"\x89PNG")


def test_a_baseline_alone_gives_the_same(done) -> None:
    """Fold by fold, by hand: fit on the other folds, told on this one."""
    told, result = done
    data = read_sequences(told.data, ReadSettings())
    parts = folds(data, FOLDS, 0)
    found = []
    for fold in range(FOLDS):
        rest, test = data.take(np.flatnonzero(parts != fold)), data.take(np.flatnonzero(parts == fold))
        train, valid = held_out(rest, told.train.held_out, 0)
        words, _ = fit_baseline(tiny_fit(baseline="kmer-nb"), train, valid)
        found.append((words.probabilities(test.tokens).argmax(1) == test.labels).mean())
    assert result["contenders"][2]["by_fold"] == pytest.approx(found)


def test_learning_rates_are_chosen_without_the_fold(done) -> None:
    told, result = done
    for one in result["contenders"]:
        network = one["name"] in ("lmm", "cnn")
        asked = [(fold, rate) for fold in range(FOLDS) for rate in (1e-3, 1e-2)] if network else []
        assert [(trial["fold"], trial["rate"]) for trial in one["tuning"]] == asked
        if not network:
            assert one["rates"] is None
            continue
        for fold, rate in enumerate(one["rates"]):
            tried = [trial for trial in one["tuning"] if trial["fold"] == fold]
            assert rate == max(tried, key=lambda trial: trial["validation_accuracy"])["rate"]
            assert {run["rate"] for run in one["runs"] if run["fold"] == fold} == {rate}
    trials = [json.loads(path.read_text()) for path in sorted((told.out / "trials").glob("*/result.json"))]
    assert len(trials) == 2 * FOLDS * 2
    assert all("predicted" not in trial and trial["asked"]["settings"]["seed"] == 1000 for trial in trials)
    assert all(trial["steps"] == 2 for trial in trials)


def test_neither_a_trial_nor_a_run_is_given_the_fold_that_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sequences that are handed to the training, of all seeds and rates."""
    import titans_lm.genomics.evaluate as module

    told, given = settings(tmp_path, models=("cnn", "kmer-nb"), seeds=(0,)), []
    really = module.train_classifier

    def recorded(fit: Any, train: Sequences, valid: Sequences, path: Path, *progress: Any) -> Any:
        given.append((path, {*train.names, *valid.names}))
        return really(fit, train, valid, path, *progress)

    monkeypatch.setattr(module, "train_classifier", recorded)
    run_evaluation(told, "", lambda _: None)
    data = read_sequences(told.data, ReadSettings())
    parts = folds(data, FOLDS, 0)
    assert len(given) == FOLDS * 2 + 2 * FOLDS
    for path, names in given:
        fold = int(re.search(r"-fold(\d)-", path.name)[1])
        assert names == {name for name, part in zip(data.names, parts, strict=True) if part != fold}, path


def test_rates_that_are_nearly_equal_are_two_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []

    def run_job(job: Any, _: Any) -> dict[str, Any]:
        folders.append(job.folder)
        return {"wall_seconds": 0.0, "diverged": "at once"}

    monkeypatch.setattr("titans_lm.experiments.runner.run_job", run_job)
    told = settings(tmp_path, models=("lmm",), seeds=(0,), rates=(1e-3, 1.0000001e-3))
    with pytest.raises(ValueError, match="lmm in fold 0 diverged with every learning rate"):
        run_evaluation(told, "", lambda _: None)
    assert len(folders) == len(set(folders)) == 2 * FOLDS


def test_a_rate_is_what_was_asked_for(tmp_path: Path) -> None:
    """train.lr without rates, the only rate instead of it, and a variant's own before either."""
    for rates, usual in (((), 1e-2), ((0.5,), 0.5)):
        told = settings(tmp_path, models=("cnn", "cnn:lr=0.25,cnn_channels=4"), seeds=(0,), rates=rates)
        result = run_evaluation(dataclasses.replace(told, out=tmp_path / f"{usual}"), "", lambda _: None)
        assert [one["rates"] for one in result["contenders"]] == [[usual] * FOLDS, [0.25] * FOLDS]
        assert not (told.out / "trials").exists()


def test_sequences_that_are_equal_as_a_model_reads_them_are_of_one_fold(tmp_path: Path) -> None:
    """Ends of their own, one middle for each three: cut to it by one of the models."""
    middles = [text[:12] for text, _ in letters(12)]
    rows = [(f"{tail}{middle}{tail}", str(number % 2)) for number, middle in enumerate(middles) for tail in "ACT"]
    told = settings(tmp_path, models=("kmer-nb:max_length=12,k=2", "kmer-nb"), seeds=(0,))
    write_table(told.data, rows)
    run_evaluation(told, "", lambda _: None)
    by_middle: dict[int, set[str]] = {}
    for place, row in enumerate(table(told.out)):
        by_middle.setdefault(place // 3, set()).add(row["fold"])
    assert all(len(found) == 1 for found in by_middle.values())


def test_what_cannot_be_built_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    told = settings(tmp_path, models=("kmer-nb", "lmm"), seeds=(0,))
    fit = dataclasses.replace(told.train, pretrained=tmp_path / "none")
    with pytest.raises(ValueError, match="which is no folder; expected the run of titans genomics pretrain"):
        run_evaluation(dataclasses.replace(told, train=fit), "", lambda _: None)
    assert not told.out.exists()


def test_folds_that_began_from_other_weights_at_one_path_are_not_mixed(tmp_path: Path) -> None:
    start = save_nucleotides(tmp_path / "pre", NucleotideModel(tiny_model(), 1))
    fit = tiny_fit(pretrained=start, model=small_model())
    told = settings(tmp_path, models=("lmm",), seeds=(0,), rates=(), train=fit)
    run_evaluation(told, "", lambda _: None)
    run_evaluation(told, "", lambda _: None)
    start.rename(tmp_path / "before")
    save_nucleotides(start, NucleotideModel(tiny_model(), 1))
    with pytest.raises(ValueError, match="holds a run of other settings"):
        run_evaluation(dataclasses.replace(told, seeds=(0, 1)), "", lambda _: None)


def test_all_backbones_begin_from_weights_of_their_architecture(tmp_path: Path) -> None:
    """Also where comparisons would give attention a convolution of its own."""
    config = tiny_model(architecture="attention")
    start = save_nucleotides(tmp_path / "pre", NucleotideModel(config, 1))
    fit = tiny_fit(pretrained=start, model=small_model())
    assert model_settings(fit, "attention", 1_000).model == config
    assert model_settings(fit, "attention:num_persistent=2").model != config, "which training refuses"
    with pytest.raises(ValueError, match=r"got the model 'lmm' with pretrained=.*; expected attention"):
        model_settings(fit, "lmm")


def test_stacks_are_of_equal_size(done) -> None:
    told, result = done
    size = result["backbone_parameters"]
    assert size == count_parameters(told.train.model, 6)
    attention = model_settings(told.train, "attention", size).model
    assert abs(count_parameters(attention, 6) / size - 1.0) < 0.01
    assert attention.attention_conv_size == 4, "attention gets the convolution"


def test_pairs_are_tested_as_the_page_says(done) -> None:
    told, result = done
    rows = table(told.out)
    assert [(pair["first"], pair["second"]) for pair in result["paired"]] == [("lmm", name) for name in MODELS[1:]]
    for pair in result["paired"]:
        for by_seed in pair["mcnemar"]:
            right = [
                np.array([row["label"] == row[f"{name} seed {by_seed['seed']}"] for row in rows])
                for name in (pair["first"], pair["second"])
            ]
            assert {name: value for name, value in by_seed.items() if name != "seed"} == mcnemar(*right)
        assert pair["mcnemar_p"] == max(by_seed["p"] for by_seed in pair["mcnemar"])
        by_fold = {one["name"]: one["by_fold"] for one in result["contenders"]}
        differences = [a - b for a, b in zip(by_fold["lmm"], by_fold[pair["second"]], strict=True)]
        assert pair["folds"] == corrected_t(differences, 1 / 0.75), "a fold for ¾ of one"


def test_it_does_nothing_twice(done, monkeypatch: pytest.MonkeyPatch) -> None:
    import titans_lm.genomics.evaluate as module

    told, result = done

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("nothing is left to train")

    monkeypatch.setattr(module, "train_classifier", fail)
    again = run_evaluation(told, "again", lambda _: None)
    assert (again["contenders"], again["paired"]) == (result["contenders"], result["paired"])
    with pytest.raises(ValueError, match="holds a run of other settings"):
        run_evaluation(dataclasses.replace(told, rates=(1e-2,), fold_seed=1), "again", lambda _: None)


def test_a_run_that_was_stopped_goes_on(done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import titans_lm.genomics.fit as module

    told, result = done
    data = read_sequences(told.data, ReadSettings())
    rates = {("lmm", fold): rate for fold, rate in enumerate(result["contenders"][0]["rates"])}
    fits = {"lmm": model_settings(told.train, "lmm", result["backbone_parameters"])}
    [job, *_] = final_jobs(told, fits, data, folds(data, FOLDS, 0), rates)
    job = dataclasses.replace(job, folder=tmp_path / "run")
    fit = module.fit

    def stopping(*args: Any, **more: Any) -> None:
        told = more["on_step"]
        fit(*args, **{**more, "on_step": lambda record: told(record) or record["step"] == 2})
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "fit", stopping)
        with pytest.raises(KeyboardInterrupt, match="the same command goes on"):
            run_job(job)
    other = dataclasses.replace(job, settings=dataclasses.replace(job.settings, lr=1.0))
    with pytest.raises(ValueError, match="holds a run of other settings"):
        run_job(other)
    again = run_job(job)
    first = next(run for run in result["contenders"][0]["runs"] if (run["seed"], run["fold"]) == (0, 0))
    assert (again["accuracy"], again["best_step"]) == (first["accuracy"], first["best_step"])


def test_the_page_of_results_has_a_section(done, tmp_path: Path) -> None:
    told, result = done
    results = tmp_path / "results"
    results.mkdir()
    (results / "dna.json").write_bytes((told.out / FILE).read_bytes())
    page = tmp_path / "results.md"
    written = render_results(results, page)
    assert (results / "dna.png") in written
    text = (results / "dna.md").read_text()
    assert "## DNA: dna" in text
    assert "| **LMM** |" in text
    assert "k-mer logistic regression, k 1" in text
    assert "corrected resampled t-test over 2 folds" in text
    assert "Each fold has its own learning rate: the best of 0.001, 0.01 by trials on what it is trained on." in text
    apart = {**result["settings"], "train": {**result["settings"]["train"], "overlap": 50}}
    assert heading({**result, "settings": apart}) == f"{heading(result)}, folds apart by 50 shared nucleotides"
    shown = screen(tables(result))
    assert shown[0].split()[:2] == ["model", "parameters"]
    assert any(line.startswith("k-mer naive Bayes") and "–" in line for line in shown)


def test_names_for_readers() -> None:
    assert named("cnn") == "CNN"
    assert set(BASELINES) == set(get_args(Baseline)), "every one has a name"
    assert named("kmer-nb:k=6") == "k-mer naive Bayes, k 6"
    assert named("lmm:pooling=last") == "LMM, pooling last"
    assert short("attention") == "Transformer++"
    assert short("lmm:chunk_size=8") == "LMM chunk_size=8"
    assert plain_name("lmm:memory_depth=2,lr=1e-3") == "lmm-memory_depth=2,lr=1e-3"


def test_variants() -> None:
    shared = tiny_fit()
    made = model_settings(shared, "lmm:memory_depth=2,pooling=last,lr=0.5,momentum=false")
    assert (made.model.memory_depth, made.model.momentum, made.pooling, made.lr) == (2, False, "last", 0.5)
    mixed = model_settings(shared, "hybrid:layer_types=[sliding,lmm],num_hidden_layers=2,pooling=last")
    assert (mixed.model.blocks, mixed.model.attention_conv_size) == (("sliding", "lmm"), shared.model.conv_size)
    words = model_settings(shared, "kmer-nb:k=6")
    assert (words.baseline, words.k) == ("kmer-nb", 6)
    assert model_settings(shared, "cnn:cnn_channels=4").cnn_channels == 4
    assert model_settings(shared, "words:word_size=3").word_size == 3
    assert shared_size(shared, ("cnn", "kmer-nb")) is None
    assert shared_size(dataclasses.replace(shared, parameters=9000), ("lmm",)) == 9000


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lnm", r"got models='lnm'; did you mean 'lmm'\?"),
        ("lmm:poling=last", r"got 'poling', which a variant of 'lmm' cannot change; did you mean 'pooling'\?"),
        ("lmm:intermediate_size=8", "got intermediate_size for a variant of 'lmm'"),
        ("kmer-nb:pooling=last", "got 'pooling', which a variant of 'kmer-nb' cannot change"),
        ("cnn:k", "got the model 'cnn:k'; expected cnn:SETTING=VALUE"),
        ("lmm:lr=1,lr=2", "every setting once"),
        ("kmer-lr:k=nine", "got k='nine'; expected int"),
        ("words", "got baseline='words' with word_size=1; expected 2 to 8 nucleotides"),
        ("words:word_size=9", "got word_size=9; expected 1 to 8"),
    ],
)
def test_names_that_are_none(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        model_settings(tiny_fit(), name)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"folds": 1}, "got folds=1; expected an integer of at least 2"),
        ({"models": ()}, "expected one or more, each once"),
        ({"seeds": (0, 0)}, "expected one or more, each once"),
        ({"rates": (0.0,)}, "got rates=0.0; expected a finite number above 0"),
        ({"folds": 30}, "got the class 'box' with 18 different sequences for 30 folds"),
    ],
)
def test_settings_that_will_not_do(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_evaluation(settings(tmp_path, **changes), "", lambda _: None)
    assert not (tmp_path / "out").exists()


def test_it_needs_data() -> None:
    with pytest.raises(ValueError, match="got no data; expected titans genomics evaluate DATA"):
        run_evaluation(EvaluateSettings(), "", lambda _: None)


def test_it_is_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="got WORLD_SIZE=2, several processes; expected one: models of sequences"):
        run_evaluation(settings(tmp_path), "", lambda _: None)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("file", "floor"),
    [
        ("human_enhancers_cohn.test", 0.682),
        ("human_nontata_promoters.test", 0.783),
        ("human_ensembl_regulatory.train1500", 0.557),
    ],
)
def test_words_of_five_reach_the_floors(data_dir: Path, file: str, floor: float) -> None:
    """One split of 80/20 gave the floors; the spread over ours is that of the sequences that are tested."""
    data = read_sequences(data_dir / "genomics" / f"{file}.tsv", ReadSettings())
    parts, found = folds(data, 5, 0), []
    for fold in range(5):
        rest, test = data.take(np.flatnonzero(parts != fold)), data.take(np.flatnonzero(parts == fold))
        train, valid = held_out(rest, 0.1, 0)
        words, _ = fit_baseline(tiny_fit(baseline="kmer-nb", k=5), train, valid)
        found.append((words.probabilities(test.tokens).argmax(1) == test.labels).mean())
    spread = (floor * (1 - floor) / (len(data) / 5)) ** 0.5
    assert abs(np.mean(found) - floor) < 2 * spread


def test_what_the_paired_tests_need_is_asked_for_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(ValueError, match=r"pip install 'titans-lm\[genomics\]'"):
        run_evaluation(settings(tmp_path, models=("lmm", "attention")), "titans genomics evaluate", lambda _: None)
    assert not (tmp_path / "out").exists()


def test_a_fold_that_leaves_too_few_leaves_no_run(tmp_path: Path) -> None:
    """With more sequences the same call goes on."""
    few = [*letters(10), ("ACGTACGTAAACGTACGTAA", "few"), ("ACGTTCGTACACGTTCGTAC", "few")]
    data = write_table(tmp_path / "few.tsv", few)
    told = dataclasses.replace(settings(tmp_path, models=("kmer-nb:k=2",), rates=()), data=data)
    with pytest.raises(ValueError, match="got the class 'few' with 1 different sequence"):
        run_evaluation(told, "few", lambda _: None)
    write_table(data, letters(36))
    run_evaluation(told, "more", lambda _: None)
