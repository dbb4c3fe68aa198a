"""The paper's numbers are consistent, and where they are not, the errata say so."""

from statistics import mean

import pytest

from titans_lm.repro.plans import Published, published
from titans_lm.repro.show import printed

WRONG_AVERAGES = {
    ("760M", "TTT"): (47.32, 49.37),
    ("400M", "Gated DeltaNet-H2*"): (47.69, 47.80),
    ("400M", "Titans (LMM)"): (47.83, 47.87),
    ("1.3B", "Titans (MAC)"): (57.32, 57.20),
}


def table(name: str) -> Published:
    return published()[name]


def test_averages_of_table_1_are_those_of_their_columns() -> None:
    """Within rounding, but for those that the errata name with what is printed and what the columns give."""
    wrong = {}
    for size, group in table("table1").groups.items():
        for name, row in group["rows"].items():
            scores = [value for column, value in row.items() if "ppl" not in column and column != "Avg"]
            assert len(scores) == 8
            if abs(mean(scores) - row["Avg"]) > 0.02:
                wrong[size, name] = (row["Avg"], mean(scores))
    assert wrong.keys() == WRONG_AVERAGES.keys()
    for (size, name), (is_printed, given) in WRONG_AVERAGES.items():
        assert wrong[size, name] == (is_printed, pytest.approx(given, abs=0.0051))
        assert (
            f"{size} {name}: the average is printed as {is_printed:.2f}; its columns give {given:.2f}"
            in table("table1").errata
        )


def test_table_5_is_made_of_tables_1_and_2() -> None:
    """What the errata say of its columns holds."""
    small, needles = table("table1").groups["400M"]["rows"], table("table2").groups["400M"]["rows"]
    for ours, (name, star) in {
        "LMM": ("Titans (LMM)", ""), "+ Attn (MAC)": ("Titans (MAC)", "*"), "+ Attn (MAG)": ("Titans (MAG)", "*"),
        "+ Attn (MAL)": ("Titans (MAL)", "*"),
    }.items():  # fmt: skip
        row, one = table("table5").groups["400M"]["rows"][ours], small[name + star]
        assert row["ppl"] == pytest.approx((one["Wiki ppl"] + one["LMB ppl"]) / 2, abs=0.0051)
        assert row["reasoning"] == one["Avg"]
        assert row["long context"] == pytest.approx(mean(needles[name].values()), abs=0.0051)


def test_numbers_are_where_they_belong() -> None:
    """Some cells, as the paper prints them."""
    rows = {size: group["rows"] for size, group in table("table1").groups.items()}
    assert list(map(len, rows.values())) == [11, 15, 13, 10]
    assert rows["340M"]["Titans (MAC)*"]["Wiki ppl"] == 25.43
    assert rows["760M"]["Titans (MAL)"]["SIQA"] == 30.98
    assert rows["1.3B"]["Titans (LMM)"]["LMB acc"] == 49.14
    assert table("table2").cell("Titans (LMM)", "W 16K") == 80.6
    assert table("table2").cell("Samba*", "W 16K") is None
    assert table("table5").cell("w/o weight decay", "ppl") == 29.04
    assert table("figure6").cell("ARMT", "10M") == 77
    assert table("table5").cell("no such row", "ppl") is None
    for one in published().values():
        for row in [row for group in one.groups.values() for row in group["rows"].values()]:
            assert all(0 <= value <= 100 for value in row.values() if value is not None)


def test_tables_are_printed_with_the_paper_s_digits() -> None:
    lines = printed(table("table5"))
    assert lines[0] == "400M parameters, 15B tokens; ours: not measured"
    assert next(line for line in lines if line.startswith("+ Attn (MAG)")).split()[-3:] == ["25.70", "48.60", "96.70"]
    unknown = printed(table("table2"))[6].split()
    assert (unknown[0], unknown[-1]) == ("Samba*", "–")
    assert printed(table("figure9")) == ["figure 9 prints no numbers; ours: not measured"]
