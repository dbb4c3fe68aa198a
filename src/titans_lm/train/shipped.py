"""Trained models that come with the package, by name; each has a card, README.md, beside its weights."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from titans_lm.config import nearest
from titans_lm.data.tasks.vocabulary import in_known_letters

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PREFIX = "pretrained:"
"""What stands before a name wherever the folder of a model is taken."""
FOLDER = Path(__file__).parent.parent / "weights"

QUESTIONS = {
    "facts": ("Where is {}?", "Where is Mary?"),
    "needles": ("What is the secret number of {} {}?", "What is the secret number of brave otter?"),
}
"""What each was taught to be asked: the form, and an example. To anything else their answers mean nothing."""


def shipped_names() -> list[str]:
    """Name the models that this installation has."""
    return sorted(path.parent.name for path in FOLDER.glob("*/model.safetensors"))


def shipped_model(name: str) -> Path:
    """Find the folder of a model; ValueError for a name that none has, and for a wheel without weights."""
    known = shipped_names()
    if not known:
        raise ValueError(
            f"got {PREFIX}{name}, and a titans-lm that came without weights; install a wheel that has them, or give "
            "the folder of a model"
        )
    if name not in known:
        raise ValueError(f"got {PREFIX}{name}, which is no model of this package; {nearest(name, known)}")
    return FOLDER / name


def model_asked(question: str) -> Path:
    """Name the model that was taught such a question, as pretrained:NAME; ValueError where none was."""
    for name in QUESTIONS:
        if _in_form(name, question) is not None:
            return Path(PREFIX + name)
    examples = " or ".join(f'"{example}"' for _, example in QUESTIONS.values())
    raise ValueError(
        f"got the question {question!r}, which no model of this package was taught; expected one such as {examples}, "
        "or --model with one of your own"
    )


def as_taught(model: Path, question: str) -> tuple[str, str | None]:
    """Write a question as one of these models was taught to be asked: capitals, spaces, a question mark.

    A question of another form, or of another model, stays as it is; with it comes an example of what was taught.
    """
    name = str(model).removeprefix(PREFIX)
    if str(model) == name or name not in QUESTIONS:
        return question, None
    taught = _in_form(name, question)
    return (question, QUESTIONS[name][1]) if taught is None else (taught, None)


def _in_form(name: str, question: str) -> str | None:
    """The question of a model's form that somebody has asked in other letters; None for any other question."""
    form = QUESTIONS[name][0]
    pattern = r"\s+".join(form.removesuffix("?").split()).replace("{}", r"(\w+)") + r"\s*\??"
    found = re.fullmatch(pattern, question.strip(), re.IGNORECASE)
    return None if found is None else form.format(*map(in_known_letters, found.groups()))


def pretrained(name: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a model and its tokenizer."""
    from titans_lm.train.run import load_model, load_tokenizer

    folder = shipped_model(name)
    return load_model(folder, "cpu"), load_tokenizer(folder)
