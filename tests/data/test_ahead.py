"""Batches made by other processes are the batches."""

import numpy as np
import pytest
import torch

from titans_lm.data.ahead import Ahead
from titans_lm.data.batches import DocumentLanes, RandomCrops

DOCUMENTS = [np.arange(5 + 3 * i, dtype=np.uint16) for i in range(9)]


@pytest.mark.parametrize("kind", [RandomCrops, DocumentLanes])
@pytest.mark.parametrize("workers", [0, 2])
def test_they_are_the_same_in_any_order(kind, workers: int) -> None:
    batches = kind(DOCUMENTS, seq_len=4, batch_size=2, seed=1)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with Ahead(batches, workers, 9) as ahead:
        for step in (0, 1, 2, 6, 7, 1, 8, 20):
            found, wanted = ahead(step), batches(step)
            assert found.keys() == wanted.keys()
            assert all((found[name] == part).all() for name, part in wanted.items())
    assert torch.equal(before, torch.get_rng_state()), "training draws its numbers as if nobody had worked ahead"
