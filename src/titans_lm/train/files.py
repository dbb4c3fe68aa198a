"""Files that are there whole or not at all: written under another name, flushed to the disk, then renamed.

And one that grows, a line of JSON after another.
"""

import errno
import fcntl
import json
import math
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from titans_lm.checks import one_line

HIDDEN = ".unfinished-"
"""Start of the names of what is not finished, or no longer wanted; nothing reads these."""
IN_USE = "in-use"
"""A lock file: the folder it is in is being written by another process."""
STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}
"""Names of what a process writes to, whatever that is: its file descriptors."""
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What file systems without locks say: Lustre without `-o flock`, NFS without lockd."""
_ASKING = threading.Lock()
_writing: set[str] = set()
"""Names of files and folders that threads of this process are at."""


def hidden() -> str:
    """Begin the name of something unfinished: whose it is can be told from it."""
    return f"{HIDDEN}{os.getpid()}-"


def write_atomically(path: Path, data: str | bytes | Iterable[str], mode: int = 0o666) -> None:
    """Write a file, at once or piece by piece, so that a reader, or a machine that dies, finds the old or the new.

    `mode` says who may read and write it, as far as the process's umask lets them. Text that is no UTF-8, which only
    the name of a file can be, is written with question marks. A link stays one; a device is written to, and so is the
    file that /dev/stdout leads to, which others are writing.
    """
    parts = [data] if isinstance(data, str | bytes) else data
    stream = STREAMS.get(str(path))
    if stream is not None or (path.exists() and not path.is_file()):
        with naming(path), open(path if stream is None else stream, "wb", closefd=stream is None) as device:
            device.writelines(map(_encoded, parts))
        return
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        naming(path),
        tempfile.NamedTemporaryFile(prefix=hidden(), dir=path.parent, delete=False) as file,
        _at(Path(file.name)),
    ):
        try:
            file.writelines(map(_encoded, parts))
            publish(file, path, mode)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _encoded(part: str | bytes) -> bytes:
    return part.encode("utf-8", "replace") if isinstance(part, str) else part


@contextmanager
def _at(path: Path) -> Iterator[None]:
    """Be at a file or folder: no thread that clears away what was left unfinished takes it for that."""
    _writing.add(path.name)
    try:
        yield
    finally:
        _writing.discard(path.name)


def check_writable(option: str, path: Path) -> None:
    """Refuse a name under which no file can be written: ValueError."""
    if str(path) in STREAMS:
        return
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir() or not above.is_dir() or not os.access(path if path.exists() else above, os.W_OK):
        raise ValueError(f"got {option} {path}, which cannot be written; expected the name of a file")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name a file in an OSError that names none: on a full disk Python says what failed, and not where.

    Libraries in Rust tell one in exceptions of their own: safetensors, and tokenizers with a bare Exception.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    except Exception as error:
        if type(error) is Exception or type(error).__name__ == "SafetensorError":
            raise OSError(errno.EIO, one_line(error), str(path)) from error
        raise


def publish(file: IO[bytes], path: Path, mode: int = 0o666) -> None:
    """Give a file that was written under another name its own, once all of it is on the disk."""
    with file:
        file.flush()
        os.fsync(file.fileno())
    os.chmod(file.name, mode & ~_umask())
    os.replace(file.name, path)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically; numbers that are not finite become null."""
    write_atomically(path, json_text(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Read a file of ours; ValueError where it is no JSON any more."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"got {path}, which is not JSON: {error}; it was cut off or changed since it was written: bring it back "
            "from a copy, or remove it with what it belongs to"
        ) from error


def json_text(value: Any, indent: int | None = None) -> str:
    """Write a value as JSON that UTF-8 can hold: the name of a file may have bytes that are no text, and is escaped."""
    text = json.dumps(finite(value), indent=indent, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(finite(value), indent=indent)
    return text


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot hold by None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Fill a folder that appears under its name only when the block ends well; an older one of that name goes.

    A link stays one: what it leads to is filled anew.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{hidden()}{path.name}-", dir=path.parent))
    try:
        with naming(path), _at(unfinished):
            unfinished.chmod(0o777 & ~_umask())
            yield unfinished
            for file in (*unfinished.rglob("*"), unfinished):
                sync(file)
            before = _set_aside(path)
            os.replace(unfinished, path)
            sync(path.parent)
            if before is not None:
                shutil.rmtree(before, ignore_errors=True)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def remove_folder(path: Path) -> None:
    """Remove a folder; it loses its name at once, so nobody ever reads a part of it."""
    doomed = _set_aside(path)
    if doomed is not None:
        shutil.rmtree(doomed, ignore_errors=True)


def _set_aside(path: Path) -> Path | None:
    """Take a folder's name away, if it is there; what a killed process leaves is removed as unfinished."""
    if not path.exists():
        return None
    doomed = Path(tempfile.mkdtemp(prefix=hidden(), dir=path.parent))
    os.replace(path, doomed)
    return doomed


def remove_file(path: Path) -> None:
    """Remove a file, if it is there, and make the disk know."""
    path.unlink(missing_ok=True)
    sync(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove what a process that was killed left unfinished; what another one is at is left."""
    for leftover in folder.glob(f"{HIDDEN}*"):
        owner = leftover.name.removeprefix(HIDDEN).partition("-")[0]
        if leftover.name in _writing or (owner.isdigit() and int(owner) != os.getpid() and _runs(int(owner))):
            continue
        shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    try:
        with suppress(PermissionError):  # it is somebody else's
            os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    return True


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Have a lock file to this process alone while the block runs; ValueError, naming its owner, where another has it.

    A lock of POSIX: it ends with the process, however that ends, and processes made by this one do not have it. On a
    file system without such locks nobody is kept out.
    """
    with path.open("a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise ValueError(
                f"got the folder {path.parent}, which {file.read()[:200] or 'another process'} has in use; "
                "wait for it, stop it, or take another folder"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        if not os.fstat(file.fileno()).st_nlink:  # whoever had it has removed it since it was opened here
            with claimed(path):
                yield
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Make a folder for the block; where that fails, new ones that are empty go again."""
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    if not (new[-1].parent if new else folder).is_dir():
        raise ValueError(f"got the folder {folder}, where a file is in the way; expected a folder, or a name for one")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for one in new:
            if any(one.iterdir()):
                break
            one.rmdir()
        raise


def sync(path: Path) -> None:
    """Make the disk hold a file's content, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    with _ASKING:  # it can only be read by setting it: two threads at once would leave it at 0
        mask = os.umask(0)
        os.umask(mask)
    return mask


class JsonLines:
    """A file of one JSON object per line that grows while training runs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Add a line; numbers that are not finite become null."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite(record)) + "\n")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Read the records one by one; a last line that was cut off when the machine died is left out."""
        if self.path.exists():
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.endswith(b"\n"):
                        yield self._record(number, line)

    def read(self) -> list[dict[str, Any]]:
        """Return the records, all at once."""
        return list(self)

    def _record(self, number: int, line: bytes) -> dict[str, Any]:
        """Read a line; ValueError where it is no record of a step."""
        try:
            record = json.loads(line)
            if isinstance(record["step"], int):
                return record
        except (ValueError, TypeError, KeyError, RecursionError):
            pass  # said below
        raise ValueError(f"{self.path} holds no record of a step in line {number}; remove that line")

    def rewind(self, step: int) -> None:
        """Drop the records after a step: training goes on from there and writes them again."""
        write_atomically(self.path, (json.dumps(record) + "\n" for record in self if record["step"] <= step))
