"""AdamW on the right groups, and a learning rate that is a function of the step."""

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from titans_lm.train.settings import FitSettings


def decays(model: nn.Module) -> dict[str, bool]:
    """Say for every trained parameter, once each, whether weight decay pulls on it.

    It pulls on weight matrices and convolution kernels only: tensors named `weight` of two dimensions or more in a
    module that is no embedding. Biases, norms, embeddings, and what a module learns beside its layers (persistent
    tokens, initial memories) are not made smaller by a rule; a matrix tied to an embedding counts as the embedding.
    """
    spared = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    return {
        name: name.rpartition(".")[2] == "weight"
        and parameter.dim() >= 2
        and id(parameter) not in spared
        and not getattr(parameter, "_no_weight_decay", False)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def build_optimiser(model: nn.Module, settings: FitSettings) -> torch.optim.AdamW:
    """Build AdamW with one group that decays and one that does not; ValueError where nothing is trained."""
    parameters = dict(model.named_parameters())
    decay = decays(model)
    if not decay:
        raise ValueError("got a model without a parameter that requires a gradient; expected something to train")
    groups = [
        {"params": [(name, parameters[name]) for name in decay if decay[name] is choice], "weight_decay": weight_decay}
        for choice, weight_decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    fused = all(parameters[name].device.type in ("cpu", "cuda") for name in decay)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        fused=fused,
    )


def learning_rate(step: int, settings: FitSettings) -> float:
    """Return the learning rate of a step, counted from 0: a straight rise, then half a cosine to the floor.

    lr (step + 1) / warmup_steps                              step < warmup_steps
    lr (floor + (1 − floor) (1 + cos π p) / 2)                after, p from 0 to 1 at the last step
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    last = max(settings.steps - 1 - settings.warmup_steps, 1)
    progress = min((step - settings.warmup_steps) / last, 1.0)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.lr * (settings.lr_floor + (1.0 - settings.lr_floor) * cosine)


def load_whole_optimiser(optimiser: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Load what an optimiser of one process has saved; each process takes its part where parameters are in parts."""
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    state = {}
    for number, kept in saved["state"].items():
        like = parameters[number]
        state[number] = {
            name: distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
            if isinstance(like, DTensor) and value.shape == like.shape
            else value
            for name, value in kept.items()
        }
    optimiser.load_state_dict({**saved, "state": state})
