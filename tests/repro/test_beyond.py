"""Tables 3 and 4: files are found by their names, and our numbers stand beside the paper's."""

import csv
import gzip
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import pytest

from cli_cases import environment, titans
from forecast.forecast_cases import without_pandas
from repro.repro_cases import DNA, SERIES, dna, micro, quiet, series
from titans_lm.commands.measure import genomics_command
from titans_lm.forecast.evaluate import evaluate_command
from titans_lm.genomics.records import FASTA
from titans_lm.genomics.records import TABLES as SEQUENCE_TABLES
from titans_lm.genomics.settings import EvaluateSettings, PredictSettings, TrainSettings
from titans_lm.repro import plans
from titans_lm.repro.plans import make_plan, published, read_toml
from titans_lm.repro.run import command_of, run_plan
from titans_lm.repro.sets import DataSet
from titans_lm.repro.sets import find_sets as find_named
from titans_lm.repro.show import plan_lines, result_lines


def find_sets(place: Path, sets: list[DataSet]) -> dict[str, Path]:
    return find_named(place, sets, read_toml("table3" if sets is SERIES else "table4")["kinds"])


def two_tables(folder: Path) -> str:
    """ECL in a folder in a folder, and Weather with a sentinel and without a header."""
    series(folder / "series" / "electricity" / "electricity.csv", channels=3)
    series(folder / "series" / "weather.txt", channels=2, sentinel=True)
    return str(folder / "series")


def by_title(table: dict) -> dict[str, dict[str, dict]]:
    titles = [column["title"] for column in table["columns"]]
    return {row["title"]: dict(zip(titles, row["cells"], strict=True)) for row in table["rows"]}


def test_what_is_said_of_the_paper_s_numbers() -> None:
    """The notes of both tables, from their cells."""
    tables = {name: published()[name] for name in ("table3", "table4")}
    rows = tables["table3"].groups["all"]["rows"]
    assert len(rows) == 9
    behind = {
        (column, name)
        for column in tables["table3"].columns
        for name, row in rows.items()
        if row[column] < rows["Neural Memory"][column]
    }
    assert behind == {("Traffic MAE", "iTransformer")}
    assert rows["iTransformer"]["Traffic MAE"] == 0.282
    rows = tables["table4"].groups["all"]["rows"]
    assert len(rows) == 8
    ours = rows["Neural memory"]
    ahead = {
        column: {name for name, row in rows.items() if row[column] is not None and row[column] > ours[column]}
        for column in tables["table4"].columns
    }
    assert ahead == {
        "Enhancer Cohn": set(), "Enhancer Ens": set(), "Non-TATA": {"Based"}, "Human OCR": {"HyenaDNA"},
        "Human Reg": {"HyenaDNA", "CNN", "GPT", "Transformer++", "Based"},
    }  # fmt: skip
    told = " ".join(tables["table4"].notes)
    assert all(f"{name} ({rows[name]['Human Reg']})" in told for name in ahead["Human Reg"])
    assert "Non-TATA (96.8)" in told
    assert "Human OCR (80.9)" in told
    assert (tables["table3"].digits, tables["table4"].digits) == (3, 1)


def test_names_of_columns_are_the_paper_s() -> None:
    assert [title.split() for title in published()["table3"].columns] == [
        [one["column"], measure] for one in SERIES for measure in ("MSE", "MAE")
    ]
    assert [one["column"] for one in DNA] == list(published()["table4"].columns)
    assert set(read_toml("table4")["kinds"]) == {*FASTA, *SEQUENCE_TABLES, "folder"}


def test_an_epoch_of_dna_is_nine_tenths_of_a_set_in_batches() -> None:
    for one in DNA:
        assert one["epoch"] == -(-round((1.0 - TrainSettings().held_out) * one["sequences"]) // 128)
        assert one["steps"] == 100 * one["epoch"]


def test_files_are_found_by_name_however_deep(tmp_path: Path) -> None:
    for name in ("ETT-small/ETTh1.csv", "ETT-small/etth2.CSV", "weather/weather.txt", "all/six/ECL.csv", "ETTm1.png",
                 ".hidden/traffic.csv", "traffic.csv/nothing", "ETTh1.notes.md"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = find_sets(tmp_path, SERIES)
    assert {column: str(path.relative_to(tmp_path)) for column, path in found.items()} == {
        "ETTh1": "ETT-small/ETTh1.csv", "ETTh2": "ETT-small/etth2.CSV", "ECL": "all/six/ECL.csv",
        "Weather": "weather/weather.txt",
    }  # fmt: skip
    assert list(found) == ["ETTh1", "ETTh2", "ECL", "Weather"], "the paper's order"
    assert find_sets(tmp_path / "ETT-small" / "ETTh1.csv", SERIES).keys() == {"ETTh1"}
    (tmp_path / "all" / "ETTh1.csv").touch()
    with pytest.raises(ValueError, match=r"got .*ETTh1.csv and .*ETTh1.csv for ETTh1; expected one of them"):
        find_sets(tmp_path, SERIES)
    with pytest.raises(ValueError, match=r"holds none of the sets; expected a folder with human_enhancers_cohn, "):
        find_sets(tmp_path, DNA)


def test_training_sets_of_dna_are_preferred(tmp_path: Path) -> None:
    for name in ("human_nontata_promoters/train/a/1.txt", "human_nontata_promoters/test/a/1.txt",
                 "human_ocr_ensembl/a/1.txt", "x/human_enhancers_cohn.test.tsv", "x/human_enhancers_cohn.train.tsv.gz",
                 "human_ensembl_regulatory.train1500.tsv"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = find_sets(tmp_path, DNA)
    assert {column: str(path.relative_to(tmp_path)) for column, path in found.items()} == {
        "Enhancer Cohn": "x/human_enhancers_cohn.train.tsv.gz", "Non-TATA": "human_nontata_promoters/train",
        "Human Reg": "human_ensembl_regulatory.train1500.tsv", "Human OCR": "human_ocr_ensembl",
    }  # fmt: skip
    alone = find_sets(tmp_path / "human_nontata_promoters", DNA)
    assert alone == {"Non-TATA": tmp_path / "human_nontata_promoters" / "train"}
    plan = make_plan("table4", "paper", data=str(tmp_path), out=tmp_path / "out")
    assert {step.settings.data.parent.name for step in plan.steps} == {"human_nontata_promoters"}
    assert any("Enhancer Cohn, Enhancer Ens, Human Reg, Human OCR: not measured" in line for line in plan.differs)
    with pytest.raises(ValueError, match="where no set has folders train and test; expected human_enhancers_cohn"):
        make_plan("table4", "paper", data=str(tmp_path / "x"))


def test_forecasts_beside_the_paper_s(tmp_path: Path) -> None:
    """Means over horizons, seed by seed; tables that are not there, and models that are not run, are not measured."""
    plan = make_plan("table3", "tiny", data=two_tables(tmp_path), out=tmp_path / "out", sizes=micro())
    assert [step.name for step in plan.steps] == ["ECL", "Weather"]
    assert command_of(plan.steps[1]) == evaluate_command(plan.steps[1].settings)
    assert "--table.sentinel keep" in command_of(plan.steps[1])
    assert "--table.sentinel" not in command_of(plan.steps[0])
    result = run_plan(plan, quiet)
    assert json.loads((tmp_path / "out" / "repro.json").read_text())["tables"] == result["tables"]
    squares, rows = map(by_title, result["tables"])
    found = json.loads((tmp_path / "out" / "Weather" / "results.json").read_text())["tables"][0]["contenders"]
    runs = next(one["runs"] for one in found if one["name"] == "lmm")
    assert len(runs) == 4
    seeds = [mean(run["test"]["mae"] for run in runs if run["seed"] == seed) for seed in (0, 1)]
    assert rows["LMM"]["Weather"] == {
        "ours": {"mean": pytest.approx(mean(seeds)), "sd": pytest.approx(stdev(seeds)), "seeds": 2}, "paper": 0.265
    }  # fmt: skip
    assert squares["LMM"]["ECL"]["ours"]["sd"] is None
    assert squares["NLinear, closed form"]["ECL"]["paper"] == 0.219
    assert squares["NLinear, closed form"]["ECL"]["ours"]["mean"] > 0
    assert rows["repeat the last value"]["ECL"]["paper"] is None
    assert squares["Mamba in the memory's place"]["Weather"] == {"ours": None, "paper": 0.255}
    assert squares["LMM"]["ETTh1"] == {"ours": None, "paper": 0.420}
    squared = [mean(run["test"]["mse"] for run in runs if run["seed"] == seed) for seed in (0, 1)]
    assert squares["LMM"]["Weather"]["ours"]["mean"] == pytest.approx(mean(squared))
    lines = result_lines(result)
    assert "MAE on scaled values, the mean over horizons" in lines
    assert any("ETTm1, ETTm2, ETTh1, ETTh2, Traffic: not measured, no file in" in line for line in lines)
    assert any("Mamba in the memory's place (Simba) is not run at this scale" in line for line in lines)
    assert any("ECL 1 (1 seed), Weather 1 (2 seeds)" in line for line in lines)
    said: list[str] = []
    assert run_plan(plan, said.append) == result
    assert [": done before, " in line for line in said] == [True, True]


def test_tables_of_another_size_are_not_the_paper_s(tmp_path: Path) -> None:
    """They are run, and it is said that the numbers do not compare; names and dates may be there or not."""
    whole, other = ",".join(["date", *"abcdefg"]), ",".join(["2016-07-01", *"1234567"])
    (tmp_path / "ETTh1.csv").write_text("\n".join([whole, *[other] * 17_420]) + "\n")
    (tmp_path / "ETTh2.csv.gz").write_bytes(gzip.compress(("\n".join([other[11:]] * 17_420)).encode()))
    (tmp_path / "ETTm1.csv").write_text("\n".join([whole, *[other] * 100]) + "\n\n")
    (tmp_path / "weather.csv").write_text("a,b\n" + "1,2\n" * 52_696)
    for plan in (make_plan("table3", "tiny", data=str(tmp_path)), make_plan("table3", "paper", data=str(tmp_path))):
        said = [line for line in plan.differs if "NOT COMPARABLE" in line]
        assert [line.partition(":")[0] for line in said] == ["ETTm1", "Weather"]
        assert "has 101 lines of 8 cells, where its table has 69,680 rows of 7 channels" in said[0]
        assert "has 52,697 lines of 2 cells, where its table has 52,696 rows of 21 channels" in said[1]


def test_dna_beside_the_paper_s(tmp_path: Path) -> None:
    """Right classes over all folds, by the predictions themselves; and what makes them no numbers of the paper's."""
    dna(tmp_path / "data" / "human_nontata_promoters.test.tsv")
    data = str(tmp_path / "data")
    plan = make_plan("table4", "tiny", data=data, out=tmp_path / "out", sizes=micro())
    (step,) = plan.steps
    assert command_of(step) == genomics_command(step.settings)
    result = run_plan(plan, quiet)
    rows = by_title(result["tables"][0])
    with (step.file.parent / "predictions.tsv").open() as file:
        told = list(csv.DictReader(file, delimiter="\t"))
    assert len(told) == 24
    seeds = [100 * mean(row["label"] == row[f"lmm seed {seed}"] for row in told) for seed in (0, 1)]
    assert rows["LMM"]["Non-TATA, ours 2 folds"] == {
        "ours": {"mean": pytest.approx(mean(seeds)), "sd": pytest.approx(stdev(seeds)), "seeds": 2}, "paper": 96.6
    }  # fmt: skip
    assert rows["5-mers, naive Bayes"]["Non-TATA, ours 2 folds"]["ours"]["mean"] > 60, "one has the box, one has not"
    assert rows["CNN"]["Non-TATA, ours 2 folds"] == {"ours": None, "paper": 84.6}
    assert rows["LMM"]["Human OCR"] == {"ours": None, "paper": 79.9}
    lines = result_lines(result)
    told_so = next(line for line in lines if "NOT COMPARABLE with the paper's table" in line)
    assert "2-fold cross-validation on the files given (Non-TATA " in told_so
    assert f"{data}/human_nontata_promoters.test.tsv" in told_so
    assert any("Enhancer Cohn, Enhancer Ens, Human Reg, Human OCR: not measured" in line for line in lines)


def test_dna_is_known_by_the_name_of_its_file(tmp_path: Path) -> None:
    """In capitals too, and not by that of a folder above."""
    dna(tmp_path / "human_ocr_ensembl" / "Human_Nontata_Promoters.tsv")
    data = str(tmp_path / "human_ocr_ensembl" / "Human_Nontata_Promoters.tsv")
    plan = make_plan("table4", "tiny", data=data, sizes=micro())
    assert [step.name for step in plan.steps] == ["non-tata"]
    assert any("nucleotides" in line for line in plan_lines(plan))


def test_tables_that_a_scale_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "traffic.csv").touch()
    with pytest.raises(ValueError, match="got Traffic, which the scale tiny leaves out; expected ETTm1, "):
        make_plan("table3", "tiny", data=str(tmp_path))
    (tmp_path / "weather.csv").touch()
    plan = make_plan("table3", "tiny", data=str(tmp_path))
    assert [step.name for step in plan.steps] == ["Weather"]
    assert "Traffic: not run at the scale tiny" in plan.differs
    assert [step.name for step in make_plan("table3", "small", data=str(tmp_path)).steps] == ["Traffic", "Weather"]


def test_the_paper_s_setting_is_printed(tmp_path: Path) -> None:
    """All tables and horizons; the official split of DNA, with files where they usually are."""
    plan = make_plan("table3", "paper")
    assert [step.name for step in plan.steps] == [one["column"] for one in SERIES]
    for step in plan.steps:
        assert (step.settings.lookback, step.settings.horizons) == (96, (96, 192, 336, 720))
        assert {"lmm", "mamba"} < set(step.settings.models)
    lines = plan_lines(plan)
    assert any("titans forecast evaluate data/series/ETTm1.csv " in line for line in lines)
    assert any(line.startswith("- files are yours to fetch: ETTm1.csv, ") for line in lines)
    assert any(line.startswith("Neural Memory  paper      0.358") for line in lines)
    steps = make_plan("table4", "paper").steps
    assert len(steps) == 5 * 3 * 2
    train, test = (
        next(step.settings for step in steps if step.name == f"enhancer-cohn-lmm{end}") for end in ("", "-test")
    )
    assert isinstance(train, TrainSettings)
    assert isinstance(test, PredictSettings)
    assert (train.data, test.data) == tuple(Path(f"data/dna/human_enhancers_cohn/{part}") for part in ("train", "test"))
    assert (test.model, train.steps) == (train.out, 100 * 147), "100 epochs of 18,759 sequences in batches of 128"
    found = make_plan("table3", "paper", data=two_tables(tmp_path))
    assert [step.name for step in found.steps] == ["ECL", "Weather"]
    assert any("ETTm1, ETTm2, ETTh1, ETTh2, Traffic: not measured" in line for line in found.differs)


def test_without_pandas_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan("table3", "tiny", data=two_tables(tmp_path), out=tmp_path / "out", sizes=micro())
    without_pandas(monkeypatch)
    with pytest.raises(ValueError, match=r"got no pandas, .* pip install 'titans-lm\[forecast\]'"):
        run_plan(plan, quiet)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "read_amounts", lambda *_: micro())
    dna(tmp_path / "human_ocr_ensembl.tsv")
    args = ["repro", "table4", "--data", tmp_path, "--out", tmp_path / "out"]
    code, out, err = titans(capsys, *args, "--dry-run")
    assert (code, err) == (0, "")
    assert "human-ocr: accuracy in 2 folds of " in out
    typed = next(line for line in out.splitlines() if line.startswith("  titans "))
    assert not (tmp_path / "out").exists(), "nothing is run"
    code, out, err = titans(capsys, *args)
    assert (code, err) == (0, "")
    assert "DNA (GenomicsBenchmarks): table 4 of arXiv 2501.00663, scale tiny" in out
    found = json.loads((tmp_path / "out" / "repro.json").read_text())
    cell = found["tables"][0]["rows"][0]["cells"][-1]["ours"]
    assert f"{cell['mean']:.1f} ± {cell['sd']:.1f}" in next(
        line for line in out.splitlines() if line.startswith("LMM ")
    )
    results = json.loads((tmp_path / "out" / "human-ocr" / "results.json").read_text())
    assert isinstance(make_plan("table4", "tiny", data=str(tmp_path)).steps[0].settings, EvaluateSettings)
    assert shlex.split(results["command"]) == shlex.split(typed)
    code, out, err = titans(capsys, "repro", "table3")
    assert (code, out) == (2, "")
    assert "got no folder of data for table3; expected --data FOLDER" in err
    code, out, err = titans(capsys, "repro", "table3", "--data", tmp_path)
    assert (code, out) == (2, "")
    assert "which holds none of the sets" in err


def test_a_plan_loads_nothing_heavy() -> None:
    code = (
        "import sys; from titans_lm.repro.plans import make_plan;"
        "[make_plan(table, 'paper') for table in ('table3', 'table4')];"
        "print(*sorted({'pandas', 'sklearn', 'scipy', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment()}, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == ""
