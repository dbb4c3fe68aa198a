"""Checkpoints: all that a run needs to go on as if it had never stopped, and a saved model that needs no run.

A checkpoint is a folder that is there whole or not at all:

    config.json, model.safetensors, tokenizer.json, …    what `AutoModelForCausalLM.from_pretrained` reads
    trainer.pt      step, optimiser, random numbers, carried state: tensors and plain values, no pickled code
    files.json      size and CRC-32 of every file beside it
"""

import errno
import json
import pickle
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from titans_lm.data.text import blocks
from titans_lm.train.files import new_folder, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "titans-lm trainer 1"
TRAINER, FILES, WEIGHTS = "trainer.pt", "files.json", "model.safetensors"
_INCIDENTAL = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "memory_backend",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""What a config.json says beside what the model is and computes."""


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not as it was written."""


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    trainer: dict[str, Any],
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    weights: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint; an interruption at any moment leaves no folder of that name, or the whole one."""
    with new_folder(folder) as unfinished:
        write_checkpoint(unfinished, model, trainer, tokenizer, weights)


def write_checkpoint(
    folder: Path,
    model: nn.Module,
    trainer: dict[str, Any],
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    weights: dict[str, Any] | None = None,
) -> None:
    """Fill the folder of a checkpoint, beside what is in it already, and sum up all of it; for `weights` see below."""
    save_model(folder, model, tokenizer, weights)
    try:
        torch.save({"format": FORMAT, **trainer}, folder / TRAINER)
    except RuntimeError as error:  # a full disk, as torch tells it
        raise OSError(errno.EIO, " ".join(str(error).split())[:300], str(folder / TRAINER)) from error
    write_sums(folder)


def write_sums(folder: Path) -> None:
    """Write size and CRC-32 of all files of a folder beside them."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    write_json(folder / FILES, {path.relative_to(folder).as_posix(): _sum(path) for path in files})


def save_model(
    folder: Path,
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    weights: dict[str, Any] | None = None,
) -> None:
    """Save a model for use: as a Hugging Face folder where it is one of theirs, else its weights in safetensors.

    `weights` are those to save where the model's own are spread over processes, or go on being trained.
    """
    try:
        with quiet_transformers():
            if hasattr(model, "save_pretrained"):
                pretrained: Any = model
                pretrained.save_pretrained(folder, **({} if weights is None else {"state_dict": weights}))
            elif weights is not None:
                safetensors.torch.save_file(_without_ties(weights), folder / WEIGHTS)
            else:
                safetensors.torch.save_model(model, str(folder / WEIGHTS))
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    except safetensors.SafetensorError as error:  # a full disk, as safetensors tells it
        raise OSError(errno.EIO, " ".join(str(error).split())[:300], str(folder)) from error


def _without_ties(weights: dict[str, Any]) -> dict[str, Any]:
    """Leave out further names of one tensor; whoever loads them ties them again."""
    first = {(x.data_ptr(), x.shape, x.stride()): name for name, x in reversed(weights.items())}
    return {name: weights[name].contiguous() for name in weights if name in first.values()}


def load_checkpoint(folder: Path, model: nn.Module) -> dict[str, Any]:
    """Load the weights into a model and return the rest; ValueError, naming the file, where something is amiss.

    Nothing is changed unless all of it can be read.
    """
    verify_checkpoint(folder)
    trainer = load_trainer(folder)
    load_weights(folder, model)
    return trainer


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load saved weights into a model of the same shape; ValueError where they do not fit it."""
    try:
        if hasattr(model, "save_pretrained"):
            pretrained: Any = model
            with quiet_transformers():
                saved, report = type(pretrained).from_pretrained(folder, output_loading_info=True)
            other = _differences(saved.config.to_dict(), pretrained.config.to_dict())
            if other or report["missing_keys"]:
                raise ValueError("; ".join(other) or f"it lacks {', '.join(sorted(report['missing_keys'])[:3])}")
            model.load_state_dict(saved.state_dict())
        else:
            safetensors.torch.load_model(model, str(folder / WEIGHTS))
    except (OSError, RuntimeError, ValueError, safetensors.SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"the weights in {folder} do not fit this {type(model).__name__}: {reason}; "
            "give the model that they were saved from"
        ) from error


def random_state() -> dict[str, Any]:
    """Take down where all random number generators stand, as tensors and plain values."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = legacy
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Put all random number generators where they stood."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
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


def _differences(saved: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Say in what two configs differ: weights may have the same shapes and mean another model."""
    names = (saved.keys() | wanted.keys()) - _INCIDENTAL
    differ = sorted(name for name in names if saved.get(name) != wanted.get(name))
    return [f"it has {name}={saved.get(name)!r}, not {wanted.get(name)!r}" for name in differ]


def load_trainer(folder: Path) -> dict[str, Any]:
    """Read what a checkpoint says beside weights; ValueError where it cannot be read."""
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
    expected = _written(folder)
    for name in sorted({TRAINER, *expected}):
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path} is missing: {_advice(folder)}")
        if _sum(path) != expected.get(name):
            raise DamagedCheckpoint(
                f"{path} is damaged (its size or checksum is not what was written): {_advice(folder)}"
            )
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.relative_to(folder).as_posix() not in {FILES, *expected}:
            raise ValueError(f"{path} was not written with this checkpoint; move it elsewhere to load the checkpoint")


def verify_weights(folder: Path) -> None:
    """Compare a saved model's weights with the sums beside them, where there are any: DamagedCheckpoint."""
    expected = _written(folder) if (folder / FILES).is_file() else {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name in expected and _sum(path) != expected[path.name]:
            raise DamagedCheckpoint(
                f"{path} is damaged (its size or checksum is not what was written); "
                f"bring it back, or remove {FILES} if it was changed on purpose"
            )


def _written(folder: Path) -> dict[str, tuple[int, int]]:
    """Read sizes and sums by file."""
    try:
        files = json.loads((folder / FILES).read_bytes())
        return {name: (int(size), int(crc)) for name, (size, crc) in files.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{folder / FILES} cannot be read: {_advice(folder)}") from error


def _advice(folder: Path) -> str:
    others = [path.name for path in folder.parent.glob("step-*") if path != folder]
    if others:
        return f"remove {folder} to go on from {max(others, key=lambda name: (len(name), name))}"
    return f"remove {folder}; there is no older checkpoint, so the run starts again"


def _sum(path: Path) -> tuple[int, int]:
    size, crc = 0, 0
    for block in blocks(path):
        size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc
