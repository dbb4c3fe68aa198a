"""What the recipes are held to: the paper's table, and the sizes of our own."""

from functools import cache
from typing import Any, NamedTuple

from titans_lm.recipes.estimate import estimate_training
from titans_lm.recipes.find import read_recipe
from titans_lm.train.options import merge_settings
from titans_lm.train.settings import LanguageSettings

ARCHITECTURES = ("lmm", "mac", "mag", "mal", "hybrid")


class Size(NamedTuple):
    """A row of the camera-ready's table 5; for 400M, which it lacks, what D17 says."""

    parameters: float
    blocks: int
    width: int
    heads: int
    lr: float
    tokens: float


PAPER = {
    "170m": Size(170e6, 12, 768, 16, 3e-3, 15e9),
    "340m": Size(340e6, 24, 1024, 16, 1.5e-3, 15e9),
    "400m": Size(400e6, 24, 1024, 16, 1.5e-3, 15e9),
    "760m": Size(760e6, 24, 1536, 16, 1.25e-3, 30e9),
    "1.3b": Size(1.3e9, 18, 2048, 8, 7e-4, 100e9),
}
OURS = {"tiny": 1e6, "small": 10e6}
NAMES = [f"{size}-{architecture}" for size in (*OURS, *PAPER) for architecture in ARCHITECTURES]


def settings_of(name: str) -> LanguageSettings:
    return merge_settings(LanguageSettings(), read_recipe(name))


@cache
def estimate_of(name: str) -> dict[str, Any]:
    """Estimate a recipe once for all tests: its model is built without weights."""
    return estimate_training(settings_of(name))
