"""The check of shapes and types that stands around every annotated function of the package while tests run.

jaxtyping's import hook puts its decorator there. The one it would take checks every argument twice and binds the
arguments of every call in Python, which was more than half of the time of tests of small models; this one asks
beartype once, and opens a scope for the sizes of dimensions only where an annotation has some. Of what it has
asked about it remembers the shapes, dtypes and types: the same again can only have the same answer. Of a function that
a test calls many times, it looks at the first calls and then at one in several.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import CodeType, NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import beartype
import jaxtyping
import numpy as np
import torch

_CHECK: Callable[[Any], Any] = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
MANY = 10
"""How often a form is asked about before it is trusted, where every time is about another item."""
FIRST, ONE_IN = 16, 8
"""How many calls of a function in one test are all looked at, and how many of the later ones."""
_CONFIG = jaxtyping.config
_PLAIN = nullcontext()
_ARRAYS = (torch.Tensor, np.ndarray)
_BEGUN: list["_Annotated"] = []
"""What has been called in this test."""
_SCOPE = jaxtyping.jaxtyped
"""jaxtyping's own, which `install` puts something else in the place of."""


def install(package: str) -> Any:
    """Check every function of `package` that is imported from here on; the finder that does it is returned."""
    # The hook writes `@jaxtyping.jaxtyped(typechecker=…)` above a function, and looks it up by this name.
    jaxtyping.jaxtyped = lambda typechecker: typechecker
    return jaxtyping.install_import_hook(package, "typecheck.checked").hook


def begin_test() -> None:
    """Look at the first calls of every function again."""
    for known in _BEGUN:
        known.calls = 0
    _BEGUN.clear()


def checked(target: Any) -> Any:
    """Check arguments and result of a function against its annotations; an int passes as a float.

    Constructors are left alone: settings arrive there, and a test of a wrong one wants the package's own
    ValueError. So are classes, of which only the constructor would be checked. Functions that are made anew in every
    call of another one share what is known of their code. Nothing is made before it is needed: of most functions a
    process calls none.
    """
    return _checked(target) if inspect.isfunction(target) and target.__name__ != "__init__" else target


def _checked(target: Any) -> Any:
    known = _KNOWN.setdefault((target.__module__, target.__qualname__, target.__code__), _Annotated())
    checking = plain = None  # beartype's check; the same where there is no more to it

    @functools.wraps(target)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal checking, plain
        known.calls = calls = known.calls + 1
        if calls > FIRST and calls % ONE_IN:
            return target(*args, **kwargs)  # most calls, which pay for no more than this
        if calls == 1 or not known.read:
            known.begin(target)
        if _CONFIG.jaxtyping_disable:
            return target(*args, **kwargs)
        if plain is not None:
            return plain(*args, **kwargs)
        given = None
        if known.remembers:
            given = tuple(map(_form, args)), tuple(kwargs), tuple(map(_form, kwargs.values()))
            results = known.passed.get(given)
            if results is not None and len(results) >= known.enough:
                result = target(*args, **kwargs)
                known.see_result(target, result, results, args, kwargs)
                return result
        if checking is None:
            checking = known.checker(target)
            plain = None if known.scoped or known.remembers else checking
        with _SCOPE("context") if known.scoped else _PLAIN:
            result = checking(*args, **kwargs)
        if given is not None:
            known.passed.setdefault(given, []).append(_form(result))
        return result

    return called


class _Annotated:
    """What is known of a function's code: what its annotations ask, and what has passed."""

    def __init__(self) -> None:
        self.read, self.hints, self.enough = False, {}, 1
        self.calls = 0
        self.scoped = self.remembers = False
        self.passed: dict[Any, list[Any]] = {}

    def begin(self, function: Any) -> None:
        """Note the first call in a test, and before all others what the annotations are."""
        _BEGUN.append(self)
        if self.read:
            return
        self.hints = _hints(function)
        self.scoped = any(map(_names_dimensions, self.hints.values()))
        # One that is made anew in every call has a checker that would be made anew too, for far more than a look.
        costly = self.scoped or "<locals>" in function.__qualname__
        self.remembers = costly and all(map(_is_told_by_form, self.hints.values()))
        self.enough = MANY if any(map(_is_of_any_length, self.hints.values())) else 1
        self.read = True

    def checker(self, function: Any) -> Any:
        """The function with beartype's check of these hints around it."""
        written, function.__annotations__ = function.__annotations__, self.hints
        checking = _CHECK(function)
        function.__annotations__ = written
        return checking

    def see_result(self, function: Any, result: Any, passed: list[Any], args: Any, kwargs: Any) -> None:
        """Check a result of arguments that have passed, where it has another form than those before."""
        if (told := _form(result)) not in passed:
            answer = functools.wraps(function)(lambda *_, **__: result)
            answer.__annotations__ = self.hints
            with _SCOPE("context"):
                _CHECK(answer)(*args, **kwargs)
            passed.append(told)


_KNOWN: dict[tuple[str, str, CodeType], _Annotated] = {}


def _form(value: Any) -> Any:
    """What an annotation that is told by form can ask of a value."""
    kind = type(value)
    if (form := _FORMS.get(kind)) is None:
        form = _FORMS[kind] = _form_of(kind)
    return form(value)


def _form_of(kind: type) -> Callable[[Any], Any]:
    """How the values of a type are told apart."""
    if kind in (str, bool):
        return lambda value: value
    if issubclass(kind, _ARRAYS):
        return lambda value: (kind, value.shape, value.dtype)
    return (lambda value: (kind, *map(_form, value))) if issubclass(kind, tuple | list) else lambda _: kind


_FORMS: dict[type, Callable[[Any], Any]] = {}


def _is_told_by_form(hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType, tuple, list, Sequence):
        return all(part is ... or _is_told_by_form(part) for part in parts)
    if origin is Literal:
        return all(isinstance(part, str | bool) for part in parts)
    if origin is not None:
        return origin is Callable
    if isinstance(hint, TypeVar):
        return hint.__bound__ is None and not hint.__constraints__
    return hint in (Any, None, NoneType) or (inspect.isclass(hint) and not getattr(hint, "_is_protocol", False))


def _is_of_any_length(hint: Any) -> bool:
    """Whether it names many items by one annotation, of which beartype looks at one, drawn anew in every call."""
    parts = get_args(hint)
    return ... in parts or get_origin(hint) in (list, Sequence) or any(map(_is_of_any_length, parts))


def _hints(function: Any) -> dict[str, Any]:
    """Read annotations; one with a name that only a type checker has is any type."""
    found: dict[str, Any] = {}
    for name, written in function.__annotations__.items():
        try:
            alone = SimpleNamespace(__annotations__={name: written})
            found |= get_type_hints(alone, function.__globals__, include_extras=True)
        except NameError:
            found[name] = Any
    return found


def _names_dimensions(hint: Any) -> bool:
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_names_dimensions, get_args(hint)))
