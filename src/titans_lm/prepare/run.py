"""Text into a token folder: read, split, encode, write; and go on where it was stopped."""

import json
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titans_lm.data.prepared import (
    FORMAT,
    INDEX,
    TOKENIZER,
    TRAIN,
    VALID,
    Shard,
    TokenFolder,
    read_index,
    tokenizer_fingerprint,
)
from titans_lm.data.text import Document, chance, split_position
from titans_lm.data.tokenizer import TokenIds
from titans_lm.prepare.progress import PreparingReport
from titans_lm.prepare.settings import PrepareSettings
from titans_lm.prepare.shards import ShardWriter
from titans_lm.prepare.sources import Source, open_source
from titans_lm.prepare.tokenise import Encoder, load_tokenizer, train_bpe, use_threads
from titans_lm.train.files import new_folder, remove_unfinished, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STARTED = "preparing.json"
"""What there is of a folder that is not finished."""
AT_ONCE = 1 << 20
"""Bytes of text that are encoded together."""
MOST_AT_ONCE = 1024
"""Documents that are encoded together."""


@dataclass(frozen=True)
class Task:
    """A document of the source: where it ends up, and the place after it in its split's order of the source."""

    split: str
    document: Document
    position: int


def prepare(settings: PrepareSettings, *, progress: PreparingReport | None = None) -> dict[str, Any]:
    """Turn text into a token folder (data/prepared), and report what came out and how fast.

    Stopped at any moment, the same call goes on after the last finished shard and gives the same files. Raises
    ValueError for a source or tokenizer that will not do, for a folder that was begun with other settings, another
    tokenizer or a source that has changed since, and for a split that nothing fell into; OSError for a full disk.
    """
    progress = progress or PreparingReport(quiet=True)
    if settings.source is None or settings.out is None:
        raise ValueError("got no source or no out; expected titans prepare SOURCE --out FOLDER")
    use_threads(settings.workers)
    out, started = settings.out, time.monotonic()
    source = open_source(settings.source, settings)
    valid = None if settings.valid is None else open_source(settings.valid, settings)
    if valid is None and settings.held_out in (0.0, 1.0):
        raise ValueError(
            f"got held_out={settings.held_out:g} without valid, which leaves nothing to "
            f"{'test' if settings.held_out == 0.0 else 'train'} on; expected a share between, or --valid SOURCE"
        )
    asked = _asked(settings, source, valid)
    if (out / INDEX).is_file():
        return _finished(out, asked)
    begun = _begun(out, asked)
    progress.start()
    if begun is None:
        begun = _begin(out, asked, _tokenizer(settings, source, valid, progress))
    encoder = _encoder(out, begun)
    writers = {
        name: ShardWriter(
            out, name, encoder.dtype, settings.shard_tokens, [Shard(**shard) for shard in part["shards"]],
            part["position"],
        )
        for name, part in begun["splits"].items()
    }  # fmt: skip
    remove_unfinished(out)
    reading = time.monotonic()
    work = _Work(out, begun, writers, progress)
    try:
        work.run(_tasks(settings, source, valid), encoder)
    finally:
        for writer in writers.values():
            writer.discard()
    skipped = [*source.skipped, *(valid.skipped if valid is not None else [])]
    index = _finish(out, begun, writers, skipped)
    seconds = time.monotonic() - started
    return {
        **TokenFolder(out, verify=False).describe(),
        "shards": sum(len(shards) for shards in index["splits"].values()),
        "skipped": len(skipped),
        "seconds": seconds,
        "megabytes_per_second": work.bytes / 1e6 / (time.monotonic() - reading),
        "peak_resident_bytes": peak_resident(),
        "folder": str(out),
    }


def peak_resident() -> int:
    """Most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class _Work:
    """Documents on their way: read here, encoded in a thread beside, written here in the order they were read."""

    def __init__(
        self, out: Path, begun: dict[str, Any], writers: dict[str, ShardWriter], progress: PreparingReport
    ) -> None:
        self.out, self.begun, self.writers, self.progress = out, begun, writers, progress
        self.bytes = 0

    def run(self, tasks: Iterable[Task], encode: Callable[[list[Document]], list[TokenIds]]) -> None:
        waiting: deque[tuple[list[Task], Future[list[TokenIds]]]] = deque()
        done = {name: writer.position for name, writer in self.writers.items()}
        last = dict(done)
        with ThreadPoolExecutor(1) as encoding:
            for group in _groups(task for task in tasks if task.position > done[task.split]):
                waiting.append((group, encoding.submit(encode, [task.document for task in group])))
                if len(waiting) > 2:
                    self._write(*waiting.popleft(), last)
            while waiting:
                self._write(*waiting.popleft(), last)
        for name, writer in self.writers.items():
            writer.close(last[name])

    def _write(self, group: list[Task], encoded: Future[list[TokenIds]], last: dict[str, int]) -> None:
        for task, tokens in zip(group, encoded.result(), strict=True):
            size = len(task.document.data)
            self.bytes += size
            last[task.split] = task.position
            if self.writers[task.split].add(tokens, size, task.position):
                write_json(self.out / STARTED, {**self.begun, "splits": _told(self.writers)})
        self.progress.update(self.bytes)


def _groups(tasks: Iterable[Task]) -> Iterator[list[Task]]:
    group: list[Task] = []
    size = 0
    for task in tasks:
        group.append(task)
        size += len(task.document.data)
        if size >= AT_ONCE or len(group) >= MOST_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _told(writers: dict[str, ShardWriter]) -> dict[str, Any]:
    return {
        name: {"shards": [asdict(shard) for shard in writer.closed], "position": writer.position}
        for name, writer in writers.items()
    }


def _tasks(settings: PrepareSettings, source: Source, valid: Source | None) -> Iterator[Task]:
    """Say of every document which split it belongs to: by a hash of its name, or by the source that it comes from."""
    for position, document in enumerate(_limited(source, settings.max_documents), 1):
        if valid is None and source.single:
            (train,), (held,), _ = split_position(document, settings.held_out)
            yield Task(TRAIN, train, position)
            yield Task(VALID, held, position)
        else:
            held_out = valid is None and chance(document.name) < settings.held_out
            yield Task(VALID if held_out else TRAIN, document, position)
    for position, document in enumerate(valid or (), 1):
        yield Task(VALID, document, position)


def _limited(source: Source, most: int) -> Iterator[Document]:
    for number, document in enumerate(source, 1):
        yield document
        if number == most:
            return


def _tokenizer(
    settings: PrepareSettings, source: Source, valid: Source | None, progress: PreparingReport
) -> "PreTrainedTokenizerBase":
    if not settings.train_bpe:
        return load_tokenizer(settings.tokenizer)
    progress.say(f"training a BPE of {settings.train_bpe:,} ids")
    texts = (task.document for task in _tasks(settings, source, valid) if task.split == TRAIN)
    return train_bpe(texts, settings)


def _asked(settings: PrepareSettings, source: Source, valid: Source | None) -> dict[str, Any]:
    """What the content of the folder depends on; the tokenizer's own rules come with it."""
    names = "source", "tokenizer", "train_bpe", "bpe_bytes", "column", "subset", "split", "held_out", "valid"
    asked = {name: getattr(settings, name) for name in (*names, "max_documents", "shard_tokens")}
    return asked | {"found": source.identity, "found_valid": None if valid is None else valid.identity}


def _same(out: Path, before: dict[str, Any], asked: dict[str, Any]) -> None:
    """Refuse to go on with other text or another tokenizer than the folder was begun with."""
    for name in ("tokenizer", "train_bpe"):
        if before.get(name) != asked[name]:
            raise ValueError(
                f"{out} was begun with {name}={before.get(name)!r}, and {asked[name]!r} is asked for: tokens of two "
                "tokenizers do not mix; give the same one, or another folder"
            )
    changed = [name for name in asked if before.get(name) != asked[name]]
    if "found" in changed or "found_valid" in changed:
        raise ValueError(
            f"the text of {out} has changed since it was begun (names, sizes or times of files); remove the folder to "
            "begin anew, or give another one"
        )
    if changed:
        said = ", ".join(f"{name}={before.get(name)!r}" for name in changed)
        raise ValueError(f"{out} was begun with {said}; give the same settings, or another folder")


def _finished(out: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """The folder is there already: say so, if it is what was asked for."""
    _same(out, read_index(out / INDEX)["asked"], asked)
    return {**TokenFolder(out).describe(), "folder": str(out), "was_there": True}


def _begun(out: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """What an earlier call has left; ValueError for a folder that holds something else."""
    if not (out / STARTED).is_file():
        remove_unfinished(out)
        found = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
        if found and found != [TOKENIZER]:
            raise ValueError(f"got the folder {out}, which holds {found[0]!r} already; expected a new or empty one")
        return None
    try:
        begun = json.loads((out / STARTED).read_bytes())
    except ValueError as error:
        raise ValueError(f"{out / STARTED} cannot be read: {error}; remove the folder to begin anew") from error
    _same(out, begun["asked"], asked)
    return begun


def _begin(out: Path, asked: dict[str, Any], tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    with new_folder(out / TOKENIZER) as folder:
        tokenizer.save_pretrained(folder)
    tokenizer = load_tokenizer(str(out / TOKENIZER))  # what training will load
    name = f"BPE of {asked['train_bpe']:,} ids, trained on the text" if asked["train_bpe"] else asked["tokenizer"]
    told = {
        "name": name, "fingerprint": tokenizer_fingerprint(tokenizer), "vocab_size": len(tokenizer),
        "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id,
    }  # fmt: skip
    splits = {name: {"shards": [], "position": 0} for name in (TRAIN, VALID)}
    begun = {"format": FORMAT, "asked": asked, "tokenizer": told, "splits": splits}
    write_json(out / STARTED, begun)
    return begun


def _encoder(out: Path, begun: dict[str, Any]) -> Encoder:
    """The folder's own tokenizer; ValueError where it is not the one that the folder was begun with."""
    tokenizer = load_tokenizer(str(out / TOKENIZER))
    found, expected = tokenizer_fingerprint(tokenizer), begun["tokenizer"]["fingerprint"]
    if found != expected:
        raise ValueError(
            f"{out / TOKENIZER} holds another tokenizer ({found}) than the folder was begun with ({expected}): tokens "
            "of two tokenizers do not mix; bring that one back, or give another folder"
        )
    return Encoder(tokenizer)


def _finish(out: Path, begun: dict[str, Any], writers: dict[str, ShardWriter], skipped: list[str]) -> dict[str, Any]:
    """Write the index, which makes the folder one that can be trained on."""
    for name, writer in writers.items():
        if not writer.closed:
            raise ValueError(
                f"no document fell into the {name} split; remove {out}, and give more documents, another --held-out, "
                "or --valid SOURCE"
            )
    index = {
        **{name: begun[name] for name in ("format", "asked", "tokenizer")},
        "dtype": writers[TRAIN].dtype.str,
        "splits": {name: part["shards"] for name, part in _told(writers).items()},
        "skipped": skipped[:100],
    }
    write_json(out / INDEX, index)
    (out / STARTED).unlink()
    return index
