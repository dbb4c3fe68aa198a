"""Read text of any length at constant memory, and go on from any token as if it had been one call."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from titans_lm.backbone import frozen_memory, is_frozen
from titans_lm.config import check_at_least
from titans_lm.data.tokenizer import BOS, EOS, VOCAB_SIZE, is_byte_tokenizer
from titans_lm.evaluate.stream import has_state, state_grows
from titans_lm.hf.cache import Call, History
from titans_lm.layers import device_of
from titans_lm.streaming.memory import NONE, Memory, Source, Told, with_caching
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
    `batch_size` rows, as many documents are read side by side, each into a memory of its own. With `keep`, so many
    tokens of every row can be taken back by `undo`.

    `caching={"caching_segment": 2048}` lets a model that was trained without it answer from earlier segments too (D52),
    with settings as `with_caching` takes them; a memory of such a reader needs a reader with the same.

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
        keep: int = 0,
        caching: dict[str, Any] | None = None,
    ) -> None:
        check_at_least("piece_len", piece_len, 1)
        check_at_least("batch_size", batch_size, 1)
        check_readable(model)
        self.model: Any = model if caching is None else with_caching(model, **caching)
        self.tokenizer, self.piece_len = tokenizer, piece_len
        self.batch_size = batch_size if memory is None else memory.rows
        self.device = device_of(self.model.get_input_embeddings())
        self.bos, self.eos = document_marks(tokenizer)
        self._history = History(keep)
        self.ends = ending_tokens(self.model, tokenizer)
        if memory is None:
            self.reset()
        else:
            self._start(memory)

    def _start(self, memory: Memory) -> None:
        self._told, self._memory = Told(memory.open, memory.sources), memory.to(self.device)

    @property
    def memory(self) -> Memory:
        """What has been read so far, as a value."""
        return self._memory

    @property
    def tokens(self) -> int:
        """Tokens read by all rows together, marks of starts and ends included."""
        return sum(self._memory.tokens)

    def fork(self, times: int = 1) -> "Reader":
        """Another reader that goes on from the same memory, with every row `times` times; this one is not touched."""
        memory = self.memory.repeat(times)
        return Reader(self.model, self.tokenizer, piece_len=self.piece_len, memory=memory, keep=self._history.keep)

    @torch.no_grad()
    def reset(self) -> None:
        """Forget everything: the state before the first token."""
        self._history.clear()
        self._start(Memory.empty(self.model.init_state(self.batch_size)))

    def undo(self, tokens: int) -> None:
        """Take back the last tokens of every row: the memory is that of a reader that has read no more (D51).

        It has the bits that the same calls would have left, the last one ending there. A source that is cut goes on
        from a new opening of it (see `resume`). Raises ValueError for more tokens than were read, or than are kept.
        """
        check_at_least("tokens", tokens, 0)
        now, keep = self._memory.tokens, self._history.keep
        fewest = min(now)
        if tokens > fewest:
            raise ValueError(f"got undo({tokens}) of a row that has read {fewest} tokens; expected {fewest} at most")
        if tokens == 0:
            return
        target = tuple(n - tokens for n in now)
        found = self._history.back(target, now)
        if found is None:
            can = f"can take back {keep} tokens, of those that it has read itself"
            limit = can if keep else "keeps nothing earlier"
            more = f"Reader(…, keep={tokens}) or more before these are read, or a fork made there"
            less = "fewer, with those that were taken back before, or a fork made there"
            raise ValueError(f"got undo({tokens}) of a reader that {limit}; expected {more if tokens > keep else less}")
        _, memory, again = found
        self._start(memory)
        for call, count in again:
            told = call.told.until(call, target, self._told)
            with frozen_memory(self.model, call.frozen):
                self._step([row[:n] for row, n in zip(call.inputs, count, strict=True)], told)
            self._tell(told.open, told.sources)

    def read(
        self,
        source: "Readable | Sequence[Readable]",
        *,
        name: str | None = None,
        new_document: bool = True,
        max_tokens: int | None = None,
        on_piece: "Callable[[Reader], None] | None" = None,
    ) -> int:
        """Read a source, or one source per row, to the end or up to `max_tokens` of each; return how many
        the longest row has read.

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
        begun = [stream.tokens > 0 or stream.exhausted for stream in streams]  # an empty one is, once it was read
        unmarked = [row for row, s in enumerate(streams) if new_document and s.of_text and not begun[row]]
        kept = list(self._memory.sources)
        for row, (sources, stream) in enumerate(zip(kept, streams, strict=True)):
            if begun[row]:
                _check_goes_on(stream, sources[-1] if self._history.keep and sources else None)
                kept[row] = sources[:-1] if sources and stream.stands_at(sources[-1]) else sources
        read = 0
        while not all(stream.exhausted for stream in streams):
            count = self.piece_len if max_tokens is None else min(self.piece_len, max_tokens - read)
            if count == 0:
                break
            hashed = tuple(stream.tokens_hashed() for stream in streams) if self._history.keep else None
            for stream in streams:
                stream.broken_off = True  # unless what is taken of it now is read
            rows = [np.empty(0, dtype=np.int64) if stream.exhausted else stream.take(count) for stream in streams]
            for row in unmarked:  # not before: a source that cannot be read leaves the memory as it was
                self._mark(row, opening_marks((self.bos, self.eos), after_open=self._memory.open[row]), opened=True)
            unmarked = []
            self._feed(self._rows(rows), hashed=hashed)
            for stream in streams:
                stream.broken_off = False
            read += max(map(len, rows))
            after = [(*old, stream.record()) for old, stream in zip(kept, streams, strict=True)]
            self._tell(self._memory.open, after, by_step=any(map(len, rows)))
            if on_piece is not None:
                on_piece(self)
        return read

    def stream(self, source: Readable, name: str | None = None) -> TokenStream:
        """Open a source as tokens, to be read in several calls."""
        if isinstance(source, TokenStream):
            return source
        stream = TokenStream(source, self.tokenizer, name)
        if stream.of_text and self.tokenizer is None and self.model.config.vocab_size != VOCAB_SIZE:
            stream.close()
            raise ValueError(
                f"got a text and no tokenizer for a model of {self.model.config.vocab_size} ids; expected "
                f"Reader(model, tokenizer): without one texts are bytes, of {VOCAB_SIZE} ids"
            )
        return stream

    def resume(self, source: Readable, name: str | None = None) -> TokenStream:
        """Open the source that row 0 was reading, at the token where it stopped; ValueError where it is another."""
        stream = self.stream(source, name)
        if not self._memory.sources[0]:
            raise ValueError(f"got {stream.name!r} to go on with, and a memory that has read nothing")
        stream.skip(self._memory.sources[0][-1])
        return stream

    def end_document(self) -> None:
        """Write <eos> in the rows that stand inside a document, where the tokenizer has one."""
        for row, opened in enumerate(self._memory.open):
            self._mark(row, [self.eos] if opened and self.eos is not None else [], opened=False)

    def _mark(self, row: int, marks: list[int], *, opened: bool) -> None:
        opens = tuple(opened if one == row else was for one, was in enumerate(self._memory.open))
        # marks that no step can read together are told one by one: between an end and a start no document is open
        steps = [marks] if 0 < len(marks) <= self.piece_len else [[mark] for mark in marks]
        for left, several in zip(range(len(steps) - 1, -1, -1), steps, strict=True):
            rows = [np.empty(0, dtype=np.int64)] * self.batch_size
            rows[row] = np.array(several, dtype=np.int64)
            self._feed(self._rows(rows), marks=True)
            self._tell([was and not (left and one == row) for one, was in enumerate(opens)], self._memory.sources)
        self._memory = replace(self._memory, open=opens)

    def feed(self, ids: "Tensor | np.ndarray | Sequence[Any]", *, logits: bool = False) -> Tensor | None:
        """Read token ids (B, T), or one array for each row, as they are.

        The last token of a row waits until another comes (see `Memory`). With `logits` the predictions that were made
        meanwhile are returned, (B, N, V): row b's are those after the token that waited, if one did, and after all
        new tokens but the last; rows that had fewer are padded with zeros at the end.
        """
        found = self._feed(self._rows(ids), logits=logits)
        if not logits:
            return None
        like = {"dtype": self.model.dtype, "device": self.device}
        empty = torch.empty(self.batch_size, 0, self.model.config.vocab_size, **like)
        return torch.cat(found, dim=1) if found else empty

    def _feed(self, rows: list[np.ndarray], *, logits: bool = False, **told: Any) -> list[Any]:
        """Read tokens a piece at a time; return what each piece predicted, with `logits`."""
        found = []
        while max(map(len, rows)) > 0:
            waits = (self._memory.pending != NONE).tolist()
            pieces = [self.piece_len + (not one) for one in waits]
            piece = [row[:length] for row, length in zip(rows, pieces, strict=True)]
            found += self._step(piece, Told(self._memory.open, self._memory.sources, **told), logits)
            rows = [row[length:] for row, length in zip(rows, pieces, strict=True)]
        return found

    def _step(self, rows: list[np.ndarray], told: Told, logits: bool = False) -> list[Any]:
        """Read one piece, of which the last token of every row waits; what it predicted, if it could, with `logits`."""
        before, memory = self._before(), self._memory
        runs, pending = [], []
        for token, new in zip(memory.pending.tolist(), rows, strict=True):
            waiting = np.array([] if token == NONE else [token], dtype=np.int64)
            runs.append(np.concatenate([waiting, new[:-1]]) if len(new) else new)
            pending.append(int(new[-1]) if len(new) else token)
        found, state = [], memory.state
        if max(map(len, runs)):
            predicted, state = self._run(runs, logits)
            found.append(predicted)
        tokens = tuple(old + len(new) for old, new in zip(memory.tokens, rows, strict=True))
        self._memory = replace(memory, state=state, pending=torch.tensor(pending, device="cpu"), tokens=tokens)
        self._record(before, rows, told)
        return found

    def _before(self) -> Memory | None:
        """The memory before a step, as the last one left it, where anybody may go back to it."""
        return replace(self._memory, open=self._told.open, sources=self._told.sources) if self._history.keep else None

    def _record(self, before: Memory | None, rows: list[np.ndarray], told: Told) -> None:
        """Keep a step that was read."""
        self._told = told
        if before is not None:
            self._history.add(Call(before.tokens, tuple(map(len, rows)), rows, told, is_frozen(self.model)), before)

    def _tell(self, opened: Sequence[bool], sources: Sequence[tuple[Source, ...]], by_step: bool = False) -> None:
        """Note whether rows stand inside documents after the last step, and what they have read, it or since."""
        told = {"open": tuple(opened), "sources": tuple(sources)}
        self._memory = replace(self._memory, **told)
        told |= {"left": tuple(sources)} if by_step else {}
        self._told = self._told._replace(**told)
        if self._history.calls:
            last = self._history.calls[-1]
            self._history.calls[-1] = last._replace(told=last.told._replace(**told))

    def next_logits(self) -> Tensor:
        """Predict what follows: logits (B, V) after the last token of every row; nothing is written."""
        if NONE in self._memory.pending:
            raise ValueError("got a row that has read nothing; expected at least one token to predict from")
        return self._run(_columns(self._memory.pending), True)[0][:, -1]

    def write(self, choose: Callable[[Tensor], int], max_new_tokens: int) -> Iterator[int]:
        """Write on, token by token, each chosen from logits (1, V) and read like any other, up to one that ends a text.

        The memory is whole after every token, so writing may be broken off anywhere. For a single row.
        """
        if self.batch_size != 1:
            raise ValueError(f"got {self.batch_size} rows to write; expected one (see fork, Memory.row)")
        if self._memory.pending[0] == NONE:
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
        before, memory = self._before(), self._memory
        logits, state = self._run(_columns(memory.pending), True)
        tokens = [int(token) for token in choose(logits[:, -1])]
        rows = self._rows([[token] for token in tokens])
        pending, read = torch.tensor(tokens, device="cpu"), tuple(count + 1 for count in memory.tokens)
        opened = tuple(token != self.eos for token in tokens)
        # not before: whoever breaks off the choice has a memory that goes on as it did
        self._memory = Memory(state, pending, read, opened, memory.sources)
        self._record(before, rows, Told(opened, memory.sources))
        return tokens

    def _rows(self, ids: Any) -> list[np.ndarray]:
        rows = [np.asarray(row.cpu() if isinstance(row, Tensor) else row) for row in ids]
        if len(rows) != self.batch_size or any(row.ndim != 1 for row in rows):
            shapes = [row.shape for row in rows]
            raise ValueError(f"got token ids of shapes {shapes}; expected {self.batch_size} rows of tokens")
        size = self.model.config.vocab_size
        for row in rows:
            if len(row) and (row.dtype.kind not in "iu" or row.min() < 0 or row.max() >= size):
                raise ValueError(f"got token ids from {row.min()} to {row.max()}; expected whole numbers below {size}")
        return [row.astype(np.int64) for row in rows]

    @torch.no_grad()
    def _run(self, rows: list[np.ndarray], logits: bool) -> tuple[Any, Any]:
        """One forward pass over up to `piece_len` tokens of every row, some of which may have fewer: logits, state."""
        ids = pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True).to(self.device)
        lengths, mask = [len(row) for row in rows], None
        if min(lengths) < max(lengths):
            mask = torch.arange(max(lengths), device=self.device) < torch.tensor(lengths, device=self.device)[:, None]
        read = self.model if logits else self.model.base_model
        out = read(ids, attention_mask=mask, state=self._memory.state, return_state=True, use_cache=False)
        if not logits:
            return None, out.state
        return out.logits if mask is None else out.logits * mask[..., None], out.state


def _columns(tokens: Tensor) -> list[np.ndarray]:
    """A token for every row."""
    return list(tokens.cpu().numpy()[:, None])


def _check_goes_on(stream: TokenStream, last: Source | None) -> None:
    """Refuse a stream from which more was taken than was read, or than the reader still knows."""
    if stream.broken_off:
        raise ValueError(
            f"got a stream of {stream.name!r} that was broken off inside a piece, at token {stream.tokens}; expected a "
            "new opening of the source (see Reader.resume)"
        )
    if last is not None and stream.name == last.name and stream.tokens > last.tokens:
        raise ValueError(
            f"got a stream of {stream.name!r} at token {stream.tokens}, of which {last.tokens} are read, the others "
            "taken back; expected a new opening of the source (see Reader.resume)"
        )


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
