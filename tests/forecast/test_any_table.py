"""Tables as they come: any names of columns, one row, numbers that are not finite, few rows."""

import math

import pandas as pd
import pytest

from cli_cases import titans
from forecast.forecast_cases import rows_of, waves, write_csv
from titans_lm.report.table import mean_with_spread

QUICK = ["--lookback", 12, "--epochs", 1, "--batch-size", 32, "--device", "cpu"]


@pytest.mark.parametrize("dated", [True, False])
def test_columns_may_have_any_names(capsys, tmp_path, dated):
    """Those that the forecast gives its own column, and signs that a plot might take for formulas."""
    frame = pd.DataFrame(waves(120, 2), columns=["date" if dated else "row", "US$ per _a$x^$"])
    if dated:
        frame.insert(0, "time", pd.date_range("2020", periods=len(frame), freq="D"))
    frame.to_csv(tmp_path / "t.csv", index=False)
    run = ["--horizon", 4, *QUICK, "--model", "nlinear", "--quiet"]
    assert titans(capsys, "forecast", "train", tmp_path / "t.csv", "--out", tmp_path / "run", *run)[0] == 0
    code, _, err = titans(capsys, "forecast", "predict", tmp_path / "run", tmp_path / "t.csv", "--out", tmp_path)
    assert (code, err) == (0, "")
    assert list(rows_of(tmp_path / "forecast.csv")[0]) == [("date_" if dated else "row_"), *list(frame)[-2:]]
    assert (tmp_path / "forecast.png").is_file()


def test_one_row_with_a_date_is_followed_by_numbers(capsys, tmp_path):
    table = write_csv(tmp_path / "t.csv")
    run = ["--lookback", 1, "--horizon", 2, "--model", "repeat", "--quiet"]
    assert titans(capsys, "forecast", "train", table, "--out", tmp_path / "run", *run)[0] == 0
    (tmp_path / "one.csv").write_text("date,a,b\n2020-01-01,1,2\n")
    code, _, err = titans(capsys, "forecast", "predict", tmp_path / "run", tmp_path / "one.csv", "--out", tmp_path)
    assert (code, err) == (0, "")
    assert [row["row"] for row in rows_of(tmp_path / "forecast.csv")] == ["1", "2"]


def test_an_error_that_is_not_finite_is_told_over_seeds(capsys, tmp_path):
    frame = pd.read_csv(write_csv(tmp_path / "t.csv"))
    frame.loc[118, "a"] = 9.96921e36  # what netCDF fills gaps with
    frame.to_csv(tmp_path / "t.csv", index=False)
    args = ["--models", "dlinear", "repeat", "--horizons", 4, "--seeds", 0, 1, *QUICK]
    code, _, err = titans(capsys, "forecast", "evaluate", tmp_path / "t.csv", "--out", tmp_path / "out", *args)
    assert (code, err) == (0, "")
    assert (tmp_path / "out" / "results.json").is_file()
    found = mean_with_spread([1.0, math.nan])
    assert math.isnan(found["mean"])
    assert math.isnan(found["sd"])


def test_too_few_rows_for_a_model_that_reads_several_windows(capsys, tmp_path):
    table = write_csv(tmp_path / "t.csv")
    args = ["--models", "lmm:windows=30", "--horizons", 4, "--patch-len", 4, *QUICK]
    code, _, err = titans(capsys, "forecast", "evaluate", table, "--out", tmp_path / "out", *args)
    assert code == 2
    assert "got 84 rows; expected at least 364 for one window of 360 rows and 4 to forecast" in err


@pytest.mark.parametrize("origin", ["2020-01-01T22:00Z", "2020-01-02T01:00+03:00", "2020-01-02"])
def test_an_origin_with_an_offset_is_the_row_of_that_time(capsys, tmp_path, origin):
    table = tmp_path / "t.csv"
    frame = pd.DataFrame(waves(40, 1), columns=["a"])
    frame.insert(0, "date", pd.date_range("2020", periods=40, freq="h", tz="+02:00"))
    frame.to_csv(table, index=False)
    run = ["--lookback", 2, "--horizon", 2, "--model", "repeat", "--quiet"]
    assert titans(capsys, "forecast", "train", table, "--out", tmp_path / "run", *run)[0] == 0
    args = ["forecast", "predict", tmp_path / "run", table, "--out", tmp_path, "--origin", origin]
    assert titans(capsys, *args)[0] == 0
    assert rows_of(tmp_path / "forecast.csv")[0]["date"] == "2020-01-02 00:00:00"


def test_the_next_date_of_a_table_with_gaps_is_an_origin(capsys, tmp_path):
    """Business days: Monday follows Friday."""
    table = tmp_path / "t.csv"
    frame = pd.DataFrame(waves(40, 1), columns=["a"])
    frame.insert(0, "date", pd.bdate_range(end="2020-01-31", periods=40))
    frame.to_csv(table, index=False)
    run = ["--lookback", 2, "--horizon", 2, "--model", "repeat", "--quiet"]
    assert titans(capsys, "forecast", "train", table, "--out", tmp_path / "run", *run)[0] == 0
    args = ["forecast", "predict", tmp_path / "run", table, "--out", tmp_path, "--origin"]
    assert titans(capsys, *args, "2020-02-03")[0] == 0
    code, _, err = titans(capsys, *args, "2020-02-06")
    assert code == 2
    assert "behind the table, which ends at 2020-01-31" in err
