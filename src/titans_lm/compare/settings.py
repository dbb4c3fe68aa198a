"""Settings of a comparison: who trains on what, for how long, and how their learning rates are chosen."""

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

from titans_lm.config import (
    MEMORY_BLOCKS,
    SHARING_BLOCKS,
    Architecture,
    BackboneConfig,
    check_at_least,
    check_positive,
    nearest,
)
from titans_lm.train.options import merge_settings
from titans_lm.train.rules import RULES
from titans_lm.train.settings import LanguageSettings, ModelSettings

VARIED = ("stateful", "weight_decay")
"""Settings of training that a variant may change beside those of the model."""
FITTED = ("hidden_size", "intermediate_size")
"""Settings of the model that no variant may change: they are what the number of parameters makes them (D43)."""
OURS = (*get_args(Architecture), *RULES)
"""Contenders that are made of our blocks."""


def small_contender() -> LanguageSettings:
    """Settings that all contenders share unless told otherwise: some minutes each on a CPU core."""
    model = BackboneConfig(
        hidden_size=128, num_attention_heads=4, num_hidden_layers=3, memory_expansion=2, segment_len=128, window=128,
        num_persistent=4,
    )  # fmt: skip
    return LanguageSettings(
        model=model, steps=600, warmup_steps=60, seq_len=512, batch_size=4, eval_every=120, save_every=200,
        log_every=10, verify_data=False, keep=1,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """Settings of `titans compare`."""

    data: str | None = None
    """What to train on, as titans train takes it; learning rates are chosen by its held-out part."""
    test: Path | None = None
    """Text that decides: a file or a folder that nobody was trained or tuned on."""
    out: Path = Path("runs/compare")
    """Folder of the runs and of compare.json; the same command goes on where it was stopped."""
    models: tuple[str, ...] = ("lmm", "mac", "mag", "mal", "attention", "sliding", "llama", "mistral", "mamba2")
    """Architectures of ours, and baselines as titans train --baseline takes them; the first sets the size.

    One of ours, delta-net or gated-delta-net may be varied, as in mac:forget_to=zero,chunk_size=64 or
    hybrid:layer_types=[lmm,sliding]: any setting of the model but its width and that of its MLP, stateful,
    weight_decay."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs that count."""
    rates: tuple[float, ...] = (1e-3, 3e-3)
    """Learning rates that each is tried with before, from a seed that does not count."""
    tune_steps: int = 200
    """Steps of each trial."""
    positions: int = 16_384
    """Tokens of a stretch of the test text; everybody starts each stretch anew."""
    test_bytes: int = 2**20
    """Bytes of the test text that are read."""
    jobs: int = 1
    """Runs at once, each in a process with its share of the cores."""
    train: LanguageSettings = field(default_factory=small_contender)
    """What all share: sizes of the model, steps, batches."""

    def __post_init__(self) -> None:
        for name in ("tune_steps", "positions", "test_bytes", "jobs"):
            check_at_least(name, getattr(self, name), 1)
        check_contest(self.models, self.seeds, self.rates)


def check_contest(models: tuple[str, ...], seeds: tuple[int, ...], rates: tuple[float, ...]) -> None:
    """Check who takes part, from which seeds, and the learning rates."""
    for name, values in (("models", models), ("seeds", seeds), ("rates", rates)):
        if not values or len(set(values)) != len(values):
            raise ValueError(f"got {name}={values!r}; expected one or more, each once")
    for rate in rates:
        check_positive("rates", rate)


class NamedModel(NamedTuple):
    """A trained model by a name: NAME=PATH."""

    name: str
    path: Path


def named_model(given: str) -> NamedModel | None:
    """Part NAME=PATH; None for what is a path itself. ValueError where one of the two is missing."""
    name, equals, path = given.partition("=")
    if not equals or "/" in name or Path(given).exists():
        return None
    if not name or not path:
        raise ValueError(f"got the model {given!r}; expected PATH or NAME=PATH")
    return NamedModel(name, Path(path))


def named_models(models: Sequence[str]) -> list[NamedModel]:
    """Give models that read text with their names, those of their folders where none are given.

    ValueError for a model twice, and for two that would be called alike.
    """
    found, unnamed = [], []
    for given in models:
        model = named_model(given)
        if model is None:
            model = NamedModel(Path(given).resolve().name, Path(given))
            unnamed.append(model.name)
        found.append(model)
    names = [model.name for model in found]
    for name in unnamed:
        if names.count(name) > 1:
            raise ValueError(f"got several models called {name!r}; expected names for them: NAME=PATH")
    paths = [model.path.resolve() for model in found]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"got the model {str(path)!r} twice; expected every model once")
    return found


def trained_model(contender: str) -> NamedModel | None:
    """Part a contender that is trained already, NAME=PATH; None for any other, such as lmm:memory_depth=2."""
    return None if ":" in contender.partition("=")[0] else named_model(contender)


def check_trained(models: tuple[str, ...], steps: int, parameters: int | None) -> None:
    """Check that trained contenders have names of their own, and what is asked of contenders that are all trained."""
    trained = [one for one in map(trained_model, models) if one is not None]
    names = [one.name for one in trained]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"got several trained models called {name!r}; expected a name for each: NAME=PATH")
    fresh = [name for name in models if trained_model(name) is None]
    if not steps and fresh:
        raise ValueError(
            f"got train.steps=0 with {', '.join(fresh)}, which would be tested with fresh weights; expected trained "
            "models, written as NAME=PATH, or steps to train for"
        )
    if parameters is not None and not fresh:
        raise ValueError(
            f"got train.parameters={parameters} with trained models alone, which keep their sizes; expected none"
        )


Shared = TypeVar("Shared", bound=ModelSettings)


class Variant(NamedTuple):
    """A contender by its name: what it is, and the settings in which it differs from what all share."""

    base: str
    changes: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        """Whether it is made of the blocks of this package."""
        return self.base in OURS

    def changed(self, shared: Shared) -> Shared:
        """Give its settings, from those that all share; ValueError for names and values that are not known."""
        names = [field.name for field in fields(BackboneConfig) if field.name != "architecture"]
        for name in FITTED:
            if name in self.changes:
                raise ValueError(
                    f"got {name} for a variant of {self.base!r}, which is as wide as it takes to have as many "
                    "parameters as the others; expected another setting"
                )
        for name in self.changes:
            if name not in (*names, *VARIED):
                hint = nearest(name, [*names, *VARIED])
                raise ValueError(f"got {name!r}, which a variant of {self.base!r} cannot change; {hint}")
        own = {name: value for name, value in self.changes.items() if name in VARIED}
        model = {name: value for name, value in self.changes.items() if name not in VARIED}
        return merge_settings(dataclasses.replace(shared, model=stack_of(shared.model, self.base, model)), own)


def stack_of(shared: BackboneConfig, base: str, changes: dict[str, Any]) -> BackboneConfig:
    """Give the stack of a contender, from what all share: an architecture with its changes.

    Where a block has no memory, the attention of the stack gets the short convolution that the memory has, on its q, k
    and v, unless it is given one, so that it is no advantage of the memory's (D21, D38). Where no block can share
    q, k and v, a shared_qkv of all is left out. ValueError for blocks of what is not the hybrid.
    """
    if "layer_types" in changes and base != "hybrid":
        raise ValueError(f"got layer_types for a variant of {base!r}; expected hybrid:layer_types=[…]")
    blocks = shared.layer_types if base == "hybrid" else None
    rule = RULES.get(base, {"architecture": base})
    own = {name: value for name, value in changes.items() if name != "shared_qkv"}
    stack = merge_settings(shared, {"layer_types": blocks, "shared_qkv": False, **rule, **own})
    given = "attention_conv_size" in changes or shared.attention_conv_size > 1
    if not given and not set(stack.blocks) <= set(MEMORY_BLOCKS):
        kernel = stack.conv_size if stack.has_memory else shared.conv_size
        stack = dataclasses.replace(stack, attention_conv_size=kernel)
    can_share = bool(set(stack.blocks) & set(SHARING_BLOCKS))
    return merge_settings(stack, {"shared_qkv": changes.get("shared_qkv", shared.shared_qkv and can_share)})


def contender(shared: Shared, name: str, parameters: int | None) -> Shared:
    """Give the settings of one contender with so many parameters, from those that all share (see `stack_of`)."""
    named, given = variant(name), dataclasses.replace(shared, parameters=parameters)
    if not named.is_ours:
        return dataclasses.replace(given, baseline=name)
    return named.changed(dataclasses.replace(given, baseline=None))


def variant(name: str) -> Variant:
    """Read the name of a contender: "mac", "llama", a folder, or "mac:chunk_size=64,momentum=false".

    Values are written as in TOML, words without quotes, in lists too: "hybrid:layer_types=[lmm,sliding]". ValueError
    for what is neither, and for a varied baseline.
    """
    base, colon, told = name.partition(":")
    if not colon or base not in OURS:
        check_varied(name, base, told)
        return Variant(name, {})
    return Variant(base, read_changes(name, told))


def read_changes(name: str, told: str, base: str = "ARCHITECTURE") -> dict[str, Any]:
    """Read what stands behind the colon of a contender's name, "chunk_size=64,momentum=false"; values as in TOML.

    Words need no quotes, nor do those in a list. ValueError, with the whole name, for what is no setting, and for one
    that is there twice; `base` is what it says should stand before the colon.
    """
    changes: dict[str, Any] = {}
    for part in re.split(r",(?![^\[]*\])", told):  # at commas that stand in no list
        setting, equals, value = part.partition("=")
        if not equals or not setting or not value or setting in changes:
            raise ValueError(f"got the model {name!r}; expected {base}:SETTING=VALUE,…, every setting once")
        changes[setting] = _read_value(value)
    return changes


def _read_value(value: str) -> Any:
    """Read a value as TOML has it, or a word, or a list of both."""
    if value[0] == "[" and value[-1] == "]":
        inside = value[1:-1].strip()
        return [_read_value(item.strip() or "''") for item in inside.split(",")] if inside else []
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def check_varied(name: str, base: str, told: str) -> None:
    """Refuse changes to what has none of our settings; a path may hold a colon."""
    if "=" in told and not Path(name).exists():
        hint = nearest(base, OURS)
        raise ValueError(f"got the model {name!r}; only ours can be varied by settings: {hint}")
