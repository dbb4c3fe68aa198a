"""Weights and optimiser of a model that is spread over processes, by torch.distributed.checkpoint (DCP).

Each process writes and reads its own part, and DCP lays the parts out for any number of processes: what two have saved,
one or four can load.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from titans_lm.train.beside import copied
from titans_lm.train.parallel import plain

STATE = "state"
"""Folder of a checkpoint that DCP writes."""


def save_state(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Write this process's part; all processes call it."""
    weights, moments = get_state_dict(plain(model), optimiser)
    dcp.save({"model": weights, "optimiser": moments}, checkpoint_id=folder / STATE)


def begin_state(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer, group: Any) -> Callable[[], Any]:
    """Begin to write this process's part, from copies; what comes back waits for the parts of all processes.

    All processes call it. They talk over a group of their own, so that training can go on with its exchange.
    """
    weights, moments = get_state_dict(plain(model), optimiser)
    state = copied({"model": weights, "optimiser": moments}, all_to_cpu=False)  # DCP copies those of a GPU, not others
    written: Any = dcp.async_save(state, checkpoint_id=folder / STATE, process_group=group)
    return getattr(written, "upload_completion", written).result


def load_state(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Read what this process needs of it; all processes call it. ValueError where it cannot be read."""
    from torch.distributed.checkpoint.api import CheckpointException

    weights, moments = get_state_dict(plain(model), optimiser)
    state: dict[str, Any] = {"model": weights, "optimiser": moments}
    try:
        with warnings.catch_warnings():  # that one process loads alone what several have saved is meant so
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            dcp.load(state, checkpoint_id=folder / STATE)
    except (CheckpointException, OSError, RuntimeError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{folder / STATE} does not fit this model, or cannot be read: {reason}") from error
    set_state_dict(plain(model), optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"])


def load_whole_weights(folder: Path, model: nn.Module) -> None:
    """Load weights that one process has saved into a model on several; ValueError where they do not fit."""
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= safetensors.torch.load_file(file)
    owner = plain(model)
    tied = {name for name in owner.state_dict() if name not in weights}
    if not weights or tied - set(getattr(owner, "_tied_weights_keys", None) or ()):
        raise ValueError(f"the weights in {folder} do not fit this {type(owner).__name__}; give the model they are of")
    options = StateDictOptions(full_state_dict=True, strict=not tied)
    try:
        set_model_state_dict(owner, weights, options=options)
    except (RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the weights in {folder} do not fit this {type(owner).__name__}: {reason}") from error


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """All weights, gathered on the main process; empty on the others. All processes call it."""
    return get_model_state_dict(plain(model), options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def has_state(folder: Path) -> bool:
    return (folder / STATE).is_dir()
