"""The recipes that come with the package, by name; knows nothing of torch."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from titans_lm.checks import did_you_mean
from titans_lm.data.text import STDLIB
from titans_lm.train.options import read_settings_file

FOLDER = Path(__file__).parent
ARCHITECTURES = ("lmm", "mac", "mag", "mal", "hybrid")
"""Tables of a recipe's file that hold what is the architecture's own."""
OPTION = "--recipe"


@cache
def recipe_names() -> tuple[str, ...]:
    """Name every recipe, SIZE-ARCHITECTURE: each file with each architecture."""
    sizes = sorted(path.stem for path in FOLDER.glob("*.toml"))
    return tuple(f"{size}-{architecture}" for size in sizes for architecture in sorted(ARCHITECTURES))


def read_recipe(name: str) -> dict[str, Any]:
    """Read a recipe's settings, those of the model below `model`; ValueError for a name that is none."""
    if name not in recipe_names():
        raise ValueError(f"got the recipe {name!r}; {recipe_hint(name)}")
    size, _, architecture = name.rpartition("-")
    values = read_settings_file(FOLDER / f"{size}.toml")
    by_architecture = {one: values.pop(one) for one in ARCHITECTURES}
    values["model"] |= {"architecture": architecture, **by_architecture[architecture]}
    return values


def recipe_hint(name: str) -> str:
    """Phrase the nearest recipe as a hint, or say how recipes are named."""
    if hint := did_you_mean(name, recipe_names()):
        return hint
    sizes, architectures = (dict.fromkeys(part) for part in zip(*(n.split("-") for n in recipe_names()), strict=True))
    return f"recipes are named SIZE-ARCHITECTURE with {', '.join(sizes)} and {', '.join(architectures)}"


def recipe_as_option(args: Sequence[str]) -> list[str]:
    """Write the command line `train RECIPE …` as `train … --recipe RECIPE`; any other stays as it is.

    ValueError for two recipes, and where the first of two words is neither a recipe nor data.
    """
    args = list(args)
    words = [arg for arg in args[1:3] if not arg.startswith("-")]
    if not words or args[1] != words[0]:
        return args
    word = words[0]
    if word in recipe_names():
        if any(arg == OPTION or arg.startswith(f"{OPTION}=") for arg in args):
            raise ValueError(f"got the recipe {word!r} and {OPTION}; expected one of them")
        return [args[0], *args[2:], OPTION, word]
    if len(words) == 2 and not is_data(word):
        raise ValueError(
            f"got {word!r} and {words[1]!r}, of which the first is neither a recipe nor data; {recipe_hint(word)}"
        )
    return args


def is_data(word: str) -> bool:
    """Whether training can read this: the word stdlib, or a path that exists."""
    return word == STDLIB or Path(word).exists()


def check_data(data: str | None, recipe: str | None, vocab_size: int | None) -> None:
    """Refuse to train on nothing or on what does not exist: ValueError with what to give, or the recipe meant."""
    if data is None:
        asked = f"the recipe {recipe!r} and " if recipe else ""
        raise ValueError(f"got {asked}no data; {_what_to_give(recipe, vocab_size)}")
    if is_data(data):
        return
    if data in recipe_names():
        raise ValueError(f"got the recipe {data!r} in the place of data; expected it first: titans train {data} DATA")
    if hint := did_you_mean(data, [STDLIB]):
        raise ValueError(f"got {data!r}, which does not exist; {hint} (or a file, a folder, a recipe)")
    raise ValueError(
        f"got {data!r}, which does not exist; expected a file, a folder, the word {STDLIB}, or a recipe: "
        f"{recipe_hint(data)}"
    )


def _what_to_give(recipe: str | None, vocab_size: int | None) -> str:
    from titans_lm.data.tokenizer import VOCAB_SIZE

    command = f"titans train {recipe}" if recipe else "titans train"
    if vocab_size in (None, VOCAB_SIZE):
        return f"expected a file, a folder of text, or the word {STDLIB}: {command} {STDLIB}"
    return (
        f"expected a folder of text in {vocab_size} token ids: titans prepare hf:HuggingFaceFW/fineweb-edu "
        f"--tokenizer NAME --out DIR, then {command} DIR"
    )
