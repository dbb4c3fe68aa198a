"""Batches: padding on the right, every sequence once, the other strand by chance, targets that are there."""

import numpy as np
import torch

from genomics.genomics_cases import letters, sequences
from titans_lm.genomics.batches import SequenceBatches, padded, pieces, with_targets
from titans_lm.genomics.records import PAD, decode, encode, reverse_complement


def test_padding_stands_on_the_right() -> None:
    batch = padded([encode("ACG", "a"), encode("T", "b")])
    assert batch["tokens"].tolist() == [[0, 1, 2], [3, PAD, PAD]]
    assert batch["valid"].tolist() == [[True, True, True], [True, False, False]]
    assert batch["tokens"].dtype == torch.int64


def with_classes(rows: list[tuple[str, str]], **settings: int) -> SequenceBatches:
    data = sequences(rows)
    return SequenceBatches(data.tokens, data.labels, **settings)


def texts(batch: dict[str, torch.Tensor]) -> list[str]:
    return [decode(row.numpy().astype(np.uint8)) for row in batch["tokens"]]


def test_every_sequence_is_read_once_before_any_is_read_again() -> None:
    rows = letters(12)
    batches = with_classes(rows, batch_size=4, seed=5)
    known = dict(rows)
    for epoch in range(2):
        seen = [(text, int(label)) for step in range(3) for batch in [batches(3 * epoch + step)]
                for text, label in zip(texts(batch), batch["labels"], strict=True)]  # fmt: skip
        assert sorted(seen) == sorted((text, ("box", "plain").index(label)) for text, label in known.items())
    assert texts(batches(0)) == texts(with_classes(rows, batch_size=4, seed=5)(0))
    assert texts(batches(0)) != texts(batches(3)), "an order of its own each time around"


def test_strands_are_drawn_anew_each_time() -> None:
    rows = letters(16)
    plain, turned = (with_classes(rows, batch_size=16, strands=strands) for strands in (False, True))
    shares = []
    for step in range(4):
        pairs = list(zip(texts(plain(step)), texts(turned(step)), strict=True))
        for straight, drawn in pairs:
            assert drawn in (straight, decode(reverse_complement(encode(straight, "s"))))
        shares.append([straight != drawn for straight, drawn in pairs])
    assert 0.3 < np.mean(shares) < 0.7
    assert len(set(map(tuple, shares))) == 4, "a step turns others than the one before"
    assert plain.fingerprint != turned.fingerprint


def test_targets_are_the_nucleotides_that_follow() -> None:
    batch = with_targets([encode("ACNG", "a"), encode("TG", "b")])
    assert batch["targets"].tolist() == [[1, -100, 2, -100], [2, -100, -100, -100]]
    drawn = SequenceBatches([encode("ACNG", "a")], batch_size=2)(7)
    assert drawn["targets"].tolist() == [[1, -100, 2, -100]] * 2


def test_long_sequences_become_pieces() -> None:
    cut = pieces([encode("ACGTACG", "a"), encode("AC", "b"), encode("A", "c")], 3)
    assert [decode(piece) for piece in cut] == ["ACG", "TAC", "AC"], "single nucleotides predict nothing"


def test_a_piece_of_unknown_nucleotides_is_left_out() -> None:
    """A step of nothing else would have no target, and a mean of none."""
    cut = pieces([encode("ACGNNNNNNGNT", "a")], 3)
    assert [piece.tolist() for piece in cut] == [encode(text, text).tolist() for text in ("ACG", "GNT")]
