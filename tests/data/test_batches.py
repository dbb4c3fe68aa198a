import re
import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from titans_lm.data.batches import IGNORED, DocumentLanes, RandomCrops, prefetched
from titans_lm.data.tokenizer import PAD, encode_document

DOCUMENTS = [encode_document(bytes([65 + i]) * n) for i, n in enumerate((3, 40, 1, 17, 8, 8, 25))]


def numbered(*lengths):
    """Documents in which no token occurs twice, so that any token says where it comes from."""
    ends = np.cumsum([0, *lengths])
    return [np.arange(a, b).astype(np.uint16) for a, b in pairwise(ends)]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", [RandomCrops, DocumentLanes])
def test_a_batch_is_a_function_of_seed_and_step(kind):
    batches = kind(DOCUMENTS, seq_len=8, batch_size=3, seed=5)
    forward = [batches(step) for step in range(20)]
    fresh = kind(DOCUMENTS, seq_len=8, batch_size=3, seed=5)
    assert all(equal(fresh(step), forward[step]) for step in reversed(range(20)))
    other = kind(DOCUMENTS, seq_len=8, batch_size=3, seed=6)
    assert not all(equal(other(step), forward[step]) for step in range(20))


@pytest.mark.parametrize("kind", [RandomCrops, DocumentLanes])
def test_the_fingerprint_names_tokens_and_settings(kind):
    base = kind(DOCUMENTS, seq_len=8, batch_size=3).fingerprint
    assert kind(DOCUMENTS, seq_len=8, batch_size=3).fingerprint == base
    changed = [*DOCUMENTS[:-1], DOCUMENTS[-1][::-1].copy()]
    others = {
        kind(changed, seq_len=8, batch_size=3).fingerprint,
        kind(DOCUMENTS, seq_len=9, batch_size=3).fingerprint,
        kind(DOCUMENTS, seq_len=8, batch_size=4).fingerprint,
        kind(DOCUMENTS, seq_len=8, batch_size=3, seed=1).fingerprint,
    }
    assert len(others | {base}) == 5


@pytest.mark.parametrize("kind", [RandomCrops, DocumentLanes])
@pytest.mark.parametrize("wrong", [{"seq_len": 0}, {"batch_size": 0}, {"seq_len": 1.5}])
def test_sizes_are_checked(kind, wrong, unchecked):
    with pytest.raises(ValueError, match="expected an integer of at least 1"):
        kind(DOCUMENTS, **{"seq_len": 8, "batch_size": 3, **wrong})


@pytest.mark.parametrize("seq_len", [1, 7, 64])
def test_crops_are_pieces_of_the_packed_documents(seq_len):
    documents = numbered(30, 2, 40)
    batches = RandomCrops(documents, seq_len=seq_len, batch_size=5)
    for step in range(10):
        batch = batches(step)
        assert batch["input_ids"].shape == batch["targets"].shape == (5, seq_len)
        assert torch.equal(batch["targets"], batch["input_ids"] + 1)  # 0, 1, 2, … packed in order


def test_crops_reach_both_ends():
    batches = RandomCrops(numbered(6), seq_len=4, batch_size=64)
    seen = batches(0)
    assert seen["input_ids"].min() == 0
    assert seen["targets"].max() == 5


def test_too_little_text_for_a_crop_is_an_error():
    assert RandomCrops(numbered(9), seq_len=8, batch_size=1)(0)["targets"][0, -1] == 8
    with pytest.raises(ValueError, match=r"got 8 tokens .* at least seq_len \+ 1 = 9"):
        RandomCrops(numbered(8), seq_len=8, batch_size=1)
    with pytest.raises(ValueError, match="got 0 tokens"):
        RandomCrops([], seq_len=8, batch_size=1)


def read_lane(batches, lane, steps):
    """Follow one lane and put its documents together again: the tokens read and the tokens predicted of each."""
    found = []
    for step in range(steps):
        batch = {name: part[lane] for name, part in batches(step).items()}
        real = batch["attention_mask"].bool()
        assert (batch["input_ids"][~real] == PAD).all()
        assert (batch["targets"][~real] == IGNORED).all()
        assert real[0]
        assert not (real[1:] & ~real[:-1]).any()  # padding on the right only
        if batch["reset"]:
            found.append(([], []))
        found[-1][0].extend(batch["input_ids"][real].tolist())
        found[-1][1].extend(batch["targets"][real].tolist())
    return found


@pytest.mark.parametrize("seq_len", [1, 4, 7, 100])
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_lanes_read_documents_whole_and_predict_every_token_once(seq_len, lanes):
    documents = numbered(5, 12, 2, 9, 30, 7, 3)
    batches = DocumentLanes(documents, seq_len=seq_len, batch_size=lanes, seed=3)
    pieces = sum(-(-(len(d) - 1) // seq_len) for d in batches.documents)
    read, predicted = [], []
    for lane in range(lanes):
        for inputs, targets in read_lane(batches, lane, 3 * pieces)[:-1]:
            assert targets == [token + 1 for token in inputs]
            read.append(inputs[0])
            predicted.append(targets[-1])
    assert set(read) == {int(d[0]) for d in batches.documents}
    assert set(predicted) == {int(d[-1]) for d in batches.documents}
    targets = sorted(token for document in batches.documents for token in document[1:].tolist())
    assert targets == sorted(token for document in documents for token in document[1:].tolist())


def test_one_epoch_reads_each_document_once():
    documents = numbered(5, 6, 7, 8)
    batches = DocumentLanes(documents, seq_len=8, batch_size=1)
    assert len(batches.documents) == 4
    starts = [int(batches(step)["input_ids"][0, 0]) for step in range(12)]
    for epoch in range(3):
        assert sorted(starts[4 * epoch : 4 * epoch + 4]) == [int(d[0]) for d in documents]


def test_a_long_document_is_shared_among_the_lanes():
    batches = DocumentLanes(numbered(101), seq_len=5, batch_size=4)
    assert [len(d) - 1 for d in batches.documents] == [25, 25, 25, 25]
    rows = batches(0)["input_ids"]
    assert len({int(row[0]) for row in rows}) == 4
    seen = sorted(t for step in range(5) for t in batches(step)["targets"].flatten().tolist())
    assert seen == list(range(1, 101))


def test_lanes_need_a_token_to_predict():
    with pytest.raises(ValueError, match="got no document of two tokens or more"):
        DocumentLanes(numbered(1, 1), seq_len=4, batch_size=2)


@pytest.mark.parametrize(("kind", "workers"), [(RandomCrops, 0), (DocumentLanes, 0), (DocumentLanes, 2)])
def test_batches_of_other_processes_are_the_same_from_any_step_on(kind, workers: int) -> None:
    documents = [np.arange(5 + 3 * i, dtype=np.uint16) for i in range(9)]
    batches = kind(documents, seq_len=4, batch_size=2, seed=1)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    coming = prefetched(batches, 3, 9, workers)
    found = [next(coming), next(coming)]
    for process in getattr(coming, "_workers", ()):  # Ctrl-C, or SIGTERM to all, finishes a step: they go on for it
        ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[1]
        assert all(int(ignored, 16) >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM))
    found += coming
    assert len(found) == 6
    for step, batch in enumerate(found, 3):
        wanted = batches(step)
        assert batch.keys() == wanted.keys()
        assert all((batch[name] == part).all() for name, part in wanted.items())
    assert list(prefetched(batches, 9, 9, workers)) == []
    assert torch.equal(before, torch.get_rng_state()), "training draws its numbers as if nobody had worked ahead"
