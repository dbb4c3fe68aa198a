"""Bits per byte of a text by position, for models with a state and without: stretches that all start anew."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from titans_lm.data.text import Document, read_documents
from titans_lm.evaluate.bits_per_byte import Text, buckets, encode_text, token_bits
from titans_lm.evaluate.stream import has_state

EDGES = (0, 128, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
PIECE = 512
"""Tokens that a model with a state reads at once."""


def score_run(
    folder: Path, source: Path, *, device: str, positions: int, most_bytes: int, reset_every: int
) -> dict[str, Any]:
    """Score the finished model of a run on the start of a text, one with a state with that state reset as well."""
    from titans_lm.train.run import load_model, load_tokenizer

    model, tokenizer = load_model(folder, device), load_tokenizer(folder)
    sizes = {"positions": positions, "most_bytes": most_bytes}
    found: dict[str, Any] = {"test": score(model, tokenizer, source, **sizes)}
    if has_state(model):
        bits = reset_score(model, tokenizer, source, reset_every=reset_every, **sizes)
        found["reset"] = {"every": reset_every, "bits_per_byte": bits}
    return found


def reset_score(
    model: Any, tokenizer: Any, source: Path, *, positions: int, most_bytes: int, reset_every: int
) -> float:
    """Bits per byte of the stretches that `score` reads, with the state thrown away every so many tokens."""
    texts = read_texts(source, tokenizer, most_bytes)
    pieces = [piece for text in texts for piece in stretches(text, positions)]
    bits = token_bits(model, [piece.ids for piece in pieces], reset_every=reset_every, piece_len=PIECE, batch_size=4)
    return float(sum(row.sum() for row in bits)) / sum(text.bytes for text in texts)


def score(model: Any, tokenizer: Any, source: Path, *, positions: int, most_bytes: int) -> dict[str, Any]:
    """Measure bits per byte over stretches of `positions` tokens, overall and by position in the stretch.

    Every stretch begins with the token that begins a document, and is read from its start to its end: models with a
    state carry it along, others see all of the stretch at once. Bits per byte by position are bits per token times the
    tokens per byte of the whole text. ValueError where there is no text.
    """
    texts = read_texts(source, tokenizer, most_bytes)
    count = sum(text.bytes for text in texts)
    pieces = [piece.ids for text in texts for piece in stretches(text, positions)]
    if has_state(model):
        bits = token_bits(model, pieces, piece_len=PIECE, batch_size=4)
    else:
        bits = token_bits(model, pieces, reset_every=positions, batch_size=1)
    tokens = sum(map(len, bits))
    edges = [edge for edge in EDGES if edge < positions] + [positions]
    found = [{**asdict(b), "bits_per_byte": b.bits_per_token * tokens / count} for b in buckets(bits, edges)]
    total = float(sum(row.sum() for row in bits))
    return {"bits_per_byte": total / count, "bytes": count, "tokens": tokens, "by_position": found}


def read_texts(source: Path, tokenizer: Any, most_bytes: int) -> list[Text]:
    """Encode documents until `most_bytes` are used up, the last up to a character; ValueError where there is none."""
    documents, _ = read_documents(source)
    texts, count = [], 0
    for document in documents:
        data = document.data[: _whole(document.data, most_bytes - count)]
        if data:
            text = encode_text(Document(document.name, data), tokenizer)
            if tokenizer.bos_token_id is None:  # a text begins after what ends one, so that its first token counts too
                text = Text(text.name, np.concatenate([[tokenizer.eos_token_id], text.ids]), len(data))
            texts.append(text)
            count += len(data)
    if not texts:
        raise ValueError(f"got the test text {str(source)!r}, which holds nothing to predict; expected text")
    return texts


def _whole(data: bytes, most: int) -> int:
    """Where to cut UTF-8 before `most` bytes without tearing a character."""
    if most >= len(data):
        return len(data)
    while most > 0 and data[most] & 0xC0 == 0x80:
        most -= 1
    return max(most, 0)


def stretches(text: Text, positions: int) -> list[Text]:
    """Cut a text into stretches, each after the token that the text began with."""
    begin, ids = text.ids[:1], text.ids[1:]
    return [
        Text(f"{text.name}#{start}", np.concatenate([begin, ids[start : start + positions]]), 0)
        for start in range(0, len(ids), positions)
    ]
