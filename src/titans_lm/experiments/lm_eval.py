"""`titans evaluate lm-eval`: lm-eval asks trained models its own tasks, or the questions of files."""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from titans_lm.experiments.models import named_models
from titans_lm.experiments.reading_settings import QuestionSettings
from titans_lm.experiments.runner import Clock, Say, write_record
from titans_lm.questions import TASKS, check_local_tasks, longest_input, starts_with_bos
from titans_lm.train.files import finite, write_atomically
from titans_lm.train.fresh import size_of
from titans_lm.train.run import load_model, load_tokenizer, resolve_model

Scores = dict[str, Any]
Sample = dict[str, Any]


@dataclass(frozen=True)
class Answerer:
    """A model that answers, and how it is told apart."""

    name: str
    path: Path
    model: Any
    tokenizer: Any

    def describe(self, settings: QuestionSettings) -> Scores:
        """Say what it is, and how it reads."""
        config = self.model.config
        bos = starts_with_bos(self.model, self.tokenizer, settings.bos)
        longest = longest_input(self.model, self.tokenizer)
        return {
            "name": self.name,
            "path": str(self.path),
            "model": type(self.model).__name__,
            "architecture": getattr(config, "architecture", None) or config.model_type,
            "parameters": size_of(self.model),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "bos": "tokenizer" if bos is None else bos,
            "max_length": longest if settings.max_length is None else settings.max_length,
        }


def run_questions(settings: QuestionSettings, command: str, say: Say) -> Scores:
    """Let models answer, one after another, and return their scores; `command` is what the result says it came from.

    Writes the files of `settings.json` and `settings.samples` at the end. Raises ValueError for a model or a task that
    is not there before anything is read.
    """
    clock = Clock()
    if not settings.models:
        raise ValueError("got no model; expected run folders or saved models: titans evaluate lm-eval MODEL")
    models = [(name, resolve_model(path)) for name, path in named_models(settings.models)]
    check_harness(settings)
    tasks = settings.tasks if settings.local is None else check_local_tasks(settings.tasks, settings.local)
    scorer = f"lm-eval {version('lm-eval')}"
    answered, samples = [], []
    for name, path in models:
        one = Answerer(name, path, load_model(path, settings.device), load_tokenizer(path))
        scores = {}
        for task, score, seen in score_by_harness(one, tasks, settings):
            scores[task] = score
            samples += [{"model": name, "task": task, **sample} for sample in seen]
            say(score_line(name, task, score))
        answered.append({**one.describe(settings), "tasks": scores})
    result = write_record(
        settings.json, "lm-eval", command, settings, [clock.read()], scorer=scorer, seed=settings.seed, models=answered
    )
    if settings.samples is not None:
        write_atomically(settings.samples, (f"{json.dumps(finite(one), default=str)}\n" for one in samples))
    return result


def score_by_harness(
    one: Answerer, tasks: Sequence[str], settings: QuestionSettings
) -> Iterator[tuple[str, Scores, list[Sample]]]:
    """Let lm-eval ask its tasks, or the files of a folder one by one, and return scores and samples of each."""
    from titans_lm.lm_eval import TitansLM, harness_scores, run_local, run_tasks

    with not_on_stdout(settings.quiet):
        model = TitansLM(
            one.model, one.tokenizer, batch_size=settings.batch_size, max_length=settings.max_length, bos=settings.bos
        )
    if settings.local is None:
        with not_on_stdout(settings.quiet):
            found = run_tasks(
                model, tasks, limit=settings.limit, num_fewshot=settings.num_fewshot,
                include_path=None if settings.include_path is None else str(settings.include_path),
                metadata={"tokenizer": str(one.path), **settings.task_metadata()}, seed=settings.seed,
            )  # fmt: skip
        for task, score in harness_scores(found).items():
            yield task, score, found.get("samples", {}).get(task, [])
        return
    for task in tasks:
        began, model.cut = time.perf_counter(), 0
        with not_on_stdout(settings.quiet):
            found = run_local(model, task, settings.local, settings.limit)
        more = {"note": TASKS[task].note, "cut": model.cut, "seconds": time.perf_counter() - began}
        samples = [
            {"item": one["doc_id"], "gold": one["doc"].get("gold", 0), "choices": [
                {"log_probability": total, "greedy": greedy} for [(total, greedy)] in one["resps"]
            ]} for one in found["samples"][task]
        ]  # fmt: skip
        yield task, {**harness_scores(found)[task], **more}, samples


@contextmanager
def not_on_stdout(quiet: bool) -> Iterator[None]:
    """Send what lm-eval prints to stderr, or nowhere: stdout is for results."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        place = nowhere if quiet else sys.stderr
        with redirect_stdout(place), redirect_stderr(place):
            yield


def check_harness(settings: QuestionSettings) -> None:
    """Check that there is an lm-eval to ask, and something to ask it; ValueError where there is not."""
    if not settings.tasks and settings.local is None:
        raise ValueError("got no --tasks; expected names of lm-eval's tasks, such as piqa, or --local with a folder")
    if find_spec("lm_eval") is None:
        raise ValueError("lm-eval, which asks and scores, is not installed: pip install 'titans-lm[eval]'")
    if settings.include_path is not None and not settings.include_path.is_dir():
        raise ValueError(f"got --include-path {settings.include_path}, which is no folder")


def score_line(name: str, task: str, score: Scores) -> str:
    """Phrase the scores of a task in a line."""
    parts = [
        f"{metric} {found['value']:.4f}" + ("" if found["stderr"] is None else f" ± {found['stderr']:.4f}")
        for metric, found in score["metrics"].items()
    ]
    items = "" if score["items"] is None else f" of {score['items']:,} items"
    guess = "" if score["chance"] is None else f"; guessing gives {score['chance']:.4f}"
    return f"{name} {task}: {', '.join(parts)}{items}{guess}"
