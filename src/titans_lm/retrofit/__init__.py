"""A memory for a pretrained model: its attention keeps a window, and a memory learns what leaves it.

Names are imported when they are first used, so that the command line need not wait for transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titans_lm.retrofit.add import add_memory
    from titans_lm.retrofit.attention import FULL, Reach
    from titans_lm.retrofit.cache import RetrofitCache, RetrofitState
    from titans_lm.retrofit.file import load
    from titans_lm.retrofit.memory import adapter_of
    from titans_lm.retrofit.saving import save
    from titans_lm.retrofit.settings import AdapterMemory, AdapterSettings

_HOME = {
    "FULL": "attention",
    "AdapterMemory": "settings",
    "AdapterSettings": "settings",
    "Reach": "attention",
    "RetrofitCache": "cache",
    "RetrofitState": "cache",
    "adapter_of": "memory",
    "add_memory": "add",
    "load": "file",
    "save": "saving",
}
__all__ = [
    "FULL",
    "AdapterMemory",
    "AdapterSettings",
    "Reach",
    "RetrofitCache",
    "RetrofitState",
    "adapter_of",
    "add_memory",
    "load",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'titans_lm.retrofit' has no attribute {name!r}")
    if _HOME[name] in ("add", "saving"):  # of a model that is saved: transformers finds its folder by this file
        import_module("titans_lm.retrofit.file")
    return getattr(import_module(f"titans_lm.retrofit.{_HOME[name]}"), name)
