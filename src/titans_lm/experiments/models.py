"""A model of an experiment, by its name: a stack of ours, a variant of one, a baseline, or a folder of weights.

mac                                   an architecture of ours
mac:chunk_size=64,momentum=false      a variant: values as in TOML, words without quotes, in lists too
delta-net, llama, folder/             a baseline, as `titans train --baseline` takes it
NAME=PATH                             a model that is trained already
"""

import dataclasses
import hashlib
import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

from titans_lm.config import MEMORY_ALONE, SHARING_BLOCKS, Architecture, BackboneConfig, nearest
from titans_lm.train.files import read_json
from titans_lm.train.options import merge_settings
from titans_lm.train.settings import RULES, ModelSettings

ARCHITECTURES = get_args(Architecture)
OURS = (*ARCHITECTURES, *RULES)
"""Models that are made of our blocks."""
FITTED = ("hidden_size", "intermediate_size")
"""Settings of the model that no variant may change: they are what the number of parameters makes them (D43)."""
STACK = tuple(field.name for field in fields(BackboneConfig) if field.name not in ("architecture", *FITTED))
"""Settings of a stack that a variant may change."""
VARIED = ("stateful", "weight_decay")
"""Settings of training that a variant may change beside them."""
WEIGHTS = ("*.safetensors", "*.bin", "config.json", "tokenizer.json")
"""Files that what a model does depends on."""
Shared = TypeVar("Shared", bound=ModelSettings)


class Model(NamedTuple):
    """A model by its name: what it is, and the settings in which it differs from what all share."""

    base: str
    changes: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        """Whether it is made of the blocks of this package."""
        return self.base in OURS


def parse_model(name: str, bases: Sequence[str] = OURS) -> Model:
    """Read the name of a model; what has none of the bases before its colon is a base itself (a path may hold one).

    ValueError for a varied baseline, and for changes that are none.
    """
    base, colon, changes = name.partition(":")
    if colon and base in bases:
        return Model(base, _read_changes(name, changes))
    if "=" in changes and not Path(name).exists():
        raise ValueError(f"got the model {name!r}, which has no settings to vary; {nearest(base, bases)}")
    return Model(name, {})


def _read_changes(name: str, written: str) -> dict[str, Any]:
    """Read "chunk_size=64,momentum=false"; ValueError, with the whole name, for what is no setting, or one twice."""
    changes: dict[str, Any] = {}
    for part in re.split(r",(?![^\[]*\])", written):  # at commas that stand in no list
        setting, equals, value = part.partition("=")
        if not equals or not setting or not value or setting in changes:
            base = name.partition(":")[0]
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


def split_changes(model: Model, *groups: Iterable[str]) -> list[dict[str, Any]]:
    """Part the changes of a variant by the groups of settings that they are of; ValueError for one of no group."""
    listed = [tuple(group) for group in groups]
    known = [name for group in listed for name in group]
    for name in model.changes:
        if name in FITTED and name not in known and model.base in OURS:
            raise ValueError(
                f"got {name} for a variant of {model.base!r}, which is as wide as it takes to have as many parameters "
                "as the others; expected another setting"
            )
        if name not in known:
            raise ValueError(f"got {name!r}, which a variant of {model.base!r} cannot change; {nearest(name, known)}")
    return [{name: value for name, value in model.changes.items() if name in group} for group in listed]


def stack_of(shared: BackboneConfig, base: str, changes: dict[str, Any]) -> BackboneConfig:
    """Give the stack of a model, from what all share: an architecture with its changes.

    Attention gets the short convolution that the memory has, on its q, k and v, beside a memory as without one, unless
    it is given one (D21, D42). Where no block can share q, k and v, a shared_qkv of all is left out. ValueError for
    blocks of what is not the hybrid.
    """
    if "layer_types" in changes and base != "hybrid":
        raise ValueError(f"got layer_types for a variant of {base!r}; expected hybrid:layer_types=[…]")
    blocks = shared.layer_types if base == "hybrid" else None
    rule = RULES.get(base, {"architecture": base})
    own = {name: value for name, value in changes.items() if name != "shared_qkv"}
    stack = merge_settings(shared, {"layer_types": blocks, "shared_qkv": False, **rule, **own})
    given = "attention_conv_size" in changes or shared.attention_conv_size not in (1, shared.conv_size)
    if not given and not set(stack.blocks) <= set(MEMORY_ALONE):
        kernel = stack.conv_size if stack.has_memory else shared.conv_size
        stack = dataclasses.replace(stack, attention_conv_size=kernel)
    can_share = bool(set(stack.blocks) & set(SHARING_BLOCKS))
    return merge_settings(stack, {"shared_qkv": changes.get("shared_qkv", shared.shared_qkv and can_share)})


def model_settings(shared: Shared, name: str, parameters: int | None) -> Shared:
    """Give the settings of one model with so many parameters, from those that all share (see `stack_of`)."""
    model, given = parse_model(name), dataclasses.replace(shared, parameters=parameters)
    if not model.is_ours:
        from titans_lm.train.baselines import baseline_names

        known = dict.fromkeys((*OURS, *baseline_names()))  # rules of others in our block are both
        if name not in known and not Path(name).exists():
            raise ValueError(f"got the model {name!r}; {nearest(name, known)} (or a folder with a model's config.json)")
        return dataclasses.replace(given, baseline=name)
    stack, own = split_changes(model, STACK, VARIED)
    config = stack_of(shared.model, model.base, stack)
    return merge_settings(dataclasses.replace(given, baseline=None, model=config), own)


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
    found = [named_model(given) or NamedModel(Path(given).resolve().name, Path(given)) for given in models]
    names, paths = [model.name for model in found], [model.path.resolve() for model in found]
    for given, name, path in zip(models, names, paths, strict=True):
        if paths.count(path) > 1:
            raise ValueError(f"got the model {str(path)!r} twice; expected every model once")
        if named_model(given) is None and names.count(name) > 1:
            raise ValueError(f"got several models called {name!r}; expected names for them: NAME=PATH")
    return found


def trained_model(name: str) -> NamedModel | None:
    """Part a model that is trained already, NAME=PATH; None for any other, such as lmm:memory_depth=2."""
    return None if ":" in name.partition("=")[0] else named_model(name)


def folder_name(name: str) -> str:
    """Name a folder by a model; one that is a path gets letters of its own, as others may end alike."""
    from titans_lm.train.baselines import baseline_names

    trained = trained_model(name)
    if trained is not None:
        return f"{plain_name(trained.name)}-{_path_sum(trained.path.resolve())}"
    model = parse_model(name)
    if model.is_ours or name in baseline_names():
        return plain_name(name)
    path = Path(name).resolve()
    return f"{path.parent.name if path.suffix == '.json' else path.name}-{_path_sum(path)}"


def plain_name(name: str) -> str:
    """Name a folder by any words."""
    return re.sub(r"[^\w.=,-]", "-", name)


def _path_sum(path: Path) -> str:
    return hashlib.blake2b(os.fsencode(path), digest_size=4).hexdigest()


def weights_sum(folder: Path) -> str:
    """Sum up weights, config and tokenizer of a saved model."""
    from titans_lm.data.text import blocks

    digest = hashlib.blake2b(digest_size=8)
    for path in sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)}):
        digest.update(path.name.encode())
        for block in blocks(path):
            digest.update(block)
    return digest.hexdigest()


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config of a saved model; ValueError where it is none."""
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        raise ValueError(f"got {folder / 'config.json'} with a {type(config).__name__}; expected a model's config")
    return config


def kind_of(folder: Path) -> str:
    """Tell what a saved model is: an architecture or a rule (delta-net) of ours, or the model type of Hugging Face."""
    config = read_config(folder)
    stack = {**vars(BackboneConfig()), **config}  # a file leaves out what is the default
    for name, rule in RULES.items():  # where its memory starts is no part of a rule
        own = {key: value for key, value in rule.items() if not key.endswith("_init")}
        if "architecture" in config and own == {key: stack[key] for key in own}:
            return name
    return str(config.get("architecture") or config.get("model_type"))
