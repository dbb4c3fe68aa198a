"""The check of shapes and types that stands around every annotated function of the package while tests run.

jaxtyping's import hook puts its decorator there. The one it would take checks every argument twice and binds the
arguments of every call in Python, which was more than half of the time of tests of small models; this one asks
beartype once, and opens a scope for the sizes of dimensions only where an annotation has some.
"""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import beartype
import jaxtyping

_CHECK: Callable[[Any], Any] = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
_SCOPE = jaxtyping.jaxtyped
"""jaxtyping's own, which `install` puts something else in the place of."""


def install(package: str) -> Any:
    """Check every function of `package` that is imported from here on; the finder that does it is returned."""
    # The hook writes `@jaxtyping.jaxtyped(typechecker=…)` above a function, and looks it up by this name.
    jaxtyping.jaxtyped = lambda typechecker: typechecker
    return jaxtyping.install_import_hook(package, "typecheck.checked").hook


def checked(target: Any) -> Any:
    """Check arguments and result of a function against its annotations; an int passes as a float.

    Constructors are left alone: settings arrive there, and a test of a wrong one wants the package's own
    ValueError. So are classes, of which only the constructor would be checked.
    """
    if not inspect.isfunction(target) or target.__name__ == "__init__":
        return target
    written, target.__annotations__ = target.__annotations__, _hints(target)
    checking, scoped = _CHECK(target), any(map(_names_dimensions, target.__annotations__.values()))
    target.__annotations__ = written

    @functools.wraps(target)
    def called(*args: Any, **kwargs: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable:
            return target(*args, **kwargs)
        if not scoped:
            return checking(*args, **kwargs)
        with _SCOPE("context"):
            return checking(*args, **kwargs)

    return called


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
