"""Reading one held-out document: what surprised the memory, and how the model goes on."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from titans_lm.data.text import Corpus
from titans_lm.data.tokenizer import byte_tokenizer, encode_document
from titans_lm.demo.settings import ReadingPlan
from titans_lm.generate import Generated, generate_text
from titans_lm.surprise import Surprise, measure_surprise

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A held-out document as the model read it, and what it wrote next."""

    name: str
    data: bytes
    """What was read."""
    surprise: Surprise
    continuation: Generated
    plan: ReadingPlan

    @property
    def prompt_tail(self) -> str:
        return self.data[-self.plan.prompt_bytes_shown :].decode(errors="replace")

    def agreement(self) -> float:
        """Rank correlation, from −1 to 1, of the memory's surprise with the model's own bits, byte by byte."""
        a, b = (np.argsort(np.argsort(x[1:])) for x in (self.surprise.summary(), self.surprise.bits))
        return float(np.corrcoef(a, b)[0, 1]) if len(a) > 1 else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "document": self.name,
            "bytes_read": len(self.data),
            "prompt_tail": self.prompt_tail,
            "continuation": self.continuation.text,
            "temperature": self.plan.temperature,
            "seconds": self.continuation.seconds,
            "surprise_and_bits_rank_correlation": self.agreement(),
        }


def read_and_continue(model: "PreTrainedModel", corpus: Corpus, plan: ReadingPlan, *, seed: int) -> Reading:
    """Read the start of the first held-out document that is long enough (or the longest), and write on from there."""
    enough = (document for document in corpus.held_out if len(document.data) >= plan.document_bytes)
    document = next(enough, None) or max(corpus.held_out, key=lambda document: len(document.data))
    data = document.data[: plan.document_bytes]
    data = data[: data.rfind(b"\n") + 1] or data  # stop where a line ends
    continuation = generate_text(
        model, byte_tokenizer(), data, max_new_tokens=plan.new_bytes, temperature=plan.temperature, seed=seed
    )
    return Reading(
        name=document.name,
        data=data,
        continuation=continuation,
        surprise=measure_surprise(model, encode_document(data, eos=False)),
        plan=plan,
    )
