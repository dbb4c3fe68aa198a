import pytest
import torch

from forecast.forecast_cases import data
from titans_lm.forecast.baselines import DLinear, Linear, SeasonalNaive
from titans_lm.forecast.fit import NormalEquations, closed_form, score
from titans_lm.forecast.model import InstanceNorm
from titans_lm.forecast.settings import TrainSettings
from titans_lm.forecast.windows import Windows

CPU = torch.device("cpu")


def test_repeat_last_and_seasonal_naive():
    x = torch.arange(6.0)[None, :, None] * torch.tensor([1.0, -1.0])
    assert SeasonalNaive(1, 6, 3)(x)[0, :, 0].tolist() == [5, 5, 5]
    assert SeasonalNaive(4, 6, 7)(x)[0, :, 1].tolist() == [-2, -3, -4, -5, -2, -3, -4]
    with pytest.raises(ValueError, match="got a season of 7 rows and a lookback of 6"):
        SeasonalNaive(7, 6, 3)


@pytest.mark.parametrize("kind", ["mean", "last", "none"])
def test_instance_norm_and_its_inverse(kind):
    x = torch.randn(3, 10, 2) * 5 + 7
    norm = InstanceNorm(kind)
    z, (centre, scale) = norm(x)
    if kind == "mean":
        torch.testing.assert_close(z.mean(1), torch.zeros(3, 2), atol=1e-5, rtol=0)
        torch.testing.assert_close(z.square().mean(1), torch.ones(3, 2), atol=1e-4, rtol=0)
    else:
        torch.testing.assert_close(z, x - x[:, -1:] if kind == "last" else x)
    torch.testing.assert_close(norm.inverse(z, (centre, scale)), x)
    y = torch.randn(3, 4, 2)
    torch.testing.assert_close(norm.inverse(y, (centre, scale)), y * scale + centre)


def test_instance_norm_of_a_constant_window_is_finite():
    z, (_, scale) = InstanceNorm("mean")(torch.full((1, 8, 1), 3.0))
    assert z.abs().max() < 1e-3
    assert torch.isfinite(scale).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["mean", "last", "none"])
@pytest.mark.parametrize("rows", [50, 15, 12])  # windows enough, fewer than the rows of one, and one alone
def test_normal_equations_are_sums_over_all_windows(kind, bias, rows):
    windows = Windows(torch.randn(rows, 3).cumsum(0), 7, 5)
    found = NormalEquations(windows, kind, bias=bias)
    batch = windows.batch(torch.arange(len(windows)))
    past, future = batch["past"].double(), batch["future"].double()
    centre = {"mean": past.mean(1, keepdim=True), "last": past[:, -1:], "none": 0.0 * past[:, :1]}[kind]
    a, b = ((part - centre).mT.flatten(0, 1) for part in (past, future))
    if bias:
        a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], dim=1)
    torch.testing.assert_close(found.inputs, a.T @ a)
    torch.testing.assert_close(found.outputs, b.T @ a)
    W = found.solved(1e-12)
    least = a @ torch.linalg.pinv(a) @ b - b  # the least squares: W itself is not unique where a's columns sum to zero
    assert found.error(W) == pytest.approx(float(least.square().mean()), rel=1e-6)
    assert found.error(W) == pytest.approx(float((a @ W.T - b).square().mean()))
    pulled = found.solved(0.5)
    gradient = 2 * (a.T @ (a @ pulled.T - b)).T
    gradient[:, :7] += 2 * 0.5 * (a[:, :7].square().sum(0).mean()) * pulled[:, :7]
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-7, rtol=0)


def test_the_closed_form_is_the_map_that_is_written():
    made = data()
    equations = NormalEquations(made.parts["train"], "last", bias=True)
    model, W = Linear(12, 4), equations.solved(1e-3)
    assert closed_form(model.map, "last", made, TrainSettings(ridge=(1e-3,))) == 1e-3
    assert score(model, made.parts["train"], CPU).mse == pytest.approx(equations.error(W), rel=1e-5)
    x = torch.randn(2, 12, 2)
    expected = (x - x[:, -1:]).mT @ W[:, :-1].float().T + W[:, -1].float()
    torch.testing.assert_close(model(x), expected.mT + x[:, -1:], atol=1e-5, rtol=1e-5)


def test_a_constant_series_has_a_map_too():
    found = NormalEquations(Windows(torch.zeros(30, 1), 4, 2), "last", bias=False).solved(1e-4)
    assert found.abs().max() == 0.0


def test_dlinear_is_two_maps_of_trend_and_rest():
    model = DLinear(8, 3, kernel=3)
    x = torch.randn(1, 8, 1)
    assert torch.allclose(model.trend.weight, torch.full((3, 8), 1 / 8))
    row = torch.cat([x[0, :1, 0], x[0, :, 0], x[0, -1:, 0]])
    trend = torch.stack([row[i : i + 3].mean() for i in range(8)])
    expected = model.trend(trend) + model.rest(x[0, :, 0] - trend)
    torch.testing.assert_close(model(x)[0, :, 0], expected)
    assert DLinear(8, 3)(x).shape == (1, 3, 1)  # a kernel longer than the window


def test_scores_are_means_over_windows_steps_and_channels_whatever_the_batches(monkeypatch):
    made = data()
    windows, model = made.parts["test"], SeasonalNaive(1, 12, 4)
    batch = windows.batch(torch.arange(len(windows)))
    error = batch["past"][:, -1:].double() - batch["future"].double()
    for size in (1, 5, len(windows) - 1, 1000):
        monkeypatch.setattr("titans_lm.forecast.fit.AT_ONCE", size)
        found = score(model, windows, CPU)
        assert found.mse == pytest.approx(float(error.square().mean()), rel=1e-12)
        assert found.mae == pytest.approx(float(error.abs().mean()), rel=1e-12)
        assert found.windows == len(windows)
