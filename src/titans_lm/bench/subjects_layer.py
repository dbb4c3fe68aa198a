"""One layer as a case: our memory layer, and layers of transformers that other models are made of."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titans_lm.bench.measure import Runnable
from titans_lm.config import MemoryConfig
from titans_lm.memory import NeuralMemory

Forward = Callable[[Tensor], Tensor]


def load(layer: str) -> None:
    """Import what a layer needs, before anybody looks at the memory."""
    if layer == "llama":
        import transformers.models.llama.modeling_llama
    if layer == "mamba2":
        import transformers.models.mamba2.modeling_mamba2  # noqa: F401


def build(request: dict[str, Any], device: torch.device) -> Runnable:
    """Make the case of a request ready to run: forward alone, or gradients of every parameter and of the input."""
    case, dtype = request["case"], getattr(torch, request["dtype"])
    module, forward = LAYERS[case["layer"]](case)
    module.to(device)
    x = torch.randn(case["rows"], case["tokens"], case["width"], device=device, requires_grad=True)
    towards = torch.randn_like(x)
    autocast = dtype != torch.float32

    @torch.no_grad()
    def read() -> None:
        with torch.autocast(device.type, dtype, enabled=autocast):
            forward(x)

    def train() -> None:
        with torch.autocast(device.type, dtype, enabled=autocast):
            y = forward(x)
        torch.autograd.grad(y, [x, *module.parameters()], towards.to(y.dtype))

    step = train if request["mode"] == "forward+backward" else read
    parameters = sum(p.numel() for p in module.parameters())
    return Runnable(step, case["rows"] * case["tokens"], facts={"parameters": parameters})


def memory_layer(case: dict[str, Any]) -> tuple[nn.Module, Forward]:
    """`NeuralMemory`: projections, convolutions and gates around the op."""
    module = NeuralMemory(
        MemoryConfig(
            hidden_size=case["width"],
            num_attention_heads=case["heads"],
            memory_expansion=case["expansion"],
            chunk_size=case["chunk"],
            forget_to=case["forget_to"],
        )
    )
    return module, lambda x: module(x)[0]


def llama_block(case: dict[str, Any]) -> tuple[nn.Module, Forward]:
    """transformers' Llama decoder block: full causal attention by scaled_dot_product_attention, and a SwiGLU MLP."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=case["width"],
        num_attention_heads=case["heads"],
        intermediate_size=case["ffn"],
        max_position_embeddings=case["tokens"],
        **SDPA,
    )
    module = LlamaDecoderLayer(config, 0)
    rotary = LlamaRotaryEmbedding(config)

    def forward(x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)[None]
        return module(x, attention_mask=None, position_embeddings=rotary.to(x.device)(x, places))

    return module, forward


def mamba2_block(case: dict[str, Any]) -> tuple[nn.Module, Forward]:
    """transformers' Mamba2 block on its torch path."""
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


SDPA: dict[str, Any] = {"attn_implementation": "sdpa"}
"""Fused attention, which is transformers' default too."""
LAYERS: dict[str, Callable[[dict[str, Any]], tuple[nn.Module, Forward]]] = {
    "memory": memory_layer,
    "llama": llama_block,
    "mamba2": mamba2_block,
}
