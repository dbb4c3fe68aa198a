"""titans-pytorch as a case: run by the Python of its own environment, which holds torch and the peer and nothing else.

    PEERS/bin/python -P peer_side.py < request.json

It measures with the file that our side measures with, loaded by its path: this package is not installed there.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

_spec = importlib.util.spec_from_file_location("bench_measure", Path(__file__).with_name("measure.py"))
if _spec is None or _spec.loader is None:
    raise ImportError("measure.py is not beside peer_side.py")
_measure = importlib.util.module_from_spec(_spec)
sys.modules["bench_measure"] = _measure  # dataclasses look their module up
_spec.loader.exec_module(_measure)


def peer() -> Any:
    """Import the peer, which our own environment does not have."""
    return importlib.import_module("titans_pytorch")


def build_layer(request: dict[str, Any], device: torch.device) -> Any:
    """Its NeuralMemory with the settings of the case, everything else at its default; gradients of all that is used.

    Parameters that never get a gradient (the template of the memory network) are left out, as backward() does.
    """
    case = request["case"]
    settings = {name: case[name] for name in ("heads", "chunk_size", "batch_size") if name in case}
    module = peer().NeuralMemory(dim=case["width"], **settings).to(device)
    x = torch.randn(case["rows"], case["tokens"], case["width"], device=device, requires_grad=True)
    parameters = list(module.parameters())
    step = _measure.one_pass(lambda: module(x)[0], [x, *parameters], request["mode"], x, allow_unused=True)
    facts = {"parameters": sum(p.numel() for p in parameters)}
    return _measure.Runnable(step, case["rows"] * case["tokens"], facts=facts)


def build_model(request: dict[str, Any], device: torch.device) -> Any:
    """Its MAC transformer: a training step with AdamW, or its own cached sampling."""
    case = request["case"]
    model = peer().MemoryAsContextTransformer(
        num_tokens=case["vocab"], dim=case["width"], depth=case["layers"], segment_len=case["segment"],
        num_persist_mem_tokens=case["persistent"], num_longterm_mem_tokens=case["longterm"],
    ).to(device)  # fmt: skip
    facts = {"parameters": sum(p.numel() for p in model.parameters())}
    rows, tokens = case["rows"], case["tokens"]
    if request["mode"] == "generate":
        prompt = torch.randint(0, case["vocab"], (rows, case["prompt"]), device=device)

        @torch.no_grad()
        def generate() -> None:
            model.sample(prompt, case["prompt"] + tokens, use_cache=True, show_progress=False)

        return _measure.Runnable(generate, rows * tokens, calls=tokens, facts=facts)
    text = torch.randint(0, case["vocab"], (rows, tokens + 1), device=device)
    step = _measure.training_step(model, lambda: model(text, return_loss=True))
    return _measure.Runnable(step, rows * tokens, facts=facts)


def work(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    peer()  # loaded before the memory is looked at
    build = build_layer if request["kind"] == "peer_layer" else build_model
    return _measure.measure(request, build, device)


if __name__ == "__main__":
    _measure.serve(work)
