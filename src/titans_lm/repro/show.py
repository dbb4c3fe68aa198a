"""Plans as lines to read, with parameters and tokens, and what came out of them: our numbers over the paper's."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from titans_lm.config import BackboneConfig
from titans_lm.data.prepared import TokenFolder, is_token_folder
from titans_lm.data.tasks.task import TaskPlan
from titans_lm.data.text import STDLIB
from titans_lm.data.tokenizer import VOCAB_SIZE
from titans_lm.experiments.models import model_settings
from titans_lm.experiments.settings import TRIAL_SEED, CompareSettings
from titans_lm.experiments.tasks import task_batches
from titans_lm.forecast.settings import EvaluateForecasters
from titans_lm.genomics import settings as dna
from titans_lm.report.paper import FORMAT, NOT_MEASURED, number, table
from titans_lm.report.table import aligned, screen
from titans_lm.repro.plans import SOURCE, Plan, Published, Step, published, read_toml
from titans_lm.repro.run import Result, command_of
from titans_lm.train.baselines import fit_baseline, make_baseline
from titans_lm.train.fresh import count_parameters, match_parameters, size_of, without_weights
from titans_lm.train.settings import LanguageSettings


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step trains."""

    parameters: tuple[int, ...]
    """Parameters of each of its models."""
    trained: int = 0
    """Tokens that each model is trained on, over all seeds and trials; 0 is not counted."""
    tested: int = 0
    """Tokens that each model is tested on, where that is counted."""
    unit: str = "tokens"


@cache
def work_of(step: Step) -> Work | None:
    """Count models and tokens of a step; None for what trains none, and for benchmarks."""
    match step.settings:
        case LanguageSettings() as s:
            size = sized(s.model, s.baseline, s.parameters, VOCAB_SIZE if s.vocab_size is None else s.vocab_size)
            return Work(parameters=(size,), trained=s.steps * s.batch_size * s.seq_len * s.accumulate)
        case CompareSettings() | TaskPlan() as s:
            return _compared(s)
        case EvaluateForecasters() as s:
            return _forecasters(replace(s, out=s.out.parent))
        case dna.TrainSettings() | dna.EvaluateSettings() as s:
            return _classifiers(s)
    return None


@cache
def sized(model: BackboneConfig, baseline: str | None, parameters: int | None, vocab_size: int) -> int:
    """Count the parameters of a model that is trained; a baseline is as large as ours, or as `parameters` says."""
    if baseline is None and parameters is not None:
        model = match_parameters(model, vocab_size, parameters)
    if baseline is None:
        return count_parameters(model, vocab_size)
    size = count_parameters(model, vocab_size) if parameters is None else parameters
    with without_weights():
        return size_of(make_baseline(fit_baseline(baseline, model, vocab_size, size)))


def _compared(s: Any) -> Work:
    """Count a comparison or a task: all models are as large as the first, and read as much."""
    runs = [(seed, s.train.steps) for seed in s.seeds]
    runs += [(TRIAL_SEED, s.tune_steps)] * len(s.rates) if len(s.rates) > 1 else []
    if isinstance(s, CompareSettings):
        vocab = _vocabulary(s.data)
        tested = s.test_bytes if vocab == VOCAB_SIZE else 0  # of how many tokens other ids make a text is not known
        trained = sum(steps for _, steps in runs) * s.train.accumulate * s.train.batch_size * s.train.seq_len
    else:
        tested, vocab = s.examples * sum(task.length for task in s.eval_tasks.values()), s.train_tasks[0].vocab_size
        fits = [replace(s.train, seed=seed, steps=steps) for seed, steps in runs]
        trained = sum(task_batches(s, fit).tokens(fit.steps * fit.accumulate) for fit in fits)
    sizes: list[int] = []
    for name in s.models:
        asked = sizes[0] if sizes and s.train.parameters is None else s.train.parameters
        fit = model_settings(s.train, name, asked)
        sizes.append(sized(fit.model, fit.baseline, asked, vocab))
    return Work(parameters=tuple(sizes), trained=trained, tested=len(s.seeds) * tested)


def _vocabulary(data: str | None) -> int:
    if data not in (None, STDLIB) and is_token_folder(data):
        return TokenFolder(data, verify=False).vocab_size
    return VOCAB_SIZE


def _forecasters(s: EvaluateForecasters) -> Work:
    """Count the parameters of forecasters at all horizons, which channels share; their windows are the table's."""
    from titans_lm.forecast.baselines import model_spec

    trained = [one for one in (model_spec(name, s) for name in s.models) if one.trained]
    return Work(parameters=tuple(_forecaster(m.base, m.net, s.lookback, h) for h in s.horizons for m in trained))


@cache
def _forecaster(name: str, net: Any, lookback: int, horizon: int) -> int:
    """Count the parameters of one forecaster: all data sets of a table have the same."""
    from titans_lm.forecast.baselines import make_model
    from titans_lm.forecast.model import Shape

    with without_weights():
        return size_of(make_model(name, net, Shape(lookback, horizon, 1), None))


def _classifiers(s: dna.TrainSettings | dna.EvaluateSettings) -> Work:
    """Count classifiers of DNA that learn by steps, and the nucleotides of sequences as long as they are read."""
    from titans_lm.genomics.evaluate import is_network, model_settings
    from titans_lm.genomics.model import make_network

    path = Path(str(s.data))
    name = (path.parent if path.name == "train" else path).name.partition(".")[0].lower()
    one = next(one for one in read_toml("table4")["sets"] if name == one["file"])
    if isinstance(s, dna.EvaluateSettings):
        fits = [model_settings(s.train, name) for name in s.models if is_network(name)]
        steps = s.folds * ((len(s.rates) * s.tune_steps if len(s.rates) > 1 else 0) + s.train.steps * len(s.seeds))
    else:
        fits, steps = [s], s.steps
    length = min(fits[0].max_length or one["longest"], one["longest"])
    with without_weights():
        sizes = tuple(size_of(make_network(fit, one.get("classes", 2))) for fit in fits)
    return Work(parameters=sizes, trained=steps * fits[0].batch_size * length, unit="nucleotides")


def work_told(work: Work) -> str:
    """Say what a step trains in a line."""
    least, most = min(work.parameters), max(work.parameters)
    sizes = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    tested = f" to train on and {work.tested:,} to test on" if work.tested else ""
    each = " for each model" if len(work.parameters) > 1 else ""
    tokens = f"; {work.trained:,} {work.unit}{tested}{each}" if work.trained else ""
    return f"{sizes} parameters{tokens}"


def plain_plan(plan: Plan) -> Result:
    """Give a plan as JSON holds it: commands with parameters and tokens, and how the setting differs."""
    steps = []
    for step in plan.steps:
        work = work_of(step)
        told = {} if work is None else {
            "parameters": work.parameters, "unit": work.unit, "trained_on": work.trained, "tested_on": work.tested,
        }  # fmt: skip
        steps.append({"name": step.name, "measures": step.what, "command": command_of(step), **told})
    return {
        "format": FORMAT, "what": "repro plan", "table": plan.table, "scale": plan.scale, "source": SOURCE,
        "title": published()[plan.table].title, "differs": plan.differs, "steps": steps,
    }  # fmt: skip


def plan_lines(plan: Plan) -> list[str]:
    """Show what a plan runs, and how large it is."""
    paper = published()[plan.table]
    lines = [heading(paper, plan.scale), ""]
    if not plan.runs:
        lines += ["These commands are printed and not run. Paths and numbers of GPUs are yours to change.", ""]
    for step in plan.steps:
        work = work_of(step)
        lines += [f"{step.name}: {step.what}", f"  {command_of(step)}"] + (
            [] if work is None else [f"  {work_told(work)}"]
        )
    if plan.runs:
        lines += ["", f"numbers go to {plan.out}"]
    lines += ["", *differences(plan.differs, paper.notes, paper.errata)]
    return lines if plan.runs else [*lines, "", *printed(paper)]


def heading(paper: Published, scale: str) -> str:
    return f"{paper.title}: {paper.where} of {SOURCE}, scale {scale}"


def printed(paper: Published) -> list[str]:
    """Show all that the paper prints; ours is not measured at this scale."""
    if not paper.groups:
        return [f"{paper.where} prints no numbers; ours: {NOT_MEASURED}"]
    lines = []
    for group in paper.groups.values():
        body = [
            [name, "paper", *(number(value, paper.digits) for value in row.values())]
            for name, row in group["rows"].items()
        ]
        lines += [f"{group['title']}; ours: {NOT_MEASURED}", *aligned(["model", "", *paper.columns], body, left=2), ""]
    return lines[:-1]


def result_lines(result: Result) -> list[str]:
    """Show our numbers, the paper's below each, and how the setting differs."""
    paper = published()[result["table"]]
    lines = [heading(paper, result["scale"])]
    sizes = {step["name"]: step["parameters"] for step in result["steps"] if step["parameters"]}
    if sizes:
        lines.append("ours: " + "; ".join(f"{name}: {count:,} parameters each" for name, count in sizes.items()))
    if result["paper"]["group"]:
        lines.append(f"paper: {result['paper']['group']}")
    lines += ["", *screen([table(part, paper.digits) for part in result["tables"]], left=2)]
    if not paper.groups:
        lines += ["", f"paper: {paper.where} prints no numbers"]
    return [*lines, "", *differences(result["differs"], result["paper"]["notes"], result["paper"]["errata"])]


def differences(differs: tuple[str, ...], notes: tuple[str, ...], errata: tuple[str, ...]) -> list[str]:
    """List how the setting differs, and what is known of the paper's numbers."""
    parts = (("How the setting differs from the paper's:", differs), ("The paper:", notes), ("Errata:", errata))
    return [line for title, told in parts if told for line in (title, *(f"- {one}" for one in told))]
