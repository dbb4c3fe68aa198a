"""What the steps of a plan read, and what it holds: a step that is done says nothing of files that came later."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titans_lm.compare.question_settings import QuestionSettings
from titans_lm.compare.settings import CompareSettings
from titans_lm.compare.task_settings import TaskSettings
from titans_lm.forecast.settings import EvaluateForecasters
from titans_lm.genomics.settings import EvaluateSettings
from titans_lm.repro.steps import Plan


def plan_contents(plan: Plan) -> dict[str, str]:
    """Sum up all that the steps read and no step makes, by path; ValueError for what is not there."""
    from titans_lm.data.contents import contents_of, files_sum, text_sum

    settings = [step.settings for step in plan.steps]
    tasks = [task for s in settings if isinstance(s, TaskSettings) for task in [*s.taught, *s.tested.values()]]
    texts, files = ({str(path): path for s in settings for path in read(s)} for read in (_texts, _files))
    return (
        {name: text_sum(path) for name, path in texts.items()}
        | {name: files_sum(Path(path)) for name, path in files.items()}
        | contents_of(tasks)
    )


def _texts(settings: Any) -> Iterator[str | Path]:
    """Texts of a step, or the word that stands for one."""
    if isinstance(settings, CompareSettings):
        yield from (text for text in (settings.data, settings.test, settings.train.valid) if text is not None)


def _files(settings: Any) -> Iterator[Path]:
    """Files of a step that are no texts: questions, tables, sequences."""
    match settings:
        case QuestionSettings():
            yield from [] if settings.local is None else [settings.local]
        case EvaluateForecasters():
            yield from settings.data
        case EvaluateSettings():
            yield from [] if settings.data is None else [settings.data]
