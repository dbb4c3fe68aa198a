"""The protocol on the real data: our NLinear beside what others have published and computed for it."""

import pytest
import torch

from titans_lm.forecast.baselines import make_model
from titans_lm.forecast.fit import fit_model, score
from titans_lm.forecast.model import Shape
from titans_lm.forecast.settings import NetSettings, TableSettings, TrainSettings
from titans_lm.forecast.table import read_table
from titans_lm.forecast.windows import prepare

HORIZONS = (96, 192, 336, 720)
ANCHORS = {
    "ett/ETTh1.csv": (0.441, 0.429),
    "ett/ETTh2.csv": (0.374, 0.399),
    "ett/ETTm1.csv": (0.412, 0.406),
    "ett/ETTm2.csv": (0.289, 0.331),
    "weather/weather.txt": (0.275, 0.292),
}
"""Mean test MSE and MAE over the four horizons, lookback 96."""


@pytest.mark.slow
@pytest.mark.parametrize("path", ANCHORS)
def test_nlinear_is_where_it_should_be(data_dir, path):
    table = read_table(data_dir / path, TableSettings(sentinel="keep"))
    found = []
    for horizon in HORIZONS:
        made = prepare(table, TableSettings(), 96, horizon)
        model = make_model("nlinear", NetSettings(), Shape(96, horizon, len(table.channels)), None)
        fit_model(model, made, TrainSettings(device="cpu"))
        found.append(score(model, made.parts["test"], torch.device("cpu")))
    mse, mae = (sum(part) / len(found) for part in list(zip(*found, strict=True))[:2])
    assert (mse, mae) == pytest.approx(ANCHORS[path], abs=0.005)


@pytest.mark.slow
def test_repeat_last_is_where_it_should_be(data_dir):
    for path, mse in (("ett/ETTh1.csv", 1.29), ("ett/ETTm1.csv", 1.21)):
        table = read_table(data_dir / path, TableSettings())
        made = prepare(table, TableSettings(), 96, 96)
        model = make_model("repeat", NetSettings(), Shape(96, 96, 7), None)
        assert score(model, made.parts["test"], torch.device("cpu")).mse == pytest.approx(mse, abs=0.01)


def test_the_sentinels_of_weather_are_refused_by_name(data_dir):
    with pytest.raises(ValueError, match=r"got -9999 in 81 cells \(channel 11, channel 18, channel 20; first in row"):
        read_table(data_dir / "weather/weather.txt", TableSettings())
