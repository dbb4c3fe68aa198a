"""Checkpoints: all that a run needs to go on as if it had never stopped, and a saved model that needs no run.

A checkpoint is a folder that is there whole or not at all, the same for one process and for several:

    config.json, model.safetensors, tokenizer.json, …    what `AutoModelForCausalLM.from_pretrained` reads
    optimizer.safetensors                                what the optimizer keeps, by parameter
    trainer.pt      step, torch's random numbers, carried state: tensors and plain values, no pickled code
    files.json      size and CRC-32 of every file beside it

Weights and optimizer are whole, so that any number of processes can take a run up. torch's distributed checkpoints
would be written in parts, but the list of the parts is a pickle, which runs whatever code it names when it is read.
"""

import errno
import json
import pickle
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from titans_lm.checks import one_line
from titans_lm.data.text import blocks
from titans_lm.ops.validate import form
from titans_lm.train.files import new_folder, write_json
from titans_lm.train.parallel import full_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "titans-lm trainer 3"
TRAINER, OPTIMIZER, FILES, WEIGHTS = "trainer.pt", "optimizer.safetensors", "files.json", "model.safetensors"
INCIDENTAL = {
    "_name_or_path", "architectures", "auto_map", "dtype", "memory_backend", "torch_dtype", "transformers_version",
    "use_cache",
}  # fmt: skip
"""What a config.json says beside what the model is and computes."""


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not as it was written."""


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    trainer: dict[str, Any],
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    optimizer: Mapping[str, Tensor] | None = None,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write a checkpoint; an interruption at any moment leaves no folder of that name, or the whole one.

    `optimizer` is what `optimizer_tensors` gives. `weights` are saved in place of the model's own, which may be spread
    over processes.
    """
    with new_folder(folder) as unfinished:
        save_model(unfinished, model, tokenizer, weights)
        try:
            kept = {name: tensor.contiguous() for name, tensor in (optimizer or {}).items()}
            safetensors.torch.save_file(kept, unfinished / OPTIMIZER)
            torch.save({"format": FORMAT, **trainer}, unfinished / TRAINER)
        except RuntimeError as error:  # a full disk, as torch tells it
            raise OSError(errno.EIO, one_line(error), str(unfinished)) from error
        write_sums(unfinished)


def write_sums(folder: Path) -> None:
    """Write size and CRC-32 of all files of a folder beside them."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    write_json(folder / FILES, {path.relative_to(folder).as_posix(): _sum(path) for path in files})


def save_model(
    folder: Path,
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Save a model for use: as a Hugging Face folder where it is one of theirs, else its weights in safetensors."""
    with quiet_transformers():
        if hasattr(model, "save_pretrained"):
            pretrained: Any = model
            pretrained.save_pretrained(folder, **({} if weights is None else {"state_dict": weights}))
        else:
            weights = model.state_dict() if weights is None else weights
            safetensors.torch.save_file(_without_ties(weights), folder / WEIGHTS)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def _without_ties(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out further names of one tensor, which has a place only if it has numbers; whoever loads them ties them."""
    first = {(x.data_ptr() or name, x.shape, x.stride()): name for name, x in reversed(weights.items())}
    return {name: weights[name].contiguous() for name in weights if name in first.values()}


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load saved weights into a model of the same shape, on one process or spread; ValueError where they do not fit."""
    try:
        weights = _pretrained(folder, model) if hasattr(model, "save_pretrained") else _read_weights(folder, model)
        model.load_state_dict(_laid_out(weights, model))
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"the weights in {folder} cannot be read: {one_line(error)}") from error
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"the weights in {folder} do not fit this {type(model).__name__}: {one_line(error)}; "
            "give the model that they were saved from"
        ) from error


def _pretrained(folder: Path, model: Any) -> dict[str, Tensor]:
    """Read the weights of a model of Hugging Face; ValueError where its config says that it is another one."""
    with quiet_transformers():
        saved, report = type(model).from_pretrained(folder, output_loading_info=True)
    other = _differences(saved.config.to_dict(), model.config.to_dict())
    if other or report["missing_keys"]:
        raise ValueError("; ".join(other) or f"it lacks {', '.join(sorted(report['missing_keys'])[:3])}")
    return saved.state_dict()


def _read_weights(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """Read the weights of any other model, with all names of what is tied, of which one was saved."""
    weights, names = safetensors.torch.load_file(folder / WEIGHTS), defaultdict[int, list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for tied in names.values():
        saved = next((name for name in tied if name in weights), None)
        if saved is not None:
            weights |= dict.fromkeys(tied, weights[saved])
    return weights


def _laid_out(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Give each process its part of the weights of a model that is spread (FSDP2)."""
    like = model.state_dict()
    return {name: _part(weight, like.get(name)) for name, weight in weights.items()}


def _part(whole: Tensor, like: Tensor | None) -> Tensor:
    """Give this process's part of a tensor that is to be spread as another is."""
    if isinstance(like, DTensor) and like.shape == whole.shape:
        return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)
    return whole


def _differences(saved: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Say in what two configs differ: weights may have the same shapes and mean another model."""
    names = (saved.keys() | wanted.keys()) - INCIDENTAL
    differ = sorted(name for name in names if saved.get(name) != wanted.get(name))
    return [f"it has {name}={saved.get(name)!r}, not {wanted.get(name)!r}" for name in differ]


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, main: bool = True) -> dict[str, Tensor]:
    """Name what an optimizer keeps by its parameters, `lm_head.weight/exp_avg`: whole, on the main process alone.

    All processes call it. Settings of its groups are none of it: a run goes on with those that it is given.
    """
    names, found = {id(parameter): name for name, parameter in model.named_parameters()}, {}
    for parameter, kept in optimizer.state.items():
        for kind, tensor in kept.items():
            whole = full_tensor(tensor)  # one after the other: all of them need not fit on a device
            if main:
                found[f"{names[id(parameter)]}/{kind}"] = whole if whole is tensor else whole.cpu()
    return found


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint's optimizer, each process its part; all of them call it. ValueError where it does not fit."""
    path, parameters = folder / OPTIMIZER, dict(model.named_parameters())
    try:
        saved = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {one_line(error)}; {_advice(folder)}") from error
    order = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    places, state = {which: place for place, which in enumerate(order)}, defaultdict[int, dict[str, Tensor]](dict)
    for title, tensor in saved.items():
        name, _, kind = title.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or id(parameter) not in places or tensor.shape not in ((), parameter.shape):
            raise ValueError(
                f"{path} holds {title!r} {form(tensor)}, which this {type(model).__name__} has no use for; give the "
                "model that the run was begun with"
            )
        state[places[id(parameter)]][kind] = _part(tensor.clone(), parameter)  # a file may be mapped, and change
    optimizer.load_state_dict({"state": dict(state), "param_groups": optimizer.state_dict()["param_groups"]})


def load_trainer(folder: Path) -> dict[str, Any]:
    """Read what a checkpoint says beside weights and optimizer; ValueError where it cannot be read."""
    path = folder / TRAINER
    try:
        trainer = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} cannot be read: {_advice(path.parent)}") from error
    if not isinstance(trainer, dict) or trainer.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by this version of titans-lm; expected format {FORMAT!r}")
    return trainer


def verify_checkpoint(folder: Path) -> None:
    """Compare every file with its size and CRC-32: DamagedCheckpoint; refuse files that were added: ValueError."""
    if not (folder / FILES).is_file():
        raise DamagedCheckpoint(f"{folder} holds no {FILES}, so it is no checkpoint of titans-lm, or not a whole one")
    expected = _written(folder, f": {_advice(folder)}")
    for name in sorted({TRAINER, *expected}):
        if not (folder / name).is_file():
            raise DamagedCheckpoint(f"{folder / name} is missing: {_advice(folder)}")
        _verify(folder / name, expected.get(name), f": {_advice(folder)}")
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.relative_to(folder).as_posix() not in {FILES, *expected}:
            raise ValueError(f"{path} was not written with this checkpoint; move it elsewhere to load the checkpoint")


def verify_weights(folder: Path) -> None:
    """Compare a saved model's weights with the sums beside them, where there are any: DamagedCheckpoint."""
    advice = f"; bring it back, or remove {FILES} if it was changed on purpose"
    for name, expected in _written(folder, advice).items() if (folder / FILES).is_file() else ():
        if name.endswith(".safetensors") and (folder / name).is_file():
            _verify(folder / name, expected, advice)


def _verify(path: Path, expected: tuple[int, int] | None, advice: str) -> None:
    if _sum(path) != expected:
        raise DamagedCheckpoint(f"{path} is damaged (its size or checksum is not what was written){advice}")


def _sum(path: Path) -> tuple[int, int]:
    size, crc = 0, 0
    for block in blocks(path):
        size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def _written(folder: Path, advice: str) -> dict[str, tuple[int, int]]:
    """Read sizes and sums by file."""
    try:
        files = json.loads((folder / FILES).read_bytes())
        return {name: (int(size), int(crc)) for name, (size, crc) in files.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{folder / FILES} cannot be read{advice}") from error


def _advice(folder: Path) -> str:
    others = [path.name for path in folder.parent.glob("step-*") if path != folder]
    if others:
        return f"remove {folder} to go on from {max(others, key=lambda name: (len(name), name))}"
    return f"remove {folder}; there is no older checkpoint, so the run starts again"


def random_state() -> dict[str, Any]:
    """Take down where torch's random number generators stand; batches draw from generators of their own."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: dict[str, Any]) -> None:
    """Put torch's random number generators where they stood."""
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars for loading and saving off the screen, which belongs to our own progress."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
