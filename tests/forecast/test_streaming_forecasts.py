import pytest
import torch

from forecast.forecast_cases import data, forecaster, net
from titans_lm.backbone import frozen_memory
from titans_lm.forecast.baselines import make_model
from titans_lm.forecast.fit import score, score_streamed, streamed
from titans_lm.forecast.model import Shape

CPU = torch.device("cpu")
MEMORIES = ("lmm", "mac", "mag", "mal")


def run(model, series, origins, memory, **settings):
    """Forecasts by their origins."""
    model.eval()
    return {
        int(origin): forecast
        for chosen, forecasts in streamed(model, series, origins, memory, device=CPU, **settings)
        for origin, forecast in zip(chosen, forecasts, strict=True)
    }


@pytest.mark.parametrize("architecture", MEMORIES)
def test_a_carried_memory_has_read_the_windows_before(architecture, monkeypatch):
    """Against one window after another, by hand, row by row."""
    monkeypatch.setattr("titans_lm.forecast.fit.CHAINS", 5)
    model, series = forecaster(architecture).eval(), torch.randn(70, 2).cumsum(0)
    found = run(model, series, range(12, 71), "carried")
    assert sorted(found) == list(range(12, 71))
    for origin in (12, 23, 24, 40, 70):
        state = None
        with torch.no_grad():
            for stop in range(12 + (origin - 12) % 12, origin + 1, 12):
                forecast, state = model.read(series[None, stop - 12 : stop], state)
        torch.testing.assert_close(found[origin], forecast[0], atol=1e-5, rtol=1e-4)


def test_a_warm_up_reads_windows_before_the_first_origin():
    model, series = forecaster(), torch.randn(70, 2).cumsum(0)
    whole = run(model, series, range(12, 61), "carried")
    warm = run(model, series, range(48, 61), "carried", warm_up=3)
    longer = run(model, series, range(48, 61), "carried", warm_up=99)  # there are no more than three
    for origin in warm:
        torch.testing.assert_close(warm[origin], whole[origin] if origin < 60 else warm[60], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(warm[origin], longer[origin])
    cold = run(model, series, range(48, 61), "carried")
    assert not torch.allclose(cold[50], warm[50], atol=1e-5)


@pytest.mark.parametrize("memory", ["fresh", "carried", "still"])
@pytest.mark.parametrize("architecture", MEMORIES)
def test_a_forecast_knows_nothing_of_its_origin_and_later(architecture, memory):
    model, series = forecaster(architecture), torch.randn(60, 2).cumsum(0)
    before = run(model, series, range(12, 61), memory)
    later = series.clone()
    later[41:] = 1e3
    after = run(model, later, range(12, 61), memory)
    for origin in range(12, 42):
        assert torch.equal(before[origin], after[origin])
    assert not torch.allclose(before[42], after[42])


def test_a_carried_forecast_depends_on_rows_before_its_window_and_others_do_not():
    model, series = forecaster(), torch.randn(60, 2).cumsum(0)
    other = series.clone()
    other[:12] += torch.randn(12, 2)
    origin = 36  # whose chain is [0, 12), [12, 24), [24, 36)
    for memory, moved in (("fresh", False), ("still", False), ("carried", True)):
        a, b = (run(model, x, range(12, 61), memory)[origin] for x in (series, other))
        assert torch.allclose(a, b, atol=1e-7) is not moved


def test_fresh_is_one_window_and_still_is_the_memory_held():
    model, series = forecaster().eval(), torch.randn(40, 2).cumsum(0)
    window = series[None, 18:30]
    with torch.no_grad():
        fresh = model(window)[0]
        with frozen_memory(model):
            still = model(window)[0]
    torch.testing.assert_close(run(model, series, range(12, 41), "fresh")[30], fresh, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(run(model, series, range(12, 41), "still")[30], still, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(fresh, still, atol=1e-5)


def test_scores_of_a_stream_are_of_the_same_windows():
    made, model = data(rows=200), forecaster()
    plain = score(model, made.parts["test"], CPU)
    fresh = score_streamed(model, made, "test", "fresh", CPU)
    assert fresh == pytest.approx(plain, rel=1e-5)
    carried = score_streamed(model, made, "test", "carried", CPU)
    assert carried.windows == plain.windows
    assert carried.mse != pytest.approx(plain.mse, rel=1e-6)
    assert model.training  # as it was


@pytest.mark.parametrize("architecture", ["lmm", "attention"])
def test_a_memory_that_is_misspelled_is_named(architecture, unchecked):
    with pytest.raises(ValueError, match="got memory='caried'; did you mean 'carried'"):
        run(forecaster(architecture), torch.zeros(40, 2), range(12, 20), "caried")


def test_many_channels_are_read_in_smaller_batches(monkeypatch):
    """And come to the same numbers."""
    made, model, sizes = data(rows=200, channels=6), forecaster(channels=6), []
    whole = [score(model, made.parts["test"], CPU), score_streamed(model, made, "test", "carried", CPU)]
    read = type(model).read
    monkeypatch.setattr(type(model), "read", lambda self, x, state=None: sizes.append(len(x)) or read(self, x, state))
    for rows, most in ((24, 4), (5, 1)):
        sizes.clear()
        monkeypatch.setattr("titans_lm.forecast.windows.ROWS", rows)
        found = [score(model, made.parts["test"], CPU), score_streamed(model, made, "test", "carried", CPU)]
        assert max(sizes) == most
        assert found[0] == pytest.approx(whole[0], rel=1e-6)
        assert found[1] == pytest.approx(whole[1], rel=1e-6)


def test_what_cannot_be_streamed_is_told():
    series = torch.zeros(40, 2)
    for model in (forecaster("attention"), make_model("nlinear", net(), Shape(12, 4, 2), None)):
        with pytest.raises(ValueError, match='got memory="carried" for a model without a memory'):
            run(model, series, range(12, 20), "carried")
    with pytest.raises(ValueError, match="expected numbers from 12, the lookback, to 40"):
        run(forecaster(), series, range(11, 20), "carried")
    with pytest.raises(ValueError, match="expected numbers from 12"):
        run(forecaster(), series, range(30, 42), "fresh")
    with pytest.raises(ValueError, match="got warm_up=-1"):
        run(forecaster(), series, range(12, 20), "carried", warm_up=-1)
