"""Trained models that come with the package, by name; each has a card, README.md, beside its weights."""

from pathlib import Path

from titans_lm.config import nearest
from titans_lm.data.tasks.vocabulary import FORMS, in_form

PREFIX = "pretrained:"
"""What stands before a name wherever the folder of a model is taken."""
FOLDER = Path(__file__).parent.parent / "weights"

QUESTIONS = {
    "facts": (FORMS[0], "Where is Mary?"),
    "needles": (FORMS[1], "What is the secret number of brave otter?"),
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
    for name, (form, _) in QUESTIONS.items():
        if in_form(form, question) is not None:
            return Path(PREFIX + name)
    examples = " or ".join(f'"{example}"' for _, example in QUESTIONS.values())
    raise ValueError(
        f"got the question {question!r}, which no model of this package was taught; expected one such as {examples}, "
        "or --model with one of your own"
    )


def taught_instead(model: Path, question: str) -> str | None:
    """Give an example of what one of these models was taught to be asked, where the question is of another form."""
    for name, (form, example) in QUESTIONS.items():
        if str(model) == PREFIX + name and in_form(form, question) is None:
            return example
    return None
