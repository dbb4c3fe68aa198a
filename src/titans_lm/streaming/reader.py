"""Read text of any length at constant memory, and go on from any token as if it had been one call."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from titans_lm.config import check_at_least
from titans_lm.data.tokenizer import BOS, EOS, is_byte_tokenizer
from titans_lm.evaluate.stream import has_state, state_grows
from titans_lm.streaming.memory import NONE, Memory
from titans_lm.streaming.tokens import TokenStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Readable = str | bytes | Path | IO[bytes] | Iterable[Any] | TokenStream
"""What can be read: text, bytes, a file by its path, an open file or pipe, token ids, or a stream that was begun."""


class Reader:
    """Reads documents into a memory, piece by piece; keeps the memory and nothing of the text.

        reader = Reader(model, tokenizer)
        reader.read(Path("book.txt"))
        answer = reader.fork()          # another reader of the same memory; neither disturbs the other

    Reading gives what one forward pass over all tokens would give, however the tokens are divided into calls and pieces
    (`piece_len`, which is speed and memory of a call alone). A document starts with <bos>, where the tokenizer has one;
    `<eos>` follows when the next one starts or at `end_document()`, so that text may be added to an open one. With
    `batch_size` rows, as many documents are read side by side, each into a memory of its own.

    Raises ValueError for a model without a state of constant size.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        batch_size: int = 1,
        piece_len: int = 2048,
        memory: Memory | None = None,
    ) -> None:
        check_at_least("piece_len", piece_len, 1)
        check_at_least("batch_size", batch_size, 1)
        check_readable(model)
        self.model, self.tokenizer, self.piece_len = model, tokenizer, piece_len
        self.batch_size = batch_size if memory is None else memory.rows
        self.device = next(model.parameters()).device
        self.bos, self.eos = document_marks(tokenizer)
        self.ends = ending_tokens(model, tokenizer)
        owner: Any = model
        if memory is None:
            with torch.no_grad():
                memory = Memory.empty(owner.init_state(batch_size))
        self._start(memory)

    def _start(self, memory: Memory) -> None:
        self._state = memory.to(self.device).state
        self._pending = memory.pending.tolist()
        self._tokens, self._open, self._sources = list(memory.tokens), list(memory.open), list(memory.sources)

    @property
    def memory(self) -> Memory:
        """What has been read so far, as a value."""
        return Memory(
            self._state, torch.tensor(self._pending), tuple(self._tokens), tuple(self._open), tuple(self._sources)
        )

    @property
    def tokens(self) -> int:
        """Tokens read by all rows together, marks of starts and ends included."""
        return sum(self._tokens)

    def fork(self, times: int = 1) -> "Reader":
        """Another reader that goes on from the same memory, with every row `times` times; this one is not touched."""
        memory = self.memory.repeat(times)
        return Reader(self.model, self.tokenizer, piece_len=self.piece_len, memory=memory)

    def reset(self) -> None:
        """Forget everything: the state before the first token."""
        owner: Any = self.model
        with torch.no_grad():
            self._start(Memory.empty(owner.init_state(self.batch_size)))

    def read(
        self,
        source: "Readable | Sequence[Readable]",
        *,
        name: str | None = None,
        new_document: bool = True,
        max_tokens: int | None = None,
        on_piece: "Callable[[Reader], None] | None" = None,
    ) -> int:
        """Read a source, or one source per row, to the end or up to `max_tokens` of each; return how many were read.

        `on_piece` is called after every piece with this reader, whose `memory` then is a complete memory. To stop at a
        token and go on later, pass a `TokenStream` (see `stream`) and pass it again. With `new_document=False` the text
        continues the document that is open. Token ids are read as they are, without marks.
        """
        if max_tokens is not None:
            check_at_least("max_tokens", max_tokens, 1)
        given = [source] if self.batch_size == 1 and not _is_list_of_sources(source) else source
        several = isinstance(given, list | tuple)
        if not several or len(given) != self.batch_size:
            count = len(given) if several else 1
            raise ValueError(f"got {count} sources for {self.batch_size} rows; expected one for each row")
        streams = [self.stream(s, name) for s in given]
        try:
            return self._read(streams, new_document, max_tokens, on_piece)
        finally:
            for stream, s in zip(streams, given, strict=True):
                if stream is not s:  # opened here
                    stream.close()

    def _read(
        self,
        streams: list[TokenStream],
        new_document: bool,
        max_tokens: int | None,
        on_piece: "Callable[[Reader], None] | None",
    ) -> int:
        begun = [stream.tokens > 0 for stream in streams]
        for row, stream in enumerate(streams):
            if new_document and stream.of_text and not begun[row]:
                self._begin_document(row)
        kept = [sources[:-1] if old else sources for sources, old in zip(self._sources, begun, strict=True)]
        read = 0
        while not all(stream.exhausted for stream in streams):
            count = self.piece_len if max_tokens is None else min(self.piece_len, max_tokens - read)
            if count == 0:
                break
            rows = [np.empty(0, dtype=np.int64) if stream.exhausted else stream.take(count) for stream in streams]
            self.feed(rows)
            read += max(map(len, rows))
            self._sources = [(*old, stream.record()) for old, stream in zip(kept, streams, strict=True)]
            if on_piece is not None:
                on_piece(self)
        return read

    def stream(self, source: Readable, name: str | None = None) -> TokenStream:
        """Open a source as tokens, to be read in several calls."""
        return source if isinstance(source, TokenStream) else TokenStream(source, self.tokenizer, name)

    def resume(self, source: Readable, name: str | None = None) -> TokenStream:
        """Open the source that row 0 was reading, at the token where it stopped; ValueError where it is another."""
        stream = self.stream(source, name)
        if not self._sources[0]:
            raise ValueError(f"got {stream.name!r} to go on with, and a memory that has read nothing")
        stream.skip(self._sources[0][-1])
        return stream

    def _begin_document(self, row: int) -> None:
        self._mark(row, opening_marks((self.bos, self.eos), after_open=self._open[row]))
        self._open[row] = True

    def end_document(self) -> None:
        """Write <eos> in the rows that stand inside a document, where the tokenizer has one."""
        for row in range(self.batch_size):
            if self._open[row] and self.eos is not None:
                self._mark(row, [self.eos])
            self._open[row] = False

    def _mark(self, row: int, marks: list[int]) -> None:
        if marks:
            rows = [np.empty(0, dtype=np.int64)] * self.batch_size
            rows[row] = np.array(marks, dtype=np.int64)
            self.feed(rows)

    def feed(self, ids: "Tensor | np.ndarray | Sequence[Any]", *, logits: bool = False) -> Tensor | None:
        """Read token ids (B, T), or one array for each row, as they are.

        The last token of a row waits until another comes (see `Memory`). With `logits` the predictions that were made
        meanwhile are returned, (B, N, V): row b's are those after the token that waited, if one did, and after all
        new tokens but the last; rows that had fewer are padded with zeros at the end.
        """
        rows = self._rows(ids)
        waiting = [[] if token == NONE else [token] for token in self._pending]
        runs = []
        for row, new in enumerate(rows):
            whole = np.concatenate([np.array(waiting[row], dtype=np.int64), new])
            runs.append(whole[:-1] if len(new) else whole[:0])
            if len(new):
                self._pending[row] = int(new[-1])
                self._tokens[row] += len(new)
        found = [
            self._run([run[start : start + self.piece_len] for run in runs], logits)
            for start in range(0, max(map(len, runs)), self.piece_len)
        ]
        if not logits:
            return None
        owner: Any = self.model
        empty = torch.empty(self.batch_size, 0, owner.config.vocab_size, device=self.device)
        return torch.cat(found, dim=1) if found else empty

    def next_logits(self) -> Tensor:
        """Predict what follows: logits (B, V) after the last token of every row; nothing is written."""
        if NONE in self._pending:
            raise ValueError("got a row that has read nothing; expected at least one token to predict from")
        state = self._state
        logits = self._run([np.array([token], dtype=np.int64) for token in self._pending], True)
        self._state = state
        assert logits is not None, "asked for"
        return logits[:, -1]

    def write(self, choose: Callable[[Tensor], int], max_new_tokens: int) -> Iterator[int]:
        """Write on, token by token, each chosen from logits (1, V) and read like any other, up to one that ends a text.

        The memory is whole after every token, so writing may be broken off anywhere. For a single row.
        """
        if self.batch_size != 1:
            raise ValueError(f"got {self.batch_size} rows to write; expected one (see fork, Memory.row)")
        if self._pending[0] == NONE:
            raise ValueError("got nothing to write on from; expected at least one token read")
        for _ in range(max_new_tokens):
            [token] = self.decode(lambda logits: [choose(logits)])
            yield token
            if token in self.ends:
                return

    def decode(self, choose: Callable[[Tensor], Sequence[int]]) -> Sequence[int]:
        """Write a token in every row, chosen from logits (B, V); each is read like any other when the next one comes.

        Every row must have read something: its last token waits (see `Memory`).
        """
        logits = self._run([np.array([token], dtype=np.int64) for token in self._pending], True)
        assert logits is not None, "asked for"
        tokens = choose(logits[:, -1])
        for row, token in enumerate(tokens):
            self._pending[row] = token
            self._tokens[row] += 1
            self._open[row] = token != self.eos
        return tokens

    def _rows(self, ids: Any) -> list[np.ndarray]:
        rows = [np.asarray(row.cpu() if isinstance(row, Tensor) else row) for row in ids]
        if len(rows) != self.batch_size or any(row.ndim != 1 for row in rows):
            shapes = [row.shape for row in rows]
            raise ValueError(f"got token ids of shapes {shapes}; expected {self.batch_size} rows of tokens")
        owner: Any = self.model
        size = owner.config.vocab_size
        for row in rows:
            if len(row) and (row.dtype.kind not in "iu" or row.min() < 0 or row.max() >= size):
                raise ValueError(f"got token ids from {row.min()} to {row.max()}; expected whole numbers below {size}")
        return [row.astype(np.int64) for row in rows]

    @torch.no_grad()
    def _run(self, rows: list[np.ndarray], logits: bool) -> Tensor | None:
        """One forward pass over up to `piece_len` tokens of every row, some of which may have fewer."""
        longest = max(map(len, rows))
        ids, valid = np.zeros((len(rows), longest), dtype=np.int64), np.zeros((len(rows), longest), dtype=bool)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)], valid[row, : len(tokens)] = tokens, True
        owner: Any = self.model
        mask = None if valid.all() else torch.from_numpy(valid).to(self.device)
        read = owner if logits else owner.base_model
        out = read(
            torch.from_numpy(ids).to(self.device),
            attention_mask=mask, state=self._state, return_state=True, use_cache=False,
        )  # fmt: skip
        self._state = out.state
        if not logits:
            return None
        return out.logits if mask is None else out.logits * mask[..., None]


def check_readable(model: nn.Module) -> None:
    """Refuse a model that cannot read without end: ValueError."""
    if not has_state(model) or not hasattr(model, "lm_head"):
        raise ValueError(f"got a {type(model).__name__}; expected a TitansForCausalLM, whose memory is a value")
    if state_grows(model):
        raise ValueError(
            "got full attention in the stack, whose keys and values grow with the text; "
            "expected blocks whose state has a constant size, such as mac or lmm"
        )


def document_marks(tokenizer: "PreTrainedTokenizerBase | None") -> tuple[int | None, int | None]:
    """What stands before and after a document, where the tokenizer has it: <bos> and <eos>."""
    if tokenizer is None or is_byte_tokenizer(tokenizer):
        return BOS, EOS
    ids: Any = tokenizer
    return ids.bos_token_id, ids.eos_token_id


def ending_tokens(model: nn.Module, tokenizer: "PreTrainedTokenizerBase | None") -> set[int]:
    """After which tokens a text ends: <eos>, and those that the model's generation_config names."""
    given: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = given if isinstance(given, list | tuple) else [given]
    return {end for end in (*named, document_marks(tokenizer)[1]) if end is not None}


def opening_marks(marks: tuple[int | None, int | None], *, after_open: bool) -> list[int]:
    """What is read before a document, of <bos> and <eos>: the end of one that is open, then the start."""
    bos, eos = marks
    return [mark for mark, due in ((eos, after_open), (bos, True)) if due and mark is not None]


def _is_list_of_sources(source: Any) -> bool:
    """Whether this is a list of sources rather than one: token ids are numbers."""
    return isinstance(source, list | tuple) and len(source) == 1 and not isinstance(source[0], int | np.integer)
