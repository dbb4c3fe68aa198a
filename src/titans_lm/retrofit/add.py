"""Put a memory beside the attention of a pretrained decoder, which stays as it is and answers as it did."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from titans_lm.checks import check_at_least, load_library
from titans_lm.hf.cache import begin_cache, check_rows, prepare_call
from titans_lm.hf.naming import CACHE, rename_cache, rename_given
from titans_lm.ops.state import state_dtype
from titans_lm.ops.validate import check_tensors, form
from titans_lm.retrofit.attention import IMPLEMENTATION, PACKED, Call, Reach, check_reach
from titans_lm.retrofit.cache import Inputs, RetrofitCache, RetrofitState
from titans_lm.retrofit.memory import OURS, LayerMemory
from titans_lm.retrofit.rotary import find_rotations
from titans_lm.retrofit.saving import save
from titans_lm.retrofit.settings import LAYERS, AdapterSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROJECTIONS, OUTPUTS = ("q_proj", "k_proj", "v_proj"), ("o_proj", "dense")
"""Names of attention's projections; Phi calls the last one dense."""


def add_memory(model: "PreTrainedModel", **settings: Any) -> "PreTrainedModel":
    """Give a decoder of transformers a memory, in place, and return it; settings are those of `AdapterSettings`.

    Its attention then sees the first `sinks` tokens and the last `window`; a token that leaves the window is written
    into a memory by the layer's own key and value and read by its own query, or by a map of hidden states (`keys`).
    Only that adapter has gradients. Until it is trained the model is its windowed base: up to `window` tokens the base.
    A forward pass takes `reach=Reach(window, sinks)` to see another window, `reach=FULL` to see all without the memory
    (the base, where there is no LoRA); its cache, that of `generate()` too, is a `RetrofitCache` of constant size. That
    state is a value as well: `init_state(batch_size)`, `state=` and `return_state=True`, without gradients.

    Raises ValueError for a model that this cannot be done with, saying why.
    """
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ValueError(
            f"got a {type(model).__name__}; expected a model of transformers, as AutoModelForCausalLM loads it"
        )
    return attach(model, AdapterSettings(**settings))


def attach(
    model: "PreTrainedModel", adapter: AdapterSettings, fill: Callable[[LayerMemory, str], None] | None = None
) -> "PreTrainedModel":
    """`add_memory`, whose memories `fill` gives their weights: called with each, and what begins their names.

    Names are those in `adapter_of`. Where it raises an error nothing of the model is changed yet.
    """
    owner: Any = model
    attentions = find_attentions(model)
    chosen = chosen_layers(adapter, len(attentions))
    rotations = find_rotations(model, attentions)
    memories = {index: _memory_beside(attentions[index], index, owner.config, adapter) for index in chosen}
    if fill is not None:
        names = {module: name.replace(".", "/") for name, module in model.named_modules()}
        for index, memory in memories.items():
            fill(memory, f"{names[attentions[index]]}/memory.")
    for layer, attention in _withholding(model, attentions):
        layer.register_forward_pre_hook(partial(_note_reach, attention), with_kwargs=True)
    model.requires_grad_(False)
    if adapter.lora_rank:
        _add_lora(model, attentions[0], adapter.lora_rank)
    for index, attention in enumerate(attentions):
        attention.reach = Reach(adapter.window, adapter.sinks)
        attention.rotation = rotations.get(index)
        attention.register_forward_pre_hook(_hand_on, with_kwargs=True)
        if index in memories:
            attention.memory = memories[index]
    names = tuple(inspect.signature(owner.base_model.forward).parameters)
    owner.base_model.register_forward_pre_hook(partial(_give_cache, attentions, names), with_kwargs=True)
    owner.register_forward_pre_hook(rename_given, with_kwargs=True)
    for module in {owner.base_model, owner}:
        module.register_forward_hook(_give_state, with_kwargs=True)
    shared, config = owner.config, copy.deepcopy(owner.config)  # another model may be made of the same object
    config._attn_implementation = IMPLEMENTATION
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = config
    owner.retrofit, owner._is_stateful = adapter, False
    # partial, as a bound function would be looked up in a file by its name among the base's own methods
    owner.generate = partial(_generate, owner)
    owner._prepare_cache_for_generation = partial(_prepare_cache, owner)
    owner.init_state, owner.save_pretrained = partial(init_state, owner), partial(_save_pretrained, owner)
    return model


def find_attentions(model: "PreTrainedModel") -> list[Any]:
    """Find the attention of every layer; ValueError where a model has something else, or more than this."""
    owner: Any = model
    config, name = owner.config, type(model).__name__
    if hasattr(model, "retrofit"):
        raise ValueError(f"got a {name} that has a memory already; expected the base")
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise ValueError(
            f"got a {name} with an adapter of PEFT; expected the base alone: loaded without it, or with it merged into "
            "its weights"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"got a {name}, an encoder-decoder model; expected a decoder")
    if config.get_text_config() is not config:
        raise ValueError(f"got a {name}, which reads more than text; expected a decoder of text alone")
    found: list[Any] = [
        m
        for m in model.modules()
        if all(hasattr(m, part) for part in PROJECTIONS) and any(hasattr(m, o) for o in OUTPUTS)
    ]
    if len(found) != config.num_hidden_layers:
        raise ValueError(
            f"got a {name}, {len(found)} of whose {config.num_hidden_layers} layers have {', '.join(PROJECTIONS)} and "
            "o_proj; expected attention in all of them, nothing recurrent and no other names"
        )
    asked = str(config._attn_implementation)
    if asked not in ("sdpa", "eager"):
        raise ValueError(f"got attention {asked!r}, which has no place for a memory; load the base with 'sdpa'")
    if not any("inv_freq" in buffer for buffer, _ in model.named_buffers()):
        raise ValueError(f"got a {name} without rotary positions; expected a model like Llama, Qwen or Mistral")
    own = next((weight for m in found for weight, _ in m.named_parameters(recurse=False)), None)
    if getattr(config, "attn_logit_softcapping", None) or own is not None:
        what = "is capped" if own is None else f"has weights of its own, {own}"
        raise ValueError(f"got a {name}, whose softmax {what}; expected plain softmax of queries and keys")
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError(f"got a {name} with layers that attend inside chunks; expected full or windowed attention")
    return sorted(found, key=lambda module: module.layer_idx)


def check_windows(model: "PreTrainedModel", windows: Iterable[int]) -> None:
    """Refuse windows that are longer than that of a layer with a memory."""
    owner: Any = model
    widest = max(windows, default=0)
    for module in model.modules():
        if isinstance(getattr(module, "memory", None), LayerMemory):
            _check_window(owner.config, module.layer_idx, widest)


def _check_window(config: Any, index: int, window: int) -> None:
    kinds, own = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    windowed = own is not None and (kinds is None or kinds[index] == "sliding_attention")
    if windowed and own < window:
        raise ValueError(
            f"got window={window} for layer {index}, whose own window has {own} tokens; expected {own} at most, or "
            "layers without this one"
        )


def _memory_beside(attention: Any, index: int, config: Any, adapter: AdapterSettings) -> LayerMemory:
    _check_window(config, index, adapter.window)
    weight = attention.q_proj.weight
    queries, width, keys = weight.shape[0] // attention.head_dim, weight.shape[1], adapter.memory.keys
    heads = queries if keys == "attention" else attention.k_proj.weight.shape[0] // attention.head_dim
    made = LayerMemory(width, adapter.memory.of_layer(heads, attention.head_dim), keys, queries, adapter.rotary)
    return made.to(weight.device, state_dtype(weight.dtype))


def chosen_layers(settings: AdapterSettings, count: int) -> tuple[int, ...]:
    """Number the layers that get a memory; ValueError for those that there are not."""
    layers = settings.layers
    if layers == "all":
        return tuple(range(count))
    if settings.best is not None:
        raise ValueError(f"got layers={layers!r}; expected numbers: titans retrofit alone reads text to find the best")
    if isinstance(layers, str):
        step = layers.removeprefix("every:")
        if layers == step or not step.isdecimal() or not 0 < int(step) <= count:
            raise ValueError(f"got layers={layers!r} with {count} layers; expected {LAYERS}")
        return tuple(range(int(step) - 1, count, int(step)))
    if not layers and not settings.lora_rank:
        raise ValueError("got layers=(); expected one layer at least, or a lora_rank")
    for index in layers:
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
            raise ValueError(f"got layer {index!r}; expected 0 to {count - 1}")
    return tuple(layers)


def keep_memories(model: "PreTrainedModel", layers: tuple[int, ...]) -> None:
    """Take the memory away from all layers but these."""
    owner: Any = model
    for module in list(model.modules()):
        if isinstance(getattr(module, "memory", None), LayerMemory) and module.layer_idx not in layers:
            del module.memory
    owner.retrofit = dataclasses.replace(owner.retrofit, layers=layers)


@torch.no_grad()
def init_state(model: Any, batch_size: int) -> RetrofitState:
    """The state before the first token: what a slot without a token leaves."""
    check_at_least("batch_size", batch_size, 1)
    ids = torch.zeros(batch_size, 1, dtype=torch.int64, device=next(model.parameters()).device)
    return model.base_model(input_ids=ids, attention_mask=torch.zeros_like(ids), return_state=True).state


def _add_lora(model: Any, attention: Any, rank: int) -> None:
    peft = load_library("peft", "lora_rank needs", "pip install peft")
    names = [name for name in (*PROJECTIONS, *OUTPUTS) if hasattr(attention, name)]
    model.add_adapter(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=names), OURS)


def _generate(model: Any, inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
    kwargs = prepare_call(inputs, kwargs, generation_config or model.generation_config)
    return type(model).generate(model, inputs, generation_config, *args, **kwargs)


def _prepare_cache(model: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Begin a cache of ours where transformers would begin one; its kinds of caches hold keys and values."""
    if model_kwargs.get(CACHE) is None:
        generation_config.cache_implementation = None
    check_rows(model_kwargs.get("attention_mask"), model_kwargs.get(CACHE))
    begin_cache(generation_config, model_kwargs, lambda: RetrofitCache(model.config.num_hidden_layers))
    type(model)._prepare_cache_for_generation(model, generation_config, model_kwargs, *args, **kwargs)


def _save_pretrained(
    model: Any, save_directory: Any, is_main_process: bool = True, *_: Any, push_to_hub: bool = False, **__: Any
) -> None:
    """Save the adapter; the base is there already."""
    if push_to_hub:
        raise ValueError("got push_to_hub; expected a folder alone, to be uploaded by huggingface_hub's upload_folder")
    if is_main_process:
        save(model, save_directory)


@torch.no_grad()
def _withholding(model: Any, attentions: list[Any]) -> list[tuple[nn.Module, Any]]:
    """Layers that do not hand on to attention what a call of the model is given besides, each with its attention."""
    given: list[Any] = []

    def look(attention: Any, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if "reach" in kwargs:
            given.append(attention)

    with ExitStack() as hooks:
        for attention in attentions:
            hooks.enter_context(attention.register_forward_pre_hook(look, with_kwargs=True))
        ids = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
        model.base_model(input_ids=ids, use_cache=False, reach=None)
    names = {module: name for name, module in model.named_modules()}
    return [(model.get_submodule(names[a].rpartition(".")[0]), a) for a in attentions if a not in given]


def _note_reach(attention: Any, _: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Leave with attention what its layer would not hand on.

    A checkpointed layer that runs again does so without this hook: with the reach of the last call.
    """
    attention.asked = kwargs.get("reach")


def _hand_on(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Put among the arguments of attention what its implementation needs."""
    if attention.config._attn_implementation != IMPLEMENTATION:
        raise ValueError(
            f"got attention {attention.config._attn_implementation!r} for a model with a memory; expected it to keep "
            f"its own, {IMPLEMENTATION!r}"
        )
    cache = kwargs.get(CACHE)
    call = Call(
        kwargs["hidden_states"] if "hidden_states" in kwargs else args[0],
        kwargs.get("position_embeddings"),
        kwargs.pop("reach", None) or getattr(attention, "asked", None) or attention.reach,
        None if cache is None else cache.layers[attention.layer_idx],
    )
    return args, {**kwargs, "retrofit": call}


def _give_cache(
    attentions: list[Any], names: tuple[str, ...], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]]:
    """Begin a cache where one is wanted, and refuse any of another kind; all arguments go on by their names."""
    kwargs = rename_cache({**dict(zip(names, args, strict=False)), **kwargs})
    cache, wanted, count = kwargs.get(CACHE), kwargs.get("use_cache"), len(attentions)
    state = kwargs.pop("state", None)
    check_reach(kwargs.get("reach"))
    if kwargs.get("output_attentions"):
        raise ValueError("got output_attentions=True; attention beside a memory keeps no weights: leave it out")
    asked = state is not None or kwargs.get("return_state")
    if asked and cache is not None:
        raise ValueError("got both past_key_values and a state; expected one of them: both say what came before")
    if cache is not None and not isinstance(cache, RetrofitCache):
        raise ValueError(
            f"got a {type(cache).__name__} for a model with a memory; expected none at first, and then the "
            "past_key_values of the output before: a RetrofitCache"
        )
    if "begun" not in kwargs:
        _check_past(attentions, cache, state, kwargs)
    if model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        if asked or cache is not None or wanted:
            raise ValueError(
                "got a cache or a state in training with gradient checkpointing, whose layers get none; expected "
                "model.eval() or gradient_checkpointing_disable()"
            )
        wanted = False
    if asked:
        made = RetrofitCache.around(state, count, masked=kwargs.get("attention_mask") is not None)
        return (), {**_placed(kwargs, state), CACHE: made, "use_cache": True}
    if cache is not None:
        return (), _recorded(model, cache, kwargs)
    if wanted is None:
        wanted = model.config.use_cache and not torch.is_grad_enabled()
    made = RetrofitCache(count) if wanted else None
    return (), {**kwargs, CACHE: made, "use_cache": bool(wanted)}


def _check_past(attentions: list[Any], cache: RetrofitCache | None, state: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a state of another model, a cache of other layers, either of other rows, and a mask of other slots."""
    tokens = kwargs.get("inputs_embeds") if kwargs.get("input_ids") is None else kwargs["input_ids"]
    if tokens is None:
        return  # the base says what it lacks
    _check_tokens(tokens, attentions[0].config.vocab_size)
    (B, T), mask, rows, seen = tokens.shape[:2], kwargs.get("attention_mask"), None, 0
    if state is not None:
        if not isinstance(state, RetrofitState):
            raise ValueError(f"got a state of type {type(state).__name__}; expected RetrofitState (see init_state)")
        _check_layers(attentions, state)
        rows = len(state.position)
    if cache is not None:
        seen = cache.get_seq_length()
        if len(cache.layers) != len(attentions):
            raise ValueError(
                f"got a cache of {len(cache.layers)} layers; expected one of this model's {len(attentions)}"
            )
        if cache.layers[0].whole:
            raise ValueError("got past_key_values of a call with a state; expected its state, which has the positions")
        rows = None if cache.layers[0].state is None else len(cache.layers[0].state.k)
    if rows not in (None, B):
        raise ValueError(f"got a state of {rows} rows and {B} rows of input; expected as many")
    if isinstance(mask, Tensor) and mask.dim() == 2 and (len(mask) != B or mask.shape[1] not in (T, seen + T)):
        raise ValueError(
            f"got an attention_mask {tuple(mask.shape)} for {B} × {T} tokens after {seen}; expected (B, T) or "
            "(B, seen + T)"
        )
    _check_packing(mask, kwargs)
    _check_places(kwargs.get("position_ids"), mask, B, T)


def _check_tokens(tokens: Any, size: int) -> None:
    """Refuse what are neither ids of the vocabulary nor embeddings, of one token at least."""
    check_tensors(tokens=tokens)
    embedded = tokens.dtype.is_floating_point
    whole = embedded or tokens.dtype in (torch.int32, torch.int64)
    if not whole or tokens.dim() != 2 + embedded or tokens.shape[1] == 0:
        raise ValueError(f"got tokens {form(tokens)}; expected ids (B, T) or embeddings (B, T, E) of one or more")
    # elsewhere to look would make every call wait
    if not embedded and tokens.is_cpu and not torch.compiler.is_compiling():
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= size:
            raise ValueError(f"got token ids from {low} to {high}; expected 0 to {size - 1}")


def _check_packing(mask: Any, kwargs: dict[str, Any]) -> None:
    """Refuse packed rows by the other names that collators have for their texts."""
    if torch.compiler.is_compiling():
        return
    lengths, texts = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
    if (
        (isinstance(lengths, Tensor) and lengths.numel() > 2)
        or (isinstance(texts, Tensor) and texts.dim() == 2 and bool((texts != texts[:, :1]).any()))
        or (isinstance(mask, Tensor) and mask.dim() == 2 and mask.dtype != torch.bool and bool((mask > 1).any()))
    ):
        raise ValueError(PACKED)


def _check_places(places: Any, mask: Any, B: int, T: int) -> None:
    """Refuse packed rows: positions that count on neither by slots nor from one real token of a row to the next."""
    if not isinstance(places, Tensor) or places.dim() != 2 or T == 1 or torch.compiler.is_compiling():
        return
    if places.shape[1] != T or len(places) not in (1, B):
        raise ValueError(
            f"got position_ids {tuple(places.shape)} for {B} × {T} tokens; expected ({B}, {T}) or (1, {T})"
        )
    real = torch.ones_like(places, dtype=torch.bool)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        real = mask[:, -T:].to(places.device) != 0
    for row, there in zip(places.expand_as(real), real, strict=True):
        if bool((row.diff() != 1).any()) and bool((row[there].diff() != 1).any()):
            raise ValueError(PACKED)


def _check_layers(attentions: list[Any], state: RetrofitState) -> None:
    """Refuse a state whose layers have other keys than this model's, or a memory that one of these has not."""
    if len(state.layers) != len(attentions):
        raise ValueError(
            f"got the state of another model, of {len(state.layers)} layers; expected one of this model's "
            f"{len(attentions)}: start from init_state()"
        )
    for index, (attention, layer) in enumerate(zip(attentions, state.layers, strict=True)):
        heads, width = layer.k.shape[2:]
        if heads * width != attention.k_proj.out_features or width != attention.head_dim:
            raise ValueError(
                f"got the state of another model, whose layer {index} has {heads} heads of {width}; expected keys of "
                f"{attention.k_proj.out_features} channels in heads of {attention.head_dim}: start from init_state()"
            )
        if layer.memory is not None and not hasattr(attention, "memory"):
            raise ValueError(
                f"got the state of another model, with a memory in layer {index}; expected none there: start from "
                "init_state()"
            )


def _recorded(model: Any, cache: RetrofitCache, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Note a call in its cache; the beginning of a long one is read first, since nobody goes back to it."""
    if not cache.is_croppable or "begun" in kwargs:
        return kwargs
    inputs = Inputs.of(kwargs)
    first, *rest = cache.cuts(inputs.length)
    if rest:
        if kwargs.get("return_dict") is False:
            raise ValueError("got return_dict=False and a call longer than the cache's keep; expected one of them")
        names = {name: value for name, value in kwargs.items() if name not in Inputs._fields}
        begun = model(**inputs.part(slice(first)), **names, begun=None)
        kwargs = {**names, **inputs.part(slice(first, None)), "begun": begun}
        inputs = Inputs.of(kwargs)
    told = {"reach": kwargs["reach"]} if kwargs.get("reach") is not None else {}
    cache.record(model, inputs.length, inputs, told)
    return kwargs


def _placed(kwargs: dict[str, Any], state: RetrofitState | None) -> dict[str, Any]:
    """Say where in their texts tokens stand that come after a state, every row at its own place."""
    if kwargs.get("position_ids") is not None:
        return kwargs
    ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    tokens = kwargs["inputs_embeds"][..., 0] if ids is None else ids
    counted = (torch.ones_like(tokens, dtype=torch.int64) if mask is None else mask.long()).cumsum(1) - 1
    before = 0 if state is None else state.position[:, None]
    return {**kwargs, "position_ids": before + counted.clamp(min=0)}


def _give_state(_: Any, __: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Put the state into what the model returns, where it was asked for, and before it what was read first."""
    begun = kwargs.get("begun")
    if begun is not None:
        for name in ("last_hidden_state", "hidden_states"):
            first, then = getattr(begun, name), getattr(output, name)
            if isinstance(then, tuple):
                output[name] = tuple(torch.cat(pair, 1) for pair in zip(first, then, strict=True))
            elif then is not None:
                output[name] = torch.cat((first, then), 1)
    if kwargs.get("return_state"):
        if isinstance(output, tuple):
            raise ValueError("got return_state and return_dict=False; expected one of them: a tuple has no name for it")
        output.state = output[CACHE].value
