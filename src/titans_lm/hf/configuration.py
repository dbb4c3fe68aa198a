"""The Hugging Face config: the settings of a backbone, flat and under the same names, and a vocabulary."""

import dataclasses
import difflib
import os
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging

from titans_lm.config import BackboneConfig, check_at_least, nearest
from titans_lm.former import drop_former

log = logging.get_logger(__name__)

_BACKBONE = {field.name: field.default for field in dataclasses.fields(BackboneConfig)}
# What older or newer releases of transformers write into a config.json beside the attributes of the base class.
_WRITTEN_BY_TRANSFORMERS = {
    "architectures",
    "attn_implementation",
    "auto_map",
    "dtype",
    "experts_implementation",
    "model_type",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
}
_OWN = {*_BACKBONE, "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "tie_word_embeddings"}
_STUB = Path(__file__).with_name("modeling_titans_lm.py")
_AUTO_MAP = {
    "AutoConfig": "TitansConfig",
    "AutoModel": "TitansModel",
    "AutoModelForCausalLM": "TitansForCausalLM",
    "AutoModelForSequenceClassification": "TitansForSequenceClassification",
}
MISSPELT = 0.85
"""Likeness from which on an unknown name in a file is taken for one of ours, misspelt."""


class TitansConfig(PreTrainedConfig):
    """Settings of a Titans language model.

    Takes every field of `BackboneConfig` by its name (architecture, hidden_size, num_hidden_layers, memory_depth,
    chunk_size, segment_len, window, …), and `vocab_size`. In a stack of several blocks `layer_types` comes to name the
    block of every layer, so that another default of architecture="hybrid" changes no old model. bos, eos and pad are
    None unless given; those of the byte tokeniser of `titans_lm.data` are 256, 257 and 258. Raises ValueError for a
    setting that does not exist, naming the nearest that does. What others have added to a saved config is kept, with a
    warning, unless it is one of our names misspelt.
    """

    model_type = "titans"
    max_position_embeddings = 2**30  # no limit; clients that find no number, as lm-eval, cut texts at one of their own
    keys_to_ignore_at_inference = ["past_key_values", "cache", "state"]  # noqa: RUF012 - the attribute's form is transformers'

    def __init__(
        self,
        vocab_size: int = 259,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        **settings: Any,
    ) -> None:
        check_at_least("vocab_size", vocab_size, 1)
        settings = drop_former(settings)
        for name, default in _BACKBONE.items():
            setattr(self, name, settings.pop(name, default))
        self.vocab_size = vocab_size
        self.use_cache = use_cache
        for name in _unknown(settings):
            raise ValueError(f"unknown setting {name!r} for TitansConfig; {nearest(name, _OWN)}")
        stack = self.backbone_config()
        for name, value in vars(stack).items():  # JSON has lists for tuples
            setattr(self, name, value)
        self.layer_types: list[str] | None = None  # transformers would rename its "attention" and refuse our names
        super().__init__(
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **settings,
        )
        self.architecture, self.layer_types = stack.architecture, list(stack.blocks) if stack.is_mixed else None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a config of what a file says; see the class for what the file may say besides."""
        ours = {name: kwargs.pop(name) for name in (_BACKBONE.keys() | {"vocab_size"}) & kwargs.keys()}
        another = ours.get("architecture", config_dict.get("architecture")) != config_dict.get("architecture")
        if another and "layer_types" not in ours:  # which the file has for the architecture it names
            ours["layer_types"] = None
        _refuse_misspelt(_unknown(kwargs))  # others are for whoever loads the model, or dropped by transformers
        config_dict = config_dict | ours
        added = _unknown(drop_former(config_dict))
        _refuse_misspelt(added)
        made = super().from_dict({k: v for k, v in config_dict.items() if k not in added}, **kwargs)
        if added:
            log.warning(f"kept what is no setting of TitansConfig: {', '.join(sorted(added))}")
            for name in added:
                setattr(made[0] if isinstance(made, tuple) else made, name, config_dict[name])
        return made

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: `save_pretrained` writes a stub and an auto_map as it is."""

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write config.json, and the stub that leads `trust_remote_code=True` to this package."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_STUB, Path(save_directory) / _STUB.name)
        self.auto_map = {auto: f"{_STUB.stem}.{name}" for auto, name in _AUTO_MAP.items()}
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    def _upload_modified_files(
        self, working_dir: Any, repo_id: str, files_timestamps: dict[str, float], *args: Any, **kwargs: Any
    ) -> Any:
        """Upload the stub too, which was written before it was noted what there was."""
        before = {name: at for name, at in files_timestamps.items() if name != _STUB.name}
        return super()._upload_modified_files(working_dir, repo_id, before, *args, **kwargs)

    def validate(self) -> None:
        """Check the settings before they are written; names in layer_types are ours and not those of transformers."""
        self.backbone_config()
        kept, self.layer_types = self.layer_types, None
        try:
            super().validate()
        finally:
            self.layer_types = kept

    def backbone_config(self) -> BackboneConfig:
        """The settings of the stack, checked."""
        return BackboneConfig(**{name: getattr(self, name) for name in _BACKBONE})


def _refuse_misspelt(names: list[str]) -> None:
    """Refuse, of names that are unknown, the first that is close to one of ours."""
    for name in names:
        if difflib.get_close_matches(name, _OWN, n=1, cutoff=MISSPELT):
            raise ValueError(f"unknown setting {name!r} for TitansConfig; {nearest(name, _OWN)}")


def _unknown(settings: dict[str, Any]) -> list[str]:
    """Names that are neither ours nor transformers'."""
    base = {name for name in vars(PreTrainedConfig()) | vars(PreTrainedConfig) if not name.startswith("__")}
    known = base | _WRITTEN_BY_TRANSFORMERS | _OWN
    return [name for name in settings if name not in known and not name.startswith("_")]
