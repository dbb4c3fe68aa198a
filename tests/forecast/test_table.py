import gzip

import numpy as np
import pytest

from forecast.forecast_cases import write_csv
from titans_lm.forecast.settings import TableSettings
from titans_lm.forecast.table import Table, read_table
from titans_lm.train.options import plain_settings


def read(path, text=None, **settings):
    if text is not None:
        path.write_text(text)
    return read_table(path, TableSettings(**settings))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table.csv"


def test_a_table_with_dates_and_a_header(path):
    found = read(path, "date,load,oil\n2020-01-01 00:00:00,1,2.5\n2020-01-01 01:00:00,3,-4\n2020-01-01 02:00:00,5,6\n")
    assert found.name == "table"
    assert found.channels == ("load", "oil")
    np.testing.assert_array_equal(found.values, [[1, 2.5], [3, -4], [5, 6]])
    assert str(found.dates[2]).startswith("2020-01-01T02:00:00")
    assert found.step == np.timedelta64(1, "h")
    assert (found.season, found.notes) == (24, ())


def test_a_table_without_dates_or_without_a_header(path):
    found = read(path, "load,oil\n1,2\n3,4\n")
    assert (found.channels, found.dates, found.season, found.step) == (("load", "oil"), None, None, None)
    found = read(path, "load,oil\n1,2,\n3,4,\n")
    np.testing.assert_array_equal(found.values, [[1, 2], [3, 4]])
    found = read(path, "1008.8,0.7\n1008.7,0.8\n")
    assert found.channels == ("channel 0", "channel 1")
    np.testing.assert_array_equal(found.values, [[1008.8, 0.7], [1008.7, 0.8]])
    found = read(path, "2020-01-01,0.7\n2020-01-02,0.8\n")
    assert (found.channels, len(found.values)) == (("channel 1",), 2)
    assert read(path, "load\n1\n2\n").values.shape == (2, 1)
    assert read(path, "1\n2\n").values.shape == (2, 1)


def test_names_that_are_numbers(path):
    """As pandas writes a table whose columns had no names."""
    found = read(path, "0,1,2\n5.5,6,7\n8,9,1\n")
    assert found.channels == ("0", "1", "2")
    assert found.notes == ("the first row, 0, 1, 2 …, is taken for names of columns",)
    np.testing.assert_array_equal(found.values, [[5.5, 6, 7], [8, 9, 1]])
    found = read(path, "date,0,1\n2020-01-01,6,7\n2020-01-02,9,1\n")
    assert (found.channels, len(found.values), str(found.dates[0])[:10]) == (("0", "1"), 2, "2020-01-01")
    assert read(path, ",0,1\n2020-01-01,6,7\n2020-01-02,9,1\n").channels == ("0", "1")
    assert read(path, "when,7,3\n2020-01-01,6,7\n2020-01-02,9,1\n").channels == ("7", "3")
    assert read(path, "0,1,2.0\n5,6,7\n").values.shape == (2, 3)
    assert read(path, "0,2,1\n5,6,7\n").values.shape == (2, 3)
    assert read(path, "0\n1\n").values.shape == (2, 1)
    assert read(path, "2020-01-01,0,1\n2020-01-02,0,1\n").values.shape == (2, 2)


def test_dates_on_both_sides_of_a_change_to_summer_time(path):
    found = read(path, "date,x\n2024-03-31 01:00:00+01:00,1\n2024-03-31 03:00:00+02:00,2\n")
    assert [str(date)[:16] for date in found.dates] == ["2024-03-31T00:00", "2024-03-31T01:00"]


@pytest.mark.parametrize("mark", [".", "/", "-"])
def test_dates_that_may_begin_with_the_day_are_read_as_fits_better(path, mark):
    """1 to 12 January of every year would be the other reading of the first; the second has no 13th month."""

    def table(dates):
        rows = (f"{date.replace('.', mark)},{row}\n" for row, date in enumerate(dates))
        return read(path, "date,load\n" + "".join(rows))

    monthly = table(f"01.{month:02}.{year}" for year in (2010, 2011) for month in range(1, 13))
    assert str(monthly.dates[-1]).startswith("2011-12-01")
    assert (monthly.season, monthly.notes) == (12, ())
    daily = table([f"{day:02}.01.2010" for day in range(1, 32)] + ["01.02.2010", "02.02.2010"])
    assert str(daily.dates[-1]).startswith("2010-02-02")
    assert (daily.season, daily.notes) == (7, ())
    american = table([f"01.{day:02}.2010" for day in range(1, 32)] + ["02.01.2010", "02.02.2010"])
    np.testing.assert_array_equal(american.dates, daily.dates)
    short = table([f"{day:02}.01.10" for day in range(1, 32)] + ["01.02.10", "02.02.10"])
    np.testing.assert_array_equal(short.dates, daily.dates)
    assert str(table(f"{day}.2.71 0:30" for day in range(1, 29)).dates[-1]).startswith("1971-02-28T00:30")


@pytest.mark.parametrize(("cell", "row"), [("True", 0), ("", 1)])
def test_truth_values_are_no_numbers(path, cell, row):
    with pytest.raises(ValueError, match=f"got True in row {row} of .*in column 'open'; expected a number"):
        read(path, f"load,open\n1,{cell}\n2,True\n3,False\n", missing="fill")


def test_separator_date_and_channels_are_settings(path):
    text = "load;when;oil\n1;1990/1/1 0:00;2\n3;1990/1/2 0:00;4\n"
    found = read(path, text, separator=";", date="when", channels=("oil",))
    assert found.channels == ("oil",)
    np.testing.assert_array_equal(found.values, [[2], [4]])
    assert (found.step, found.season) == (np.timedelta64(1, "D"), 7)


@pytest.mark.parametrize(("offset", "minutes"), [("+02:00", 120), ("-0530", -330), ("+02", 120), ("Z", 0)])
def test_dates_of_one_offset_stay_as_they_are_written(path, offset, minutes):
    found = read(path, f"date,x\n2020-01-01 00:00:00{offset},1\n2020-01-01 01:00:00{offset},2\n")
    assert str(found.dates[0]).startswith("2020-01-01T00:00:00")
    assert found.offset == np.timedelta64(minutes, "m")


def test_a_first_row_with_a_missing_cell_is_no_header(path):
    for cell in ("", "NA", "null", "N/A"):
        found = read(path, f"2020-01-01,{cell},1\n2020-01-02,2,3\n", missing="fill")
        assert found.channels == ("channel 1", "channel 2"), cell
        np.testing.assert_array_equal(found.values, [[2, 1], [2, 3]])


def test_names_may_be_words_for_a_missing_cell(path):
    """NA is North America too."""
    assert read(path, "date,NA\n2020-01-01,1\n2020-01-02,2\n").channels == ("NA",)
    assert read(path, "NA,null\n1,2\n3,4\n").channels == ("NA", "null")


def test_a_column_that_counts_the_rows_is_no_channel(path):
    found = read(path, ",a,b\n0,1,2\n1,3,4\n")
    assert (found.channels, found.values.tolist()) == (("a", "b"), [[1, 2], [3, 4]])
    assert found.notes == ("the first column, which has no name and counts the rows, is left out",)
    assert read(path, ",a\n2020-01-01,1\n2020-01-02,3\n").dates is not None  # dates without a name
    assert read(path, ",a,b\n0,1,2\n2,3,4\n").values.shape == (2, 3)  # does not count
    assert read(path, ",a,b\n7,1,2\n8,3,4\n").channels == ("a", "b")  # the end of a longer table
    assert read(path, ",a,b\n0,1,2\n1,3,4\n", channels=("Unnamed: 0", "b")).values.tolist() == [[0, 2], [1, 4]]
    dated = read(path, ",when,a\n0,2020-01-01,1\n1,2020-01-02,3\n")
    assert dated.channels == ("a",)
    assert dated.dates is not None


def test_a_tab_may_be_written_as_a_shell_passes_it_on(path):
    assert read(path, "a\tb\n1\t2\n", separator="\\t").values.tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("step", "expected"),
    [("YS", ["2010-01-01", "2011-01-01"]), ("QS", ["2002-07-01", "2002-10-01"]), ("QE", ["2002-09-30", "2002-12-31"])],
)
def test_quarters_and_years_go_on_by_the_calendar(tmp_path, step, expected):
    table = read(write_csv(tmp_path / "t.csv", 10, step=step))
    first = str(table.dates[0])[:4]
    shift = int(first) - 2000
    found = [str(date)[:10] for date in table.dates_after(2)]
    assert found == [f"{int(date[:4]) + shift}{date[4:]}" for date in expected]
    assert table.notes == ()
    assert table.season == (None if step == "YS" else 4)


@pytest.mark.parametrize(
    ("step", "season"),
    [
        ("15min", 96),
        ("10min", 144),
        ("h", 24),
        ("3h", 8),
        ("12h", 2),
        ("5h", None),
        ("D", 7),
        ("W", 52),
        ("MS", 12),
        ("YS", None),
    ],
)
def test_a_season_follows_from_the_step(tmp_path, step, season):
    found = read(write_csv(tmp_path / "t.csv", 40, step=step))
    assert found.season == season
    assert found.notes == ()


def test_dates_go_on_by_the_usual_step_and_by_whole_months(tmp_path):
    hours = read(write_csv(tmp_path / "h.csv", 30)).dates_after(2)
    assert [str(date)[:16] for date in hours] == ["2020-01-02T06:00", "2020-01-02T07:00"]
    months = read(write_csv(tmp_path / "m.csv", 30, step="MS")).dates_after(3)
    assert [str(date)[:10] for date in months] == ["2022-07-01", "2022-08-01", "2022-09-01"]
    ends = read(write_csv(tmp_path / "e.csv", 30, step="ME")).dates_after(3)
    assert [str(date)[:10] for date in ends] == ["2022-07-31", "2022-08-31", "2022-09-30"]
    uneven = Table("t", np.zeros((3, 1)), ("x",), np.array(["2020-01-01", "2020-01-02", "2020-01-04"], "M8[s]"))
    assert [str(date)[:10] for date in uneven.dates_after(1)] == ["2020-01-05"]
    assert Table("t", np.zeros((3, 1)), ("x",)).dates_after(2) is None


def test_uneven_steps_are_told(path):
    found = read(path, "date,x\n2020-01-01,1\n2020-01-02,2\n2020-01-04,3\n2020-01-05,4\n")
    assert found.notes == ("1 of 3 steps between dates differ from the usual one; rows are read as even",)


GAPS = "a,b\n,1\n2,\n3,inf\n,4\n"


def test_missing_values_are_refused_by_name(path):
    with pytest.raises(ValueError, match=r'no number in 4 cells \(a, b; first in row 0\).*expected missing="fill"'):
        read(path, GAPS)


def test_missing_values_are_filled_with_what_stands_before_them(path):
    found = read(path, GAPS, missing="fill")
    np.testing.assert_array_equal(found.values, [[2, 1], [2, 1], [3, 1], [3, 4]])
    assert found.notes == ("no number in 4 cells (a, b; first in row 0): filled",)


def test_a_filled_cell_tells_nothing_of_later_ones(path):
    before = read(path, "a\n1\n\nnan\n5\n".replace("\n\n", "\nnan\n"), missing="fill").values
    after = read(path, "a\n1\nnan\nnan\n9\n", missing="fill").values
    np.testing.assert_array_equal(before[:3], after[:3])


def test_sentinels_are_refused_kept_or_filled(path):
    text = "a,b\n1,5\n-9999,6\n3,-9999.0\n"
    with pytest.raises(ValueError, match=r"got -9999 in 2 cells \(a, b; first in row 1\).*\"fill\".*\"keep\""):
        read(path, text)
    kept = read(path, text, sentinel="keep")
    np.testing.assert_array_equal(kept.values[1], [-9999, 6])
    assert kept.notes == ("-9999 in 2 cells (a, b; first in row 1): kept",)
    filled = read(path, text, sentinel="fill")
    np.testing.assert_array_equal(filled.values, [[1, 5], [1, 6], [3, 6]])
    assert filled.notes == ("-9999 in 2 cells (a, b; first in row 1): filled",)
    np.testing.assert_array_equal(read(path, text, sentinels=()).values, kept.values)


@pytest.mark.parametrize(
    ("text", "found", "separator"),
    [
        ("date;load;oil\n2020-01-01;1,5;2\n2020-01-02;3,25;4\n", ";", ","),
        ("date;load\n2020-01-01;1\n2020-01-02;3\n", ";", ","),
        ("1\t2\n3\t4\n", r"\\t", ","),
        ("a,b\n1,2\n", ",", ";"),
    ],
)
def test_another_separator_is_named(path, text, found, separator):
    with pytest.raises(
        ValueError, match=rf"with no '{separator}' in its first row, but '{found}'; expected --table.sep"
    ):
        read(path, text, separator=separator)
    comma = "expected --table.separator ';' --table.decimal ','"
    with pytest.raises(ValueError, match=comma if "1,5" in text else "expected --table.separator '.*'$"):
        read(path, text, separator=separator)
    assert read(path, "a;b\n1\n2\n").channels == ("a;b",), "a name may hold one"


def test_fractions_behind_a_comma(path):
    text = "date;load;oil\n2020-01-01;1,5;2\n2020-01-02;-3,25;4\n"
    found = read(path, text, separator=";", decimal=",")
    np.testing.assert_array_equal(found.values, [[1.5, 2], [-3.25, 4]])
    np.testing.assert_array_equal(read(path, "1,5;2\n3;4,5\n", separator=";", decimal=",").values, [[1.5, 2], [3, 4.5]])
    with pytest.raises(ValueError, match=r"got '1,5' in row 0 of .*; expected a number, or --table.decimal ','"):
        read(path, text, separator=";")
    for wrong in ({"decimal": ","}, {"decimal": "_"}):
        with pytest.raises(ValueError, match="got decimal="):
            read(path, text, **wrong)
    assert "decimal" not in plain_settings(TableSettings()), "runs that were saved before it go on"


MISTAKES = {
    "no file": (None, {}, "which is no file"),
    "an empty file": ("", {}, "which is no table"),
    "a header alone": ("date,a\n", {}, "no row of numbers"),
    "ragged rows": ("a,b\n1,2\n1,2,3\n", {}, "which is no table"),
    "a word": ("a,b\n1,2\n3,four\n", {}, r"got 'four' in row 1 of .*, in column 'b'; expected a number"),
    "a switch alone": (
        "a\nTrue\nFalse\n",
        {},
        "got True in row 0 of .*, in column 'a'; expected a number",
    ),
    "a name twice": ("a,b,a\n1,2,3\n", {}, "two columns named 'a'"),
    "dates alone": ("date,a\n2020-01-01,1\n", {"channels": ("date",)}, "the channel 'date'"),
    "an unknown channel": ("load,b\n1,2\n", {"channels": ("laod",)}, "did you mean 'load'"),
    "an unknown date": ("when,b\n2020-01-01,2\n", {"date": "whem"}, "did you mean 'when'"),
    "numbers for dates": ("a,b\n1,2\n", {"date": "a"}, "got numbers in the column of dates 'a'"),
    "a name too few": ("a,b\n1,2,3\n4,5,6\n", {}, "with fewer names than cells in a row; expected a name for each"),
    "no date": ("date,a\n2020-01-01,1\nsoon,2\n", {}, "got 'soon' as the date of row 1"),
    "dates that go back": (
        "date,a\n2020-01-02,1\n2020-01-01,2\n",
        {},
        "got 2020-01-01 in row 1 of .* behind 2020-01-02; expected dates that increase",
    ),
    "a date twice": ("date,a\n2020-01-02,1\n2020-01-02,2\n", {}, "there twice"),
    "an empty column": ("a,b\n1,\n2,\n", {"missing": "fill"}, "column 'b' of .* without a number"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(path, name):
    text, settings, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        read(path, text, **settings)


def test_a_table_that_is_packed_is_read_as_it_is(path):
    text = "a;b\n1;2\n3;4\n"
    packed = path.with_name("table.csv.gz")
    packed.write_bytes(gzip.compress(text.encode()))
    settings = TableSettings(separator=";")
    np.testing.assert_array_equal(read_table(packed, settings).values, read(path, text, separator=";").values)
    with pytest.raises(ValueError, match=r"expected --table.separator ';'"):
        read_table(packed, TableSettings())
    whole = bytearray(gzip.compress(text.encode() * 50))
    whole[20] ^= 255
    for damaged in (text.encode(), bytes(whole), bytes(whole[:15])):
        packed.write_bytes(damaged)
        with pytest.raises(ValueError, match="which is no table"):
            read_table(packed, settings)


def test_bytes_that_are_no_text(path):
    path.write_bytes(b"a,b\n1,\xff\xfe\n")
    with pytest.raises(ValueError, match="which is no table"):
        read(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"separator": ", "}, "got separator=', '; expected one character"),
        ({"missing": "drop"}, "got missing='drop'"),
        ({"sentinel": "drop"}, "got sentinel='drop'"),
        ({"split": "ett"}, "got split='ett'"),
        ({"train_share": 0.8, "test_share": 0.2}, "expected a sum below 1"),
        ({"period": 0}, "got period=0"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        TableSettings(**settings)
