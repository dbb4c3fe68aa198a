"""Rows of prepared tokens: each once in an epoch, the same for whoever reads them, and what the text says."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from prepare.prepare_cases import prepared, write_texts
from titans_lm.data.batches import IGNORED, DocumentLanes, DocumentRows, PackedRows
from titans_lm.data.prepared import Split

KINDS = [PackedRows, DocumentRows]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    path = tmp_path_factory.mktemp("packing")
    write_texts(path / "texts", 30)
    return prepared(path / "texts", path / "out", shard_tokens=1500).train


def epoch(batches, number: int = 0) -> list:
    """The samples of an epoch, each as (row, tokens in, targets)."""
    B = batches.batch_size
    found = []
    for index in range(number * batches.rows, (number + 1) * batches.rows):
        batch = batches(index // B)
        found.append(tuple(batch[name][index % B] for name in ("sample", "input_ids", "targets")))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_once_in_an_epoch_and_another_order_in_the_next(split: Split, kind) -> None:
    batches = kind(split, seq_len=32, batch_size=3, seed=5)
    first, second = ([int(row) for row, _, _ in epoch(batches, number)] for number in (0, 1))
    assert sorted(first) == sorted(second) == list(range(batches.rows))
    assert first != second
    other = [int(row) for row, _, _ in epoch(kind(split, seq_len=32, batch_size=3, seed=6))]
    assert sorted(other) == sorted(first)
    assert other != first


def test_packed_rows_are_the_text_end_to_end(split: Split) -> None:
    whole = np.concatenate(list(split)).astype(np.int64)
    T = 32
    rows = {
        int(row): (ids.numpy(), targets.numpy())
        for row, ids, targets in epoch(PackedRows(split, seq_len=T, batch_size=4))
    }
    for row, (ids, targets) in rows.items():
        assert np.array_equal(ids, whole[row * T : (row + 1) * T])
        assert np.array_equal(targets, whole[row * T + 1 : (row + 1) * T + 1])
    assert len(rows) == (len(whole) - 1) // T


def test_rows_of_documents_hold_one_each_and_predict_every_token_once(split: Split) -> None:
    batches = DocumentRows(split, seq_len=32, batch_size=4)
    predicted = []
    for _, ids, targets in sorted(epoch(batches), key=lambda sample: int(sample[0])):
        real = targets != IGNORED
        length = int(real.sum())
        assert real[:length].all(), "padding is on the right"
        assert (ids[1:length] == targets[: length - 1]).all()
        predicted.append(targets[:length].numpy())
    assert np.array_equal(np.concatenate(predicted), np.concatenate([document[1:] for document in split]))
    masks = [batches(step).get("attention_mask") for step in range(batches.rows // 4)]
    assert any(mask is not None and not mask.all() for mask in masks)
    assert any(
        mask is None
        for mask in (DocumentRows(split, seq_len=1, batch_size=1)(s).get("attention_mask") for s in range(3))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_reads_gets_the_same(split: Split, kind) -> None:
    """By steps in any order, by a copy in another process, in batches of another size."""
    batches = kind(split, seq_len=16, batch_size=4, seed=1)
    steps = {step: batches(step) for step in (7, 0, 200, 3)}
    copy, halves = pickle.loads(pickle.dumps(batches)), kind(split, seq_len=16, batch_size=2, seed=1)
    for step, batch in steps.items():
        assert all((copy(step)[name] == part).all() for name, part in batch.items())
        for half in (0, 1):
            part = halves(2 * step + half)
            for name in ("input_ids", "targets", "sample"):
                assert (part[name] == batch[name][2 * half : 2 * half + 2]).all()
    assert copy.fingerprint == batches.fingerprint
    assert halves.fingerprint != batches.fingerprint


def test_lanes_read_prepared_documents(split: Split) -> None:
    lanes, plain = (DocumentLanes(x, seq_len=16, batch_size=3) for x in (split, [np.array(d) for d in split]))
    for step in (0, 1, 40):
        assert all((lanes(step)[name] == part).all() for name, part in plain(step).items())
    assert lanes.fingerprint != plain.fingerprint, "named by the sums of its shards"
    others = [{"seq_len": 8}, {"batch_size": 2}, {"seed": 1}]
    named = {DocumentLanes(split, **{"seq_len": 16, "batch_size": 3, **other}).fingerprint for other in others}
    assert len(named - {lanes.fingerprint}) == 3, "and by where its pieces lie"


def test_too_little_text(split: Split, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected at least seq_len"):
        PackedRows(split, seq_len=split.tokens, batch_size=1)
    assert PackedRows(split, seq_len=1, batch_size=1).rows == split.tokens - 1, "the last token has none after it"
    nothing = Split(split.folder, [], split.dtype)
    for kind in KINDS:
        with pytest.raises(ValueError, match="got no documents to train on"):
            kind(nothing, seq_len=4, batch_size=1)
        with pytest.raises(ValueError, match="got seq_len=0"):
            kind(split, seq_len=0, batch_size=1)
