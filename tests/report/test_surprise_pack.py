"""Numbers in sixteen bits, and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from report.surprise_cases import as_text, made_up, relative, starts_of, unpacked
from titans_lm.report.surprise.page import pack, page_data
from titans_lm.report.surprise.text import by_piece
from titans_lm.surprise import PARTS


def back(values: np.ndarray) -> np.ndarray:
    return unpacked(pack(values.reshape(-1, values.shape[-1]))).reshape(values.shape)


@given(arrays.arrays(np.float32, (2, 7), elements=st.floats(0.0, width=32) | st.just(float("nan"))))
def test_any_number_comes_back_within_a_thousandth(values: np.ndarray) -> None:
    found = back(values)
    known = np.isfinite(values)
    assert np.isnan(found[~known]).all()
    tiny = values <= 1e-50 * np.where(known, values, 0.0).max(-1, keepdims=True).astype(np.float64)
    np.testing.assert_allclose(found[known & ~tiny], values[known & ~tiny], rtol=1e-3)
    assert not found[known & tiny].any()


def test_usual_numbers_come_back_much_closer() -> None:
    values = np.exp(np.random.default_rng(0).normal(size=(3, 2, 1000)))
    np.testing.assert_allclose(back(values), values, rtol=1e-4)


@pytest.mark.parametrize("values", [[0.0, 0.0], [3.0, 3.0], [5.0], [np.nan, np.nan], [0.0, 7.0], [1e-300, 1.0]])
def test_series_without_a_range(values: list[float]) -> None:
    expected = [0.0 if value == 1e-300 else value for value in values]
    np.testing.assert_allclose(back(np.array([values])), [expected], rtol=1e-12)


def test_equal_numbers_stay_equal_and_order_stays() -> None:
    values = np.sort(np.exp(4 * np.random.default_rng(1).normal(size=500)))
    found = back(np.repeat(values, 2)[None])[0]
    assert (found[::2] == found[1::2]).all()
    assert (np.diff(found) >= 0).all()


def test_a_piece_has_the_mean_of_its_tokens_or_their_total() -> None:
    values = np.array([[1.0, 10.0], [3.0, 30.0], [5.0, 50.0], [100.0, 100.0]])
    starts = np.array([0, 1, 3])
    assert by_piece(values, starts).tolist() == [[1.0, 10.0], [4.0, 40.0]]
    assert by_piece(values, starts, total=True).tolist() == [[1.0, 10.0], [8.0, 80.0]]
    assert np.isnan(by_piece(np.array([np.nan, 1.0]), np.array([0, 1, 2]))[0])


def test_the_data_of_a_page_are_the_arrays() -> None:
    text = as_text("naïve, isn’t it?\n".encode() * 5)
    found = made_up(text)
    pieces = 30
    data = page_data(found, text, pieces)
    starts = text.starts[: pieces + 1]
    assert starts_of(data) == starts[:-1].tolist()
    assert (data["blocks"], data["heads"], data["layers"], data["pieces"]) == (2, 2, 2, pieces)
    assert data["tokens"] == starts[-1] > pieces
    for what in PARTS:
        sizes = by_piece(found.part(what), starts).reshape(pieces, -1)
        np.testing.assert_allclose(unpacked(data["sizes"][what]), sizes.T, rtol=1e-3)
        expected = by_piece(found.summary(what), starts)
        np.testing.assert_allclose(relative(data, what), expected, rtol=1e-3)
    bits = by_piece(found.bits, starts, total=True)
    np.testing.assert_allclose(relative(data, "bits"), bits, rtol=1e-3)
    assert np.isnan(bits[0])


def test_one_series_is_found_by_block_head_and_layer() -> None:
    text = as_text(b"some text")
    found = made_up(text, blocks=3, heads=2, layers=2)
    data = page_data(found, text, len(text.pieces))
    for block, head, layer in [(0, 0, 0), (1, 1, 0), (2, 0, 1)]:
        values = unpacked(data["sizes"]["past"])[(block * 2 + head) * 2 + layer]
        np.testing.assert_allclose(values, found.past[block][:, head, layer], rtol=1e-3)
