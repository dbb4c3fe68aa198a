"""Batches made by other processes are the batches."""

import numpy as np
import pytest
import torch

from titans_lm.data.batches import DocumentLanes, RandomCrops, prefetched

DOCUMENTS = [np.arange(5 + 3 * i, dtype=np.uint16) for i in range(9)]


@pytest.mark.parametrize(("kind", "workers"), [(RandomCrops, 0), (DocumentLanes, 0), (DocumentLanes, 2)])
def test_they_are_the_same_from_any_step_on(kind, workers: int) -> None:
    batches = kind(DOCUMENTS, seq_len=4, batch_size=2, seed=1)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    found = list(prefetched(batches, 3, 9, workers))
    assert len(found) == 6
    for step, batch in enumerate(found, 3):
        wanted = batches(step)
        assert batch.keys() == wanted.keys()
        assert all((batch[name] == part).all() for name, part in wanted.items())
    assert list(prefetched(batches, 9, 9, workers)) == []
    assert torch.equal(before, torch.get_rng_state()), "training draws its numbers as if nobody had worked ahead"
