"""Memories of conversations and documents: the last used in RAM, all of them on disk as memory files.

Every change is on disk before anybody is told of it, so a server that is killed loses nothing that it has acknowledged.
Names come from clients and reach the file system as hashes only.
"""

import fcntl
import hashlib
import json
import logging
import threading
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from titans_lm.serve.schema import ClientError
from titans_lm.streaming import Memory, save_memory
from titans_lm.streaming.file import Header, fingerprint, open_memory, read_header
from titans_lm.train.files import remove_file, remove_unfinished

Kind = Literal["conversation", "memory"]
log = logging.getLogger("titans_lm.serve")


@dataclass(frozen=True)
class Entry:
    """A memory under a name, with what the server notes about it."""

    kind: Kind
    name: str
    memory: Memory
    notes: dict[str, Any] = field(default_factory=dict)


class Store:
    """All memories of a server for one model, by kind and name; may be used from several threads.

    Raises ValueError where another server has the folder open.
    """

    def __init__(self, folder: Path, model: nn.Module, *, in_memory: int, most: int) -> None:
        print_of = json_hash(asdict(fingerprint(model)))
        self.folder, self.model, self.in_memory, self.most = folder / print_of, model, in_memory, most
        self.folder.mkdir(parents=True, exist_ok=True)
        self._claim = (self.folder / "in-use").open("w")
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._claim.close()
            raise ValueError(
                f"got the store {str(folder)!r}, which another server has open for this model; stop it, or take another"
            ) from None
        remove_unfinished(self.folder)
        self._lock = threading.Lock()
        self._loaded: OrderedDict[Path, Entry] = OrderedDict()
        self._known: dict[Path, dict[str, Any]] = {}
        self._coming: dict[Path, Kind] = {}
        self._damaged: set[Path] = set()
        for path in sorted(self.folder.glob("*.memory")):
            try:
                self._known[path] = described(read_header(path), path)
            except (ValueError, KeyError, OSError) as error:
                self._refuse(path, error)

    def close(self) -> None:
        """Let another server have the folder."""
        self._claim.close()

    def path(self, kind: Kind, name: str) -> Path:
        """Where an entry is: a hash of kind and name, so that no name can lead anywhere."""
        return self.folder / f"{json_hash([kind, name])}.memory"

    def entries(self, kind: Kind) -> list[dict[str, Any]]:
        """Describe all entries of a kind, the last written first."""
        with self._lock:
            found = [known for known in self._known.values() if known["object"] == kind]
        return sorted(found, key=lambda known: (-known["used"], known["id"]))

    def describe(self, kind: Kind, name: str) -> dict[str, Any] | None:
        """What a client may know of an entry; None where there is none, ClientError 409 where it is damaged."""
        path = self._whole(kind, name)
        with self._lock:
            return self._known.get(path)

    def get(self, kind: Kind, name: str) -> Entry | None:
        """Find an entry, in RAM or on disk; None where there is none, ClientError 409 where it is damaged."""
        while True:
            path = self._whole(kind, name)
            with self._lock:
                if path in self._loaded:
                    self._loaded.move_to_end(path)
                    return self._loaded[path]
                known = self._known.get(path)
                if known is None:
                    return None
            try:
                header, memory = open_memory(path, self.model)
            except ValueError as error:
                with self._lock:
                    if self._known.get(path) is known:  # else it was deleted or written meanwhile
                        self._refuse(path, error)
                continue
            entry = Entry(kind, name, memory, header.notes)
            if self._keep(path, entry, known):
                return entry

    def put(self, entry: Entry) -> dict[str, Any]:
        """Write an entry to disk, then make it the current one; returns its description."""
        path = self.path(entry.kind, entry.name)
        self.check_room(entry.kind, entry.name, reserve=True)
        now = int(time.time())
        notes = {"created": now, **entry.notes, "used": now, "kind": entry.kind, "name": entry.name}
        try:
            known = described(save_memory(entry.memory, path, self.model, notes=notes), path)
            with self._lock:
                self._known[path] = known
        except ValueError as error:
            raise ClientError(409, f"nothing is kept: {error}", code="not_kept") from error
        finally:
            with self._lock:
                self._coming.pop(path, None)
        self._keep(path, Entry(entry.kind, entry.name, entry.memory, notes), known)
        return known

    def check_room(self, kind: Kind, name: str, *, reserve: bool = False) -> None:
        """Refuse a new entry where the store is full; with `reserve` keep its place until it is written."""
        path = self._whole(kind, name)
        with self._lock:
            count = sum(known["object"] == kind for known in self._known.values())
            count += sum(other == kind for other in self._coming.values())
            if path not in self._known and path not in self._coming and count >= self.most:
                raise ClientError(
                    429, f"this server keeps {count} of kind {kind} and takes no more; delete one", code="store_full"
                )
            if reserve and path not in self._known:
                self._coming[path] = kind

    def delete(self, kind: Kind, name: str) -> bool:
        """Forget an entry; whether there was one."""
        path = self.path(kind, name)
        with self._lock:
            self._loaded.pop(path, None)
            known = self._known.pop(path, None)
        try:
            remove_file(path)
        except OSError:  # what the disk does not let go is not forgotten
            with self._lock:
                self._known |= {} if known is None else {path: known}
            raise
        with self._lock:
            found = known is not None or path in self._damaged
            self._damaged.discard(path)
        return found

    def _refuse(self, path: Path, error: Exception) -> None:
        """Let nobody use a file that cannot be read: taken for none it would be written over."""
        log.error("%s cannot be used until it is mended or deleted: %s", path, error)
        self._known.pop(path, None)
        self._damaged.add(path)

    def _whole(self, kind: Kind, name: str) -> Path:
        """Where an entry is, unless what is there is damaged."""
        path = self.path(kind, name)
        if path in self._damaged:
            raise ClientError(
                409, f"the {kind} {name[:100]!r} is kept in a file that cannot be read ({path.name}; see the log); "
                "delete it, or take another name", code="damaged",
            )  # fmt: skip
        return path

    def _keep(self, path: Path, entry: Entry, known: dict[str, Any]) -> bool:
        """Hold an entry in RAM, unless what is known of it has changed since: then it is an old one."""
        with self._lock:
            if self._known.get(path) is not known:
                return False
            self._loaded[path] = entry
            self._loaded.move_to_end(path)
            while len(self._loaded) > self.in_memory:
                self._loaded.popitem(last=False)
            return True

    def counts(self, kind: Kind | None = None) -> dict[str, int]:
        """How many entries there are, of one kind or of both, and how many of them in RAM."""
        with self._lock:
            stored = [known["object"] for known in self._known.values()]
            loaded = [entry.kind for entry in self._loaded.values()]
        kinds = {"stored": stored, "in_memory": loaded}
        return {name: len(found) if kind is None else found.count(kind) for name, found in kinds.items()}


def json_hash(value: Any) -> str:
    """A name for the file system that says nothing about the value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:40]


def described(header: Header, path: Path) -> dict[str, Any]:
    """What a client may know of an entry, from its file."""
    notes = header.notes
    return {
        "id": notes["name"],
        "object": notes["kind"],
        "created": notes["created"],
        "used": notes["used"],
        "tokens": sum(header.tokens),
        "bytes": path.stat().st_size,
        "memory": notes.get("memory"),
        "turns": notes.get("turns", 0),
        "sources": [{"name": source.name, "tokens": source.tokens} for source in header.sources[0]],
    }
