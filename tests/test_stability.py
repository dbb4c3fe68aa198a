"""Nothing that can be read breaks a memory, and no start of a training does: numbers stay finite (derivation, 12).

Two blocks of width 64 over bytes, all other settings as they come. Beside the default gates, the worst that training
could make of them: the largest step and momentum at every token, and nothing forgotten.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_cases import MEMORIES
from titans_lm.hf import TitansConfig, TitansForCausalLM
from titans_lm.memory_rule import MemoryRule
from titans_lm.ops.state import state_tensors

STREAM, PIECE = 100_000, 4_000
SPACE, HIGH, LOW = 32, 1, 2

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked")]


BARE = {"memory_norm": False, "memory_residual": False}
"""A deep memory without what keeps its answers in bounds: it has the bound on θ by fan-in (D14)."""
OTHERS = [{"memory_objective": "huber"}, {"memory_objective": "lp"}, {"memory_objective": "lp", **BARE}]
OTHERS += [{"omega_window": 4, "memory_depth": 1}, {"key_degree": 2, "memory_depth": 1}]
FOUR = tuple(name for name in MEMORIES if name != "tnt")
"""Those of one memory a block; what bounds it bounds each of several, and their time is as many times as long."""
SMALLER = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
"""For settings beyond the paper (D48 to D50), and for a precision that changes no bound."""
SIZES: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": SMALLER}


def byte_model(architecture: str, **own: Any) -> TitansForCausalLM:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2}
    return TitansForCausalLM(TitansConfig(architecture=architecture, **sizes | own))


def adversarial_pieces(tokens: int) -> Iterator[Tensor]:
    """Three rows: one byte over and over, random bytes, and two bytes that are opposite extremes in turn."""
    for start in range(0, tokens, PIECE):
        length = min(PIECE, tokens - start)
        same = torch.full((length,), SPACE)
        yield torch.stack([same, torch.randint(0, 256, (length,)), HIGH + torch.arange(length) % 2])


def largest_numbers(model: TitansForCausalLM, tokens: int) -> tuple[float, float]:
    """Stream the rows through the model; the largest |number| that was ever in its state, and in its logits."""
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[HIGH] *= 100.0
        embedding[LOW] = -embedding[HIGH]
    state, in_state, in_logits = None, 0.0, 0.0
    with torch.inference_mode():
        for ids in adversarial_pieces(tokens):
            out = model(ids, state=state, return_state=True, use_cache=False)
            state = out.state
            numbers = [x.abs().max().item() for x in state_tensors(state) if x.is_floating_point()]
            assert all(map(math.isfinite, numbers))
            assert bool(out.logits.isfinite().all())
            in_state, in_logits = max(in_state, *numbers), max(in_logits, out.logits.abs().max().item())
    return in_state, in_logits


@pytest.mark.parametrize("precision", SIZES)
@pytest.mark.parametrize("architecture", FOUR)
def test_a_hundred_thousand_hostile_tokens_leave_a_memory_finite(architecture: str, precision: str) -> None:
    model = byte_model(architecture, **SIZES[precision]).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
        in_state, in_logits = largest_numbers(model, STREAM)
    assert in_state < 1e3
    assert in_logits < 1e4


@pytest.mark.parametrize(
    ("architecture", "own"),
    [
        *((name, {}) for name in FOUR),
        ("tnt", SMALLER),
        ("lmm", BARE),
        ("lmm", {"memory_depth": 4, "memory_expansion": 2}),
        *(("lmm", SMALLER | own) for own in OTHERS),
    ],
)
def test_gates_at_their_bounds_leave_a_memory_finite(architecture: str, own: dict[str, Any]) -> None:
    model = byte_model(architecture, **own).eval()
    for rule in (module for module in model.modules() if isinstance(module, MemoryRule)):
        for gate, logit in (("theta_proj", 20.0), ("eta_proj", 20.0), ("alpha_proj", -20.0)):
            torch.nn.init.constant_(getattr(rule, gate).proj.bias, logit)
    in_state, _ = largest_numbers(model, 20_000)
    assert in_state < 1e3


@pytest.mark.parametrize("own", [own for own in OTHERS if own.get("memory_norm", True)], ids=str)
def test_other_memories_stay_finite_as_well(own: dict[str, Any]) -> None:
    in_state, in_logits = largest_numbers(byte_model("lmm", **SMALLER, **own).eval(), STREAM)
    assert in_state < 1e3
    assert in_logits < 1e4


def source_text() -> Tensor:
    """Real text that is on every machine: a file of the standard library."""
    return torch.tensor(list(Path(argparse.__file__).read_bytes()))


@pytest.mark.parametrize("architecture", FOUR)
def test_a_reckless_training_stays_finite(architecture: str) -> None:
    """500 steps of AdamW at learning rate 0.03 from the first step on."""
    model, text, length = byte_model(architecture).train(), source_text(), 64
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-2)
    losses = []
    for step in range(500):
        start = step * length % (len(text) - length)
        ids = text[None, start : start + length]
        loss = model(ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert math.isfinite(loss.item()), step
        assert math.isfinite(norm.item()), step
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert sum(losses[-50:]) / 50 < losses[0], "it has learned something even so"
