"""Titans as Hugging Face models: embedding, backbone, heads, and the contract of `generate()`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from titans_lm.backbone import Backbone, BackboneState
from titans_lm.blocks import BLOCKS, concat_segments
from titans_lm.config import SurpriseSizes
from titans_lm.hf.cache import TitansCache, begin_cache, check_rows, last_real, prepare_call
from titans_lm.hf.configuration import TitansConfig
from titans_lm.hf.documents import PACKING, find_documents, read_documents
from titans_lm.hf.labels import check_classes, kept_places, predicted
from titans_lm.hf.naming import CACHE, take_either
from titans_lm.layers import Diagnostics, Linear
from titans_lm.ops.validate import check_surprise, check_tensors

LOSS = {"ignore_index", "num_items_in_batch", "shift_labels"}
"""What transformers' loss takes besides logits and labels."""
UNREAD = {"assistant_tokenizer", "cache_position", "tokenizer"}
"""What `generate()` passes on to every model in some release of transformers, and no model reads."""


@dataclass
class TitansModelOutput(BaseModelOutputWithPast):
    """What the stack returns.

    `state` (with return_state) carries gradients and belongs to truncated or full backpropagation through segments;
    `past_key_values` holds the same state without them. `surprise` (with output_surprise) has ‖∇ℓ‖ of every token,
    (B, T, H, L) for each block with a memory; with output_surprise="parts" the sizes of momentary and past surprise and
    of what was forgotten, (B, T, H, L, 3).
    """

    state: BackboneState | None = None
    surprise: tuple[Tensor, ...] | None = None


@dataclass
class TitansOutput(CausalLMOutputWithPast):
    """What a head returns: loss and logits, and what the stack does (see `TitansModelOutput`)."""

    state: BackboneState | None = None
    surprise: tuple[Tensor, ...] | None = None


class TitansPreTrainedModel(PreTrainedModel):
    """What every Titans model shares: its config, how weights start, and what stays in float32."""

    config_class = TitansConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = [block.__name__ for block in BLOCKS.values()]  # noqa: RUF012 - a list is what transformers reads
    _keep_in_fp32_modules_strict = {"initial"}  # noqa: RUF012 - M_init starts a state, and states are float32
    _is_stateful = False  # to transformers: one whose cache cannot be cropped

    def _init_weights(self, module: nn.Module) -> None:
        self.base_model.backbone.init_weights(module)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing: `save_pretrained` writes a stub and an auto_map as it is."""

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, every_n_layers: int = 1
    ) -> None:
        """Tell the stack which blocks to compute again and how; reentry is never used: it cuts gradients of states."""
        super()._set_gradient_checkpointing(enable, partial(gradient_checkpointing_func, use_reentrant=False))
        self.base_model.backbone.checkpoint_every = every_n_layers

    def init_state(self, batch_size: int) -> BackboneState:
        """The state at the start of a document."""
        return self.base_model.backbone.init_state(batch_size)

    def compile_decoding(self, backend: str = "inductor") -> None:
        """Compile what reads single tokens (see `Backbone.compile_decoding`)."""
        self.base_model.backbone.compile_decoding(backend)

    def _returned(self, output: Any, return_dict: bool | None) -> Any:
        wanted = self.config.return_dict if return_dict is None else return_dict
        return output.to_tuple() if wanted is False else output

    def _output(
        self, loss: Tensor | None, logits: Tensor, trunk: Any, return_dict: bool | None
    ) -> TitansOutput | tuple:
        """Give what a head makes of its trunk, and what the trunk carries."""
        carried = {name: trunk.get(name) for name in (CACHE, "hidden_states", "state", "surprise")}
        return self._returned(TitansOutput(loss=loss, logits=logits, **carried), return_dict)


class TitansModel(TitansPreTrainedModel):
    """Token embedding and backbone: input ids (B, T) in, hidden states (B, T, E) out."""

    def __init__(self, config: TitansConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.backbone = Backbone(config.backbone_config())
        self.post_init()

    @take_either
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TitansCache | None = None,
        inputs_embeds: Float[Tensor, "B T E"] | None = None,
        use_cache: bool | None = None,
        state: BackboneState | None = None,
        return_state: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_surprise: SurpriseSizes = False,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
        **packing: Any,
    ) -> TitansModelOutput | tuple:
        """Read tokens after those that a cache or a state already holds.

        The mask (B, T) or (B, past + T) marks real tokens, padding on any side. Where `position_ids` (B, T) begin at 0
        again inside a row, a document begins that is read as if alone; `seq_idx` (B, T), the number of each token's
        document, and `cu_seq_lens_q` (N + 1,), cumulative lengths in a single row, say the same. Raises ValueError for
        what is no tensor, for ids outside the vocabulary's type, for both or none of ids and embeddings, and for a
        cache, mask or positions of another form.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("got both or none of input_ids and inputs_embeds; expected exactly one")
        check_tensors(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, position_ids=position_ids
        )
        if output_attentions:
            raise ValueError("got output_attentions=True; fused attention keeps no weights, and memories have none")
        check_surprise("output_surprise", output_surprise)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x = self._embed(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        cache = self._cache(past_key_values, use_cache, state)
        state = state if cache is None or cache.state is None else cache.state
        valid = _valid(attention_mask, x, 0 if cache is None else cache.get_seq_length())
        diagnostics = Diagnostics(output_surprise) if output_surprise or output_hidden_states else None
        embedded = x
        documents = find_documents(x, state, valid, position_ids, packing)
        if documents is not None:
            x, state = read_documents(self.backbone, x, state, valid, documents, diagnostics)
            if cache is not None:
                cache.store(state, x.shape[1])
        elif cache is None:
            x, state = self.backbone(x, state, valid, diagnostics)
        else:
            x, state = self._read_into(cache, x, state, valid, diagnostics)
        output = TitansModelOutput(
            last_hidden_state=x,
            **{CACHE: cache if use_cache else None},
            hidden_states=(embedded, *diagnostics.hidden_states) if diagnostics and output_hidden_states else None,
            state=state if return_state else None,
            surprise=tuple(diagnostics.surprise_norms) if diagnostics and output_surprise else None,
        )
        return self._returned(output, return_dict)

    def _read_into(
        self,
        cache: TitansCache,
        x: Tensor,
        state: BackboneState | None,
        valid: Tensor | None,
        diagnostics: Diagnostics | None,
    ) -> tuple[Tensor, BackboneState | None]:
        """Read a call into a cache, in two parts where one may go back into the second alone."""
        outputs, start = [], 0
        for count in cache.cuts(x.shape[1]):
            inputs = tuple(None if part is None else part[:, start : start + count] for part in (x, valid))
            cache.record(self.backbone, count, inputs)
            y, state = self.backbone(inputs[0], state, inputs[1], diagnostics)
            cache.store(state, count)
            outputs.append(y)
            start += count
        if diagnostics is not None:
            diagnostics.join(len(outputs), concat_segments)
        return concat_segments(outputs), state

    def _embed(self, input_ids: Tensor) -> Tensor:
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"got input_ids {input_ids.dtype} {tuple(input_ids.shape)}; expected int32 or int64 (B, T)"
            )
        try:
            return self.embed_tokens(input_ids)
        except IndexError as error:  # raised on CPU; looking at the ids first would make every call wait for a GPU
            low, high = int(input_ids.min()), int(input_ids.max())
            last = self.config.vocab_size - 1
            raise ValueError(f"got token ids from {low} to {high}; expected 0 to {last}") from error

    @staticmethod
    def _cache(cache: Any, use_cache: bool, state: BackboneState | None) -> TitansCache | None:
        if cache is None:
            return TitansCache() if use_cache else None
        if not isinstance(cache, TitansCache):
            raise ValueError(
                f"got past_key_values of type {type(cache).__name__}; expected TitansCache, or None to start one: a "
                "memory has no keys and values to put a prefix to, as PEFT's prefix tuning would (prompt tuning and "
                "LoRA work)"
            )
        if state is not None:
            raise ValueError(
                "got both past_key_values and state; expected one of them: both say what came before (generate() "
                "begins a cache, and takes a state as past_key_values=TitansCache(state))"
            )
        return cache


def _valid(mask: Tensor | None, x: Tensor, seen: int) -> Tensor | None:
    """The mask of this call's tokens: `generate()` passes one for past and present together."""
    if mask is None:
        return None
    B, T = x.shape[:2]
    if mask.dim() != 2 or mask.shape[0] != B or mask.shape[1] not in (T, seen + T):
        raise ValueError(
            f"got attention_mask of shape {tuple(mask.shape)}; expected (B, T) = ({B}, {T}), or (B, {seen} + {T}) "
            "with the tokens that the cache has read"
        )
    return mask[:, mask.shape[1] - T :].to(device=x.device, dtype=torch.bool)


def last_places(x: Float[Tensor, "B T E"], count: int, mask: Tensor | None) -> Float[Tensor, "B N E"]:
    """The last `count` places of every row; padding after a token stands for that token, whose successor is asked for.

    Drafted tokens follow a prompt's padding on the right, and the first of them is checked at the prompt's last token.
    """
    if mask is None or x.shape[1] <= 1:
        return x[:, -count:]
    real = mask[:, mask.shape[1] - x.shape[1] :].to(x.device, torch.bool)
    places = torch.arange(x.shape[1], device=x.device)
    known = torch.where(real, places, 0).cummax(1).values[:, -count:]
    return x.gather(1, known.unsqueeze(-1).expand(-1, -1, x.shape[2]))


class TitansForCausalLM(TitansPreTrainedModel, GenerationMixin):
    """A Titans language model: `generate()`, safetensors, Trainer and PEFT as any causal LM, a state of constant size.

    `forward(…)` takes what `TitansModel.forward` takes, and `labels` (B, T), shifted inside, −100 ignored, and
    `logits_to_keep`: how many last positions get logits, 0 for all. Padding on the right then has those of the
    row's last real token.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: TitansConfig) -> None:
        super().__init__(config)
        self.model = TitansModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def generate(self, inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Generate as every transformers model does, with the memory's state as the cache."""
        settings = generation_config or self.generation_config
        asked = kwargs.get("cache_implementation", getattr(settings, "cache_implementation", None))
        if asked is not None:
            raise ValueError(
                f"got cache_implementation={asked!r}; expected none: between tokens this model keeps the state of its "
                "memory, of constant size, in a TitansCache"
            )
        kwargs = prepare_call(inputs, kwargs, settings)
        return super().generate(inputs, generation_config, *args, **kwargs)

    # pyrefly: ignore [bad-override]: what follows the two differs between releases of transformers
    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Begin a cache, where transformers has found, in all places that may say so, that there is to be one.

        By now it knows the mask of a prompt too, be it only from the prompt's padding.
        """
        mask = model_kwargs.get("attention_mask")
        if generation_config.prefill_chunk_size is not None and mask is not None and not bool(mask[:, -1].all()):
            raise ValueError(
                "got prefill_chunk_size and a prompt with padding on the right; expected padding on the left, or no "
                "prefill_chunk_size: the last real token of a row may stand in an earlier chunk"
            )
        check_rows(mask, model_kwargs.get(CACHE))
        if generation_config.is_assistant:  # a draft is told its target's positions, which may be those of before
            model_kwargs.pop("position_ids", None)
        begin_cache(generation_config, model_kwargs, TitansCache)
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    # pyrefly: ignore [bad-override]: as above
    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Guide by each row's last token, where transformers would take padding if the prompt ends in it."""
        prompt, mask = kwargs.get("encoder_input_ids"), (kwargs.get("model_kwargs") or {}).get("attention_mask")
        if generation_config.guidance_scale not in (None, 1) and kwargs.get("negative_prompt_ids") is None:
            if kwargs.get("input_ids_seq_length") == 0:
                raise ValueError(
                    "got guidance_scale and a prompt of inputs_embeds alone; expected negative_prompt_ids too: the "
                    "guide would begin at the prompt's last token, which is not known"
                )
            kwargs["negative_prompt_ids"] = last_real(prompt, mask)
        return super()._get_logits_processor(generation_config, *args, **kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse transformers' continuous batching, whose pages hold keys and values."""
        raise ValueError(
            "got generate_batch(), which pages keys and values; expected generate(), which takes a padded batch, or "
            "`titans serve`"
        )

    def _prepare_position_ids_for_generation(self, *_: Any, **__: Any) -> None:
        """Make none: a state knows where it stands, and positions would be compared with it at every token."""

    @take_either
    def forward(  # noqa: PLR0913 - the arguments are transformers'
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TitansCache | None = None,
        inputs_embeds: Float[Tensor, "B T E"] | None = None,
        labels: Int[Tensor, "B _"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        state: BackboneState | None = None,
        return_state: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_surprise: SurpriseSizes = False,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> TitansOutput | tuple:
        """Predict the next token at every position; see the class and `TitansModel.forward`.

        `shift_labels` (B, T) are labels that stand at the token before already; `num_items_in_batch` and
        `ignore_index` are as in transformers' loss.
        """
        if unknown := set(others) - LOSS - PACKING - UNREAD:
            raise ValueError(
                f"got unknown arguments {sorted(unknown)}; expected those of forward, or one of "
                f"{', '.join(sorted(LOSS | PACKING))}"
            )
        loss_settings = {name: value for name, value in others.items() if name in LOSS}
        trunk = self.model(
            input_ids, attention_mask, past_key_values, inputs_embeds, use_cache, state, return_state,
            output_attentions, output_hidden_states, output_surprise, True, position_ids,
            **{name: value for name, value in others.items() if name in PACKING},
        )  # fmt: skip
        hidden = trunk.last_hidden_state
        if isinstance(logits_to_keep, int):
            hidden = last_places(hidden, logits_to_keep, attention_mask) if logits_to_keep else hidden
        else:
            hidden = hidden[:, logits_to_keep]
        logits, loss = self.lm_head(hidden), None
        if labels is not None or loss_settings.get("shift_labels") is not None:
            real = kept_places(attention_mask, trunk.last_hidden_state.shape[1], logits_to_keep)
            labels = predicted(labels, logits, real, loss_settings)
            size = self.config.vocab_size
            try:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=size, **loss_settings)
            except IndexError as error:  # as for token ids
                raise ValueError(f"got labels that are no token ids: {error}; expected 0 to {size - 1}") from error
        return self._output(loss, logits, trunk, return_dict)


class TitansForSequenceClassification(TitansPreTrainedModel):
    """`config.num_labels` scores (B, num_labels) from each row's last real token, which has read the whole text.

    `forward(…)` takes what `TitansModel.forward` takes, and `labels` (B,), or (B, num_labels) for several classes at
    once. Without a mask, `pad_token_id` of the config says which tokens of input_ids are padding.
    """

    def __init__(self, config: TitansConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TitansModel(config)
        self.score = Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    accepts_loss_kwargs = False
    """The loss is a mean over rows, which Trainer divides among the batches of a step."""

    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Float[Tensor, "B T E"] | None = None,
        position_ids: Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> TitansOutput | tuple:
        """Score every row; raises ValueError for a row without a token, and for labels that are none of its scores.

        What a data set may have as columns stands here by name: Trainer drops all others.
        """
        others.pop("num_items_in_batch", None)
        pad = self.config.pad_token_id
        if attention_mask is None and input_ids is not None and pad is not None:
            attention_mask = input_ids != pad
        given = {"inputs_embeds": inputs_embeds, "position_ids": position_ids, **others}
        trunk = self.model(input_ids, attention_mask, return_dict=True, **given)
        hidden = trunk.last_hidden_state
        T = hidden.shape[1]
        if T == 0 or (attention_mask is not None and not bool((attention_mask[:, -T:] != 0).any(1).all())):
            raise ValueError("got a row without a real token; expected at least one, whose output is scored")
        logits = self.score(last_places(hidden, 1, attention_mask)[:, 0]).to(
            torch.promote_types(hidden.dtype, torch.float32)
        )
        loss = None
        if labels is not None:
            check_classes(labels, logits, self.config.problem_type)
            try:
                loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
            except IndexError as error:  # as for token ids
                raise ValueError(f"got labels of no class: {error}; expected 0 to {logits.shape[1] - 1}") from error
        return self._output(loss, logits, trunk, return_dict)
