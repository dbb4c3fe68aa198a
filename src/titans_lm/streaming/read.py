"""Read files into a memory file: progress, a save now and then, and going on after an interruption."""

import hashlib
import io
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from torch import nn

from titans_lm.checks import check_at_least, check_choice, check_readable
from titans_lm.data.tokenizer import is_byte_tokenizer
from titans_lm.streaming.file import Precision, load_memory, read_header, save_memory
from titans_lm.streaming.memory import Memory
from titans_lm.streaming.reader import Reader
from titans_lm.streaming.tokens import TokenStream
from titans_lm.train.files import check_writable, remove_unfinished
from titans_lm.train.loop import StoppedWaiting, StopRequest
from titans_lm.train.progress import CountReport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STDIN = "-"


def amount_told(reader: Reader, rate: float) -> str:
    """Say how much has been read, how many tokens a second, and how large the memory is, which stays the same."""
    return f"{reader.tokens:,} tokens  {rate:,.0f} tokens/s  memory {reader.memory.bytes / 2**20:,.1f} MiB"


class StoppedReading(KeyboardInterrupt):
    """Reading was asked to stop (Ctrl-C or SIGTERM); what was read is saved."""


def read_files(
    model: nn.Module,
    tokenizer: "PreTrainedTokenizerBase",
    files: Sequence[str | Path],
    out: Path,
    *,
    onto: Path | None = None,
    resume: bool = False,
    save_every: int = 1_000_000,
    piece_len: int = 2048,
    precision: Precision = "exact",
    quiet: bool = False,
) -> dict[str, Any]:
    """Read files and pipes in order, "-" being standard input, and write the memory to `out`.

    The memory is saved every `save_every` tokens and at the end; whatever happens in between, `out` is a whole memory
    of some earlier moment. With `resume` reading goes on from `out`, where there is one, if the files are those it was
    made from. `onto` is a memory to start from. The last document stays open: what follows continues it.

    Raises ValueError where `out` exists without `resume`, where a source has changed, and for files that cannot be
    read, before anything is read, and where nothing comes from a pipe; StoppedReading after Ctrl-C or SIGTERM.
    """
    check_at_least("save_every", save_every, 1)
    check_choice("precision", precision, ("exact", "bfloat16"))
    paths = check_reading(files, out, resume=resume)
    began = time.perf_counter()
    memory, done, unfinished = _start(model, paths, out, onto)
    reader = Reader(model, tokenizer, piece_len=piece_len, memory=memory)
    first = reader.tokens
    left = paths[done:]
    piped = [path for path in left if _is_pipe(path)]
    total = None if piped else sum(path.stat().st_size for path in left)
    report = CountReport(quiet=quiet, title="reading").start(total)
    with report, StopRequest() as stop:
        job = _Job(reader, out, save_every, report, stop)
        for index, path in enumerate(left):
            opened = reader.resume if unfinished and index == 0 else reader.stream
            with _Waited(path, stop) if _is_pipe(path) else nullcontext(path) as source:
                job.read(opened(source, _name(path)))
    if piped and not any(source.tokens for source in reader.memory.sources[0][-len(paths) :]):
        names = ("standard input" if str(path) == STDIN else str(path) for path in piped)
        raise ValueError(f"got nothing on {', '.join(names)}; expected some text")
    whole = out.exists() and job.saved == reader.memory.sources
    if not whole or (precision != "exact" and read_header(out).precision == "exact"):  # what is rounded stays as it is
        job.save(precision)
    seconds = time.perf_counter() - began
    return {
        "memory": str(out),
        "tokens": reader.tokens,
        "tokens_read_now": reader.tokens - first,
        "seconds": round(seconds, 3),
        "tokens_per_second": round((reader.tokens - first) / seconds, 1),
        "state_bytes": reader.memory.bytes,
        "file_bytes": out.stat().st_size,
        "rounding": max(read_header(out).loss.values(), default=None),
        "sources": [source.name for source in reader.memory.sources[0]],
    }


class _Job:
    """One reading: what is saved, and when."""

    def __init__(self, reader: Reader, out: Path, save_every: int, report: CountReport, stop: StopRequest) -> None:
        self.reader, self.out, self.save_every, self.report, self.stop = reader, out, save_every, report, stop
        self.saved = reader.memory.sources
        self.first = self.saved_tokens = reader.tokens
        self.bytes, self.reads_bytes = 0, is_byte_tokenizer(reader.tokenizer)
        """Of the files that have been read to their end; a byte is a token, or some of a token's."""

    def read(self, stream: TokenStream) -> None:
        try:
            self.reader.read(stream, on_piece=lambda reader: self._after_piece(reader, stream))
        except StoppedWaiting:
            self._end()
        finally:
            stream.close()
        self.bytes += stream.bytes

    def _after_piece(self, reader: Reader, stream: TokenStream) -> None:
        done = stream.tokens if self.reads_bytes else stream.bytes
        rate = self.report.rate(reader.tokens - self.first)
        self.report.update(self.bytes + done, amount_told(reader, rate))
        if self.stop:
            self._end()
        if reader.tokens - self.saved_tokens >= self.save_every:
            self.save()

    def _end(self) -> None:
        self.save()
        raise StoppedReading(
            f"stopped after {self.reader.tokens:,} tokens, which are saved in {self.out}; "
            "the same command with --resume goes on"
        )

    def save(self, precision: Precision = "exact") -> None:
        """Only the last save may round: reading that goes on from an earlier one is to give the same memory."""
        save_memory(self.reader.memory, self.out, self.reader.model, precision=precision)
        self.saved, self.saved_tokens = self.reader.memory.sources, self.reader.tokens


class _Waited(io.BufferedIOBase):
    """A pipe, on which the first request to stop ends waiting for more, or for whoever writes into it."""

    def __init__(self, path: Path, stop: StopRequest) -> None:
        self.path, self.stop = path, stop
        self.file: IO[bytes] | None = sys.stdin.buffer if str(path) == STDIN else None

    def read1(self, size: int = -1, /) -> bytes:
        with self.stop.waiting():
            if self.file is None:
                self.file = self.path.open("rb")
            return getattr(self.file, "read1", self.file.read)(size)  # what is there

    def close(self) -> None:
        if self.file is not None and str(self.path) != STDIN:
            self.file.close()
        super().close()


def check_reading(files: Sequence[str | Path], out: Path, *, resume: bool = False) -> list[Path]:
    """Check what can be checked without a model, and give the files as paths; ValueError as read_files raises it."""
    if not files:
        raise ValueError("got no files to read; expected one or more (- is standard input)")
    paths = [Path(file) for file in files]
    for path in paths:
        if str(path) != STDIN:
            check_readable(path)
    if all(not _is_pipe(path) and path.stat().st_size == 0 for path in paths):
        raise ValueError(f"got {', '.join(map(repr, map(str, paths)))}, in which there is nothing; expected text")
    if out.exists() and not resume:
        raise ValueError(f"got the memory {str(out)!r}, which exists; resume to go on with it, or choose another name")
    check_writable("the memory", out)
    return paths


def _start(model: nn.Module, paths: list[Path], out: Path, onto: Path | None) -> tuple[Memory | None, int, bool]:
    """The memory to begin with, how many files it has read to their end, and whether the next one is half read."""
    if onto is not None and out.resolve() == Path(onto).resolve():
        raise ValueError(f"got {str(out)!r} to read onto and to write to; expected two names: resuming needs the first")
    if out.parent.is_dir():
        remove_unfinished(out.parent)
    base = None if onto is None else _single(load_memory(onto, model), onto)
    if not out.exists():
        return base, 0, False
    memory = _single(load_memory(out, model), out)
    if base is not None and memory.sources[0][: len(base.sources[0])] != base.sources[0]:
        raise ValueError(
            f"got the memory {str(out)!r}, which does not go on from {str(onto)!r}; expected one that does"
        )
    sources = memory.sources[0][0 if base is None else len(base.sources[0]) :]
    if [source.name for source in sources] != [_name(path) for path in paths[: len(sources)]]:
        read = ", ".join(source.name for source in sources)
        raise ValueError(f"got a memory to go on with that has read {read}; expected the same files in the same order")
    for source, path in zip(sources, paths, strict=False):
        if source.complete and not _is_pipe(path) and _sha256(path) != source.sha256:
            raise ValueError(f"got {str(path)!r}, which has changed since it was read; expected the same files")
    unfinished = bool(sources) and not sources[-1].complete
    return memory, len(sources) - unfinished, unfinished


def _is_pipe(path: Path) -> bool:
    """Whether it can be read once only, and nobody knows how long it is."""
    return str(path) == STDIN or path.is_fifo()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _single(memory: Memory, path: Path) -> Memory:
    if memory.rows != 1:
        raise ValueError(f"got the memory {str(path)!r} of {memory.rows} rows; expected one of a single row")
    return memory


def _name(path: Path) -> str:
    return "stdin" if str(path) == STDIN else str(path)
