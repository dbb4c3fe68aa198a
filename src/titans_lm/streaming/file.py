"""A memory as one file: its tensors in safetensors, and a header that says what they are and whose.

tensors     state.position, state.layers.0.memory.M.0, …, pending: every tensor of the state under its path in it.
            One that is the same tensor as another (M and the anchor at a chunk's border) is written once.
metadata    format, version, and `header`: JSON with the model's fingerprint, what was read, and when
            digest: SHA-256 over header and tensors
"""

import hashlib
import io
import json
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from titans_lm.beyond_config import CachingConfig
from titans_lm.config import BackboneConfig, check_choice
from titans_lm.former import LATER, former_settings
from titans_lm.layers import device_of
from titans_lm.memory import NeuralMemory
from titans_lm.ops.state import map_state, state_dtype
from titans_lm.streaming.memory import NONE, Memory, Source
from titans_lm.streaming.reader import check_readable
from titans_lm.train.files import json_text, write_atomically

FORMAT, VERSION = "titans-memory", 1
Precision = Literal["exact", "bfloat16"]
INCIDENTAL = {"memory_backend", "_name_or_path", "architectures", "dtype", "transformers_version"}
"""Settings that change no result, or are told beside: backends agree with each other."""
SAMPLED = 4096
"""Numbers of a tensor that tell whether it was changed."""
MOST_HEADER = 100_000_000
"""Bytes of a header; safetensors takes no more either."""
_DAMAGE = (
    SafetensorError, KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError, UnicodeDecodeError,
    struct.error,
)  # fmt: skip
_known: "weakref.WeakKeyDictionary[nn.Module, tuple[dict[str, tuple[Any, ...]], str]]" = weakref.WeakKeyDictionary()
_forms: "weakref.WeakKeyDictionary[nn.Module, tuple[str, Any]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 of a model's settings and of its weights, and the precision that the weights were read in."""

    config: str
    weights: str
    dtype: str

    def difference(self, other: "Fingerprint") -> str | None:
        """Say in what another fingerprint differs, or None."""
        if self.config != other.config:
            return "its settings are others"
        if self.dtype != other.dtype:
            return f"its weights were in {self.dtype}, and are in {other.dtype} now"
        return None if self.weights == other.weights else "its weights are others"


def fingerprint(model: nn.Module) -> Fingerprint:
    """Compute a model's fingerprint; weights are hashed again only where a tensor was changed or replaced."""
    digest = hashlib.sha256(json.dumps(_settings(model), sort_keys=True).encode()).hexdigest()
    tensors = {name: _at_hand(model, name, x) for name, x in sorted(model.state_dict().items())}
    marks = {name: _mark(x) for name, x in tensors.items()}
    known = _known.get(model)
    if known is None or known[0] != marks:
        known = _known[model] = (marks, hash_tensors(tensors))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return Fingerprint(digest, known[1], dtype)


def _mark(x: Tensor) -> tuple[Any, ...]:
    """What tells that a tensor was changed; some of its numbers too: through `.data` they change without a version."""
    numbers = x.detach().flatten()
    sample = float(numbers[:: max(1, len(numbers) // SAMPLED)].double().sum())
    return x.data_ptr(), 0 if x.is_inference() else x._version, x.dtype, sample


def _at_hand(model: nn.Module, name: str, x: Tensor) -> Tensor:
    """A weight, from where accelerate keeps it if it is offloaded; ValueError where that is not known."""
    if not x.is_meta:
        return x
    owner, _, own = name.rpartition(".")
    kept = getattr(getattr(model.get_submodule(owner), "_hf_hook", None), "weights_map", None)
    if kept is None:
        raise ValueError(f"got a model whose weight {name} is nowhere at hand; expected one that is loaded")
    return kept[own]


def _settings(model: Any) -> dict[str, Any]:
    """All settings that what a model computes depends on."""
    applied = _applied(model)
    if hasattr(model, "retrofit"):
        base = {name: value for name, value in model.config.to_dict().items() if name not in INCIDENTAL}
        return {"base": base, "adapter": asdict(model.retrofit), **applied}
    config = model.config.backbone_config()
    settings = former_settings(config.decay_first) | {k: v for k, v in asdict(config).items() if k not in INCIDENTAL}
    unchanged = [name for name in LATER if settings[name] == getattr(BackboneConfig, name)]
    known = {k: v for k, v in settings.items() if k not in unchanged}
    return {**known, "vocab_size": model.config.vocab_size, **applied}


def _applied(model: Any) -> dict[str, Any]:
    """What was done to a model after it was made: other caching in its memories, adapters that are turned off."""
    names, modules = [field.name for field in fields(CachingConfig)], list(model.modules())
    made = [getattr(model.config, name, None) for name in names]
    several = [[getattr(m.config, name) for name in names] for m in modules if isinstance(m, NeuralMemory)]
    found: dict[str, Any] = {"caching": several} if any(one != made for one in several) else {}
    if any(getattr(m, "disable_adapters", False) is True for m in modules):
        found["adapters"] = "off"
    elif chosen := _adapters(modules):
        found["adapters"] = chosen
    return found


def _adapters(modules: list[Any]) -> list[Any]:
    """Which of a model's PEFT adapters are in use, and how much of each: nothing where that is all of all."""
    tuned = [m for m in modules if isinstance(getattr(m, "active_adapters", None), list) and hasattr(m, "scaling")]
    used = [({name: m.scaling[name] for name in m.active_adapters if name in m.scaling}, m) for m in tuned]
    return [scales for scales, m in used if scales != dict.fromkeys(m.scaling, 1)]


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, precisions, shapes and contents."""
    digest = hashlib.sha256()
    for name, x in tensors.items():
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        plain = x.detach().to("cpu").contiguous()
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Header:
    """What a memory file says of itself."""

    model: Fingerprint
    tokens: tuple[int, ...]
    open: tuple[bool, ...]
    sources: tuple[tuple[Source, ...], ...]
    written: str
    """When, in UTC."""
    precision: Precision
    loss: dict[str, float]
    """With bfloat16: ‖x − bf16(x)‖ / ‖x‖ of every tensor that was rounded."""
    shared: dict[str, str]
    """Tensors that are another one, by name."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What whoever wrote it wanted to say beside it."""

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """All tensors of the state, those that are another one among them."""
        return tensors | {name: tensors[same] for name, same in self.shared.items() if same in tensors}

    @classmethod
    def parse(cls, text: str) -> "Header":
        values = json.loads(text)
        values["model"] = Fingerprint(**values["model"])
        values["sources"] = tuple(tuple(Source(**source) for source in row) for row in values["sources"])
        values["shared"] = dict(values["shared"])
        return cls(**{**values, "tokens": tuple(values["tokens"]), "open": tuple(values["open"])})


def save_memory(
    memory: Memory,
    path: str | Path,
    model: nn.Module,
    *,
    precision: Precision = "exact",
    notes: dict[str, Any] | None = None,
) -> Header:
    """Write a memory to a file, which appears whole or not at all, and return what it says of itself.

    "bfloat16" halves it and rounds M, S and the rest of the state; the header has how much that changed each tensor.
    `notes` are kept beside it, as JSON. ValueError for the memory of a model with another state, and for
    numbers that are not finite, which nobody could load.
    """
    check_choice("precision", precision, ("exact", "bfloat16"))
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, x in named_state(memory.state, "state"):
        same = first.setdefault(id(x), name)
        if same == name:
            tensors[name] = x.detach().to("cpu").contiguous()
        else:
            shared[name] = same
    if broken := not_finite(tensors):
        raise ValueError(
            f"got a memory with numbers that are not finite, in {', '.join(broken[:3])}; expected that of a model that "
            "has not diverged, and is not damaged"
        )
    loss: dict[str, float] = {}
    if precision == "bfloat16":
        for name, x in tensors.items():
            if x.is_floating_point():
                tensors[name] = x.to(torch.bfloat16)
                size = x.norm().item()
                loss[name] = (tensors[name].to(x.dtype) - x).norm().item() / size if size else 0.0
    tensors["pending"] = memory.pending.clone()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    header = Header(
        fingerprint(model), memory.tokens, memory.open, memory.sources, now, precision, loss, shared, notes or {}
    )
    if not _fits(header, header.whole(tensors), model, _form(model, header)):
        raise ValueError(
            "got a memory whose tensors are not those of this model's state; expected the model that has read it, such "
            "as reader.model"
        )
    text = json_text(asdict(header))
    metadata = {"format": FORMAT, "version": str(VERSION), "header": text, "digest": _digest(text, tensors)}
    # safetensors copies what it is given to bytes; views of one storage become tensors of their own
    try:
        data = safetensors.torch.save({k: v.clone() for k, v in tensors.items()}, metadata)
    except SafetensorError as error:
        count = sum(map(len, memory.sources))
        raise ValueError(f"got a memory of {count:,} sources, too many for a file ({error}); expected fewer") from error
    write_atomically(Path(path), data, 0o600)  # it tells what was read
    return header


def load_memory(path: str | Path, model: nn.Module) -> Memory:
    """Read a memory that this model has written; ValueError for another model's and for a file that is not whole."""
    return open_memory(path, model)[1]


def open_memory(path: str | Path, model: nn.Module) -> tuple[Header, Memory]:
    """`load_memory`, and what the file says of itself."""
    check_readable(model)
    header, tensors = read_memory_file(path)
    other = header.model.difference(fingerprint(model))
    if other is not None:
        raise ValueError(f"got the memory {str(path)!r} of another model: {other}; give the model that has written it")
    pattern = _form(model, header)
    precision = state_dtype(next(model.parameters()).dtype)
    for name, x in tensors.items():
        if x.is_floating_point():
            tensors[name] = x.to(precision)
    tensors = header.whole(tensors)
    if not _fits(header, tensors, model, pattern):
        raise ValueError(f"got the memory {str(path)!r}, whose tensors are not those of this model's state")
    if not_finite(tensors):
        raise ValueError(f"the memory {str(path)!r} holds numbers that are not finite")
    parts = (tensors[name] for name, _ in named_state(pattern, "state"))
    state = map_state(lambda _: next(parts), pattern)
    memory = Memory(state, tensors["pending"], header.tokens, header.open, header.sources)
    owner: Any = model
    return header, memory.to(device_of(owner.get_input_embeddings()))


def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """Name the tensors that hold infinity or NaN."""
    return [name for name, x in tensors.items() if not bool(x.isfinite().all())]


def _form(model: Any, header: Header) -> Any:
    """A state of one row of the model without its numbers, made once as long as the model has these settings."""
    known = _forms.get(model)
    if known is None or known[0] != header.model.config:
        with torch.no_grad():
            known = header.model.config, map_state(lambda x: x.to("meta"), model.init_state(1))
        _forms[model] = known
    return known[1]


def _fits(header: Header, tensors: dict[str, Tensor], model: Any, form: Any) -> bool:
    """Whether names, shapes, kinds of numbers and rows are those of a model's state."""
    rows, pattern, vocab_size = len(header.tokens), dict(named_state(form, "state")), model.config.vocab_size
    if tensors.keys() != pattern.keys() | {"pending"} or not tensors.keys() >= set(header.shared.values()):
        return False
    pending = tensors["pending"]
    pairs = [(tensors[name], x) for name, x in pattern.items()]
    return (
        all(x.shape == (rows, *like.shape[1:]) for x, like in pairs)
        and all(x.dtype == like.dtype or (x.is_floating_point() and like.is_floating_point()) for x, like in pairs)
        and (pending.shape, pending.dtype) == ((rows,), torch.int64)
        and bool(((pending >= NONE) & (pending < vocab_size)).all())
        and rows == len(header.open) == len(header.sources)
        and all(isinstance(count, int) for count in header.tokens)
    )


def read_memory_file(path: str | Path) -> tuple[Header, dict[str, Tensor]]:
    """Read header and tensors of a memory file without its model; ValueError unless every bit is as it was written."""
    path = Path(path)
    with _reading(path):
        data = path.read_bytes()  # at once: another process may give the path to another file meanwhile
        metadata = _metadata(path, io.BytesIO(data))
        # Copies: they lie in memory as tensors do that were computed, to the last bit of what is computed with them.
        tensors = {name: x.clone() for name, x in safetensors.torch.load(data).items()}
        header = Header.parse(metadata["header"])
    if _digest(metadata["header"], tensors) != metadata.get("digest"):
        raise ValueError(f"the memory {str(path)!r} is damaged: its contents are not what was written")
    return header, tensors


def read_header(path: str | Path) -> Header:
    """Read what a memory file says of itself and nothing else; whether its tensors are whole is not looked at."""
    path = Path(path)
    with _reading(path), path.open("rb") as file:
        return Header.parse(_metadata(path, file)["header"])


def check_memory_file(path: str | Path | None) -> None:
    """Refuse what is no memory file before a model is loaded for it; None is no file."""
    if path is not None:
        read_header(path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Read a memory file; whatever shows that it is none, or not whole, is a ValueError."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"got the memory {str(path)!r}, which {found}; expected a file that `titans read` has written")
    try:
        yield
    except _DAMAGE as error:
        raise ValueError(f"the memory {str(path)!r} cannot be read: it is damaged or not whole ({error})") from error


def _metadata(path: Path, file: io.BufferedIOBase) -> dict[str, str]:
    other = ValueError(f"got {str(path)!r}, which is no memory file; expected one that `titans read` has written")
    first = file.read(8)
    if len(first) < 8:
        raise SafetensorError(f"it has {len(first)} bytes")
    (length,) = struct.unpack("<Q", first)
    if length > MOST_HEADER:
        raise SafetensorError(f"its header would be {length:,} bytes") if file.read(1) == b"{" else other
    metadata = json.loads(file.read(length)).get("__metadata__") or {}
    if metadata.get("format") != FORMAT:
        raise other
    version = metadata.get("version", "")
    if version != str(VERSION):
        raise ValueError(
            f"got the memory {str(path)!r} in format {version or 'unknown'}; this version of titans-lm reads format "
            f"{VERSION}; update titans-lm, or read the text again"
        )
    return metadata


def named_state(state: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested state with its path: fields of NamedTuples by name, others by number."""
    if isinstance(state, Tensor):
        yield name, state
    elif state is not None:
        fields = getattr(state, "_fields", None) or range(len(state))
        for field, part in zip(fields, state, strict=True):
            yield from named_state(part, f"{name}.{field}")


def _digest(header: str, tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256(f"{header}\n{hash_tensors(dict(sorted(tensors.items())))}".encode()).hexdigest()
