"""Text from a model: read a prompt of any length, then write on, a piece at a time."""

import codecs
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from titans_lm.config import check_at_least, check_between
from titans_lm.data.tokenizer import BOS, decode_bytes, encode_bytes, is_byte_tokenizer
from titans_lm.streaming import Memory, Reader
from titans_lm.streaming.reader import ending_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Generated:
    """What a model wrote, and how long it took."""

    text: str
    """The text after the prompt; bytes that make no character are shown as U+FFFD."""
    tokens: int
    prompt_tokens: int
    seconds: float
    """Time for reading the prompt and writing."""
    memory: Memory | None = None
    """What the model knows after it, where it went on from a memory."""


class RunningText:
    """Tokens as text, as soon as they make whole characters: `text`, and how many characters are held back."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer: Any = tokenizer
        self.bytes = codecs.getincrementaldecoder("utf-8")("replace") if is_byte_tokenizer(tokenizer) else None
        self.text, self.held = "", 0
        self._line: list[int] = []
        self._taken = 0

    def put(self, token: int) -> None:
        if self.bytes is not None:
            self.text += self.bytes.decode(decode_bytes([token]))
            self.held = int(bool(self.bytes.getstate()[0]))
            return
        # Tokens of words depend on those before them, of which a line is enough, with the token that ended the last: a
        # decoder that drops the first space of a text does not drop that of a line.
        self._line.append(token)
        line = self.tokenizer.decode(self._line, skip_special_tokens=True)
        self.held = len(line) - self._taken if line.endswith("\ufffd") else 0
        if not self.held:
            self.text += line[self._taken :]
            self._taken = len(line)
        if line.endswith("\n"):
            self._line = [token]
            self._taken = len(self.tokenizer.decode(self._line, skip_special_tokens=True))

    def finish(self) -> None:
        """What can become no character any more is shown as one that is none."""
        if self.bytes is not None:
            self.text += self.bytes.decode(b"", final=True)
        elif self.held:
            self.text += self.tokenizer.decode(self._line, skip_special_tokens=True)[self._taken :]
        self.held = 0


class TextStream(BaseStreamer):
    """Pass on tokens as text as soon as they make whole characters; the prompt, which comes first, is not shown.

    Bytes that can be no character come out as U+FFFD, once it is certain that they are none.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", write: Callable[[str], None]) -> None:
        self.write, self.running = write, RunningText(tokenizer)
        self.shown, self.prompt_seen = 0, False

    def put(self, value: Tensor) -> None:
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        for token in value.flatten().tolist():
            self.running.put(token)
        self._show()

    def end(self) -> None:
        self.running.finish()
        self._show()

    def _show(self) -> None:
        new, self.shown = self.running.text[self.shown :], len(self.running.text)
        if new:
            self.write(new)


def generate_text(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str | bytes = "",
    *,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    write: Callable[[str], None] | None = None,
    memory: Memory | None = None,
) -> Generated:
    """Write on after a prompt; `write` receives the text in pieces as it comes.

    The prompt starts a document: <bos> stands before it. temperature 0 takes the likeliest token every time; top_k
    keeps the k likeliest and top_p the likeliest that add up to p (0 and 1 keep all). repetition_penalty above 1 makes
    tokens that have been written less likely, as transformers has it; those of the prompt are left alone. With a seed
    the text is the same every time, and the random numbers of the caller are left as they are. Bytes that are not UTF-8
    can be a prompt for a byte model only.

    With a `memory` the prompt follows what it has read, in the same document if one is open; prompt and answer are in
    the memory of the result, and the one that was given stays as it is.
    """
    check_at_least("max_new_tokens", max_new_tokens, 1)
    chooser = Chooser(temperature, top_k, top_p, seed, model.device, repetition_penalty)  # checks the dials
    bytewise = is_byte_tokenizer(tokenizer)
    streamer = None if write is None else TextStream(tokenizer, write)
    started = time.perf_counter()
    if memory is not None:
        reader = _follow(memory, model, tokenizer, prompt)
        prompt_tokens, new = reader.tokens - memory.tokens[0], []
        if streamer is not None:
            streamer.put(torch.empty(0, dtype=torch.int64))  # the prompt, which is not shown
        for token in reader.write(chooser, max_new_tokens):
            new.append(token)
            if streamer is not None:
                streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
    else:
        reader, input_ids = None, encode_prompt(tokenizer, prompt).to(model.device)
        prompt_tokens = input_ids.shape[1]
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.inference_mode(), torch.random.fork_rng(devices, enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(ending_tokens(model, tokenizer)) or None,
                pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
                streamer=streamer,
                logits_processor=_repetition(repetition_penalty, prompt_tokens),
                **chooser.dials,
            )
        new = output[0, prompt_tokens:].tolist()
    seconds = time.perf_counter() - started
    text = decode_bytes(new).decode(errors="replace") if bytewise else tokenizer.decode(new, skip_special_tokens=True)
    return Generated(text, len(new), prompt_tokens, seconds, None if reader is None else reader.memory)


def _follow(
    memory: Memory, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", prompt: str | bytes
) -> Reader:
    """Read the prompt after what the memory has read."""
    if memory.rows != 1:
        raise ValueError(f"got a memory of {memory.rows} rows; expected one row (see Memory.row)")
    reader = Reader(model, tokenizer, memory=memory)
    if prompt or not memory.open[0]:
        reader.read(prompt, name="prompt", new_document=not memory.open[0])
    return reader


def _repetition(penalty: float, prompt_tokens: int = 0) -> LogitsProcessorList:
    chosen = LogitsProcessorList()
    if penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(penalty, prompt_ignore_length=prompt_tokens))
    return chosen


COLDEST = 1e-6
"""Least temperature above 0: below, logits that are divided by it are no numbers any more."""
NOT_UTF_8 = "got a prompt that is not UTF-8; expected UTF-8, as the model reads no bytes"


class Chooser:
    """Chooses a token from logits (1, V) as transformers does, by the dials of `generate_text`.

    Its random numbers are its own: with a seed it chooses the same, whatever else draws some meanwhile.
    """

    def __init__(
        self,
        temperature: float,
        top_k: int,
        top_p: float,
        seed: int | None,
        device: torch.device | str,
        repetition_penalty: float = 1.0,
    ) -> None:
        check_between("temperature", temperature, 0.0, 100.0)
        if 0.0 < temperature < COLDEST:
            raise ValueError(f"got temperature={temperature}; expected 0, for the likeliest, or {COLDEST} to 100")
        if seed is not None:
            check_between("seed", seed, 0, 2**63 - 1)
        check_between("top_p", top_p, 1e-6, 1.0)
        check_at_least("top_k", top_k, 0)
        check_between("repetition_penalty", repetition_penalty, 0.01, 100.0)
        self.dials: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        self.warpers, self.random = _repetition(repetition_penalty), None
        self.chosen: list[int] | None = [] if self.warpers else None  # what a penalty looks at
        if temperature > 0.0:
            self.dials = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
            self.random = torch.Generator(device)
            self.random.manual_seed(secrets.randbits(63) if seed is None else seed)
            if temperature != 1.0:
                self.warpers.append(TemperatureLogitsWarper(temperature))
            if top_k > 0:
                self.warpers.append(TopKLogitsWarper(top_k))
            if top_p < 1.0:
                self.warpers.append(TopPLogitsWarper(top_p))

    @torch.no_grad()
    def __call__(self, logits: Tensor) -> int:
        before: Any = None  # the other warpers do not look at it
        if self.chosen is not None:
            before = torch.tensor([self.chosen], dtype=torch.int64, device=logits.device)
        scores: Any = self.warpers(before, logits.float())
        if self.random is None:
            token = int(scores.argmax(dim=-1))
        else:
            token = int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self.random))
        if self.chosen is not None:
            self.chosen.append(token)
        return token


def encode_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: str | bytes) -> Tensor:
    """Turn a prompt into token ids (1, T) that start a document.

    A str made from bytes that are not UTF-8 (surrogateescape, as in sys.argv) gives those bytes back.
    """
    if is_byte_tokenizer(tokenizer):
        data = prompt.encode("utf-8", "surrogateescape") if isinstance(prompt, str) else prompt
        return torch.tensor([[BOS, *encode_bytes(data).tolist()]])
    if isinstance(prompt, bytes):
        try:
            prompt = prompt.decode()
        except UnicodeDecodeError as error:
            raise ValueError(NOT_UTF_8) from error
    elif any("\ud800" <= one <= "\udfff" for one in prompt):
        raise ValueError(NOT_UTF_8)
    ids, start, end = tokenizer(prompt).input_ids, tokenizer.bos_token_id, tokenizer.eos_token_id
    if ids[-1:] == [end] and tokenizer(prompt, add_special_tokens=False).input_ids[-1:] != [end]:
        ids = ids[:-1]  # the tokenizer's own: the text goes on
    if start is not None and ids[:1] != [start]:
        ids = [start, *ids]
    if not ids:
        raise ValueError("got an empty prompt for a tokenizer without a start token; expected some text")
    return torch.tensor([ids])
