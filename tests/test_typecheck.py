"""The checks that stand around the package while tests run do check, and can be put aside."""

import os

import beartype.roar
import pytest
import torch

from titans_lm.config import check_at_least
from titans_lm.ops.fused import rms_norm

checking = pytest.mark.skipif(os.environ.get("TITANS_TYPECHECK") == "0", reason="TITANS_TYPECHECK=0 asks for no checks")
VIOLATION = beartype.roar.BeartypeCallHintViolation


@checking
def test_sizes_of_one_call_have_to_agree_and_those_of_two_need_not() -> None:
    for width in (7, 8):
        assert rms_norm(torch.ones(2, width), torch.ones(width), 1e-6).shape == (2, width)
    with pytest.raises(VIOLATION, match="weight"):
        rms_norm(torch.ones(2, 8), torch.ones(7), 1e-6)


@checking
def test_types_are_checked_where_no_size_is_named() -> None:
    with pytest.raises(VIOLATION, match="least"):
        check_at_least("size", 3, "2")


def test_they_can_be_put_aside(unchecked: None) -> None:
    with pytest.raises(RuntimeError):  # torch's own
        rms_norm(torch.ones(2, 8), torch.ones(7), 1e-6)
