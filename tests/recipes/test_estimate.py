"""What `--dry-run` says adds up."""

import dataclasses
import json

import pytest

from model_cases import small_config
from recipes.recipe_cases import estimate_of, settings_of
from titans_lm.bench.flops import model_flops
from titans_lm.recipes.estimate import Step, estimate_lines, estimate_training, held_bytes, product_precision
from titans_lm.train.fresh import byte_model
from titans_lm.train.settings import LanguageSettings

SMALL = LanguageSettings(model=small_config("mag"), batch_size=3, seq_len=10, accumulate=2, steps=7)


def test_it_is_about_the_model_that_would_be_trained() -> None:
    found, model = estimate_training(SMALL), byte_model(SMALL.model)
    assert found["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert found["parameters"] == sum(found["parameters_by_part"].values())
    assert found["parameters_by_part"]["embed_tokens"] == 259 * 8
    assert found["vocab_size"] == 259
    wider = estimate_training(dataclasses.replace(SMALL, vocab_size=1000))
    assert wider["parameters"] - found["parameters"] == (1000 - 259) * 8
    assert json.loads(json.dumps(found)) == found


def test_memory_is_sixteen_bytes_a_parameter_and_what_a_step_holds() -> None:
    found = estimate_training(SMALL)
    n, memory = found["parameters"], found["memory_bytes"]
    assert (memory["weights"], memory["gradients"], memory["adamw"]) == (4 * n, 4 * n, 8 * n)
    held = held_bytes(Step(SMALL.model, 259, 3, 10, "bfloat16"))
    assert memory.items() >= held.items()
    assert memory["total"] == 16 * n + sum(held.values())


def test_hours_follow_from_work_and_speed() -> None:
    found = estimate_training(SMALL, peak_tflops=2.0, utilisation=0.25)
    work = found["flops_per_token"]
    assert work["forward_by_part"] == model_flops(SMALL.model, 259, 10)
    assert work["forward"] == sum(work["forward_by_part"].values())
    assert work["training"] == 3 * work["forward"]
    assert (found["tokens_per_step"], found["tokens"]) == (3 * 10 * 2, 7 * 3 * 10 * 2)
    assert found["gpu_hours"] == pytest.approx(420 * work["training"] / 0.5e12 / 3600)
    slower = estimate_training(SMALL, peak_tflops=1.0, utilisation=0.125)
    assert slower["gpu_hours"] == pytest.approx(4 * found["gpu_hours"])


@pytest.mark.parametrize(
    ("precision", "device", "expected"),
    [
        ("auto", "auto", "bfloat16"),
        ("auto", "cuda:1", "bfloat16"),
        ("auto", "cpu", "float32"),
        ("float32", "cuda", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
    ],
)
def test_the_precision_is_that_of_a_gpu_unless_it_is_named(precision: str, device: str, expected: str) -> None:
    settings = LanguageSettings(precision=precision, device=device)
    assert product_precision(settings) == expected
    assert estimate_training(settings)["batch"]["precision"] == expected


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"peak_tflops": 0.0}, "got peak_tflops=0.0; expected a finite number above 0"),
        ({"utilisation": 0.0}, "got utilisation=0.0; expected a finite number above 0"),
        ({"utilisation": 5.0}, "got utilisation=5.0; expected a number from 0.0 to 1.0"),
    ],
)
def test_assumptions_are_checked(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_training(SMALL, **wrong)


def test_what_is_read_says_what_was_counted_and_what_was_estimated() -> None:
    found, text = estimate_of("170m-mac"), "\n".join(estimate_lines(estimate_of("170m-mac")))
    settings = settings_of("170m-mac")
    assert f"mac: {found['parameters']:,} parameters, vocabulary of 32,000" in text
    assert f"{settings.batch_size} × 4,096 tokens, products in bfloat16" in text
    assert f"{found['memory_bytes']['total'] / 1e9:.3f} GB  estimate" in text
    assert f"{found['tokens']:,} tokens: 28,610 steps of 524,288" in text
    assert "989 TFLOP/s" in text
    assert "assumed, not measured" in text
    for name, size in found["memory_bytes"].items():
        [line] = [line for line in text.splitlines() if line.startswith(f"  {name.replace('_', ' ')} ")]
        assert f"{size / 1e9:.3f} GB" in line
    for name, count in found["parameters_by_part"].items():
        assert any(line.split() == [name, f"{count:,}"] for line in text.splitlines())


def test_it_is_about_as_many_parameters_as_are_asked_for() -> None:
    settings = LanguageSettings(parameters=2_000_000)
    assert abs(estimate_training(settings)["parameters"] / 2_000_000 - 1.0) < 0.001
    assert estimate_training(settings)["flops_per_token"] != estimate_training(LanguageSettings())["flops_per_token"]
    with pytest.raises(ValueError, match="baseline='llama' with an estimate"):
        estimate_training(LanguageSettings(baseline="llama"))
    with pytest.raises(ValueError, match="activation_checkpointing=True with an estimate"):
        estimate_training(LanguageSettings(activation_checkpointing=True))
