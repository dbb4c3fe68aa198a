"""What `titans repro` wrote, on the page of results."""

import json
from pathlib import Path
from typing import Any

import pytest

from titans_lm.report.page import pages, read_results
from titans_lm.report.paper import FORMAT

STEP = {
    "name": "text", "measures": "bits per byte", "command": "titans compare a --test b", "file": "x",
    "parameters": 12_345,
    "hardware": {"processor": "a CPU", "cores": 2, "commit": "abc", "date": "2026-01-01 00:00"},
}  # fmt: skip


def repeated(**changes: Any) -> dict[str, Any]:
    cells = [
        {"ours": {"mean": 1.2345, "sd": 0.1, "seeds": 3}, "paper": 27.5},
        {"ours": {"mean": 1234.5, "sd": None, "seeds": 1}, "paper": None},
        {"ours": None, "paper": 47.83},
    ]
    columns = [{"title": t, "paper_column": t, "digits": d} for t, d in (("ppl", 3), ("speed", 0), ("long", 1))]
    made = {
        "format": FORMAT, "what": "repro", "table": "table5", "scale": "tiny",
        "paper": {
            "source": "arXiv 1", "where": "table 5", "title": "Ablations", "group": "400M", "digits": 2, "notes": [],
            "errata": [],
        },
        "steps": [STEP, {**STEP, "measures": "recall", "parameters": None, "hardware": None}],
        "tables": [{"title": "", "columns": columns, "rows": [{"title": "LMM", "paper_row": "LMM", "cells": cells}]}],
        "differs": ["smaller", "shorter"],
    }  # fmt: skip
    return {**made, **changes}


def written(folder: Path, result: dict[str, Any]) -> str:
    (folder / "table5.json").write_text(json.dumps(result))
    return pages(read_results(folder), "bench")["reproduction"]


def test_a_table_of_the_paper_stands_on_the_page(tmp_path: Path) -> None:
    text = written(tmp_path, repeated())
    assert "## Repeated: ablations (table 5 of arXiv 1, scale tiny)" in text
    step = "bits per byte: `titans compare a --test b` on a CPU, 2 cores; commit abc, 2026-01-01 00:00; 12,345 "
    assert f"<small>[table5.json](bench/table5.json), {step}" in text
    assert "recall: `titans compare a --test b`</small>\n" in text
    assert "Status: scale tiny, 2026-01-01." in text
    assert "- smaller\n- shorter\n" in text
    assert "Paper: 400M." in text
    assert "| LMM | ours | 1.234 ± 0.100 | 1,234 | not measured |" in text
    assert "|  | paper | 27.50 | – | 47.83 |" in text


def test_a_table_without_numbers_of_the_paper_has_a_line_a_model(tmp_path: Path) -> None:
    result = repeated()
    for column in result["tables"][0]["columns"]:
        column["paper_column"] = None
    assert "| paper |" not in written(tmp_path, result)


@pytest.mark.parametrize("change", [{"format": "titans-lm bench 1"}, {"format": None}, {"what": "repros"}])
def test_other_files_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no result of a benchmark"):
        written(tmp_path, repeated(**change))
