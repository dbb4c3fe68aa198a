from titans_lm.report.table import Column, Table, bold, markdown, screen

COLUMNS = [Column("name", lambda row: bold(row[0], row[1] > 1)), Column("a | b", lambda row: f"{row[1]:.1f}")]
TABLE = Table(said="Said below.", columns=COLUMNS, rows=[("one", 1.0), ("two", 22.0)])


def test_columns_make_cells():
    assert TABLE.head == ["name", "a | b"]
    assert TABLE.body == [["one", "1.0"], ["**two**", "22.0"]]


def test_in_markdown_numbers_stand_to_the_right_and_no_bar_ends_a_cell():
    assert markdown(TABLE) == ["| name | a / b |", "| --- | ---: |", "| one | 1.0 |", "| **two** | 22.0 |"]


def test_on_a_terminal_tables_stand_one_below_the_other():
    shown = ["name  a | b", "one     1.0", "two    22.0"]
    assert screen([TABLE]) == shown
    hidden = Table(columns=COLUMNS, rows=TABLE.rows, on_screen=False)
    told = Table(title="First.", columns=COLUMNS, rows=TABLE.rows)
    assert screen([TABLE, hidden, told, Table(said="Nothing there."), Table()]) == [
        *shown, "", "First.", *shown, "", "Nothing there.",
    ]  # fmt: skip
