"""`titans evaluate TASK`: models of equal size on a synthetic task, tested on fresh rows of every size."""

from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from titans_lm.data.contents import contents_of
from titans_lm.data.prepared import tokenizer_fingerprint
from titans_lm.data.tasks.batches import TaskBatches
from titans_lm.data.tasks.haystack import BYTES, WORDS, tokenizer_in
from titans_lm.data.tasks.task import AT, Task
from titans_lm.data.tasks.vocabulary import FULL_STOP, word_tokenizer
from titans_lm.data.tokenizer import is_byte_tokenizer
from titans_lm.evaluate.accuracy import bytes_of_state, task_score
from titans_lm.evaluate.stream import check_positions
from titans_lm.experiments.models import kind_of, model_settings, trained_model, weights_sum
from titans_lm.experiments.runner import CONTENTS, SPEC, Result, Run, Say, kept, run_experiment, runs_of, write_record
from titans_lm.experiments.settings import TaskFit
from titans_lm.report.table import mean_with_spread
from titans_lm.train.fresh import MATCHED_BY, size_of
from titans_lm.train.loop import fit
from titans_lm.train.losses import TaskLoss
from titans_lm.train.options import plain_settings
from titans_lm.train.progress import CountReport, Outlook, ProgressReport
from titans_lm.train.run import RunFolder, begun_with, load_model, resolve_model, tokenizer_beside
from titans_lm.train.sized import Sized, own_size, sized_for
from titans_lm.train.trainer import FitResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FILE = "results.json"
RIGHT = "right"
"""Shares of answers and of single targets that were right, means over sizes; the second decides where the first tie."""
KEPT = ("parameters", "steps", "tokens", "seconds", "skipped_steps", "tests", RIGHT)
TOKENS_AT_ONCE = 1 << 24
"""Tokens of a batch that is tested: what is drawn is in memory as a whole."""
FRESH = 1_000_003
"""What is added to the seed of a run for the rows of the first size that it is tested on, of the second twice: needles
at two depths, say, are not the same needles."""


@dataclass(frozen=True)
class TrainedModel:
    """A trained model that an experiment begins from."""

    name: str
    path: str
    """Run folder or saved model, as it was given."""
    kind: str
    """Architecture or rule of ours, or model type of Hugging Face."""
    weights: str
    """Sum of weights, config and tokenizer: what a path holds may change between two runs."""

    @classmethod
    def find(cls, name: str) -> "TrainedModel | None":
        """Find the model NAME=PATH; None for other names. ValueError where there is none at its path."""
        named = trained_model(name)
        if named is None:
            return None
        folder = resolve_model(named.path)
        return cls(named.name, str(named.path), kind_of(folder), weights_sum(folder))

    def check(self, task: Task, longest: int) -> int:
        """Check that the model has the ids of a task, in its own tokens, and positions for rows of `longest` tokens.

        Gives the number of its parameters. ValueError, saying what to do, and for weights that cannot be loaded.
        """
        model: Any = load_model(self.path, "cpu")
        ids = model.config.get_text_config().vocab_size
        if hasattr(task, "tokenizer"):
            self._check_tokens(ids, task)
        if ids < task.vocab_size:
            raise ValueError(
                f"got {self.name}={self.path}, a model of {ids:,} ids, and a task of {task.vocab_size:,}; expected a "
                "model with as many, or a task with fewer"
            )
        sizes = "--sizes and --test-sizes of {:,} tokens or fewer"
        check_positions(model, longest, sizes, f"{self.name}={self.path}, which has")
        return size_of(model)

    def _check_tokens(self, ids: int, task: Any) -> None:
        """Refuse a model of other tokens than those of a task; tokenizers are compared by what they do."""
        own, other, chosen = tokenizer_beside(self.path), task_tokenizer(task), task.tokenizer
        if own is not None and not (
            is_byte_tokenizer(own) if other is None else tokenizer_fingerprint(own) == tokenizer_fingerprint(other)
        ):
            folder = BYTES if is_byte_tokenizer(own) else resolve_model(self.path)
            raise ValueError(
                f"got task.tokenizer={chosen!r} for {self.name}={self.path}, which was trained with another one; "
                f"expected its own: pass --task.tokenizer {folder}"
            )
        if own is None and ids != task.vocab_size:
            raise ValueError(
                f"got task.tokenizer={chosen!r} of {task.vocab_size:,} ids for {self.name}={self.path}, a model of "
                f"{ids:,} without a tokenizer beside it; expected the one that it was trained with: pass "
                "--task.tokenizer, or save the model's tokenizer in its folder"
            )


def run_task(settings: Any, command: str, say: Say) -> Result:
    """Train and test all models on a task and write OUT/results.json; stopped, the same call goes on.

    `settings` are one of `TASK_EXPERIMENTS`. All have as many parameters as the first (or as `train.parameters`), read
    the same rows, and are tried with the same learning rates for as many steps (where there are several rates). Trained
    models keep their size, and without steps are tested as they are. `command` is what the file says it came from.
    Raises ValueError for a model that will not do, before anything is trained.
    """
    longest = try_rows(settings)
    size, starts = check_models(settings, longest, say)

    def job_of(run: Run) -> TaskJob:
        return task_job(settings, size, run, starts[run.name])

    rates, trials, results = run_experiment(settings, job_of, say, RIGHT, most=True)
    models = [_summary(name, rates[name], trials[name], results[name]) for name in settings.models]
    return write_record(
        settings.out / FILE, "task", command, settings, runs_of(models),
        task=type(settings.task).__name__.removesuffix("Settings"),
        chance={size: task.chance for size, task in settings.eval_tasks.items()}, parameters_asked_for=size,
        contenders=models,
    )  # fmt: skip


def try_rows(settings: Any) -> int:
    """Draw some rows of every size, of long ones few, and give the tokens of the longest.

    ValueError for a task that cannot be drawn, before anything is trained.
    """
    longest = 0
    for task in [*(settings.train_tasks if settings.train.steps else []), *settings.eval_tasks.values()]:
        rows = max(1, min(64, TOKENS_AT_ONCE // max(1, task.length)))
        longest = max(longest, task.draw(np.random.default_rng(0), rows)["input_ids"].shape[1])
    return longest


def check_models(settings: Any, longest: int, say: Say) -> tuple[int | None, dict[str, TrainedModel | None]]:
    """Find how many parameters all shall have, that every model can have as many, and those that are trained already.

    Trained ones have as many as they have, and must know the task's ids and rows of `longest` tokens; None where all
    are trained.
    """
    starts = {name: TrainedModel.find(name) for name in settings.models}
    task, parameters, sizes = settings.train_tasks[0], settings.train.parameters, {}
    for name, start in starts.items():
        if start is not None:
            sizes[name] = start.check(task, longest)
            say(f"{name}: {sizes[name]:,} parameters, trained already ({start.kind})")
    if len(sizes) == len(starts):
        return None, starts
    first = settings.models[0]
    if parameters is None:
        parameters = sizes.get(first)
    if parameters is None:
        parameters = own_size(model_settings(settings.train, first, None), task.vocab_size)
    for name in settings.models:
        if name not in sizes:
            sized = sized_for(model_settings(settings.train, name, parameters), task.vocab_size)
            say(f"{name}: {sized.describe()}")
    return parameters, starts


@dataclass(frozen=True)
class TaskJob(Run):
    """A model to train on tasks, and those to test it on; one that is trained already begins from its weights."""

    settings: TaskFit
    train_tasks: tuple[Task, ...]
    eval_tasks: dict[str, Task]
    examples: int
    curriculum: bool
    test_tokens: int
    shares: tuple[float, ...]
    start: TrainedModel | None
    shown: bool
    """Whether its progress is shown."""

    @property
    def work(self) -> int:
        return self.settings.steps

    def spec(self) -> Result:
        began = {} if self.start is None else {"start": plain_settings(self.start)}
        return {
            **began,
            "name": self.name,
            "settings": plain_settings(self.settings),
            "taught": [str(task) for task in self.train_tasks],
            "tested": {size: str(task) for size, task in self.eval_tasks.items()},
            "vocab_size": self.train_tasks[0].vocab_size,
            CONTENTS: contents_of([*self.train_tasks, *self.eval_tasks.values()]),
            "examples": self.examples,
            "curriculum": self.curriculum,
            "test_tokens": self.test_tokens,
            "shares": list(self.shares),
            **({} if self.settings.parameters is None else {"matched_by": MATCHED_BY}),
        }

    def train(self, outlook: Outlook | None = None) -> Result:
        torch.manual_seed(self.settings.seed)
        sized = self._begin()
        ended = self._learn(sized.model, outlook)
        found = self._test(sized.model, self.examples, quiet=not self.shown)
        longest = max(1, *(task.length for task in self.eval_tasks.values()))
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
            return sized_for(self.settings, self.train_tasks[0].vocab_size)
        model = load_model(self.start.path, self.settings.device)  # in the precision that it was saved in
        return Sized(model.float() if self.settings.steps else model)

    def _learn(self, model: "PreTrainedModel", outlook: Outlook | None) -> FitResult:
        """Train a model in the folder of the run, from where that stopped; without steps it stays as it is."""
        own = task_tokenizer(self.train_tasks[0]) if self.start is None else tokenizer_beside(self.start.path)
        if getattr(self.train_tasks[0], "tokenizer", None) == WORDS and model.generation_config is not None:
            model.generation_config.eos_token_id = FULL_STOP  # where it has answered
            model.generation_config.pad_token_id = None if own is None else own.pad_token_id
        begun = begun_with(self.folder)
        run = RunFolder.open(self.folder, own) if begun else RunFolder.create(self.folder, self.spec(), own)
        if not self.settings.steps:
            return FitResult(step=0, tokens=0, skipped=0, seconds=0.0)
        batches = task_batches(self, self.settings)
        while_training = (lambda model: self._test(model, 128, quiet=True)) if self.settings.eval_every else None
        loss = TaskLoss(self.settings.lm_loss_weight, self.settings.gate_l1)
        progress = ProgressReport(quiet=not self.shown, title=self.folder.name, outlook=outlook)
        return fit(model, batches, loss, self.settings, run=run, eval_fn=while_training, progress=progress)

    def _test(self, model: "PreTrainedModel", examples: int, *, quiet: bool) -> Result:
        tests = {}
        for place, (size, task) in enumerate(self.eval_tasks.items(), 1):
            length = max(1, task.length)
            asked = min(examples, max(1, self.test_tokens // length)) if self.test_tokens else examples
            batches = -(-asked // max(1, min(self.settings.batch_size, TOKENS_AT_ONCE // length)))
            rows = -(-asked // batches)
            seed = self.settings.seed + place * FRESH
            count = batches * rows  # as many as asked for, or a few more so that all batches are alike
            title = f"{self.folder.name}, test {size}".rstrip()
            with CountReport(quiet=quiet, title=title).start(count * task.length or None) as report:
                score = task_score(model, task, examples=asked, batch_size=rows, seed=seed, on_piece=report.read)
            tests[size] = {**asdict(score), "accuracy": score.accuracy, "exact": score.exact, "rows": count}
            if hasattr(task, "count_facts"):  # short rows have room for short stories alone
                counts = [task.count_facts(np.random.default_rng([seed, batch]), rows) for batch in range(batches)]
                tests[size]["facts"] = mean(count for one in counts for count in one)
        return {"tests": tests}

    def describe(self, result: Result) -> str:
        tests = ", ".join(f"{size} {100 * test['exact']:.1f} %" for size, test in result["tests"].items())
        return f"{tests}; {result['parameters']:,} parameters, {result['seconds'] / 60:.1f} minutes"


def task_batches(plan: Any, fit: TaskFit) -> TaskBatches:
    """What a model is trained on; of a curriculum, sizes join evenly over the first half of the batches."""
    tasks = plan.train_tasks
    join_every = max(1, fit.steps * fit.accumulate // (2 * len(tasks))) if plan.curriculum else 0
    return TaskBatches(
        tasks, batch_size=fit.batch_size, seed=fit.seed, join_every=join_every, batch_tokens=fit.batch_tokens,
        weights=plan.shares or None,
    )  # fmt: skip


def task_tokenizer(task: Any) -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer whose tokens a task is of; None where its ids are of its own, as are bytes without marks."""
    name = getattr(task, "tokenizer", BYTES)
    if name == WORDS:
        return word_tokenizer()
    return None if name == BYTES else tokenizer_in(name)


def task_job(settings: Any, parameters: int | None, run: Run, start: TrainedModel | None) -> TaskJob:
    """Make the job of a run; a trial is tested on the sizes that are trained on."""
    if start is None:
        base = model_settings(settings.train, run.name, parameters)
    else:
        base = replace(settings.train, parameters=None)
    return TaskJob(
        **vars(run), settings=run.fit(base), train_tasks=tuple(settings.train_tasks),
        eval_tasks=settings.eval_tasks if run.counts else settings.trial_tasks, examples=settings.examples,
        curriculum=settings.curriculum, test_tokens=settings.test_tokens, shares=settings.shares, start=start,
        shown=settings.jobs == 1 and not settings.quiet,
    )  # fmt: skip


def _summary(name: str, rate: float, trials: list[Result], results: list[Result]) -> Result:
    runs = [{"seed": result[SPEC]["settings"]["seed"], **kept(result, *KEPT)} for result in results]
    found = {test: [run["tests"][test]["exact"] for run in runs] for test in runs[0]["tests"]}
    sizes: dict[str, list[list[float]]] = {}
    for test, values in found.items():
        sizes.setdefault(test.split(AT)[0], []).append(values)
    first = results[0]
    return {
        "name": name,
        **{key: value for key, value in first[SPEC].items() if key == "start"},
        "parameters": first["parameters"],
        "shape": first["shape"],
        "state_bytes": first["state_bytes"],
        "rate": rate if first["steps"] else None,
        "tuning": trials,
        "runs": runs,
        # Depths have equally many rows; the spread is that of seeds, each with its mean over depths.
        "exact": {size: mean_with_spread([mean(run) for run in zip(*of, strict=True)]) for size, of in sizes.items()},
        "by_test": {test: mean_with_spread(values) for test, values in found.items()},
    }
