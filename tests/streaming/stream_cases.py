"""Models, texts and memories for the tests of reading."""

from typing import Any

import torch
from torch import Tensor

from model_cases import BOUNDED, small_config, wake
from titans_lm.data.tokenizer import BOS, encode_bytes
from titans_lm.hf import TitansForCausalLM
from titans_lm.streaming import Memory
from titans_lm.streaming.file import named_state
from titans_lm.train.fresh import byte_model

CONSTANT = BOUNDED


def reading_model(architecture: str, **settings: Any) -> TitansForCausalLM:
    """A byte model in float64: what is told apart here is not rounding."""
    torch.manual_seed(0)
    model = byte_model(small_config(architecture, **settings))
    wake(model, 0.2)
    return model.double().eval()


def text(length: int, seed: int = 0) -> bytes:
    """Bytes of any value, none of which repeats what stood before."""
    generator = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(0, 256, (length,), generator=generator).tolist())


def ids_of(*parts: bytes | int) -> Tensor:
    """Token ids (1, T): bytes as they are, numbers for marks."""
    found: list[int] = []
    for part in parts:
        found += [part] if isinstance(part, int) else encode_bytes(part).tolist()
    return torch.tensor([found])


def one_forward(model: TitansForCausalLM, ids: Tensor) -> tuple[Tensor, Any]:
    """Logits of every token, and the state after all but the last: where a memory stands after these tokens."""
    with torch.no_grad():
        logits = model(ids).logits
        state = model(ids[:, :-1], return_state=True, use_cache=False).state
    return logits, state


def document(data: bytes) -> Tensor:
    return ids_of(BOS, data)


def assert_same_state(a: Any, b: Any, tolerance: float = 1e-9) -> None:
    for (name, x), (_, y) in zip(named_state(a, ""), named_state(b, ""), strict=True):
        torch.testing.assert_close(x, y, rtol=0.0, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def assert_same_memory(a: Memory, b: Memory, tolerance: float = 1e-9) -> None:
    assert (a.tokens, a.open, a.pending.tolist()) == (b.tokens, b.open, b.pending.tolist())
    assert_same_state(a.state, b.state, tolerance)
