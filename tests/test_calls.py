"""A MAC block's forward besides arithmetic: at most half of its first 1,418 calls and 1,562 operations."""

import pytest

from count_calls import count_forward
from titans_lm.ops import matmul


@pytest.mark.usefixtures("unchecked")
def test_a_mac_block_makes_few_calls_and_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "has_faster_products", lambda: False)  # the way of most machines: oneDNN's has more
    calls, operations = count_forward("mac")
    assert operations.total() <= 781
    assert calls.total() <= 709
