"""A language model as a case: a training step, the reading of a prompt, single tokens, or generation.

Ours of any architecture, and Llama and Mamba2 from transformers at the same width, depth and vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titans_lm.bench.measure import Runnable
from titans_lm.bench.subjects_layer import SDPA, mamba2_config
from titans_lm.config import BackboneConfig

PIECE = 4096
"""Tokens of a long context that are read at once."""
DECODED = 32
"""Tokens that a run of decoding writes."""
Carried = Any
"""What a model keeps of the tokens it has read: our state, or a cache of transformers."""


def load() -> None:
    """Import what models need, before anybody looks at the memory."""
    import transformers.models.llama.modeling_llama
    import transformers.models.mamba2.modeling_mamba2  # noqa: F401

    import titans_lm.hf  # noqa: F401


def build(request: dict[str, Any], device: torch.device) -> Runnable:
    """Make the case of a request ready to run."""
    case = request["case"]
    model = make_model(case).to(device)
    for setting in ("bos_token_id", "eos_token_id", "pad_token_id"):  # no token ends a text early
        setattr(model.generation_config, setting, None)
    if case.get("compiled"):
        model.compile_decoding()
    facts = {"parameters": sum(p.numel() for p in model.parameters())}
    dtype = getattr(torch, request["dtype"])

    def within(step: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                step()

        return run

    step, tokens, calls = MODES[request["mode"]](model, case, device)
    return Runnable(within(step), tokens, calls=calls, facts=facts)


def make_model(case: dict[str, Any]) -> nn.Module:
    """Make the model that a case names, with fresh weights; the embedding is tied in all of them."""
    name = case["model"]
    if name == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=case["width"], num_hidden_layers=case["layers"], num_attention_heads=case["heads"],
            intermediate_size=case["ffn"], vocab_size=case["vocab"], max_position_embeddings=2**20,
            tie_word_embeddings=True, **SDPA,
        )  # fmt: skip
        return LlamaForCausalLM(config)
    if name == "mamba2":
        from transformers import Mamba2ForCausalLM

        ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        layers = case["layers"]
        config = mamba2_config(case["width"], layers, vocab_size=case["vocab"], tie_word_embeddings=True, **ends)
        return Mamba2ForCausalLM(config)
    import dataclasses

    from titans_lm.hf import TitansConfig, TitansForCausalLM

    config = BackboneConfig(
        architecture=name, hidden_size=case["width"], num_hidden_layers=case["layers"],
        num_attention_heads=case["heads"], intermediate_size=case["ffn"], memory_expansion=case["expansion"],
        memory_depth=case["depth"], chunk_size=case["chunk"], segment_len=case["segment"], window=case["segment"],
        num_persistent=case["persistent"],
    )  # fmt: skip
    return TitansForCausalLM(TitansConfig(vocab_size=case["vocab"], **dataclasses.asdict(config)))


def draw(case: dict[str, Any], tokens: int, device: torch.device) -> Tensor:
    return torch.randint(0, case["vocab"], (case["rows"], tokens), device=device)


def train(model: nn.Module, case: dict[str, Any], device: torch.device) -> tuple[Callable[[], Any], int, int]:
    """One step: forward, backward, AdamW."""
    text = draw(case, case["tokens"], device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()

    def step() -> None:
        model(text, labels=text, use_cache=False).loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step, text.numel(), 1


def prefill(model: nn.Module, case: dict[str, Any], device: torch.device) -> tuple[Callable[[], Any], int, int]:
    """Read a prompt in one call, and keep what generation goes on from."""
    text = draw(case, case["tokens"], device)
    model.eval()

    @torch.no_grad()
    def step() -> None:
        read(model, text, None)

    return step, text.numel(), 1


def decode(model: nn.Module, case: dict[str, Any], device: torch.device) -> tuple[Callable[[], Any], int, int]:
    """Single tokens after a context, chosen by the model; every run starts from the same context."""
    model.eval()
    first = draw(case, 1, device)
    with torch.no_grad():
        context = read_context(model, case, device)

    @torch.no_grad()
    def step() -> None:
        carried, token = restart(context, case["context"]), first
        for _ in range(DECODED):
            logits, carried = read(model, token, carried)
            token = logits[:, -1].argmax(-1, keepdim=True)

    return step, case["rows"] * DECODED, DECODED


def generate(model: nn.Module, case: dict[str, Any], device: torch.device) -> tuple[Callable[[], Any], int, int]:
    """Sample through transformers' generate(), with the filter and temperature that titans-pytorch defaults to."""
    prompt = draw(case, case["prompt"], device)
    model.eval()

    def step() -> None:
        written = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=case["tokens"], do_sample=True,
            temperature=1.5, min_p=0.1, top_k=0,
        )  # fmt: skip
        if written.shape[1] != case["prompt"] + case["tokens"]:
            raise RuntimeError(f"generate() wrote {written.shape[1] - case['prompt']} tokens of {case['tokens']}")

    return step, case["rows"] * case["tokens"], case["tokens"]


def loop(model: nn.Module, case: dict[str, Any], device: torch.device) -> tuple[Callable[[], Any], int, int]:
    """The same tokens by a plain loop over the model, as titans-pytorch writes: filter, temperature, and a draw."""
    prompt = draw(case, case["prompt"], device)
    model.eval()

    @torch.no_grad()
    def step() -> None:
        logits, carried = read(model, prompt, None)
        for _ in range(case["tokens"] - 1):
            logits = logits[:, -1]
            unlikely = logits < logits.amax(-1, keepdim=True) + math.log(0.1)  # of less than a tenth of the largest
            token = torch.multinomial((logits / 1.5).masked_fill_(unlikely, -math.inf).softmax(-1), 1)
            logits, carried = read(model, token, carried)

    return step, case["rows"] * case["tokens"], case["tokens"]


MODES = {"train": train, "prefill": prefill, "decode": decode, "generate": generate, "loop": loop}


def read(model: nn.Module, ids: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
    """Read tokens after those that `carried` holds; logits of the last one, and what to carry on."""
    name = type(model).__name__
    if name == "TitansForCausalLM":
        out = model(ids, state=carried, return_state=True, use_cache=False, logits_to_keep=1)
        return out.logits, out.state
    if name == "Mamba2ForCausalLM":
        out = model(ids, cache_params=carried, use_cache=True, logits_to_keep=1)
        return out.logits, out.cache_params
    out = model(ids, past_key_values=carried, use_cache=True, logits_to_keep=1)
    return out.logits, out.past_key_values


def read_context(model: nn.Module, case: dict[str, Any], device: torch.device) -> Carried:
    """Read a context piece by piece, or make up the keys and values where reading would be quadratic.

    Full attention has read a long context when its keys and values are there; what stands in them does not change the
    time of a token, so they are drawn. ValueError for a model that cannot go on in pieces.
    """
    context = case["context"]
    first = min(context, PIECE)
    _, carried = read(model, draw(case, first, device), None)
    if context == first:
        return carried
    if case["model"] == "llama":
        for layer in carried.layers:
            shape = (*layer.keys.shape[:2], context, layer.keys.shape[3])
            layer.keys, layer.values = (torch.randn(shape, device=device, dtype=layer.keys.dtype) for _ in range(2))
        return carried
    if case["model"] == "attention":
        return stretched(carried, context)
    if case["model"] == "mamba2":
        raise ValueError("its torch path reads a prompt in one call only, and a state of constant size costs the same")
    for start in range(first, context, PIECE):
        _, carried = read(model, draw(case, min(PIECE, context - start), device), carried)
    return carried


def stretched(state: Any, context: int) -> Any:
    """Give every full attention of a state as many keys and values as a context would, drawn at random."""

    def longer(x: Tensor) -> Tensor:
        return torch.randn(x.shape[0], context, *x.shape[2:], device=x.device, dtype=x.dtype)

    layers = tuple(layer._replace(k=longer(layer.k), v=longer(layer.v)) for layer in state.layers)
    return state._replace(position=torch.full_like(state.position, context), layers=layers)


def restart(carried: Carried, context: int) -> Carried:
    """Begin a run where the context ended: our states are values, keys and values that grew are cut back."""
    for layer in getattr(carried, "layers", ()):
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = layer.keys[:, :, :context], layer.values[:, :, :context]
    return carried
