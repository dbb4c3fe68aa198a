"""GPU-hours: by the equations of our models, by parameters for others, by their limits for what is timed."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from repro.repro_cases import micro, named_sets
from titans_lm.bench.flops import model_flops
from titans_lm.bench.models import model_cases
from titans_lm.bench.ops import op_cases
from titans_lm.bench.scaling import stream_cases
from titans_lm.bench.settings import KernelsSettings, ScalingSettings
from titans_lm.cli import parse
from titans_lm.data.tasks.babilong import BabiLongSettings
from titans_lm.genomics.model import ConvolutionalClassifier
from titans_lm.recipes.estimate import estimate_training
from titans_lm.repro.hours import FLOPS, measurements, step_cost
from titans_lm.repro.plans import TABLES, make_plan
from titans_lm.repro.sets import DNA, SERIES, set_of
from titans_lm.repro.show import cost_told, plan_lines
from titans_lm.repro.steps import Step
from titans_lm.train.baselines import fit_baseline
from titans_lm.train.settings import plain_settings


def steps_of(table: str, scale: str = "paper", **given) -> dict[str, Step]:
    return {step.name: step for step in make_plan(table, scale, **given).steps}


def test_gpu_hours_are_those_of_a_dry_run() -> None:
    steps = steps_of("table5", data="tokens")
    assert next(iter(steps)) == "400m-lmm", "tokens that are there are not prepared"
    linear = steps["400m-linear"]
    command = parse(["train", "400m-lmm", "--dry-run", "--model.memory-depth", "1"])
    names = plain_settings(linear.settings)
    assert plain_settings(command)["model"] == names["model"]
    found = estimate_training(linear.settings)
    cost = step_cost(linear)
    assert cost is not None
    assert cost.hours == pytest.approx(found["gpu_hours"])
    assert (cost.parameters, cost.trained) == ((found["parameters"],), found["tokens"])
    assert step_cost(steps["needles"]) is None


def test_baselines_are_six_flops_for_each_parameter_and_token() -> None:
    """With as many parameters as the model that would be trained, which is made here."""
    step = steps_of("figure7")["170m-mamba"]
    small = replace(step.settings.model, num_hidden_layers=2, hidden_size=64, num_attention_heads=2)
    settings = replace(step.settings, model=small, vocab_size=500, steps=10, batch_size=3, seq_len=20, accumulate=2)
    cost = step_cost(replace(step, settings=settings))
    ours = estimate_training(replace(settings, baseline=None))["parameters"]
    made = AutoModelForCausalLM.from_config(fit_baseline("mamba", small, 500, ours))
    size = sum(parameter.numel() for parameter in made.parameters())
    assert cost is not None
    assert (cost.parameters, cost.trained) == ((size,), 10 * 3 * 20 * 2)
    assert cost.hours == pytest.approx(6 * size * 1200 / FLOPS / 3600)
    assert cost_told(cost).endswith(" GPU-hours (6 FLOPs for each parameter and token)")
    assert f"{size:,} parameters; 1,200 tokens; 10 steps of 120; at least 0 GB on one GPU" in cost_told(cost)


@pytest.mark.slow
def test_every_training_step_of_the_paper_says_what_it_takes() -> None:
    """Of all tables: parameters, tokens, GPU-hours, which add up to the sum; nothing else is left out than is said."""
    for table in TABLES:
        plan = make_plan(table, "paper")
        costs = {step.name: step_cost(step) for step in plan.steps}
        free = {name for name, cost in costs.items() if cost is None}
        commands = {step.name: step.argv[:2] for step in plan.steps}
        for name in free:
            known = commands[name] in (["evaluate", "lm-eval"], ["genomics", "predict"])
            assert known or commands[name][0] == "prepare", name
        counted = [cost for cost in costs.values() if cost is not None]
        assert all(cost.hours > 0 for cost in counted)
        assert all(cost.measured or (min(cost.parameters) > 0 and cost.trained > 0) for cost in counted)
        lines = plan_lines(plan)
        hours = sum(cost.hours for cost in counted)
        total = f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
        assert any(f"{total} GPU-hours in all" in line for line in lines)
        assert sum(line.startswith("not counted") for line in lines) == bool(free)
        assert not any("not estimated" in line for line in lines)


@pytest.mark.parametrize("scale", ["tiny", "small"])
@pytest.mark.parametrize("table", ["table1", "table2", "table5", "figure6", "figure7"])
def test_all_models_of_a_step_can_be_of_one_size(table: str, scale: str) -> None:
    """Whatever the first of them is, the others can have as many parameters: within 1 %."""
    for step in make_plan(table, scale).steps:
        cost = step_cost(step)
        assert cost is not None
        assert len(cost.parameters) == len(step.settings.models)
        assert max(cost.parameters) / min(cost.parameters) < 1.01


def test_stories_count_what_is_tested_too() -> None:
    step = steps_of("figure6")["qa2"]
    s = step.settings
    assert s.train.model.conv_size == 8, "a place is named up to five tokens behind its person"
    assert s.task == replace(BabiLongSettings(), story="qa2", books=s.task.books, tokenizer="words")
    short = replace(s, sizes=("512", "1K"), test_sizes=("2K", "10M"), examples=3)
    cost = step_cost(replace(step, settings=short))
    vocab = s.task.vocab_size
    model = replace(s.train.model, architecture="mac")
    per_token = {length: sum(model_flops(model, vocab, length).values()) for length in (768, 2048, 10 * 2**20)}
    trained = 20_000 * 32 * 768
    flops = 3 * trained * per_token[768] + 3 * sum(n * per_token[n] for n in (2048, 10 * 2**20))
    assert cost is not None
    assert (cost.trained, cost.tested) == (trained, 3 * (2048 + 10 * 2**20))
    assert cost.hours == pytest.approx(flops / FLOPS / 3600)
    assert "to train on and 31,463,424 to test on" in cost_told(cost)


def test_a_comparison_counts_trials_and_seeds_and_sizes_all_alike() -> None:
    (step,) = make_plan("table1", "tiny", effort=micro()).steps
    settings = replace(step.settings, models=("lmm", "llama"), rates=(1e-3, 1e-2), tune_steps=5, seeds=(0, 1, 2))
    cost = step_cost(replace(step, settings=settings))
    assert cost is not None
    ours, other = cost.parameters
    assert abs(other / ours - 1) < 0.05
    trained, tested = (2 * 5 + 3 * 2) * 2 * 32, 3 * 200
    assert (cost.trained, cost.tested) == (trained, tested)
    model = replace(settings.train.model, architecture="lmm")
    per_token = [sum(model_flops(model, 259, length).values()) for length in (32, 64)]
    flops = 3 * trained * per_token[0] + tested * per_token[1] + 2 * other * (3 * trained + tested)
    assert cost.hours == pytest.approx(flops / FLOPS / 3600)
    assert "for each model" in cost_told(cost)
    assert cost.basis == "baselines by 6 FLOPs for each parameter and token"


def test_what_is_timed_takes_no_longer_than_its_limits() -> None:
    """Every measurement is a process that is stopped after so many seconds."""
    for step in steps_of("figure8").values():
        cost = step_cost(step)
        assert cost is not None
        assert cost.measured == len(op_cases(step.settings, "cuda")) > 4
        assert cost.hours == pytest.approx(cost.measured * 600 / 3600)
    model, scaling = steps_of("figure9").values()
    assert measurements(model.settings) == len(model_cases(model.settings)) == 3 * 7
    assert measurements(scaling.settings) == 5 + 2, "every length, and two forms beside"
    short = step_cost(replace(model, settings=replace(model.settings, timeout=60.0)))
    assert short is not None
    assert short.hours == pytest.approx(21 / 60)
    streaming = ScalingSettings(lengths=(2048,), rounds=2)
    assert measurements(streaming) == 3 + 2 * len(stream_cases(streaming))
    lines = plan_lines(make_plan("figure9", "paper"))
    assert any(line.startswith("at most 4.67 GPU-hours in all: an upper bound") for line in lines)
    with pytest.raises(TypeError, match="no measurements of"):
        measurements(KernelsSettings())


def test_forecasters_are_counted_by_patch() -> None:
    step = steps_of("table3")["ETTh1"]
    only = replace(step.settings, models=("dlinear", "repeat"), horizons=(96,), rates=(1e-3,), seeds=(0, 1))
    cost = step_cost(replace(step, settings=only))
    assert cost is not None
    patches = (96 - 16) // 8 + 1
    trained, read = 7 * 2 * 10 * 8449, 7 * (2 * 10 * 2785 + 2 * 2785)
    size = 2 * (96 * 96 + 96)
    assert cost.parameters == (size, size)
    assert (cost.trained, cost.tested) == (patches * trained, patches * read)
    assert cost.hours == pytest.approx(2 * size * patches * (3 * trained + read) / FLOPS / 3600)


def test_classifiers_of_dna_are_counted_by_nucleotide() -> None:
    steps = steps_of("table4")
    lmm, cnn = steps["human-reg-lmm"], steps["human-reg-cnn"]
    found, other = step_cost(lmm), step_cost(cnn)
    assert found is not None
    assert other is not None
    trained = lmm.settings.steps * 128 * 802
    assert found.trained == other.trained == trained
    per_nucleotide = sum(model_flops(lmm.settings.model, 0, 802).values())
    assert found.hours == pytest.approx(3 * trained * per_nucleotide / FLOPS / 3600)
    size = sum(parameter.numel() for parameter in ConvolutionalClassifier(cnn.settings, 3).parameters())
    assert other.parameters == (size,)
    assert other.hours == pytest.approx(6 * size * trained / FLOPS / 3600)
    assert step_cost(steps["human-reg-lmm-test"]) is None


def test_cross_validation_counts_folds_and_trials(tmp_path: Path) -> None:
    (step, *_) = make_plan("table4", "small", data=named_sets(tmp_path, "table4")).steps
    s = step.settings
    cost = step_cost(step)
    assert cost is not None
    assert cost.trained == s.folds * (2 * 500 + 3 * 5000) * 64 * 500
    assert len(cost.parameters) == 4, "what is counted or measured by length takes no steps"
    assert "embeddings left out" in cost.basis


def test_sets_are_known_by_the_names_of_paths_that_are_not_there() -> None:
    assert set_of(Path("data/dna/human_ocr_ensembl/train"), DNA).column == "Human OCR"
    assert set_of(Path("electricity/weather.csv"), SERIES).column == "Weather"
