"""Settings from files, as files, and as command lines: plain dataclasses in, plain dataclasses out.

One set of names serves the library, the command line (`--warmup-steps 100`), a config file and the `settings.json` of
a run, which is itself such a file.
"""

import dataclasses
import json
import shlex
import tomllib
import types
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from titans_lm.config import check_choice, nearest

Settings = TypeVar("Settings")
RENAMED = {
    "gate_price": "gate_l1", "text_weight": "lm_loss_weight", "run": "out", "store": "out", "fast": "quick",
}  # fmt: skip
"""Names that settings had in files of saved runs, and those that they have now."""


LATER = {"decimal": ".", "init": None}
"""Settings that came after runs had been saved: files say nothing of these values, so that such runs go on."""


def read_settings_file(path: Path) -> dict[str, Any]:
    """Read settings from a .json or .toml file; ValueError for a file that is neither."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"got the settings file {str(path)!r}, which {found}; expected a .json or .toml file")
    kind = "toml" if path.suffix.lower() == ".toml" else "json"
    text = path.read_bytes()
    try:
        values = tomllib.loads(text.decode()) if kind == "toml" else json.loads(text)
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, and of numbers with too many digits too
        raise ValueError(f"got {str(path)!r}, which is not {kind}: {error}; expected a .json or .toml file") from error
    if not isinstance(values, dict):
        raise ValueError(f"got {str(path)!r} with a {type(values).__name__} in it; expected names and values")
    return values


def merge_settings(default: Settings, values: dict[str, Any]) -> Settings:
    """Replace settings by values that came from a file; dataclasses inside go by nested names.

    A setting is found by the name that it had before, too, and by that of a command line. ValueError for an unknown
    name, with the nearest known one, and for a value of the wrong kind.
    """
    hints = get_type_hints(type(default))
    values = {name if name in hints else RENAMED.get(name, name): value for name, value in values.items()}
    values = _nested(default, values)
    for name in values:
        if name not in hints:
            raise ValueError(
                f"unknown setting {name!r} for {type(default).__name__}; {nearest(name, _known(default) - {''})}"
            )
    changes = {}
    for name, value in values.items():
        before = getattr(default, name)
        if dataclasses.is_dataclass(before):
            if not isinstance(value, dict):
                raise ValueError(f"got {name}={value!r}; expected names and values below {name}")
            changes[name] = merge_settings(before, value)
        else:
            changes[name] = _convert(name, value, hints[name])
    return dataclasses.replace(default, **changes)


def option_names(kind: type) -> dict[str, str]:
    """Name the settings of a dataclass as a command line does; "" where those inside go by their own names alone.

    `Annotated[…, tyro.conf.arg(name=…)]` says where that is not the name of the field.
    """
    hints = get_type_hints(kind, include_extras=True)
    said = {item.name: getattr(hints[item.name], "__metadata__", ()) for item in dataclasses.fields(kind)}
    names = {name: [getattr(mark, "name", None) for mark in marks] for name, marks in said.items()}
    return {name: next((one for one in given if one is not None), name) for name, given in names.items()}


def _nested(default: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Put what a command line calls by its own name alone into the settings that it belongs to."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        field, inside = _place(default, name, value)
        if inside:
            before = found.get(field, {})
            if not isinstance(before, dict):
                raise ValueError(f"got {field}={before!r}; expected names and values below {field}")
            found[field] = {**before, name: value}
        elif isinstance(value, dict) and isinstance(found.get(field), dict):
            found[field] = {**value, **found[field]}
        else:
            found[field] = value
    return found


def _place(default: Any, name: str, value: Any) -> tuple[str, bool]:
    """Find the field that a value belongs to, and whether it is one of those inside that field."""
    names = option_names(type(default))
    fits = name in names and (not isinstance(value, dict) or dataclasses.is_dataclass(getattr(default, name)))
    if fits:
        return name, False
    called = next((field for field, option in names.items() if option == name and field != name), None)
    if called is not None:
        return called, False
    around = [field for field, option in names.items() if not option and name in _known(getattr(default, field))]
    return (around[0], True) if around else (name, False)


def _known(settings: Any) -> set[str]:
    """List the names that settings are called by, those that stand for others inside among them."""
    names = option_names(type(settings))
    inner = [_known(getattr(settings, field)) for field, option in names.items() if not option]
    return set(names.values()).union(*inner)


def plain_settings(settings: Any) -> dict[str, Any]:
    """Turn settings into what JSON can hold; `merge_settings` is the way back."""
    return {
        item.name: plain_settings(value)
        if dataclasses.is_dataclass(value)
        else str(value)
        if isinstance(value, Path)
        else [str(each) if isinstance(each, Path) else each for each in value]
        if isinstance(value, tuple)
        else value
        for item in dataclasses.fields(settings)
        for value in [getattr(settings, item.name)]
        if LATER.get(item.name, dataclasses.MISSING) != value
    }


def written_command(*words: str, settings: Any, **left_out: Any) -> str:
    """Write the command that settings came from: `titans`, words, and the options that are not the defaults.

    `left_out` are settings that the words say already, or that are no part of what was asked, with their defaults;
    where numbers go beside their folder, and whether anything is shown, is none either.
    """
    usual = {"json": None, "quiet": False}
    aside = {name: value for name, value in usual.items() if hasattr(settings, name)}
    told = dataclasses.replace(settings, **aside | left_out)
    return shlex.join(["titans", *words, *as_options(told, type(settings)())])


def as_options(settings: Any, default: Any, prefix: str = "--") -> list[str]:
    """Write settings as the options of a command line that turn the default into them; those inside go by dots."""
    parts, hints = [], get_type_hints(type(settings))
    for name, option in option_names(type(settings)).items():
        value, usual = getattr(settings, name), getattr(default, name)
        option = option.replace("_", "-")
        if dataclasses.is_dataclass(value):
            parts += as_options(value, usual, f"{prefix}{option}." if option else prefix)
        elif value == usual:
            continue
        elif isinstance(value, bool) and hints[name] is bool:  # one that may be None takes a value: True or False
            parts.append(f"{prefix}{option}" if value else f"{prefix}no-{option}")
        else:
            parts += [f"{prefix}{option}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return parts


def _convert(name: str, value: Any, hint: Any) -> Any:
    """Take a value as the type that a setting has, without guessing: no "3" for 3, no 1 for true."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    several = next((kind for kind in kinds if get_origin(kind) is tuple), None)
    if several is not None and isinstance(value, list | tuple):
        inside = get_args(several)
        if Ellipsis not in inside and len(value) != len(inside):
            raise ValueError(f"got {name}={value!r}; expected {len(inside)} values")
        return tuple(_convert(name, item, inside[0]) for item in value)
    literal = next((kind for kind in kinds if get_origin(kind) is Literal), None)
    if literal is not None and not (value is None and type(None) in kinds):
        check_choice(name, value, get_args(literal))
        return value
    for kind in kinds:
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind is Path and isinstance(value, str):
            return Path(value)
        if type(value) is kind:
            return value
    names = {type(None): "nothing"}
    wanted = " or ".join(
        "several of them" if get_origin(kind) is tuple else names.get(kind, kind.__name__) for kind in kinds
    )
    raise ValueError(f"got {name}={value!r}; expected {wanted}")


def as_settings(kind: type[Settings], settings: Any, **changes: Any) -> Settings:
    """Give settings of another kind with the values of all names that both have, and changes."""
    names = {item.name for item in dataclasses.fields(kind)} & {item.name for item in dataclasses.fields(settings)}  # pyrefly: ignore
    return kind(**{name: getattr(settings, name) for name in names} | changes)
