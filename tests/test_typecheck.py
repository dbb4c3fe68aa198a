"""The checks that stand around the package while tests run do check, and can be put aside."""

import os

import beartype.roar
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import typecheck
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


def test_what_passed_once_is_no_pass_for_another_shape_or_type_or_result() -> None:
    given = [torch.ones(2, 3), (torch.ones(2), torch.ones(2)), torch.ones(3)]

    @typecheck.checked
    def product(x: Float[Tensor, "B T"], rows: tuple[Float[Tensor, " B"], ...], by: str = "x") -> Float[Tensor, " T"]:
        return given[2]

    for _ in range(2 * typecheck.MANY):
        assert product(*given[:2]) is given[2]
    typecheck.begin_test()
    for wrong in (torch.ones(2, 4), torch.ones(2, 3).long(), "x"):
        with pytest.raises(VIOLATION):
            product(wrong, given[1])
    for rows in ((torch.ones(3), torch.ones(3)), [torch.ones(2)]):
        with pytest.raises(VIOLATION, match="rows"):
            product(given[0], rows)
    with pytest.raises(VIOLATION, match="by"):
        product(*given[:2], by=3)
    for given[2] in (torch.ones(4), None):
        for _ in range(2):
            with pytest.raises(VIOLATION, match="return"):
                product(*given[:2])


def test_of_many_calls_some_are_looked_at() -> None:
    @typecheck.checked
    def same(x: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        return x

    refused = 0
    for x in [torch.ones(3)] * typecheck.FIRST + [torch.ones(3, 1)] * (2 * typecheck.ONE_IN):
        try:
            same(x)
        except VIOLATION:
            refused += 1
    assert refused == 2


def test_what_is_made_anew_in_every_call_is_checked_in_every_one() -> None:
    def outer(x: object, result: object) -> object:
        @typecheck.checked
        def inner(x: Tensor) -> Tensor:
            return result

        return inner(x)

    for _ in range(2):
        assert outer(torch.ones(2), torch.ones(3)).shape == (3,)
        with pytest.raises(VIOLATION, match="x"):
            outer(2.0, torch.ones(3))
        with pytest.raises(VIOLATION, match="return"):
            outer(torch.ones(2), 3.0)


def test_they_can_be_put_aside(unchecked: None) -> None:
    with pytest.raises(RuntimeError):  # torch's own
        rms_norm(torch.ones(2, 8), torch.ones(7), 1e-6)
