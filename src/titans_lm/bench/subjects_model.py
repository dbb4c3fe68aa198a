"""Layers and language models as cases: a training step, a prompt, single tokens, generation, a text that goes on.

Ours of any architecture, and Llama and Mamba2 from transformers at the same width, depth and vocabulary.
"""

import gc
import inspect
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from titans_lm.bench.measure import Runnable, matmul_times, one_pass, resident, seconds, training_step
from titans_lm.bench.registry import subject
from titans_lm.config import BackboneConfig, MemoryConfig
from titans_lm.evaluate.stream import CACHE_NAMES
from titans_lm.memory import NeuralMemory
from titans_lm.tnt import TNTMemory
from titans_lm.train.fresh import language_model, size_of

PIECE = 4096
"""Tokens of a long context that are read at once."""
DECODED = 32
"""Tokens that a run of decoding writes."""
Carried = Any
"""What a model keeps of the tokens it has read: our state, or a cache of transformers."""
Forward = Callable[[Tensor], Tensor]
Timed = tuple[Callable[[], Any], int, int]
"""A step, the tokens it processes, and its calls that follow one another."""


def load_layer(case: dict[str, Any]) -> None:
    """Import what a layer needs, before anybody looks at the memory."""
    if case["layer"] in ("llama", "mamba2"):
        import_module(f"transformers.models.{case['layer']}.modeling_{case['layer']}")


@subject("layer", load=load_layer)
def layer(request: dict[str, Any], device: torch.device) -> Runnable:
    """Make the case of a request ready to run: forward alone, or gradients of every parameter and of the input."""
    case = request["case"]
    module, forward = LAYERS[case["layer"]](case)
    module.to(device)
    x = torch.randn(case["rows"], case["tokens"], case["width"], device=device, requires_grad=True)

    def run() -> Tensor:
        with autocast(request, device):
            return forward(x)

    step = one_pass(run, [x, *module.parameters()], request["mode"], x)
    return Runnable(step, case["rows"] * case["tokens"], facts={"parameters": size_of(module)})


def autocast(request: dict[str, Any], device: torch.device) -> torch.autocast:
    """What runs in the precision of a request, where that is not float32."""
    dtype = getattr(torch, request["dtype"])
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def layer_config(case: dict[str, Any], **own: Any) -> MemoryConfig:
    return MemoryConfig(
        hidden_size=case["width"], num_attention_heads=case["heads"], memory_expansion=case["expansion"],
        forget_to=case["forget_to"], **own,
    )  # fmt: skip


def memory_layer(case: dict[str, Any]) -> tuple[nn.Module, Forward]:
    module = NeuralMemory(layer_config(case, chunk_size=case["chunk"]))
    return module, lambda x: module(x)[0]


def tnt_settings(chunk: int, shard: int) -> dict[str, Any]:
    return {"tnt_local_chunks": (chunk,), "tnt_global_chunk": shard, "tnt_shard": shard}


def tnt_layer(case: dict[str, Any]) -> tuple[nn.Module, Forward]:
    """`TNTMemory` with one local memory, and chunks of the global one as long as a shard."""
    module = TNTMemory(layer_config(case, **tnt_settings(case["chunk"], case["shard"])))
    return module, lambda x: module(x)[0]


def llama_block(case: dict[str, Any]) -> tuple[nn.Module, Forward]:
    """transformers' Llama decoder block: full causal attention by scaled_dot_product_attention, and a SwiGLU MLP."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = llama_config(case, max_position_embeddings=case["tokens"])
    module = LlamaDecoderLayer(config, 0)
    rotary = LlamaRotaryEmbedding(config)

    def forward(x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)[None]
        return module(x, attention_mask=None, position_embeddings=rotary.to(x.device)(x, places))

    return module, forward


def llama_config(case: dict[str, Any], **settings: Any) -> Any:
    """A Llama of the case's width, with fused attention, which is transformers' default too."""
    from transformers import LlamaConfig

    settings |= {"attn_implementation": "sdpa", "hidden_size": case["width"], "intermediate_size": case["ffn"]}
    return LlamaConfig(num_attention_heads=case["heads"], **settings)


def mamba2_block(case: dict[str, Any]) -> tuple[nn.Module, Forward]:
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Block

    module = Mamba2Block(mamba2_config(case["width"], layers=1), 0)
    return module, module


def mamba2_config(width: int, layers: int, **settings: Any) -> Any:
    """A Mamba2 of this width: expanded twice, heads of 64 (of 16 in tiny models), one group, state 128."""
    from transformers import Mamba2Config

    head = 64 if 2 * width % 64 == 0 else 16
    return Mamba2Config(
        hidden_size=width, num_hidden_layers=layers, num_heads=2 * width // head, head_dim=head, n_groups=1,
        state_size=128, **settings,
    )  # fmt: skip


LAYERS: dict[str, Callable[[dict[str, Any]], tuple[nn.Module, Forward]]] = {
    "memory": memory_layer,
    "tnt": tnt_layer,
    "llama": llama_block,
    "mamba2": mamba2_block,
}


def load_models(_: dict[str, Any]) -> None:
    for name in ("llama", "mamba2"):
        load_layer({"layer": name})
    import_module("titans_lm.hf")


@subject("model", load=load_models)
def model(request: dict[str, Any], device: torch.device) -> Runnable:
    case = request["case"]
    made = make_model(case).to(device).train(request["mode"] == "train")
    for setting in ("bos_token_id", "eos_token_id", "pad_token_id"):  # no token ends a text early
        setattr(made.generation_config, setting, None)
    if case.get("compiled"):
        made.compile_decoding()
    with autocast(request, device):  # a context is kept in the precision that it goes on in
        step, tokens, calls = MODES[request["mode"]](made, case, device)

    def run() -> None:
        with autocast(request, device):
            step()

    return Runnable(run, tokens, calls=calls, facts={"parameters": size_of(made)})


def make_model(case: dict[str, Any]) -> nn.Module:
    """Make the model that a case names, with fresh weights; the embedding is tied in all of them."""
    if "sized" in case:  # by the name that `titans compare` takes
        from titans_lm.experiments.models import model_settings
        from titans_lm.experiments.settings import small_training
        from titans_lm.train.sized import sized_for

        return sized_for(model_settings(small_training(), case["sized"], case["parameters"]), case["vocab"]).model
    name = case["model"]
    if name == "llama":
        from transformers import LlamaForCausalLM

        config = llama_config(
            case, num_hidden_layers=case["layers"], vocab_size=case["vocab"], max_position_embeddings=2**20,
            tie_word_embeddings=True,
        )  # fmt: skip
        return LlamaForCausalLM(config)
    if name == "mamba2":
        from transformers import Mamba2ForCausalLM

        ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        sizes = {"layers": case["layers"], "vocab_size": case["vocab"]}
        return Mamba2ForCausalLM(mamba2_config(case["width"], **sizes, tie_word_embeddings=True, **ends))
    return language_model(stack_config(case, name), case["vocab"])


def stack_config(case: dict[str, Any], architecture: str) -> BackboneConfig:
    return BackboneConfig(
        architecture=architecture, hidden_size=case["width"], num_hidden_layers=case["layers"],
        num_attention_heads=case["heads"], intermediate_size=case["ffn"], memory_expansion=case["expansion"],
        memory_depth=case["depth"], chunk_size=case["chunk"], segment_len=case["segment"], window=case["segment"],
        num_persistent=case["persistent"],
    )  # fmt: skip


def draw(case: dict[str, Any], tokens: int, device: torch.device) -> Tensor:
    return torch.randint(0, case["vocab"], (case["rows"], tokens), device=device)


def train(model: nn.Module, case: dict[str, Any], device: torch.device) -> Timed:
    text = draw(case, case["tokens"], device)
    return training_step(model, lambda: model(text, labels=text, use_cache=False).loss), text.numel(), 1


def prefill(model: nn.Module, case: dict[str, Any], device: torch.device) -> Timed:
    """Read a prompt in one call, and keep what generation goes on from."""
    text = draw(case, case["tokens"], device)
    return torch.no_grad()(lambda: read(model, text, None)), text.numel(), 1


def decode(model: nn.Module, case: dict[str, Any], device: torch.device) -> Timed:
    """Single tokens after a context, chosen by the model; every run starts from the same context."""
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


def generate(model: nn.Module, case: dict[str, Any], device: torch.device) -> Timed:
    """Sample through transformers' generate(), with the filter and temperature that titans-pytorch defaults to."""
    prompt = draw(case, case["prompt"], device)

    def step() -> None:
        written = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=case["tokens"], do_sample=True,
            temperature=1.5, min_p=0.1, top_k=0,
        )  # fmt: skip
        if written.shape[1] != case["prompt"] + case["tokens"]:
            raise RuntimeError(f"generate() wrote {written.shape[1] - case['prompt']} tokens of {case['tokens']}")

    return step, case["rows"] * case["tokens"], case["tokens"]


def loop(model: nn.Module, case: dict[str, Any], device: torch.device) -> Timed:
    """The same tokens by a plain loop over the model, as titans-pytorch writes: filter, temperature, and a draw."""
    prompt = draw(case, case["prompt"], device)

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
    if type(model).__name__ == "TitansForCausalLM":
        out = model(ids, state=carried, return_state=True, use_cache=False, logits_to_keep=1)
        return out.logits, out.state
    kept = next(name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters)
    out = model(ids, **{kept: carried}, use_cache=True, logits_to_keep=1)
    return out.logits, out[kept]


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


@subject("stream", load=load_models, timed=False)
def stream(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Read `tokens` in pieces with the state carried; a record for every `window` of them.

    The ratios say whether a long text costs more than a short one: resident memory (all of it, imports too) at the
    end against that after the first window, throughput of the last window against the second (the first one warms up).
    """
    case = request["case"]
    start = resident(device)
    model = make_model(case).to(device).eval()
    carried, records, seen, total = None, [], 0, 0.0
    with torch.no_grad(), autocast(request, device):
        while seen < case["tokens"]:
            piece = min(case["window"], case["tokens"] - seen)
            took, carried = read_window(model, case, piece, carried, device)
            seen, total = seen + piece, total + took
            gc.collect()
            records.append({"tokens": seen, "tokens_per_second": piece / took, "memory_bytes": resident(device)})
    second = records[min(1, len(records) - 1)]
    return {
        "tokens": seen,
        "parameters": size_of(model),
        "windows": records,
        "memory_before_bytes": start,
        "memory_ratio": records[-1]["memory_bytes"] / records[0]["memory_bytes"],
        "throughput_ratio": records[-1]["tokens_per_second"] / second["tokens_per_second"],
        "tokens_per_second": seen * case["rows"] / total,
        "matmul_flops_per_second": 2 * request["matmul"] ** 3
        / min(matmul_times(request["matmul"], getattr(torch, request["dtype"]), device)),
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def read_window(
    model: torch.nn.Module, case: dict[str, Any], tokens: int, carried: Any, device: torch.device
) -> tuple[float, Any]:
    """Read some tokens in pieces; how long it took, and the state after them."""
    pieces = [draw(case, min(case["piece"], tokens - i), device) for i in range(0, tokens, case["piece"])]

    def step() -> None:
        nonlocal carried
        for ids in pieces:
            _, carried = read(model, ids, carried)

    return seconds(step, device), carried
