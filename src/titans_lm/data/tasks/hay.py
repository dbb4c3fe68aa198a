"""What facts are hidden in: a few dull sentences over and over, or books; in the tokens of a tokenizer."""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from titans_lm.config import nearest

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

BYTES = "bytes"
"""Name of the tokenizer whose ids are the bytes of the text."""
NOISE = (
    "The river runs past the mill.", "A cart stands in the yard.", "Bread is baked before it is light.",
    "The clock in the hall is slow.", "Nobody has come down the road.",
)  # fmt: skip
SENTENCE = re.compile(r"(?<=[.!?])[\"'’”)]*\s+")
"""What is between two sentences of a book; abbreviations are cut too, which does no harm to a haystack."""


@dataclass(frozen=True)
class Hay:
    """Texts as tokens, and where in them a sentence may be put."""

    texts: "tuple[np.ndarray, ...]"
    places: "tuple[np.ndarray, ...]"
    """Of each text, the offsets before which a sentence begins; the first is 0."""

    def cut(self, rng: "np.random.Generator", tokens: int) -> "tuple[np.ndarray, np.ndarray]":
        """Cut so many tokens from a random sentence of a random text on, and say where in them sentences begin.

        The last sentence is cut off where the tokens are enough; where a text ends, another random one goes on.
        """
        import numpy as np

        parts, places, have = [], [], 0
        chances = np.array([len(text) for text in self.texts], float)
        chances /= chances.sum()
        while have < tokens or not parts:
            which = int(rng.choice(len(self.texts), p=chances))
            text, begins = self.texts[which], self.places[which]
            start = int(begins[rng.integers(len(begins))]) if not parts else 0
            part = text[start : start + tokens - have]
            places.append(begins[(begins >= start) & (begins < start + max(len(part), 1))] - start + have)
            parts.append(part)
            have += len(part)
        return np.concatenate(parts), np.concatenate(places)


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """Load a tokenizer from a folder; ValueError where there is none."""
    from transformers import AutoTokenizer

    if not Path(name).is_dir():
        raise ValueError(f"got tokenizer={name!r}; {nearest(name, [BYTES])}, or give the folder of a tokenizer")
    return AutoTokenizer.from_pretrained(name, local_files_only=True)


@lru_cache(maxsize=4)
def _tokenizer(name: str) -> "PreTrainedTokenizerBase":
    return load_tokenizer(name)


def vocabulary(tokenizer: str) -> int:
    """Count the ids that a tokenizer makes."""
    return 256 if tokenizer == BYTES else len(_tokenizer(tokenizer))


def encode(text: str, tokenizer: str = BYTES) -> "np.ndarray":
    """Turn a piece of text into tokens, without marks of a begin or an end."""
    import numpy as np

    if tokenizer == BYTES:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    return np.asarray(_tokenizer(tokenizer)(text, add_special_tokens=False).input_ids, np.int64)


@lru_cache(maxsize=4)
def noise(tokenizer: str = BYTES) -> Hay:
    """Make hay of five sentences that come again and again, as long as a long book."""
    import numpy as np

    sentences = [encode(f"{sentence} ", tokenizer) for sentence in NOISE]
    lengths = np.array([len(sentence) for sentence in sentences])
    again = -(-(1 << 20) // lengths.sum())
    ends = np.cumsum(np.tile(lengths, again))
    return Hay((np.tile(np.concatenate(sentences), again),), (np.concatenate([[0], ends[:-1]]),))


@lru_cache(maxsize=4)
def books(source: Path, tokenizer: str = BYTES) -> Hay:
    """Make hay of the texts of a file or a folder: white space becomes one space, sentences are found by their marks."""
    import numpy as np

    from titans_lm.data.text import read_documents

    texts, places = [], []
    for document in read_documents(source)[0]:
        sentences = SENTENCE.split(" ".join(document.data.decode("utf-8", "replace").split()))
        pieces = _encode_all([f"{sentence} " for sentence in sentences if sentence], tokenizer)
        texts.append(np.concatenate(pieces))
        places.append(np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])[:-1]]))
    return Hay(tuple(texts), tuple(places))


def _encode_all(sentences: list[str], tokenizer: str) -> "list[np.ndarray]":
    import numpy as np

    if tokenizer == BYTES:
        return [encode(sentence) for sentence in sentences]
    found = _tokenizer(tokenizer)(sentences, add_special_tokens=False).input_ids
    return [np.asarray(ids, np.int64) for ids in found]
