"""Nucleotides as tokens: one id for each of A C G T, one for N, which is any of them, and one for padding."""

import numpy as np
from numpy.typing import NDArray

from titans_lm.config import check_choice
from titans_lm.genomics.settings import Unknown

LETTERS = "ACGTN"
N, PAD = 4, 5
VOCAB_SIZE = 6
IUPAC = "RYSWKMBDHV"
"""Codes for one of two or three bases: R is A or G, Y is C or T, and so on; N takes their place."""
Tokens = NDArray[np.uint8]

_OTHER, _CODE = 255, 254
_COMPLEMENT = np.array([3, 2, 1, 0, N, PAD], np.uint8)


def _table() -> Tokens:
    table = np.full(256, _OTHER, np.uint8)
    for letters, ids in ((LETTERS, range(5)), ("U", [3]), (IUPAC, [_CODE] * len(IUPAC))):
        for letter, number in zip(letters, ids, strict=True):
            table[ord(letter)] = table[ord(letter.lower())] = number
    return table


_TABLE = _table()


def encode(text: str, name: str, unknown: Unknown = "iupac") -> Tokens:
    """Turn letters into ids: A 0, C 1, G 2, T 3, N 4, in capitals or not; U, which RNA has in place of T, is 3.

    The ten codes for one of several bases (RYSWKMBDHV) become N by default and are an error with unknown="error".
    Everything else (gaps, digits, letters of proteins) is an error, and becomes N with unknown="n". ValueError for
    these, naming the sequence and the position, which counts from 1, and for a sequence of no letters.
    """
    check_choice("unknown", unknown, ("iupac", "error", "n"))
    tokens = _TABLE[np.frombuffer(text.encode("ascii", "replace"), np.uint8)]
    if not len(tokens):
        raise ValueError(f"got the sequence {name!r} without a nucleotide in it; expected at least one")
    strange = tokens == _OTHER if unknown == "iupac" else tokens >= _CODE
    if unknown != "n" and strange.any():
        place = int(strange.argmax())
        expected = f"{LETTERS}, U" + (f" or one of {IUPAC}" if unknown == "iupac" else "")
        raise ValueError(
            f"got {text[place]!r} at position {place + 1} of the sequence {name!r}; expected {expected}, or "
            "unknown='n', which reads everything else as N"
        )
    return np.where(tokens >= _CODE, np.uint8(N), tokens)


def decode(tokens: Tokens) -> str:
    """Turn ids back into capital letters; padding is left out."""
    return "".join(LETTERS[token] for token in tokens if token != PAD)


def reverse_complement(tokens: Tokens) -> Tokens:
    """Read the other strand: the order reversed, A for T, C for G, N and padding as they are."""
    return _COMPLEMENT[tokens[::-1]]
