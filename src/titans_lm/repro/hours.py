"""What steps take on GPUs: models, tokens, and GPU-hours from matrix products, as `titans train --dry-run` has them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from titans_lm.bench.settings import BenchSettings, ModelSettings, OpsSettings, ScalingSettings
from titans_lm.compare.settings import CompareSettings, contender
from titans_lm.compare.task_settings import TaskSettings
from titans_lm.config import BackboneConfig
from titans_lm.data.text import STDLIB
from titans_lm.forecast.settings import EvaluateForecasters
from titans_lm.genomics import settings as dna
from titans_lm.repro.cost import classifier_steps, forecast_rows, mean_length, read_tokens
from titans_lm.repro.sets import DNA, SERIES, Classes, Series, set_of
from titans_lm.repro.steps import Step
from titans_lm.train.settings import LanguageSettings

if TYPE_CHECKING:
    from torch import nn

FLOPS = 989e12 * 0.05
"""FLOP/s that a GPU is taken to reach: what `titans train --dry-run` assumes."""
BYTES = 16
"""Bytes of a parameter in training: the weight, its gradient and two moments in float32."""
BY_PARAMETERS = "6 FLOPs for each parameter and {}"
"""The usual count of a model whose equations are not counted here: 2 forward, 4 backward; attention's own products,
which grow with the length of a row, are not in it."""
BY_WEIGHTS = f"other models than ours: {BY_PARAMETERS.format('nucleotide')}, embeddings left out"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a step takes."""

    hours: float
    """GPU-hours."""
    parameters: tuple[int, ...] = ()
    """Parameters of each of its models."""
    trained: float = 0
    """Tokens that each model is trained on, over all seeds and trials."""
    tested: float = 0
    """Tokens that each model reads without gradients, where that is counted."""
    unit: str = "tokens"
    note: str = ""
    """What else is known: steps, memory."""
    basis: str = ""
    """How it was counted, where it was not by the equations of our models."""
    measured: int = 0
    """Measurements of a benchmark, none of which may take longer than its limit: the hours are an upper bound."""


def step_cost(step: Step) -> Cost | None:
    """Estimate what a step takes on a GPU; None for preparing text, questions and predictions of a trained model."""
    s = step.settings
    match s:
        case LanguageSettings():
            return _trained(replace(s, run=None, data=None))  # the same for all runs, and reckoned once
        case CompareSettings() | TaskSettings():
            return _contest(s)
        case EvaluateForecasters():
            return _forecasts(s)
        case dna.TrainSettings() | dna.EvaluateSettings():
            return _classifiers(s)
        case BenchSettings():
            many = measurements(s)
            return Cost(hours=many * s.timeout / 3600, measured=many, note=f"each stopped after {s.timeout:g} seconds")
    return None


def _hours(flops: float) -> float:
    return flops / FLOPS / 3600


@cache
def _trained(s: LanguageSettings) -> Cost:
    """A run of `titans train`: ours by its equations, a baseline by its parameters."""
    from titans_lm.data.tokenizer import VOCAB_SIZE
    from titans_lm.recipes.estimate import estimate_training

    per_step = s.batch_size * s.seq_len * s.accumulate
    tokens = s.steps * per_step
    steps = f"{s.steps:,} steps of {per_step:,}"
    if s.baseline is None:
        found = estimate_training(s)
        memory = f"{found['memory_bytes']['total'] / 1e9:.0f} GB on one GPU"
        return Cost(
            hours=found["gpu_hours"], parameters=(found["parameters"],), trained=tokens, note=f"{steps}; {memory}"
        )
    _, size = sized(s.model, s.baseline, s.parameters, VOCAB_SIZE if s.vocab_size is None else s.vocab_size)
    memory = f"at least {BYTES * size / 1e9:.0f} GB on one GPU, activations not counted"
    return Cost(
        hours=_hours(6.0 * size * tokens), parameters=(size,), trained=tokens, note=f"{steps}; {memory}",
        basis=BY_PARAMETERS.format("token"),
    )  # fmt: skip


@cache
def sized(
    model: BackboneConfig, baseline: str | None, parameters: int | None, vocab_size: int
) -> tuple[BackboneConfig, int]:
    """Count the parameters of a model that is trained, and give our config with the sizes that it then has.

    A baseline is made as large as ours (or as `parameters` says), on the meta device.
    """
    import torch

    from titans_lm.train.baselines import fit_baseline, make_baseline
    from titans_lm.train.match import count_parameters, match_parameters

    if baseline is None:
        wide = model if parameters is None else match_parameters(model, vocab_size, parameters)
        return wide, count_parameters(wide, vocab_size)
    size = count_parameters(model, vocab_size) if parameters is None else parameters
    config = fit_baseline(baseline, model, vocab_size, size)
    with torch.device("meta"):
        return model, _count(make_baseline(config))


def _count(model: "nn.Module") -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@cache
def _contest(s: CompareSettings | TaskSettings) -> Cost:
    """A comparison or a task: all models are as large as the first, and read as much."""
    from titans_lm.bench.flops import model_flops

    vocab, lengths = _vocabulary(s), dict(_test_lengths(s))
    trained, tested = read_tokens(s)
    row = s.train.seq_len if isinstance(s, CompareSettings) else round(mean_length(s.taught))
    asked, sizes, flops, by_parameters = s.train.parameters, [], 0.0, False
    for name in s.models:
        fit = contender(s.train, name, asked)
        model, size = sized(fit.model, fit.baseline, asked, vocab)
        asked = size if asked is None else asked
        sizes.append(size)
        if fit.baseline is not None:
            by_parameters = True
            flops += 2.0 * size * (3 * trained + tested)
        else:
            flops += 3 * trained * sum(model_flops(model, vocab, row).values())
            flops += sum(many * sum(model_flops(model, vocab, length).values()) for length, many in lengths.items())
    return Cost(
        hours=_hours(flops), parameters=tuple(sizes), trained=trained, tested=tested,
        basis=f"baselines by {BY_PARAMETERS.format('token')}" if by_parameters else "",
    )  # fmt: skip


def _vocabulary(s: CompareSettings | TaskSettings) -> int:
    if isinstance(s, TaskSettings):
        return s.taught[0].vocab_size
    from titans_lm.data.prepared import TokenFolder, is_token_folder
    from titans_lm.data.tokenizer import VOCAB_SIZE

    if s.data not in (None, STDLIB) and is_token_folder(s.data):
        return TokenFolder(s.data, verify=False).vocab_size
    return VOCAB_SIZE


def _test_lengths(s: CompareSettings | TaskSettings) -> Iterator[tuple[int, int]]:
    """Give the lengths of rows that are tested, with the tokens of all rows of each, over all seeds."""
    if isinstance(s, CompareSettings):
        yield s.positions, len(s.seeds) * s.test_bytes
        return
    tokens: dict[int, int] = {}
    for task in s.tested.values():
        length = max(1, task.length)
        tokens[length] = tokens.get(length, 0) + len(s.seeds) * s.examples * task.length
    yield from tokens.items()


@cache
def _forecasts(s: EvaluateForecasters) -> Cost:
    """Forecasters on tables of the paper: by their parameters for each patch, and no run ends before its last epoch."""
    import torch

    from titans_lm.forecast.contenders import contender as forecaster
    from titans_lm.forecast.contenders import make_model
    from titans_lm.forecast.model import Shape

    patches = (s.lookback - s.net.patch_len) // s.net.stride + 1
    who = [one for one in (forecaster(name, s) for name in s.models) if one.trained]
    sizes: set[int] = set()
    flops = trained = tested = 0.0
    for path in s.data:
        table = set_of(path, SERIES)
        assert isinstance(table, Series)
        for horizon in s.horizons:
            rows = forecast_rows(s, table, horizon)
            trained, tested = trained + patches * rows[0], tested + patches * rows[1]
            for one in who:
                with torch.device("meta"):
                    size = _count(make_model(one.base, one.net, Shape(s.lookback, horizon, table.channels), None))
                sizes.add(size)
                flops += 2.0 * size * patches * (3 * rows[0] + rows[1])
    return Cost(
        hours=_hours(flops), parameters=(min(sizes), max(sizes)), trained=trained, tested=tested, unit="patches",
        note="no run ends before its last epoch", basis=BY_PARAMETERS.format("patch"),
    )  # fmt: skip


@cache
def _classifiers(s: dna.TrainSettings | dna.EvaluateSettings) -> Cost:
    """Classifiers of DNA that learn by steps: ours by their equations, others by their weights but the embeddings."""
    import torch
    from torch import nn

    from titans_lm.bench.flops import model_flops
    from titans_lm.genomics.contenders import contender as classifier
    from titans_lm.genomics.contenders import is_network
    from titans_lm.genomics.model import make_network

    assert s.data is not None
    one = set_of(s.data, DNA)
    assert isinstance(one, Classes)
    if isinstance(s, dna.EvaluateSettings):
        fits, steps = [classifier(s.train, name) for name in s.models if is_network(name)], classifier_steps(s)
    else:
        fits, steps = [s], s.steps
    length = min(fits[0].max_length or one.longest, one.longest)
    trained, sizes, flops = steps * fits[0].batch_size * length, [], 0.0
    for fit in fits:
        with torch.device("meta"):
            network = make_network(fit, one.classes)
        sizes.append(_count(network))
        embedded = sum(_count(part) for part in network.modules() if isinstance(part, nn.Embedding))
        ours = sum(model_flops(fit.model, 0, length).values()) if fit.baseline is None else 2.0 * (sizes[-1] - embedded)
        flops += 3.0 * trained * ours
    others = any(fit.baseline is not None for fit in fits)
    return Cost(
        hours=_hours(flops), parameters=tuple(sizes), trained=trained, unit="nucleotides",
        note=f"{length} of every sequence, though some are shorter", basis=BY_WEIGHTS if others else "",
    )  # fmt: skip


def measurements(s: BenchSettings) -> int:
    """Count the workers of a benchmark, each a process that is stopped when its time is over."""
    from titans_lm.bench import models, ops, scaling
    from titans_lm.bench.registry import allocators

    match s:
        case OpsSettings():
            return len(ops.op_cases(s, s.device))
        case ModelSettings():
            return len(models.model_cases(s))
        case ScalingSettings():
            return len(scaling.op_cases(s, allocators(s.device)[-1])) + s.rounds * len(scaling.stream_cases(s))
    raise TypeError(f"no measurements of {type(s).__name__}")
