"""The Hugging Face config: the settings of a backbone, flat and under the same names, and a vocabulary."""

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

from titans_lm.config import BackboneConfig, check_at_least, drop_former, nearest

_BACKBONE = {field.name: field.default for field in dataclasses.fields(BackboneConfig)}
# What older or newer releases of transformers write into a config.json beside the attributes of the base class.
_WRITTEN_BY_TRANSFORMERS = {
    "architectures",
    "attn_implementation",
    "auto_map",
    "dtype",
    "experts_implementation",
    "model_type",
    "torch_dtype",
    "transformers_version",
}


class TitansConfig(PreTrainedConfig):
    """Settings of a Titans language model.

    Takes every field of `BackboneConfig` by its name (architecture, hidden_size, num_hidden_layers, memory_depth,
    chunk_size, segment_len, window, …), and `vocab_size`. In a stack of several blocks `layer_types` comes to name the
    block of every layer, so that another default of architecture="hybrid" changes no old model. bos, eos and pad are
    None unless given; the byte tokeniser of `titans_lm.data` sets them. Raises ValueError for a setting that does not
    exist, naming the nearest that does.
    """

    model_type = "titans"
    keys_to_ignore_at_inference = ["past_key_values", "state"]  # noqa: RUF012 - the attribute's form is transformers'

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
        self._refuse_unknown(settings)
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

    @staticmethod
    def _refuse_unknown(settings: dict[str, Any]) -> None:
        base = {name for name in vars(PreTrainedConfig()) | vars(PreTrainedConfig) if not name.startswith("__")}
        for name in settings:
            if name not in base | _WRITTEN_BY_TRANSFORMERS and not name.startswith("_"):
                known = {*_BACKBONE, "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"}
                raise ValueError(f"unknown setting {name!r} for TitansConfig; {nearest(name, known)}")

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
