"""What tests of tasks read rows with."""

import numpy as np

from titans_lm.data.tasks.vocabulary import word_ids


def decode_words(ids: np.ndarray) -> str:
    """The text that word tokens were made of."""
    written = {token: word.encode() for word, token in word_ids().items()}
    return b"".join(written.get(int(token), bytes([int(token) % 256])) for token in ids).decode("utf-8", "replace")
