import numpy as np
import pytest
import torch

from forecast.forecast_cases import data, table
from titans_lm.forecast.settings import TableSettings
from titans_lm.forecast.table import Table
from titans_lm.forecast.windows import Scaler, WindowBatches, Windows, borders, prepare, split_of

ETTH = [(96, 8449, 2785, 2785), (720, 7825, 2161, 2161)]
ETTM = [(96, 34369, 11425, 11425), (720, 33745, 10801, 10801)]
WEATHER = [(96, 36696, 5175, 10444), (720, 36072, 4551, 9820)]


@pytest.mark.parametrize(
    ("name", "rows", "horizon", "counts"),
    [
        (name, rows, horizon, counts)
        for name, rows, known in (("ETTh1", 17_420, ETTH), ("ETTm2", 69_680, ETTM), ("weather", 52_696, WEATHER))
        for horizon, *counts in known
    ],
)
def test_published_window_counts(name, rows, horizon, counts):
    made = prepare(Table(name, np.arange(rows, dtype=float)[:, None], ("x",)), TableSettings(), 96, horizon)
    assert list(made.counts.values()) == counts
    # the first forecasts of validation and test begin where the part before ends
    test, border = made.parts["test"], made.borders
    assert border["test"].start + 96 == border["validation"].stop
    assert border["validation"].start + 96 == border["train"].stop
    first = test.batch(torch.tensor([0]))["future"][0, 0]
    np.testing.assert_allclose(made.scaler.undone(first.numpy()), border["validation"].stop, rtol=1e-5)


def test_the_rows_of_ett_behind_twenty_months_are_not_used():
    found = borders(17_420, 96, TableSettings(split="etth"))
    assert found == {"train": slice(0, 8640), "validation": slice(8544, 11520), "test": slice(11424, 14400)}
    assert borders(69_680, 96, TableSettings(split="ettm"))["test"] == slice(46080 - 96, 57600)


def test_a_split_by_the_name_is_told():
    rows = np.arange(17_420, dtype=float)[:, None]
    made = prepare(Table("etth-of-ours", rows, ("x",)), TableSettings(), 96, 96)
    assert made.notes == (
        'by its name: split "etth", 12, 4 and 4 months of 30 days; 3,020 rows behind them are not used',
    )
    made = prepare(Table("ours", rows, ("x",)), TableSettings(split="etth"), 96, 96)
    assert made.notes == ('split "etth", 12, 4 and 4 months of 30 days; 3,020 rows behind them are not used',)
    assert prepare(Table("ours", rows, ("x",)), TableSettings(), 96, 96).notes == ()


def test_shares_are_rounded_down_and_validation_has_the_rest():
    found = borders(103, 5, TableSettings())
    assert found == {"train": slice(0, 72), "validation": slice(67, 83), "test": slice(78, 103)}
    assert borders(100, 5, TableSettings(train_share=0.5, test_share=0.25))["test"] == slice(70, 100)


def test_auto_goes_by_the_name():
    assert [split_of(name, TableSettings()) for name in ("ETTh1", "ettm2", "weather")] == ["etth", "ettm", "shares"]
    assert split_of("ETTh1", TableSettings(split="shares")) == "shares"
    with pytest.raises(ValueError, match=r'got 100 rows for the split "etth", which has 14,400'):
        borders(100, 5, TableSettings(), "ETTh1")


def test_scaling_knows_the_training_rows_alone():
    made = data(rows=100)
    train = made.table.values[:70]
    np.testing.assert_allclose(made.scaler.mean, train.sum(0) / 70)
    np.testing.assert_allclose(made.scaler.std, np.sqrt(((train - train.mean(0)) ** 2).sum(0) / 70))
    np.testing.assert_allclose(made.scaled[:70].numpy().mean(0), 0.0, atol=1e-6)
    np.testing.assert_allclose(made.scaler.undone(made.scaler.scaled(made.table.values)), made.table.values)
    later = made.table.values.copy()
    later[70:] = 1e6
    changed = prepare(Table("waves", later, made.table.channels), TableSettings(), 12, 4)
    np.testing.assert_array_equal(changed.scaler.mean, made.scaler.mean)


def test_a_constant_channel_is_scaled_by_one_and_told():
    values = table(100).values.copy()
    values[:70, 1] = 0.1 + 0.2  # whose computed deviation need not be zero
    made = prepare(Table("waves", values, ("a", "b")), TableSettings(), 12, 4)
    assert made.scaler.std[1] == 1.0
    np.testing.assert_allclose(made.scaled[:70, 1], 0.0, atol=1e-6)
    assert made.notes == ("constant in the training rows, and so scaled by 1: b",)
    assert Scaler.of(np.ones((5, 1))).std == 1.0
    with pytest.raises(ValueError, match=r"got numbers as large as 1e\+300; expected a mean and a deviation that are"):
        Scaler.of(np.array([[1.0], [1e300], [2.0]]))


def test_windows_are_rows_and_those_behind_them():
    series = torch.arange(20.0)[:, None] * torch.tensor([1.0, 10.0])
    windows = Windows(series, 4, 3)
    assert len(windows) == 20 - 4 - 3 + 1
    batch = windows.batch(torch.tensor([0, 13]))
    assert batch["past"][:, :, 0].tolist() == [[0, 1, 2, 3], [13, 14, 15, 16]]
    assert batch["future"][:, :, 1].tolist() == [[40, 50, 60], [170, 180, 190]]
    long = windows.spanning(3)
    assert (len(long), long.reach) == (20 - 12 - 3 + 1, 15)
    assert long.batch(torch.tensor([1]))["past"][0, :, 0].tolist() == list(range(1, 13))
    assert long.batch(torch.tensor([1]))["future"][0, :, 0].tolist() == [13, 14, 15]


@pytest.mark.parametrize("size", [1, 4, 5, 14, 99])
def test_no_window_is_dropped(size):
    windows = Windows(torch.arange(20.0)[:, None], 4, 3)
    found = torch.cat([batch["past"][:, 0, 0] for batch in windows.in_order(size)])
    assert found.tolist() == list(range(14))
    batches = WindowBatches(windows, batch_size=size, seed=3)
    for epoch in range(2):
        seen = [batches(epoch * batches.steps + step)["past"][:, 0, 0] for step in range(batches.steps)]
        assert sorted(torch.cat(seen).tolist()) == list(range(14))


def test_batches_are_a_function_of_seed_and_step():
    windows = Windows(torch.arange(40.0)[:, None], 4, 3)
    first, again = (WindowBatches(windows, batch_size=5, seed=3) for _ in range(2))
    assert torch.equal(first(9)["past"], again(9)["past"])
    assert first.fingerprint == again.fingerprint
    other = WindowBatches(windows, batch_size=5, seed=4)
    assert not torch.equal(first(0)["past"], other(0)["past"])
    assert not torch.equal(first(0)["past"], first(first.steps)["past"]), "an order of its own each time around"
    assert first.fingerprint != other.fingerprint
    assert first.fingerprint != WindowBatches(windows.spanning(2), batch_size=5, seed=3).fingerprint


def test_too_few_rows_are_told():
    with pytest.raises(ValueError, match=r"got 6 rows; expected at least 7 for one window of 4 rows and 3"):
        Windows(torch.zeros(6, 1), 4, 3)
    with pytest.raises(ValueError, match=r"got 22 rows for validation in 'waves' \(100 rows\); expected at least 24"):
        data(rows=100, lookback=12, horizon=12)
    with pytest.raises(ValueError, match="got horizon=0"):
        Windows(torch.zeros(6, 1), 4, 0)
