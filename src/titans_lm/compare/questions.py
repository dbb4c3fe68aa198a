"""Models on lm-eval's tasks, or on files of questions scored the same way: what `titans evaluate lm-eval` runs."""

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

from rich.progress import MofNCompleteColumn

from titans_lm.bench.hardware import hardware
from titans_lm.bench.run import FORMAT
from titans_lm.compare.jobs import Say
from titans_lm.compare.question_settings import QuestionSettings
from titans_lm.questions import (
    Likelihood,
    Question,
    answer_questions,
    check_local_tasks,
    longest_input,
    read_questions,
    score_questions,
    starts_with_bos,
)
from titans_lm.train.files import finite, write_atomically, write_json
from titans_lm.train.options import plain_settings
from titans_lm.train.progress import Report
from titans_lm.train.run import load_model, load_tokenizer, resolve_model

Scores = dict[str, Any]
Sample = dict[str, Any]


@dataclass(frozen=True)
class Answering:
    """A model that answers, and how it is told apart."""

    name: str
    path: Path
    model: Any
    tokenizer: Any

    def describe(self, settings: QuestionSettings) -> dict[str, Any]:
        """Say what it is, and how it reads."""
        config = self.model.config
        longest = longest_input(self.model, self.tokenizer)
        bos = starts_with_bos(self.model, self.tokenizer, settings.bos)
        return {
            "name": self.name,
            "path": str(self.path),
            "model": type(self.model).__name__,
            "architecture": getattr(config, "architecture", None) or config.model_type,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "bos": "tokenizer" if bos is None else bos,
            "max_length": longest if settings.max_length is None else settings.max_length,
        }


def run_questions(settings: QuestionSettings, command: str, say: Say) -> dict[str, Any]:
    """Let models answer, one after another, and return their scores; `command` is what the result says it came from.

    Writes the files of `settings.json` and `settings.samples` at the end. Raises ValueError for a model or a task that
    is not there before anything is read.
    """
    started = time.perf_counter()
    if not settings.models:
        raise ValueError("got no model; expected run folders or saved models: titans evaluate lm-eval MODEL")
    names = short_names(settings.models)
    if settings.local is None:
        check_harness(settings)
        scorer, tasks = f"lm-eval {version('lm-eval')}", settings.tasks
    else:
        scorer, tasks = "titans-lm", check_local_tasks(settings.tasks, settings.local)
    paths = [resolve_model(folder) for folder in settings.models]
    answered, samples = [], []
    for name, path in zip(names, paths, strict=True):
        one = Answering(name, path, load_model(path, settings.device), load_tokenizer(path))
        given = asked_here(one, tasks, settings) if settings.local else asked_by_harness(one, settings)
        scores = {}
        for task, score, seen in given:
            scores[task] = score
            samples += seen
            say(told(name, task, score))
        answered.append({**one.describe(settings), "tasks": scores})
    result = {
        "format": FORMAT,
        "what": "lm-eval",
        "command": command,
        "scorer": scorer,
        "seed": settings.seed,
        "wall_seconds": time.perf_counter() - started,
        "hardware": hardware(),
        "settings": plain_settings(settings),
        "models": answered,
    }
    if settings.json is not None:
        write_json(settings.json, result)
    if settings.samples is not None:
        write_atomically(settings.samples, (f"{json.dumps(finite(one), default=str)}\n" for one in samples))
    return result


def asked_here(
    one: Answering, tasks: Sequence[str], settings: QuestionSettings
) -> Iterator[tuple[str, Scores, list[Sample]]]:
    """Score the files of a folder: for each task its scores, and a sample for every item."""
    assert settings.local is not None
    for task in tasks:
        questions, began = read_questions(task, settings.local, settings.limit), time.perf_counter()
        total = sum(len(question.pairs) for question in questions)
        title = f"{one.name} {task}"
        with Report(quiet=settings.quiet, title=title) as report:
            report.begin(MofNCompleteColumn(), total=total)
            found, cut = answer_questions(
                one.model,
                one.tokenizer,
                questions,
                batch_size=settings.batch_size,
                max_length=settings.max_length,
                bos=settings.bos,
                done=lambda n, report=report, title=title, total=total: report.show(
                    n, "", f"{title}: {n:,} of {total:,} choices"
                ),
            )
        score = {**score_questions(task, questions, found), "cut": cut, "seconds": time.perf_counter() - began}
        yield task, score, _samples(one.name, task, questions, found)


def _samples(name: str, task: str, questions: Sequence[Question], found: Sequence[Likelihood]) -> list[Sample]:
    rest = iter(found)
    return [
        {
            "model": name,
            "task": task,
            "item": number,
            "gold": question.gold,
            "choices": [next(rest)._asdict() for _ in question.pairs],
        }
        for number, question in enumerate(questions)
    ]


def asked_by_harness(one: Answering, settings: QuestionSettings) -> Iterator[tuple[str, Scores, list[Sample]]]:
    """Let lm-eval ask its tasks; its progress goes to stderr."""
    from titans_lm.lm_eval import TitansLM, harness_scores, run_tasks

    with _out_of_the_way(settings.quiet):
        model = TitansLM(
            one.model,
            one.tokenizer,
            batch_size=settings.batch_size,
            max_length=settings.max_length,
            bos=settings.bos,
        )
        found = run_tasks(
            model,
            settings.tasks,
            limit=settings.limit,
            num_fewshot=settings.num_fewshot,
            include_path=None if settings.include_path is None else str(settings.include_path),
            metadata={"tokenizer": str(one.path), **settings.told()},
            seed=settings.seed,
        )
    for task, score in harness_scores(found).items():
        seen = found.get("samples", {}).get(task, [])
        yield task, score, [{"model": one.name, "task": task, **sample} for sample in seen]


@contextmanager
def _out_of_the_way(quiet: bool) -> Iterator[None]:
    """Send what lm-eval prints to stderr, or nowhere: stdout is for results."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere if quiet else sys.stderr):
        if quiet:
            with redirect_stderr(nowhere):
                yield
        else:
            yield


def check_harness(settings: QuestionSettings) -> None:
    """Check that there is an lm-eval to ask, and something to ask it; ValueError where there is not."""
    if not settings.tasks:
        raise ValueError("got no --tasks; expected names of lm-eval's tasks, such as piqa, or --local with a folder")
    if find_spec("lm_eval") is None:
        raise ValueError(
            "got --tasks of lm-eval, which is not installed: pip install 'titans-lm[eval]'; --local needs it not"
        )
    if settings.include_path is not None and not settings.include_path.is_dir():
        raise ValueError(f"got --include-path {settings.include_path}, which is no folder")


def short_names(folders: Sequence[str]) -> list[str]:
    """Name models by the last part of their folders, in full where two have the same."""
    last = [Path(folder).resolve().name for folder in folders]
    if len(set(folders)) != len(folders):
        raise ValueError(f"got the models {', '.join(folders)}; expected each once")
    return last if len(set(last)) == len(last) else list(folders)


def told(name: str, task: str, score: Scores) -> str:
    """Phrase the scores of a task in a line."""
    parts = [
        f"{metric} {found['value']:.4f}" + ("" if found["stderr"] is None else f" ± {found['stderr']:.4f}")
        for metric, found in score["metrics"].items()
    ]
    items = "" if score["items"] is None else f" of {score['items']:,} items"
    guess = "" if score["chance"] is None else f"; guessing gives {score['chance']:.4f}"
    return f"{name} {task}: {', '.join(parts)}{items}{guess}"
