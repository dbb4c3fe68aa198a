"""An adapter as a folder: its tensors in safetensors with a header that says what it is and whose, and a config.json.

adapter.safetensors    metadata: format, version, and `header`: JSON with the settings, the base's name and fingerprint
config.json            the same for transformers
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from transformers import AutoConfig, PreTrainedConfig

from titans_lm.retrofit.memory import adapter_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT, VERSION = "titans-retrofit", 2
FILE = "adapter.safetensors"
"""The name of an adapter in its folder."""
UNUSED = "return_unused_kwargs"


class RetrofitConfig(PreTrainedConfig):
    """What a folder with an adapter says of itself to transformers: `base`, `fingerprint` and `settings`."""

    model_type = FORMAT

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a config of what a file says; other settings, which transformers' own would keep, are for the base."""
        names = ("_from_auto", "_from_pipeline", "_commit_hash", "name_or_path", "base", "fingerprint", "settings")
        own, unused = {name: kwargs.pop(name) for name in names if name in kwargs}, kwargs.pop(UNUSED, False)
        made = super().from_dict(config_dict, **own)
        return (made, kwargs) if unused else made


AutoConfig.register(FORMAT, RetrofitConfig)


def save(model: "PreTrainedModel", folder: str | Path) -> Path:
    """Write the adapter of a model, and nothing of its base, to a folder; returns the file of its weights."""
    owner: Any = model
    path = Path(folder) / FILE
    config = path.with_name("config.json")
    try:
        kind = json.loads(config.read_bytes()).get("model_type") if config.is_file() else FORMAT
    except (ValueError, AttributeError) as error:
        raise ValueError(f"got the folder {str(folder)!r}, whose config.json is none; expected a new folder") from error
    if kind != FORMAT:
        raise ValueError(
            f"got the folder {str(folder)!r}, which holds a model of type {kind!r}; expected a folder of its own"
        )
    tensors = {
        name.replace(".base_layer.", "."): x.detach().to("cpu").contiguous().clone()
        for name, x in adapter_of(model).state_dict().items()
        if ".lora_" not in name  # of a LoRA that somebody has put on maps of the memory, which PEFT saves
    }
    if any("modules_to_save" in name for name in tensors):
        raise ValueError("got a memory among PEFT's modules_to_save; expected it in no file but its adapter's own")
    name = owner.config._name_or_path
    header = {
        "base": str(Path(name).resolve()) if name and Path(name).is_dir() else name,
        "fingerprint": fingerprint(model),
        "settings": dataclasses.asdict(owner.retrofit),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"format": FORMAT, "version": str(VERSION), "header": json.dumps(header, ensure_ascii=False)}
    whole = path.with_suffix(".unfinished")
    safetensors.torch.save_file(tensors, whole, metadata)
    whole.replace(path)
    RetrofitConfig.from_dict({**header, "architectures": ["RetrofitForCausalLM"]}).save_pretrained(path.parent)
    return path


def fingerprint(model: "PreTrainedModel") -> str:
    """SHA-256 of the base's weights as bfloat16 has them: the same in every precision that a base may be loaded in."""
    digest = hashlib.sha256()
    for name, x in sorted(model.named_parameters()):
        name = name.replace(".base_layer.", ".")
        if ".memory." in name or ".lora_" in name:
            continue
        if x.is_meta:
            raise ValueError("got a base with offloaded weights; expected it whole on its devices, without disk or cpu "
                             "in device_map beside a GPU")  # fmt: skip
        digest.update(f"{name} {tuple(x.shape)}\n".encode())
        digest.update(x.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().data)
    return digest.hexdigest()
