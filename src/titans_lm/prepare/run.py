"""Text into a token folder: read, split, encode, write into shards; and go on where it was stopped."""

import json
import math
import os
import resource
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titans_lm.data.prepared import (
    FORMAT,
    INDEX,
    STARTED,
    TOKENIZER,
    TRAIN,
    VALID,
    Shard,
    TokenFolder,
    folder_tokenizer,
    read_index,
    tokenizer_fingerprint,
)
from titans_lm.data.text import Document, chance, check_apart, split_position
from titans_lm.data.tokenizer import TokenIds, count_ids
from titans_lm.prepare.settings import PrepareSettings
from titans_lm.prepare.sources import Refused, Source, open_source
from titans_lm.prepare.tokenise import Encoder, grouped, load_tokenizer, train_bpe, use_threads
from titans_lm.train.files import (
    IN_USE,
    claimed,
    hidden,
    made,
    new_folder,
    publish,
    remove_folder,
    remove_unfinished,
    write_atomically,
    write_json,
)
from titans_lm.train.progress import CountReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ShardWriter:
    """The shards of one split: whole documents, a new file after `shard_tokens` tokens.

    `closed` are those that are finished, and `position` is where the source stood when the last of them was: documents
    before it need not be read again. An OSError names the file and says that finished shards are kept.
    """

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int, closed: list[Shard], position: int
    ) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.closed, self.position = closed, position
        self._begin()

    def _begin(self) -> None:
        self.file, self.digest = None, blake2b(digest_size=16)
        self.tokens, self.documents = 0, list[tuple[int, int]]()

    @property
    def name(self) -> str:
        return f"{self.split}-{len(self.closed):05d}.bin"

    def add(self, tokens: TokenIds, text_bytes: int, position: int) -> bool:
        """Write a document, the one before `position` of the source; whether that has closed a shard."""
        data = np.ascontiguousarray(tokens, self.dtype).tobytes()
        try:
            if self.file is None:
                self.file = tempfile.NamedTemporaryFile(prefix=hidden(), dir=self.folder, delete=False)  # noqa: SIM115
            self.file.write(data)
        except OSError as error:
            raise self._failed(error) from error
        self.digest.update(data)
        self.tokens += len(tokens)
        self.documents.append((self.tokens, text_bytes))
        return self.tokens >= self.shard_tokens and self.close(position)

    def close(self, position: int) -> bool:
        """Finish the shard, if one was begun; documents before `position` are done."""
        self.position = position
        if self.file is None:
            return False
        path = self.folder / self.name
        documents = np.array(self.documents, np.int64).reshape(-1, 2)
        ends = BytesIO()
        np.save(ends, documents)
        try:
            write_atomically(path.with_suffix(".npy"), ends.getvalue())
            publish(self.file, path)
        except OSError as error:
            raise self._failed(error) from error
        self.closed.append(
            Shard(
                path.name, self.tokens, len(documents), int(documents[:, 1].sum()), self.digest.hexdigest(),
                blake2b(ends.getvalue(), digest_size=16).hexdigest(),
            )
        )  # fmt: skip
        self._begin()
        return True

    def discard(self) -> None:
        """Remove what is not finished."""
        if self.file is not None:
            with suppress(OSError):  # on a full disk what is still in the buffer cannot be written
                self.file.close()
            Path(self.file.name).unlink(missing_ok=True)
            self._begin()

    def _failed(self, error: OSError) -> OSError:
        self.discard()
        why = error.strerror or os.strerror(error.errno or 0)
        told = f"{why}; finished shards are kept: free space, and run the same command again"
        return OSError(error.errno, told, str(self.folder / self.name))


AT_ONCE, MOST_AT_ONCE = 1 << 20, 1024
"""Bytes of text, and documents, that are encoded together."""


@dataclass(frozen=True)
class Placed:
    """A document of the source: where it ends up, and the place after it in its split's order of the source."""

    split: str
    document: Document
    position: int


def prepare(settings: PrepareSettings, *, progress: CountReport | None = None) -> dict[str, Any]:
    """Turn text into a token folder (data/prepared), and report what came out and how fast.

    Stopped at any moment, the same call goes on after the last finished shard and gives the same files. Raises
    ValueError for a source or tokenizer that will not do, for a folder that was begun with other settings, another
    tokenizer or a source that has changed since (of a data set on the hub names alone are compared), and for a split
    that nothing fell into; OSError for a full disk. Where the content of the source is what will not do, nothing of it
    stays.
    """
    progress = progress or CountReport(quiet=True, title="preparing")
    if settings.source is None or settings.out is None:
        raise ValueError("got no source or no out; expected titans prepare SOURCE --out FOLDER")
    use_threads(settings.workers)
    out, started = settings.out, time.monotonic()
    source = open_source(settings.source, settings)
    valid = None if settings.valid is None else open_source(settings.valid, settings)
    if settings.valid is not None:
        check_apart(settings.source, settings.valid)
    if valid is None and settings.held_out in (0.0, 1.0):
        raise ValueError(
            f"got held_out={settings.held_out:g} without valid, which leaves nothing to "
            f"{'test' if settings.held_out == 0.0 else 'train'} on; expected a share between, or --valid SOURCE"
        )
    asked = _asked(settings, source, valid)
    if (out / INDEX).is_file():
        check_same(out, read_index(out / INDEX)["asked"], asked)
        TokenFolder(out, verify=False).tokenizer()  # whoever trains needs it as much as the shards
        return {**TokenFolder(out).describe(), "folder": str(out), "was_there": True}
    with made(out), claimed(out / IN_USE):
        begun = _begun(out, asked)
        progress.start()
        begun = begun or _begin(out, asked, _tokenizer(settings, source, valid, progress))
        folder = _Folder(out, begun, settings.shard_tokens)
        remove_unfinished(out)
        reading = time.monotonic()
        try:
            done = folder.fill(_placed(settings, source, valid), progress)
            skipped = [*source.skipped, *(valid.skipped if valid is not None else [])]
            index = folder.finish(skipped)
        except Refused:
            folder.remove()
            raise
    return {
        **TokenFolder(out, verify=False).describe(),
        "shards": sum(len(shards) for shards in index["splits"].values()),
        "skipped": len(skipped),
        "seconds": time.monotonic() - started,
        "megabytes_per_second": done / 1e6 / (time.monotonic() - reading),
        "peak_resident_bytes": peak_resident(),
        "folder": str(out),
    }


def peak_resident() -> int:
    """Most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class _Folder:
    """A token folder that is being filled: documents are read here, encoded in a thread beside, written in order."""

    def __init__(self, out: Path, begun: dict[str, Any], shard_tokens: int) -> None:
        self.out, self.begun, self.encode = out, begun, Encoder(folder_tokenizer(out, begun))
        self.writers = {
            name: ShardWriter(
                out, name, self.encode.dtype, shard_tokens, [Shard(**s) for s in part["shards"]], part["position"]
            )
            for name, part in begun["splits"].items()
        }

    def fill(self, placed: Iterator[Placed], progress: CountReport) -> int:
        """Write the documents that are not there yet; the bytes that they had."""
        waiting: deque[tuple[list[Placed], Future[list[TokenIds]]]] = deque()
        after = {name: writer.position for name, writer in self.writers.items()}
        done, last = 0, dict(after)

        def write() -> None:
            nonlocal done
            group, encoded = waiting.popleft()
            for one, tokens in zip(group, encoded.result(), strict=True):
                last[one.split] = one.position
                if self.writers[one.split].add(tokens, len(one.document.data), one.position):
                    write_json(self.out / STARTED, {**self.begun, "splits": self._splits()})
            done += sum(len(one.document.data) for one in group)
            progress.update(done, f"{done / 1e6:,.1f} MB  {progress.rate(done / 1e6):,.1f} MB/s")

        try:
            with ThreadPoolExecutor(1) as encoding:
                missing = (one for one in placed if one.position > after[one.split])
                for group in grouped(missing, lambda one: len(one.document.data), AT_ONCE, MOST_AT_ONCE):
                    waiting.append((group, encoding.submit(self.encode, [one.document for one in group])))
                    if len(waiting) > 2:
                        write()
                while waiting:
                    write()
            for name, writer in self.writers.items():
                writer.close(last[name])
        finally:
            for writer in self.writers.values():
                writer.discard()
        return done

    def _splits(self) -> dict[str, Any]:
        return {
            name: {"shards": [asdict(shard) for shard in writer.closed], "position": writer.position}
            for name, writer in self.writers.items()
        }

    def remove(self) -> None:
        """Take away what calls have written; whatever else is in the folder stays."""
        (self.out / STARTED).unlink()
        for name in self.writers:
            for path in (*self.out.glob(f"{name}-*.bin"), *self.out.glob(f"{name}-*.npy")):
                path.unlink()
        remove_folder(self.out / TOKENIZER)

    def finish(self, skipped: list[str]) -> dict[str, Any]:
        """Write the index, which makes the folder one that can be trained on."""
        for name, writer in self.writers.items():
            if not writer.closed:
                raise Refused(
                    f"got no document {'to train on' if name == TRAIN else 'to test on'}; expected "
                    "more documents, or --valid SOURCE"
                    + (f"; skipped {len(skipped):,}, the first {skipped[0]}" if skipped else "")
                )
        index = {
            **{name: self.begun[name] for name in ("format", "asked", "tokenizer")},
            "dtype": self.encode.dtype.str,
            "splits": {name: part["shards"] for name, part in self._splits().items()},
            "skipped": skipped[:100],
        }
        write_json(self.out / INDEX, index)
        (self.out / STARTED).unlink()
        return index


def _placed(settings: PrepareSettings, source: Source, valid: Source | None) -> Iterator[Placed]:
    """Say of every document which split it belongs to: by a hash of its name, or by the source that it comes from."""
    border = 0.0 if valid is not None or source.single else _border(source, settings)
    for position, document in enumerate(islice(source, settings.max_documents or None), 1):
        if valid is None and source.single:
            try:
                (train,), (held,), _ = split_position(document, settings.held_out)
            except ValueError as error:
                raise Refused(str(error)) from error
            yield Placed(TRAIN, train, position)
            yield Placed(VALID, held, position)
        else:
            yield Placed(VALID if chance(document.name) < border else TRAIN, document, position)
    for position, document in enumerate(valid or (), 1):
        yield Placed(VALID, document, position)


def _border(source: Source, settings: PrepareSettings) -> float:
    """Below which chance a document is held out: `held_out`, moved so far that few documents give each split one.

    A large source is read only until both splits have something, which is some 1 / held_out documents.
    """
    lowest, highest = 1.0, 0.0
    for document in islice(source, settings.max_documents or None):
        found = chance(document.name)
        lowest, highest = min(lowest, found), max(highest, found)
        if lowest < settings.held_out <= highest:
            return settings.held_out
    return math.nextafter(lowest, 1.0) if settings.held_out <= lowest else highest


def _tokenizer(
    settings: PrepareSettings, source: Source, valid: Source | None, progress: CountReport
) -> "PreTrainedTokenizerBase":
    if not settings.train_bpe:
        return load_tokenizer(settings.tokenizer)
    progress.say(f"training a BPE of {settings.train_bpe:,} ids")
    texts = (one.document for one in _placed(settings, source, valid) if one.split == TRAIN)
    return train_bpe(texts, settings)


def _asked(settings: PrepareSettings, source: Source, valid: Source | None) -> dict[str, Any]:
    """What the content of the folder depends on; the tokenizer's own rules come with it."""
    names = "source", "tokenizer", "train_bpe", "bpe_bytes", "column", "subset", "split", "held_out", "valid"
    asked = {name: getattr(settings, name) for name in (*names, "max_documents", "shard_tokens")}
    return asked | {"found": source.identity, "found_valid": None if valid is None else valid.identity}


def check_same(out: Path, before: dict[str, Any], asked: dict[str, Any]) -> None:
    """Refuse to go on with other settings, other text or another tokenizer than the folder was begun with."""
    changed = {name: before.get(name) for name in asked if before.get(name) != asked[name]}
    mixed = ": tokens of two tokenizers do not mix" if changed.keys() & {"tokenizer", "train_bpe"} else ""
    if changed.keys() & {"found", "found_valid"} and not mixed:
        raise ValueError(
            f"the text of {out} has changed since it was begun (names, sizes or times of files); remove the folder to "
            "begin anew, or give another one"
        )
    if changed:
        said = ", ".join(f"{name}={value!r}" for name, value in changed.items() if not name.startswith("found"))
        raise ValueError(f"{out} was begun with {said}{mixed}; give the same settings, or another folder")


def _begun(out: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """What an earlier call has left; ValueError for a folder that holds something else."""
    if not (out / STARTED).is_file():
        remove_unfinished(out)
        found = sorted(path.name for path in out.iterdir() if path.name != IN_USE) if out.is_dir() else []
        if found:
            raise ValueError(f"got the folder {out}, which holds {found[0]!r} already; expected a new or empty one")
        return None
    try:
        begun = json.loads((out / STARTED).read_bytes())
    except ValueError as error:
        raise ValueError(f"{out / STARTED} cannot be read: {error}; remove the folder to begin anew") from error
    check_same(out, begun["asked"], asked)
    if (out / TOKENIZER).is_dir() or any(part["shards"] for part in begun["splits"].values()):
        return begun
    return None  # killed before its tokenizer had its name


def _begin(out: Path, asked: dict[str, Any], tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    with new_folder(out / TOKENIZER) as folder:
        tokenizer.save_pretrained(folder)
        tokenizer = load_tokenizer(str(folder))  # what training will load
        name = f"BPE of {asked['train_bpe']:,} ids, trained on the text" if asked["train_bpe"] else asked["tokenizer"]
        told = {
            "name": name, "fingerprint": tokenizer_fingerprint(tokenizer), "vocab_size": count_ids(tokenizer),
            "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id,
        }  # fmt: skip
        splits = {name: {"shards": [], "position": 0} for name in (TRAIN, VALID)}
        begun = {"format": FORMAT, "asked": asked, "tokenizer": told, "splits": splits}
        write_json(out / STARTED, begun)  # first: a tokenizer in a folder without it is somebody else's
    return begun
