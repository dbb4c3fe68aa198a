"""A byte model with a memory on real text: with the memory, with the memory reset, and the same stack without one."""

from dataclasses import dataclass
from typing import Any

from titans_lm.data.batches import RandomCrops
from titans_lm.data.text import Corpus, load_corpus
from titans_lm.data.tokenizer import VOCAB_SIZE, encode_document
from titans_lm.demo.settings import LanguagePlan
from titans_lm.demo.training import Lesson, Trained
from titans_lm.evaluate.bits_per_byte import BitsPerByte, bits_per_byte, encode_text
from titans_lm.evaluate.intervals import Difference, compare
from titans_lm.train.fresh import byte_model
from titans_lm.train.losses import next_token_loss
from titans_lm.train.match import count_parameters, match_parameters

MEMORY_SHARE = 0.62
"""Share of the training time that the model with the memory gets, when time is short: its steps cost more."""


@dataclass(frozen=True, kw_only=True)
class LanguageOutcome:
    """What came out of the language experiment; differences are below 0 where the memory helps."""

    corpus: Corpus
    segment_len: int
    memory: Trained
    no_memory: Trained
    with_memory: BitsPerByte
    reset: BitsPerByte
    without: BitsPerByte
    against_reset: Difference
    against_none: Difference
    reset_against_none: Difference

    def as_dict(self) -> dict[str, Any]:
        return {
            "corpus": self.corpus.describe(),
            "segment_len": self.segment_len,
            "memory": self.memory.as_dict(),
            "no_memory": self.no_memory.as_dict(),
            "held_out": {name: getattr(self, name).as_dict() for name in ("with_memory", "reset", "without")},
            "differences": {
                "with_memory_minus_reset": vars(self.against_reset),
                "with_memory_minus_without": vars(self.against_none),
                "reset_minus_without": vars(self.reset_against_none),
            },
        }


def run_language(plan: LanguagePlan, data: str, *, seconds: float, quiet: bool) -> LanguageOutcome:
    """Train both models on the same batches, in `seconds` or with fewer steps, and measure them on held-out text."""
    corpus = load_corpus(data)
    documents = [encode_document(document.data) for document in corpus.train]
    lesson = Lesson(
        build=byte_model,
        batches=RandomCrops(documents, seq_len=plan.seq_len, batch_size=plan.batch_size, seed=plan.fit.seed),
        loss_fn=next_token_loss,
        settings=plan.fit,
        metric="bits_per_token",
    )
    memory = lesson.train(
        "bytes, memory", plan.memory, quiet=quiet, max_seconds=seconds * MEMORY_SHARE, least_steps=plan.least_steps
    )
    config = match_parameters(plan.no_memory, VOCAB_SIZE, count_parameters(plan.memory, VOCAB_SIZE))
    # The rival gets the same steps, whatever they take.
    no_memory = lesson.train("bytes, no memory", config, quiet=quiet, max_steps=memory.steps)
    # Held-out documents come in an order that has nothing to do with them.
    texts = [encode_text(one, max_bytes=plan.document_bytes) for one in corpus.held_out[: plan.documents]]
    segment, measured = plan.memory.segment_len, {"edges": plan.edges, "batch_size": 16}
    with_memory = bits_per_byte(memory.model, texts, **measured)
    reset = bits_per_byte(memory.model, texts, reset_every=segment, **measured)
    without = bits_per_byte(no_memory.model, texts, **measured)
    return LanguageOutcome(
        corpus=corpus, segment_len=segment, memory=memory, no_memory=no_memory, with_memory=with_memory, reset=reset,
        without=without, against_reset=compare(with_memory, reset), against_none=compare(with_memory, without),
        reset_against_none=compare(reset, without),
    )  # fmt: skip
