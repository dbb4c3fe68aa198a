"""Small tables and models that the tests of forecasting share."""

import csv
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from titans_lm import forecast
from titans_lm.config import BackboneConfig
from titans_lm.forecast.model import Forecaster, Shape
from titans_lm.forecast.settings import NetSettings, TableSettings
from titans_lm.forecast.table import Table
from titans_lm.forecast.windows import Prepared, prepare

SMALL = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "memory_expansion": 1,
    "chunk_size": 2,
    "segment_len": 2,
    "window": 4,
    "num_persistent": 1,
}


def waves(rows: int, channels: int = 2, seed: int = 0) -> np.ndarray:
    """Seasons of 12 rows with noise, every channel at its own height and size."""
    rng = np.random.default_rng(seed)
    time = np.arange(rows)[:, None]
    place = np.arange(channels)
    return (
        (1 + place) * np.sin(2 * np.pi * time / 12 + place) + 10 * place + 0.3 * rng.standard_normal((rows, channels))
    )


def table(rows: int, channels: int = 2, name: str = "waves") -> Table:
    return Table(name, waves(rows, channels), tuple("abcdefg"[:channels]))


def data(rows: int = 120, lookback: int = 12, horizon: int = 4, channels: int = 2, **settings) -> Prepared:
    return prepare(table(rows, channels), TableSettings(**settings), lookback, horizon)


def net(architecture: str = "lmm", **settings) -> NetSettings:
    own = {"patch_len": 4, "stride": 4, "dropout": 0.0, "shortcut": "linear", **settings}
    return NetSettings(backbone=BackboneConfig(architecture=architecture, **SMALL), **own)


def forecaster(architecture: str = "lmm", channels: int = 2, **settings) -> Forecaster:
    """A small one whose head has been set off from zero, so that its tokens count."""
    model = Forecaster(net(architecture, **settings), Shape(12, 4, channels))
    model.head.reset_parameters()
    return model


def write_csv(path: Path, rows: int = 120, channels: int = 2, *, start: str = "2020-01-01", step: str = "h") -> Path:
    """A table of waves with dates."""
    frame = pd.DataFrame(waves(rows, channels), columns=list("abcdefg"[:channels]))
    frame.insert(0, "date", pd.date_range(start, periods=rows, freq=step))
    frame.to_csv(path, index=False)
    return path


def without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what reads tables be imported anew, as where pandas was never installed."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    for name in ("evaluate", "predict", "table"):
        monkeypatch.delitem(sys.modules, f"titans_lm.forecast.{name}", raising=False)
        monkeypatch.delattr(forecast, name, raising=False)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file by the names of its columns."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
