"""Adapters of folders back on their bases: by `load`, and by `AutoModelForCausalLM` once this file is imported."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM

from titans_lm.checks import load_pretrained
from titans_lm.config import check_known
from titans_lm.retrofit.add import attach
from titans_lm.retrofit.memory import adapter_of
from titans_lm.retrofit.saving import FILE, FORMAT, VERSION, RetrofitConfig, fingerprint
from titans_lm.retrofit.settings import AdapterSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RetrofitForCausalLM:
    """What `AutoModelForCausalLM` loads a folder with an adapter by: the base with a memory."""

    config_class = RetrofitConfig

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, config: RetrofitConfig, **settings: Any) -> "PreTrainedModel":
        """Load the adapter of a folder onto its base, or onto the `base` that the caller names."""
        return load(folder, getattr(config, "base", None), **settings)


AutoModelForCausalLM.register(RetrofitConfig, RetrofitForCausalLM)


def load(
    adapter: str | Path,
    base: "str | Path | PreTrainedModel | None" = None,
    *,
    window: int | None = None,
    sinks: int | None = None,
    **settings: Any,
) -> "PreTrainedModel":
    """Load an adapter, a folder or the file in it, onto its base: a model of transformers, ready to be used.

    `base` is a model, a folder or a name, None for the name that the file has; `settings` are those of
    `AutoModelForCausalLM.from_pretrained`. Another window or other sinks than it was trained with may be given.

    Raises ValueError for a file that is no adapter or not whole, and for one that belongs to other weights.
    """
    path = Path(adapter)
    path = path if path.suffix == Path(FILE).suffix else path / FILE
    header, tensors = read_adapter(path)
    if base is None and not header["base"]:
        raise ValueError(f"got the adapter {str(path)!r}, whose base had no name; give it: load(adapter, base)")
    model: Any = load_base(header["base"] if base is None else base, **settings)
    if fingerprint(model) != header["fingerprint"]:
        half = " in float32 or bfloat16: float16 rounds otherwise" if model.dtype == torch.float16 else ""
        raise ValueError(
            f"got the adapter {str(path)!r} of other weights; expected its base, {header['base']!r}, as it was then: "
            f"not resized, merged or trained since, of the same class{half}. Give it: load(adapter, base)"
        )
    kept = AdapterSettings(**header["settings"])
    changed = {"window": kept.window if window is None else window, "sinks": kept.sinks if sinks is None else sinks}

    def fill(module: torch.nn.Module, begin: str = "") -> None:
        own = {name.removeprefix(begin): x for name, x in tensors.items() if name.startswith(begin)}
        try:
            module.load_state_dict(own)
        except RuntimeError as error:
            raise ValueError(f"the adapter {str(path)!r} does not fit its own settings; it is damaged") from error

    attach(model, dataclasses.replace(kept, **changed), fill)
    fill(adapter_of(model))
    return model.eval()


def load_base(base: "str | Path | PreTrainedModel", **settings: Any) -> Any:
    """Load a causal language model by its folder or name, unless it is one already."""
    if settings.pop("output_loading_info", False):
        raise ValueError("got output_loading_info; expected none: a base and its adapter are loaded one by one")
    if not isinstance(base, str | Path):
        return base
    model, report = from_pretrained(AutoModelForCausalLM, base, output_loading_info=True, **settings)
    if lacking := sorted(report["missing_keys"]):
        raise ValueError(f"the base {str(base)!r} lacks {', '.join(lacking[:3])}: not all of it is there")
    return model.eval()


def from_pretrained(kind: Any, name: str | Path, **settings: Any) -> Any:
    """What transformers loads by that name; ValueError where it cannot."""
    if Path(name).is_absolute() and not Path(name).is_dir():
        raise ValueError(
            f"got the base {str(name)!r}, which is no folder (any more); expected it there. If it has been moved, name "
            'the folder in titans_lm.retrofit.load(adapter, base), or once and for all as "base" in the adapter\'s '
            "config.json"
        )
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ValueError(f"got the base {str(name)!r}, a folder without a config.json; expected that of a saved model")
    code = "; titans_lm.retrofit.load(adapter, base, trust_remote_code=True) runs it"  # which no command takes
    return load_pretrained(kind, name, f"the base {str(name)!r}", code=code, **settings)


def read_adapter(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read header and tensors of an adapter without its base."""
    if not path.is_file():
        raise ValueError(f"got the adapter {str(path)!r}, which does not exist; expected a file of titans retrofit")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        header = json.loads(metadata.get("header", "{}"))
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"the adapter {str(path)!r} cannot be read: it is damaged or not whole ({error})") from error
    if (metadata.get("format"), metadata.get("version")) != (FORMAT, str(VERSION)):
        raise ValueError(f"got {str(path)!r}, which is no adapter of format {FORMAT} {VERSION}")
    check_known(AdapterSettings, header["settings"])
    return header, tensors
