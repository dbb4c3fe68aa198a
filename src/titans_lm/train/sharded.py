"""Weights and optimiser of a model that is spread over processes, by torch.distributed.checkpoint (DCP).

Each process writes and reads its own part, and DCP lays the parts out for any number of processes: what two have saved,
one or four can load.

DCP keeps its list of tensors (`.metadata`) and plain values as pickles, which run whatever code they name when they are
read. Here they are read by unpicklers that know the classes of such a list, and tensors and plain values, and no more.
"""

import errno
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem
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
METADATA = ".metadata"
_ADMITTED = {
    *(
        (dcp_metadata.__name__, name)
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}  # fmt: skip
"""What the list of a checkpoint's tensors is made of, beside precisions."""


class _ListUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        precision = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not precision and (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no list of tensors holds")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    """DCP's reader, with the list of tensors as it was read by us."""

    def __init__(self, folder: Path, listed: dcp_metadata.Metadata) -> None:
        super().__init__(folder)
        self.listed = listed

    def read_metadata(self, *_: Any, **__: Any) -> dcp_metadata.Metadata:
        return self.listed


class _Planner(DefaultLoadPlanner):
    """DCP's planner, which takes values that are no tensors only where they are plain."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def save_state(folder: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Write this process's part; all processes call it."""
    weights, moments = get_state_dict(plain(model), optimiser)
    try:
        dcp.save({"model": weights, "optimiser": moments}, checkpoint_id=folder / STATE)
    except CheckpointException as error:  # a full disk, as DCP tells it
        raise OSError(errno.EIO, " ".join(str(error).split())[:300], str(folder / STATE)) from error


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
    listed = _read_list(folder / STATE)
    weights, moments = get_state_dict(plain(model), optimiser)
    state: dict[str, Any] = {"model": weights, "optimiser": moments}
    try:
        with warnings.catch_warnings():  # that one process loads alone what several have saved is meant so
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            dcp.load(state, storage_reader=_Reader(folder / STATE, listed), planner=_Planner())
    except (CheckpointException, OSError, RuntimeError, KeyError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{folder / STATE} does not fit this model, or cannot be read: {reason}") from error
    set_state_dict(plain(model), optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"])


def _read_list(folder: Path) -> dcp_metadata.Metadata:
    """Read DCP's list of tensors; ValueError where it is none, or names a file elsewhere."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            listed = _ListUnpickler(file).load()
        if not isinstance(listed, dcp_metadata.Metadata):
            raise TypeError(f"it is a {type(listed).__name__}")
        files = {info.relative_path for info in listed.storage_data.values()}
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{path} cannot be read: {error}; remove the checkpoint {folder.parent}") from error
    if any(Path(name).name != name for name in files):
        raise ValueError(f"{path} names files outside of {folder}; remove the checkpoint {folder.parent}")
    return listed


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
