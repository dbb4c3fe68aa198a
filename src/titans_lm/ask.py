"""Ask what a text says: read it into a memory, then answer from the memory alone."""

import os
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from titans_lm.checks import check_at_least
from titans_lm.data.tasks.vocabulary import as_taught, split_words
from titans_lm.data.text import SNIFFED, looks_binary
from titans_lm.generate import Generated, generate_text
from titans_lm.streaming import Memory, load_memory, save_memory
from titans_lm.streaming.file import check_memory_file
from titans_lm.streaming.read import STDIN, StoppedReading, read_files
from titans_lm.train.files import check_writable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MOST = 32
"""Tokens of an answer, unless its model ends it before."""


def answer(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    question: str,
    memory: Memory,
    *,
    max_new_tokens: int = MOST,
) -> Generated:
    """Answer a question from a memory, which stays as it is; the likeliest words, in the form of the chat template."""
    asked = as_asked(tokenizer, question, opened=memory.open[0])
    return generate_text(model, tokenizer, asked, memory=memory, max_new_tokens=max_new_tokens, temperature=0.0)


def as_asked(tokenizer: "PreTrainedTokenizerBase", question: str, opened: bool = False) -> str:
    """Write a question as the model was taught to be asked: in its words, and by its chat template, if it has one."""
    question = as_taught(question, tokenizer)
    if not has_template(tokenizer):
        return question
    return templated(tokenizer, [{"role": "user", "content": question}], opened)


def has_template(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the model was taught how a chat is written."""
    return bool(getattr(tokenizer, "chat_template", None))


def templated(tokenizer: "PreTrainedTokenizerBase", messages: list[dict[str, str]], opened: bool = False) -> str:
    """Write messages by the chat template, up to where the answer begins; ValueError where it refuses them.

    Without the mark that a text begins with: whoever reads it writes that. In an `opened` document nobody does, and
    there a mark that begins every turn as well stays.
    """
    from jinja2 import TemplateError

    owner: Any = tokenizer
    try:
        text = owner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, TypeError, ValueError) as error:
        raise ValueError(f"the model's chat template refuses these messages: {error}") from error
    bos = owner.bos_token or ""
    return text if opened and bos and text.count(bos) > 1 else text.removeprefix(bos)


def ask_files(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    files: Sequence[str | Path],
    question: str,
    *,
    memory: Path | None = None,
    out: Path | None = None,
    max_new_tokens: int = MOST,
    quiet: bool = False,
) -> dict[str, Any]:
    """Read files after what a memory holds, keep the memory in `out`, and answer a question from it.

    The files may be none where there is a memory, which then is asked as it is. ValueError for an empty file, a
    question without anything to answer it from, a memory of another model, and an `out` that exists.
    """
    check_asked(files, question, memory, out)
    check_at_least("max_new_tokens", max_new_tokens, 1)
    if not files:
        assert memory is not None, "checked"
        known = load_memory(memory, model)
    else:
        known = _read(model, tokenizer, files, memory, quiet)
        if out is not None:
            save_memory(known, out, model)
    found = answer(model, tokenizer, question, known, max_new_tokens=max_new_tokens)
    return {
        "question": question,
        "answer": found.text.strip(),
        "seconds": round(found.seconds, 3),
        "tokens_read": known.tokens[0],
        "sources": [source.name for source in known.sources[0]],
        "read_in_part": [source.name for source in known.sources[0] if not source.complete],
        "memory": None if out is None else str(out),
        "memory_bytes": None if out is None else out.stat().st_size,
        "split_words": split_words(as_taught(question, tokenizer), tokenizer),
    }


def _read(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    files: Sequence[str | Path],
    onto: Path | None,
    quiet: bool,
) -> Memory:
    """Read files whole; KeyboardInterrupt where that is stopped: half of a text answers no question."""
    with TemporaryDirectory() as folder:
        kept = Path(folder) / "memory"
        try:
            read_files(model, tokenizer, files, kept, onto=onto, quiet=quiet)
        except StoppedReading:
            raise KeyboardInterrupt(
                "stopped before all was read, and nothing is kept; for long texts, titans read FILES --out MEMORY goes "
                "on where it was stopped, and titans ask --memory MEMORY answers"
            ) from None
        return load_memory(kept, model)


def _check_text(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(SNIFFED)
        seen = start.removeprefix(BOM_UTF8)
        while not seen.strip() and (block := file.read(SNIFFED)):
            seen = block
    if looks_binary(start):
        raise ValueError(f"got the file {str(path)!r}, which is not text (it holds a zero byte); expected text")
    if not seen.strip():
        raise ValueError(f"got the file {str(path)!r}, which is empty or blank; expected some text")


def check_asked(files: Sequence[str | Path], question: str, memory: Path | None, out: Path | None) -> None:
    """Refuse what cannot be answered before anything is read: ValueError."""
    paths = [Path(file) for file in files]
    if not question.strip() or os.path.isfile(question):  # unlike Path's, it takes a question of any length
        raise ValueError(f'got {question!r} in the place of the question; expected titans ask FILE "Where is Mary?"')
    if not paths and memory is None:
        raise ValueError(f"got the question {question!r} and nothing to read; expected files before it, or --memory")
    for path in paths:
        if str(path) != STDIN and path.is_file():
            _check_text(path)
    if out is not None and not paths:
        raise ValueError(f"got --out {out} and nothing to read; expected files to keep the memory of")
    if out is not None:
        check_writable("--out", out)
        if out.exists():
            raise ValueError(f"got --out {out}, which exists; ask it with --memory {out}, or choose another name")
    check_memory_file(memory)
