"""Parameters and tokens of steps: those of the models that would be trained."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from repro.repro_cases import micro, named_sets
from titans_lm.cli import parse
from titans_lm.data.tasks.babilong import BabiLongSettings
from titans_lm.genomics.model import ConvolutionalClassifier
from titans_lm.recipes.estimate import estimate_training
from titans_lm.repro.plans import Step, make_plan, published
from titans_lm.repro.show import plan_lines, work_of, work_told
from titans_lm.train.baselines import fit_baseline
from titans_lm.train.options import plain_settings


def steps_of(table: str, scale: str = "paper", **given) -> dict[str, Step]:
    return {step.name: step for step in make_plan(table, scale, **given).steps}


def test_they_are_those_of_a_dry_run() -> None:
    steps = steps_of("table5", data="tokens")
    assert next(iter(steps)) == "400m-lmm", "tokens that are there are not prepared"
    linear = steps["400m-linear"]
    command = parse(["train", "400m-lmm", "--dry-run", "--model.memory-depth", "1"])
    assert plain_settings(command)["model"] == plain_settings(linear.settings)["model"]
    found, work = estimate_training(linear.settings), work_of(linear)
    assert work is not None
    assert (work.parameters, work.trained) == ((found["parameters"],), found["tokens"])
    assert work_of(steps["needles"]) is None


def test_baselines_have_as_many_parameters_as_ours() -> None:
    """Those of the model that would be trained, which is made here."""
    step = steps_of("figure7")["170m-mamba"]
    small = replace(step.settings.model, num_hidden_layers=2, hidden_size=64, num_attention_heads=2)
    settings = replace(step.settings, model=small, vocab_size=500, steps=10, batch_size=3, seq_len=20, accumulate=2)
    work = work_of(replace(step, settings=settings))
    ours = estimate_training(replace(settings, baseline=None))["parameters"]
    made = AutoModelForCausalLM.from_config(fit_baseline("mamba", small, 500, ours))
    size = sum(parameter.numel() for parameter in made.parameters())
    assert work is not None
    assert (work.parameters, work.trained) == ((size,), 10 * 3 * 20 * 2)
    assert work_told(work) == f"{size:,} parameters; 1,200 tokens"


@pytest.mark.slow
def test_every_training_step_of_the_paper_says_how_large_it_is() -> None:
    """Of all tables, and nothing else."""
    for table in published():
        plan = make_plan(table, "paper")
        works = {step.name: work_of(step) for step in plan.steps}
        untrained = ("evaluate lm-eval", "genomics predict", "prepare", "bench ops", "bench model", "bench scaling")
        for step in plan.steps:
            work = works[step.name]
            assert (work is None) == (step.command in untrained)
            assert work is None or (min(work.parameters) > 0 and (work.trained > 0 or table == "table3"))
        assert sum(" parameters" in line for line in plan_lines(plan) if line.startswith("  ")) == sum(
            work is not None for work in works.values()
        )


@pytest.mark.parametrize(
    ("table", "scale"),
    [*((table, "tiny") for table in ("table1", "table2", "table5", "figure6", "figure7")), ("table1", "small")],
)
def test_all_models_of_a_step_can_be_of_one_size(table: str, scale: str) -> None:
    """Whatever the first of them is, the others can have as many parameters: within 1 %."""
    for step in make_plan(table, scale).steps:
        work = work_of(step)
        assert work is not None
        assert len(work.parameters) == len(step.settings.models)
        assert max(work.parameters) / min(work.parameters) < 1.01


def test_stories_count_what_is_tested_too() -> None:
    step = steps_of("figure6")["qa2"]
    s = step.settings
    assert s.train.model.conv_size == 8, "a place is named up to five tokens behind its person"
    assert s.task == replace(BabiLongSettings(), story="qa2", books=s.task.books, tokenizer="words")
    work = work_of(replace(step, settings=replace(s, sizes=("512", "1K"), test_sizes=("2K", "10M"), examples=3)))
    assert work is not None
    # rows of 1,024 join after a quarter of the steps, and are drawn as often from there on
    joined = 32 * (5_000 * 512 + 15_000 * 768)
    assert work.trained == pytest.approx(joined, rel=0.01)
    assert work.tested == 3 * (2048 + 10 * 2**20)
    assert "to train on and 31,463,424 to test on" in work_told(work)


def test_a_comparison_counts_trials_and_seeds_and_sizes_all_alike() -> None:
    (step,) = make_plan("table1", "tiny", sizes=micro()).steps
    settings = replace(step.settings, models=("lmm", "llama"), rates=(1e-3, 1e-2), tune_steps=5, seeds=(0, 1, 2))
    work = work_of(replace(step, settings=settings))
    assert work is not None
    ours, other = work.parameters
    assert abs(other / ours - 1) < 0.05
    assert (work.trained, work.tested) == ((2 * 5 + 3 * 2) * 2 * 32, 3 * 200)
    assert work_told(work).endswith(" for each model")


def test_bytes_to_test_on_are_no_tokens_of_other_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titans_lm.repro.show._vocabulary", lambda _: 512)
    (step,) = make_plan("table1", "tiny", sizes=micro()).steps
    work = work_of(step)
    assert work is not None
    assert work.tested == 0
    assert "to test on" not in work_told(work)


def test_forecasters_at_all_horizons() -> None:
    step = steps_of("table3")["ETTh1"]
    work = work_of(replace(step, settings=replace(step.settings, models=("dlinear", "repeat"), horizons=(96, 192))))
    assert work is not None
    assert work.parameters == (2 * (96 * 96 + 96), 2 * (96 * 192 + 192))
    assert work_told(work) == "18,624 to 37,248 parameters"


def test_classifiers_of_dna_are_counted_by_nucleotide() -> None:
    steps = steps_of("table4")
    lmm, cnn = steps["human-reg-lmm"], steps["human-reg-cnn"]
    found, other = work_of(lmm), work_of(cnn)
    assert found is not None
    assert other is not None
    assert found.trained == other.trained == lmm.settings.steps * 128 * 802
    size = sum(parameter.numel() for parameter in ConvolutionalClassifier(cnn.settings, 3).parameters())
    assert other.parameters == (size,)
    assert work_of(steps["human-reg-lmm-test"]) is None


def test_cross_validation_counts_folds_and_trials(tmp_path: Path) -> None:
    (step, *_) = make_plan("table4", "small", data=named_sets(tmp_path, "table4")).steps
    s = step.settings
    work = work_of(step)
    assert work is not None
    assert work.trained == s.folds * (2 * 500 + 3 * 5000) * 64 * 500
    assert len(work.parameters) == 4, "what is counted or measured by length takes no steps"
