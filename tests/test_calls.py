"""What a MAC block's forward costs besides arithmetic, at most half of 1,418 calls and 1,562 operations.

So many were counted at commit 11d24aa, before the core was rebuilt. With torch 2.13 they are 662 and 781; where oneDNN
multiplies, 707 and 736.
"""

import pytest

from count_calls import count_forward
from titans_lm.ops import matmul


@pytest.mark.usefixtures("unchecked")
def test_a_mac_block_makes_few_calls_and_few_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "has_faster_products", lambda: False)  # the way of most machines: oneDNN's has more
    calls, operations = count_forward("mac")
    assert operations.total() <= 781
    assert calls.total() <= 670
