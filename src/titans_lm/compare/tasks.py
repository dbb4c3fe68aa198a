"""Models of equal size on a synthetic task: what `titans evaluate mqar` and its sisters run."""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
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
from titans_lm.data.tasks.babilong import BabiLongSettings
from titans_lm.data.tasks.batches import TaskBatches
from titans_lm.data.tasks.sizes import AT
from titans_lm.data.tasks.task import Task
from titans_lm.data.text import read_documents
from titans_lm.evaluate.tasks import bytes_of_state, task_score
from titans_lm.report.spread import mean_with_spread
from titans_lm.train.files import write_json
from titans_lm.train.loop import fit
from titans_lm.train.losses import TaskLoss
from titans_lm.train.match import count_parameters, sized_for
from titans_lm.train.run import RunFolder, begun_with
from titans_lm.train.settings import plain_settings

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
    learning rates for as many steps (where there are several rates). `command` is what the file says it came from.
    Raises ValueError for a model that will not do, before anything is trained.
    """
    for task in [*settings.taught, *settings.tested.values()]:  # one that cannot be drawn is told before training
        task.draw(np.random.default_rng(0), 64)
    settings.out.mkdir(parents=True, exist_ok=True)
    parameters = _size(settings, say)
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


@dataclass(frozen=True)
class TaskJob:
    """A model to train on tasks, and those to test it on."""

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

    @property
    def join_every(self) -> int:
        """Steps after which a size joins; 0 where all are there from the first on."""
        return max(1, self.settings.steps // (2 * len(self.taught))) if self.curriculum else 0

    @property
    def rate(self) -> float:
        return self.settings.lr

    def asked(self) -> Result:
        """Tell what the result depends on: all but where it is kept."""
        return {
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
        }

    def begun(self) -> Result | None:
        """Tell what a run that is not done was begun with."""
        return begun_with(self.folder)

    def train(self) -> Result:
        """Train it, from where it stopped if it did, and test it."""
        run = RunFolder.open(self.folder) if self.begun() else RunFolder.create(self.folder, self.asked())
        torch.manual_seed(self.settings.seed)
        sized = sized_for(self.settings, self.taught[0].vocab_size)
        batches = TaskBatches(
            self.taught, batch_size=self.settings.batch_size, seed=self.settings.seed, join_every=self.join_every,
            batch_tokens=self.settings.batch_tokens, weights=self.shares or None,
        )  # fmt: skip
        while_training = (lambda model: self._test(model, 128)) if self.settings.eval_every else None
        loss = TaskLoss(self.settings.text_weight, self.settings.gate_price)
        ended = fit(sized.model, batches, loss, self.settings, run=run, eval_fn=while_training)
        found = self._test(sized.model, self.examples)
        longest = max(1, *(task.length for task in self.tested.values()))
        return {
            **found,
            RIGHT: [mean(test[kind] for test in found["tests"].values()) for kind in ("exact", "accuracy")],
            "parameters": sized.parameters,
            "steps": ended.step,
            "tokens": ended.tokens,
            "seconds": ended.seconds,
            "skipped_steps": ended.skipped,
            "state_bytes": {"length": longest, **asdict(bytes_of_state(sized.model, longest))},
        }

    def _test(self, model: "PreTrainedModel", examples: int) -> Result:
        tests = {}
        for place, (size, task) in enumerate(self.tested.items(), 1):
            length = max(1, task.length)
            asked = min(examples, max(1, self.test_tokens // length)) if self.test_tokens else examples
            batches = -(-asked // max(1, min(self.settings.batch_size, TOKENS_AT_ONCE // length)))
            rows = -(-asked // batches)
            seed = self.settings.seed + place * FRESH
            score = task_score(model, task, examples=asked, batch_size=rows, seed=seed)
            count = batches * rows  # as many as asked for, or a few more so that all batches are alike
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


def contents_of(tasks: Iterable[Task]) -> dict[str, str]:
    """Sum up the files that tasks draw from, by their paths: what a path holds may change between two runs."""
    paths = {path for task in tasks for name in ("books", "source") if (path := getattr(task, name, None)) is not None}
    found = {}
    for path in sorted(paths):
        digest = hashlib.blake2b(digest_size=8)
        for document in read_documents(path)[0]:
            digest.update(f"{document.name}\0{len(document.data)}\0".encode() + document.data)
        found[str(path)] = digest.hexdigest()
    return found


def trials(settings: TaskSettings, parameters: int) -> list[TaskJob]:
    """List the runs that choose learning rates, by the sizes that are taught."""
    return [_job(settings, parameters, attempt) for attempt in trial_attempts(settings)]


def finals(settings: TaskSettings, parameters: int, rates: dict[str, float]) -> list[TaskJob]:
    """List the runs that count."""
    return [_job(settings, parameters, attempt) for attempt in final_attempts(settings, rates)]


def _job(settings: TaskSettings, parameters: int, attempt: Attempt) -> TaskJob:
    base = attempt.applied(contender(settings.train, attempt.name, parameters))
    counts = attempt.steps is None
    return TaskJob(
        attempt.name, base, attempt.folder, counts, tuple(settings.taught),
        settings.tested if counts else settings.tried, settings.examples, settings.curriculum,
        settings.test_tokens, settings.shares,
    )  # fmt: skip


def _size(settings: TaskSettings, say: Say) -> int:
    """Find how many parameters all shall have, and that every contender can have as many."""
    vocab, parameters = settings.taught[0].vocab_size, settings.train.parameters
    if parameters is None:
        parameters = count_parameters(contender(settings.train, settings.models[0], None).model, vocab)
    for name in settings.models:
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
        "parameters": runs[0]["parameters"],
        "state_bytes": mine[0]["state_bytes"],
        "rate": rate,
        "tuning": tuning,
        "runs": runs,
        # Depths have equally many rows; the spread is that of seeds, each with its mean over depths.
        "exact": {size: mean_with_spread([mean(run) for run in zip(*of, strict=True)]) for size, of in sizes.items()},
        "by_test": {test: mean_with_spread(values) for test, values in found.items()},
    }
