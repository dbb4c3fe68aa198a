"""A tokenizer of the words that tasks are made of: one token a word, one for two digits, bytes for everything else.

    id 0 … 255    the byte itself
    id 256 …      a word of the tasks' own sentences or two digits, with the space before it where there is one

Any text can be written, and what the tasks say is short: a needle of 47 bytes is 12 tokens. Digits go by two, as they
go by three in large vocabularies: a number of seven is four tokens, and the one that follows a token in it is nearly
always told by that token alone.
"""

import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

WORD = re.compile(r" ?(?:[A-Za-z]+|[0-9]{2})")


@cache
def vocabulary() -> dict[str, int]:
    """Return the id of every word that needles and stories have and of two digits, with and without a space before."""
    from titans_lm.data.tasks.hay import NOISE
    from titans_lm.data.tasks.needle import ADJECTIVES, FRAME, INTRODUCTION, NOUNS
    from titans_lm.data.tasks.stories import WORDS

    texts = [INTRODUCTION, *NOISE, *ADJECTIVES, *NOUNS, *FRAME, *WORDS]
    words = sorted({word for text in texts for word in re.findall("[A-Za-z]+", text)})
    words += [f"{number:02}" for number in range(100)]
    return {written: 256 + i for i, written in enumerate(form for word in words for form in (word, f" {word}"))}


def encode_words(text: str) -> "np.ndarray":
    """Turn a text into tokens."""
    import numpy as np

    known, ids, last = vocabulary(), [], 0
    for found in WORD.finditer(text):
        token = known.get(found[0])
        if token is not None:
            ids += [*text[last : found.start()].encode(), token]
            last = found.end()
    return np.array([*ids, *text[last:].encode()], np.int64)


def decode_words(ids: "np.ndarray") -> str:
    """Turn tokens into the text that they were made of."""
    written = {token: word.encode() for word, token in vocabulary().items()}
    return b"".join(written.get(int(token), bytes([int(token) % 256])) for token in ids).decode("utf-8", "replace")
