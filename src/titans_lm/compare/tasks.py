"""Models of equal size on a synthetic task: what `titans evaluate mqar` and its sisters run."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from titans_lm.bench.hardware import hardware
from titans_lm.bench.run import FORMAT
from titans_lm.compare.jobs import Attempt, Result, Say, final_attempts, trial_attempts, tune, work
from titans_lm.compare.settings import contender
from titans_lm.compare.spent import KEPT, spent_on
from titans_lm.compare.task_settings import TaskFit, TaskSettings
from titans_lm.compare.trained import Start
from titans_lm.data.contents import contents_of
from titans_lm.data.tasks.babilong import BabiLongSettings
from titans_lm.data.tasks.batches import TaskBatches
from titans_lm.data.tasks.sizes import AT
from titans_lm.data.tasks.task import Task
from titans_lm.evaluate.accuracy import bytes_of_state, task_score
from titans_lm.report.spread import mean_with_spread
from titans_lm.train.files import write_json
from titans_lm.train.loop import fit
from titans_lm.train.losses import TaskLoss
from titans_lm.train.match import MATCHED_BY, count_parameters
from titans_lm.train.options import plain_settings
from titans_lm.train.progress import ProgressReport, TokenReport
from titans_lm.train.run import RunFolder, begun_with
from titans_lm.train.sized import Sized, sized_for
from titans_lm.train.trainer import FitResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FILE = "results.json"
RIGHT = "right"
"""Shares of answers and of single targets that were right, means over sizes; the second decides where the first tie."""
TOKENS_AT_ONCE = 1 << 24
"""Tokens of a batch that is tested: what is drawn is in memory as a whole."""
FRESH = 1_000_003
"""What is added to the seed of a run for the rows of the first size that it is tested on, of the second twice: needles
at two depths, say, are not the same needles."""


def run_task(settings: TaskSettings, command: str, say: Say) -> dict[str, Any]:
    """Train and test all models on a task and write OUT/results.json; stopped, the same call goes on.

    All have as many parameters as the first (or as `train.parameters`), read the same rows, and are tried with the same
    learning rates for as many steps (where there are several rates). Trained models keep their size, and without steps
    are tested as they are. `command` is what the file says it came from.
    Raises ValueError for a model that will not do, before anything is trained.
    """
    longest = try_rows(settings)
    settings.out.mkdir(parents=True, exist_ok=True)
    parameters = _size(settings, longest, say)
    tuning, rates = tune(settings, trials(settings, parameters), say, RIGHT, most=True)
    ran = work(finals(settings, parameters, rates), settings.jobs, say)
    contenders = [_contender(name, rates[name], tuning.get(name, []), ran) for name in settings.models]
    result = {
        "format": FORMAT,
        "what": "task",
        "task": type(settings.task).__name__.removesuffix("Settings"),
        "command": command,
        "hardware": hardware(),
        **spent_on(part for one in contenders for part in [*one["tuning"], *one["runs"]]),
        "settings": plain_settings(settings),
        **guessing(settings.tested),
        "parameters_asked_for": parameters,
        "contenders": contenders,
    }
    write_json(settings.out / FILE, result)
    return result


def try_rows(settings: TaskSettings) -> int:
    """Draw some rows of every size, of long ones few, and give the tokens of the longest.

    A task that cannot be drawn is told before training.
    """
    longest = 0
    for task in [*(settings.taught if settings.train.steps else []), *settings.tested.values()]:
        rows = max(1, min(64, TOKENS_AT_ONCE // max(1, task.length)))
        longest = max(longest, task.draw(np.random.default_rng(0), rows)["input_ids"].shape[1])
    return longest


@dataclass(frozen=True)
class TaskJob:
    """A model to train on tasks, and those to test it on; one that is trained already begins from its weights."""

    name: str
    settings: TaskFit
    folder: Path
    counts: bool
    taught: tuple[Task, ...]
    tested: dict[str, Task]
    examples: int
    curriculum: bool = False
    test_tokens: int = 0
    shares: tuple[float, ...] = ()
    start: Start | None = None
    shown: bool = False
    """Whether its progress is shown."""

    @property
    def join_every(self) -> int:
        """Steps after which a size joins; 0 where all are there from the first on."""
        return max(1, self.settings.steps // (2 * len(self.taught))) if self.curriculum else 0

    @property
    def rate(self) -> float:
        return self.settings.lr

    def asked(self) -> Result:
        """Tell what the result depends on: all but where it is kept."""
        began = {} if self.start is None else {"start": plain_settings(self.start)}
        return {
            **began,
            "name": self.name,
            "settings": plain_settings(self.settings),
            "taught": [str(task) for task in self.taught],
            "tested": {size: str(task) for size, task in self.tested.items()},
            "vocab_size": self.taught[0].vocab_size,
            "contents": contents_of([*self.taught, *self.tested.values()]),
            "examples": self.examples,
            "curriculum": self.curriculum,
            "test_tokens": self.test_tokens,
            "shares": list(self.shares),
            **({} if self.settings.parameters is None else {"matched_by": MATCHED_BY}),
        }

    def begun(self) -> Result | None:
        """Tell what a run that is not done was begun with."""
        return begun_with(self.folder)

    def train(self) -> Result:
        """Train it, from where it stopped if it did, and test it."""
        torch.manual_seed(self.settings.seed)
        sized = self._begin()
        ended = self._learn(sized.model)
        found = self._test(sized.model, self.examples, quiet=not self.shown)
        longest = max(1, *(task.length for task in self.tested.values()))
        return {
            **found,
            RIGHT: [mean(test[kind] for test in found["tests"].values()) for kind in ("exact", "accuracy")],
            "parameters": sized.parameters,
            "shape": asdict(sized.shape),
            "steps": ended.step,
            "tokens": ended.tokens,
            "seconds": ended.seconds,
            "skipped_steps": ended.skipped,
            "state_bytes": {"length": longest, **asdict(bytes_of_state(sized.model, longest))},
        }

    def _begin(self) -> Sized:
        """Make the model with fresh weights, or load the one that is trained: to be trained further in float32."""
        if self.start is None:
            return sized_for(self.settings, self.taught[0].vocab_size)
        model = self.start.model(self.settings.device)
        return Sized.given(model.float() if self.settings.steps else model)

    def _learn(self, model: "PreTrainedModel") -> FitResult:
        """Train a model in the folder of the run, from where that stopped; without steps it stays as it is."""
        own = None if self.start is None else self.start.tokenizer()
        begun = self.begun() is not None
        run = RunFolder.open(self.folder, own) if begun else RunFolder.create(self.folder, self.asked(), own)
        if not self.settings.steps:
            return FitResult(step=0, tokens=0, skipped=0, seconds=0.0)
        batches = TaskBatches(
            self.taught, batch_size=self.settings.batch_size, seed=self.settings.seed, join_every=self.join_every,
            batch_tokens=self.settings.batch_tokens, weights=self.shares or None,
        )  # fmt: skip
        while_training = (lambda model: self._test(model, 128, quiet=True)) if self.settings.eval_every else None
        loss = TaskLoss(self.settings.text_weight, self.settings.gate_price)
        progress = ProgressReport(quiet=not self.shown, title=self.folder.name)
        return fit(model, batches, loss, self.settings, run=run, eval_fn=while_training, progress=progress)

    def _test(self, model: "PreTrainedModel", examples: int, *, quiet: bool) -> Result:
        tests = {}
        for place, (size, task) in enumerate(self.tested.items(), 1):
            length = max(1, task.length)
            asked = min(examples, max(1, self.test_tokens // length)) if self.test_tokens else examples
            batches = -(-asked // max(1, min(self.settings.batch_size, TOKENS_AT_ONCE // length)))
            rows = -(-asked // batches)
            seed = self.settings.seed + place * FRESH
            count = batches * rows  # as many as asked for, or a few more so that all batches are alike
            title = f"{self.folder.name}, test {size}".rstrip()
            with TokenReport(quiet=quiet, title=title).start(count * task.length or None) as report:
                score = task_score(model, task, examples=asked, batch_size=rows, seed=seed, on_piece=report.read)
            tests[size] = {**asdict(score), "accuracy": score.accuracy, "exact": score.exact, "rows": count}
            tests[size] |= facts_told(task, batches, rows, seed)
        return {"tests": tests}

    def told(self, result: Result) -> str:
        """Phrase what came out."""
        tests = ", ".join(f"{size} {100 * test['exact']:.1f} %" for size, test in result["tests"].items())
        return f"{tests}; {result['parameters']:,} parameters, {result['seconds'] / 60:.1f} minutes"


def guessing(tested: dict[str, Task]) -> Result:
    """Tell what guessing gives of every size: of whole answers, and of single targets where that is another share."""
    single = {size: getattr(task, "token_chance", None) for size, task in tested.items()}
    told = {"token_chance": single} if None not in single.values() else {}
    return {"chance": {size: task.chance for size, task in tested.items()}, **told}


def facts_told(task: Task, batches: int, rows: int, seed: int) -> Result:
    """Tell how many facts the stories of a test had on average, as short rows have room for short stories alone."""
    if not isinstance(task, BabiLongSettings):
        return {}
    counts = [task.counted(np.random.default_rng([seed, batch]), rows) for batch in range(batches)]
    return {"facts": mean(count for one in counts for count in one)}


def trials(settings: TaskSettings, parameters: int | None) -> list[TaskJob]:
    """List the runs that choose learning rates, by the sizes that are taught."""
    return _jobs(settings, parameters, trial_attempts(settings))


def finals(settings: TaskSettings, parameters: int | None, rates: dict[str, float]) -> list[TaskJob]:
    """List the runs that count."""
    return _jobs(settings, parameters, final_attempts(settings, rates))


def _jobs(settings: TaskSettings, parameters: int | None, attempts: list[Attempt]) -> list[TaskJob]:
    starts = {name: Start.of(name) for name in {attempt.name for attempt in attempts}}
    return [_job(settings, parameters, attempt, starts[attempt.name]) for attempt in attempts]


def _job(settings: TaskSettings, parameters: int | None, attempt: Attempt, start: Start | None) -> TaskJob:
    if start is None:
        base = attempt.applied(contender(settings.train, attempt.name, parameters))
    else:
        base = attempt.applied(replace(settings.train, parameters=None, baseline=None))
    counts = attempt.steps is None
    return TaskJob(
        attempt.name, base, attempt.folder, counts, tuple(settings.taught),
        settings.tested if counts else settings.tried, settings.examples, settings.curriculum,
        settings.test_tokens, settings.shares, start, settings.jobs == 1 and not settings.quiet,
    )  # fmt: skip


def _size(settings: TaskSettings, longest: int, say: Say) -> int | None:
    """Find how many parameters all shall have, and that every contender can have as many.

    Trained ones have as many as they have, and must know the task's ids and rows of `longest` tokens; None where all
    are trained.
    """
    task, parameters = settings.taught[0], settings.train.parameters
    vocab, kept = task.vocab_size, {}
    for name in settings.models:
        if (start := Start.of(name)) is not None:
            kept[name] = start.check(task, longest)
            say(f"{name}: {kept[name]:,} parameters, trained already ({start.kind})")
    if len(kept) == len(settings.models):
        return None
    if parameters is None:
        parameters = kept.get(settings.models[0])
    if parameters is None:
        parameters = count_parameters(contender(settings.train, settings.models[0], None).model, vocab)
    for name in settings.models:
        if name in kept:
            continue
        say(f"{name}: {sized_for(contender(settings.train, name, parameters), vocab).describe()}")
    return parameters


def _contender(name: str, rate: float, tuning: list[Result], ran: list[Result]) -> Result:
    kept = ("parameters", "steps", "tokens", "seconds", "skipped_steps", "tests", RIGHT, *KEPT)
    mine = [result for result in ran if result["name"] == name]
    runs = [
        {"seed": result["asked"]["settings"]["seed"], **{key: result[key] for key in kept if key in result}}
        for result in mine
    ]
    found = {test: [run["tests"][test]["exact"] for run in runs] for test in runs[0]["tests"]}
    sizes: dict[str, list[list[float]]] = {}
    for test, values in found.items():
        sizes.setdefault(test.split(AT)[0], []).append(values)
    return {
        "name": name,
        **{key: value for key, value in mine[0]["asked"].items() if key == "start"},
        "parameters": runs[0]["parameters"],
        **{key: value for key, value in mine[0].items() if key == "shape"},  # runs of before tell none
        "state_bytes": mine[0]["state_bytes"],
        "rate": rate if runs[0]["steps"] else None,
        "tuning": tuning,
        "runs": runs,
        # Depths have equally many rows; the spread is that of seeds, each with its mean over depths.
        "exact": {size: mean_with_spread([mean(run) for run in zip(*of, strict=True)]) for size, of in sizes.items()},
        "by_test": {test: mean_with_spread(values) for test, values in found.items()},
    }
