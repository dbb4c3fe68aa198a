"""Shipped models read a long text once: one is asked what is hidden in it, another is surprised by it, and writes."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titans_lm.ask import answer
from titans_lm.backbone import frozen_memory
from titans_lm.data.tasks.vocabulary import split_words
from titans_lm.demo.hidden import LIBRARY, Hidden, Kind, drawn_facts, hide, long_text, own_facts
from titans_lm.demo.settings import BooksPlan, DemoSettings, SearchPlan
from titans_lm.evaluate.documents import Book, Encoder, spans
from titans_lm.evaluate.positions import overall, score_spans
from titans_lm.evaluate.stream import reader_for
from titans_lm.generate import generate_text
from titans_lm.report.surprise.files import write_surprise
from titans_lm.streaming import Reader, load_memory, save_memory
from titans_lm.streaming.read import amount_told
from titans_lm.train.files import write_atomically
from titans_lm.train.fresh import describe_model
from titans_lm.train.progress import CountReport
from titans_lm.train.run import pretrained
from titans_lm.train.shipped import PREFIX, shipped_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODELS: dict[Kind, str] = {"place": "facts", "number": "needles"}
READERS = ("memory", "reset", "window")
"""Who answers: from the memory file; the same model with its memory reset; the same model having read the end alone."""
TEXT = "text.txt"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One question, and what each reader answered."""

    kind: Kind
    question: str
    expected: str
    tokens_ago: int
    """Tokens between the fact and the question."""
    at: int
    """Tokens that were read when it was asked."""
    answers: dict[str, str]

    def right(self, reader: str) -> bool:
        return self.answers[reader] == self.expected


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How one model read the text."""

    model: str
    parameters: int
    tokens: int
    seconds: float
    state_bytes: int
    files: list[str]
    """Memory files, in the order in which they were written."""
    file_bytes: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """What came out of the search."""

    seed: int
    own: bool
    """Whether the facts are the user's."""
    source: str
    tokens: int
    text_bytes: int
    window: int
    hidden: Hidden
    readings: list[Reading]
    asked: list[Asked]

    def score(self, kind: Kind, reader: str) -> tuple[int, int]:
        """Count right answers of one reader to questions of one kind, and the questions."""
        of = [one for one in self.asked if one.kind == kind]
        return sum(one.right(reader) for one in of), len(of)

    def as_dict(self) -> dict[str, Any]:
        scores = {
            name: {reader: self.score(kind, reader)[0] for reader in READERS} | {"asked": self.score(kind, "memory")[1]}
            for kind, name in MODELS.items()
        }
        kept = {name: value for name, value in vars(self).items() if name not in ("hidden", "readings", "asked")}
        return {
            **kept,
            "facts": [
                {"tokens_before": place, **asdict(fact)}
                for fact, place in zip(self.hidden.facts, self.hidden.places, strict=True)
            ],
            "words_that_are_spelled": self.hidden.split,
            "scores": scores,
            "readings": [asdict(reading) for reading in self.readings],
            "asked": [asdict(one) for one in self.asked],
        }


def make_hidden(settings: DemoSettings, plan: SearchPlan, seed: int) -> Hidden:
    """Make the text; ValueError for a user's text or facts that will not do."""
    rng = np.random.default_rng(seed)
    own = None if settings.facts is None else own_facts(settings.facts)
    sentences, counts = long_text(settings.text, plan.tokens if settings.tokens is None else settings.tokens)
    answered = MODELS["number"] in shipped_names()
    if own and not answered and any(fact.kind == "number" for fact in own):
        raise ValueError(
            f"got numbers in {settings.facts}, and no {PREFIX}{MODELS['number']} to answer them; expected sentences of "
            "people alone, or a wheel that has it"
        )
    numbers = plan.numbers if answered else 0
    told = [own] if own else drawn_facts(rng, plan.parts, plan.moves, numbers)
    hidden = hide(rng, sentences, counts, told)
    tokenizer = pretrained("facts")[1]
    hidden.split.extend(dict.fromkeys(word for fact in hidden.facts for word in split_words(fact.sentence, tokenizer)))
    return hidden


def search(settings: DemoSettings, plan: SearchPlan, hidden: Hidden, seed: int, *, quiet: bool) -> Found:
    """Read, save, forget the text, and ask: files go to the folder of the demo."""
    text = "".join(hidden.parts)
    write_atomically(settings.out / TEXT, text + "\n")
    readings, asked = [], []
    for kind, name in MODELS.items():
        if any(fact.kind == kind for fact in hidden.facts):
            reading, found = _read(name, kind, hidden, settings.out, plan, quiet=quiet)
            readings.append(reading)
            asked += found
    return Found(
        seed=seed,
        own=settings.facts is not None,
        source=LIBRARY if settings.text is None else str(settings.text),
        tokens=hidden.ends[-1],
        text_bytes=len(text.encode()),
        window=plan.window,
        hidden=hidden,
        readings=readings,
        asked=asked,
    )


def _read(
    name: str, kind: Kind, hidden: Hidden, out: Path, plan: SearchPlan, *, quiet: bool
) -> tuple[Reading, list[Asked]]:
    """Read with one model. Where people are is asked after every part, as they walk about; numbers at the end."""
    model, tokenizer = pretrained(name)
    reader, asked, files, spent = Reader(model, tokenizer, piece_len=plan.piece_len), [], [], 0.0

    def told(reader: Reader) -> None:
        rate = reader.tokens / max(spent + time.perf_counter() - started, 1e-9)
        report.update(reader.tokens, amount_told(reader, rate))

    with CountReport(quiet=quiet, title=f"reading with {PREFIX}{name}").start(hidden.ends[-1]) as report:
        for number, part in enumerate(hidden.parts):
            started = time.perf_counter()
            reader.read(part, name=TEXT, new_document=number == 0, on_piece=told)
            spent += time.perf_counter() - started
            last = number == len(hidden.parts) - 1
            if not last and kind == "number":
                continue
            files.append(f"{name}.memory" if last else f"{name}-{number + 1}.memory")
            save_memory(reader.memory, out / files[-1], model)
            asked += _ask(model, tokenizer, kind, hidden, number, out / files[-1], plan.window)
    reading = Reading(
        model=name, parameters=describe_model(model)["parameters"], tokens=reader.tokens, seconds=spent,
        state_bytes=reader.memory.bytes, files=files, file_bytes=(out / files[-1]).stat().st_size,
    )  # fmt: skip
    return reading, asked


def _ask(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    kind: Kind,
    hidden: Hidden,
    part: int,
    file: Path,
    window: int,
) -> list[Asked]:
    """Ask all that is known by the end of a part, of the memory file and of those that stand beside it."""
    end = Reader(model, tokenizer)
    read = "".join(hidden.parts[: part + 1])  # parts may be shorter than the window
    memories = {"memory": load_memory(file, model), "reset": end.memory}
    end.feed([tokenizer(read[-8 * window :]).input_ids[-window:]])
    memories["window"] = end.memory

    def said(question: str) -> dict[str, str]:
        texts = {name: answer(model, tokenizer, question, memory).text for name, memory in memories.items()}
        return {name: text.strip().rstrip(".") for name, text in texts.items()}

    known = [(fact, ago) for fact, ago in hidden.known(part).values() if fact.kind == kind]
    return [
        Asked(
            kind=kind, question=fact.question, expected=fact.answer, tokens_ago=ago, at=hidden.ends[part],
            answers=said(fact.question),
        )
        for fact, ago in known
    ]  # fmt: skip


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
        with frozen_memory(model, mode == "frozen"):
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
