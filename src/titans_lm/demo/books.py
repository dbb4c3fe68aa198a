"""The shipped book model reads the start of the demo's text, is surprised, and goes on writing."""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from titans_lm.backbone import frozen_memory
from titans_lm.demo.search import TEXT
from titans_lm.demo.settings import BooksPlan
from titans_lm.evaluate.documents import Book, Encoder, spans
from titans_lm.evaluate.positions import overall, score_spans
from titans_lm.evaluate.stream import reader_for
from titans_lm.generate import generate_text
from titans_lm.report.surprise.files import write_surprise
from titans_lm.streaming import Reader
from titans_lm.train.files import write_atomically
from titans_lm.train.fresh import describe_model
from titans_lm.train.run import pretrained
from titans_lm.train.shipped import PREFIX, shipped_names

NAME, OPENING = "books", "opening.txt"
MODES = ("carried", "frozen", "reset")
"""The state carried through the text; the same with its memories frozen; thrown away every so many tokens."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What the book model made of the start of the text."""

    model: str
    parameters: int
    tokens: int
    bytes: int
    seconds: float
    reset_every: int
    bits_per_byte: dict[str, float]
    """By mode."""
    before: str
    """The end of what it has read."""
    written: str
    files: list[str]


def read_opening(out: Path, plan: BooksPlan, seed: int, *, quiet: bool) -> Opening | None:
    """Read the first characters of the demo's text in every mode, write its surprise page, and go on writing.

    None where no book model came with the package.
    """
    if NAME not in shipped_names():
        return None
    model, tokenizer = pretrained(NAME)
    text = (out / TEXT).read_text(encoding="utf-8")[: plan.characters].rsplit(maxsplit=1)[0]
    write_atomically(out / OPENING, text)
    started, found = time.perf_counter(), {}
    for mode in MODES:
        every = plan.reset_every if mode == "reset" else None
        with frozen_memory(model) if mode == "frozen" else nullcontext():
            reader = reader_for(model, piece_len=plan.piece_len)
            opening = spans([Book(OPENING, out / OPENING)], Encoder(tokenizer))
            found[mode] = overall(score_spans(model, opening, reader, reset_every=every))
    read = Reader(model, tokenizer, piece_len=plan.piece_len)
    read.read(out / OPENING)
    dials = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.15, "seed": seed}
    written = generate_text(model, tokenizer, memory=read.memory, max_new_tokens=plan.new_tokens, **dials).text
    surprised = write_surprise(model, tokenizer, out / OPENING, out, name=f"{PREFIX}{NAME}", quiet=quiet)
    return Opening(
        model=NAME,
        parameters=describe_model(model)["parameters"],
        tokens=found["carried"].tokens,
        bytes=found["carried"].bytes,
        seconds=time.perf_counter() - started,
        reset_every=plan.reset_every,
        bits_per_byte={mode: one.bits_per_byte for mode, one in found.items()},
        before=" ".join(text[-300:].split()[1:]),
        written=written,
        files=[OPENING, *(Path(surprised[kind]).name for kind in ("html", "png", "jsonl"))],
    )
