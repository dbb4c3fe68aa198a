"""The name of a cache among arguments and outputs: `past_key_values`, which transformers calls `cache` from 5.24 on."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers.modeling_outputs import ModelOutput

CACHE = "cache" if hasattr(ModelOutput, "past_key_values") else "past_key_values"
"""What this transformers calls it; 5.24 keeps the earlier name of outputs as a property."""
EARLIER = "past_key_values"


def rename_cache(kwargs: dict[str, Any], name: str = CACHE) -> dict[str, Any]:
    """Give arguments in which a cache has `name`, whichever of its names it had; ValueError for both."""
    other = EARLIER if name == "cache" else "cache"
    if other not in kwargs:
        return kwargs
    if kwargs.get(name) is not None and kwargs[other] is not None:
        raise ValueError("got both cache and past_key_values; expected one of them: they are two names of one argument")
    given = {key: value for key, value in kwargs.items() if key != other}
    return {**given, name: given[name] if given.get(name) is not None else kwargs[other]}


def rename_given(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Rename a cache among the arguments of a module, before it is called."""
    return args, rename_cache(kwargs)


def take_either(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method that takes past_key_values take it as cache too."""

    @wraps(method)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **rename_cache(kwargs, EARLIER))

    return renamed
