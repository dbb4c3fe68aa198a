import json

import numpy as np
import pytest
import safetensors.torch
import torch

from cli_cases import titans
from forecast.forecast_cases import SMALL, rows_of, without_pandas, write_csv
from titans_lm.forecast.evaluate import ForecastJob
from titans_lm.forecast.predict import load_forecaster
from titans_lm.forecast.settings import TableSettings
from titans_lm.forecast.table import pd, read_table
from titans_lm.report.forecast import heading, plots
from titans_lm.report.page import render_results

SIZES = [f"--model.{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
QUICK = [
    *("--lookback", 12, "--epochs", 1, "--batch-size", 32, "--device", "cpu", "--patch-len", 4),
    *("--stride", 4, *SIZES),
]


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A table and a run of `titans forecast train` on it."""
    from titans_lm.cli import main

    folder = tmp_path_factory.mktemp("forecast")
    table = write_csv(folder / "waves.csv")
    args = ["forecast", "train", table, "--horizon", 4, "--out", folder / "run", *QUICK, "--quiet"]
    main([*map(str, args), "--json", str(folder / "train.json")])
    return folder, table


def test_training_says_what_it_found_and_leaves_a_model(fitted, capsys, tmp_path):
    folder, table = fitted
    told = json.loads((folder / "train.json").read_text())
    assert told["command"].startswith(f"titans forecast train {table} --lookback 12")
    assert told["windows"] == {"train": 69, "validation": 9, "test": 21}
    assert told["test"]["windows"] == 21
    code, out, _ = titans(
        capsys, "forecast", "train", table, "--horizon", 4, "--out", tmp_path / "run", *QUICK, "--model", "nlinear"
    )
    assert code == 0
    assert "waves: 120 rows of 2 channels; windows: 69 train, 9 validation, 21 test" in out
    assert "nlinear: 52 parameters; run folder " in out
    assert "\nvalidation MSE " in out
    assert f"titans forecast predict {tmp_path / 'run'} {table}" in out


def test_a_run_that_is_done_is_read_and_one_of_other_settings_refused(fitted, capsys, monkeypatch):
    folder, table = fitted
    monkeypatch.setattr(ForecastJob, "train", lambda self: pytest.fail("it was done before"))
    args = ["forecast", "train", table, "--out", folder / "run", *QUICK]
    assert titans(capsys, *args, "--horizon", 4)[0] == 0
    code, _, err = titans(capsys, *args, "--horizon", 5)
    assert code == 2
    assert "holds a run of other settings; give another --out" in err


def test_a_run_is_not_read_for_a_table_that_was_changed(fitted, capsys, tmp_path):
    folder, table = fitted
    other = tmp_path / table.name
    other.write_text(table.read_text().rstrip() + "1\n")
    code, _, err = titans(capsys, "forecast", "train", other, "--out", folder / "run", *QUICK, "--horizon", 4)
    assert code == 2
    assert f"was begun when {table.name} held something else; give another --out" in err


def contiguous(_module, given):
    assert given[0].is_contiguous()


def test_a_saved_model_is_the_model(fitted):
    folder, table = fitted
    model = load_forecaster(folder / "run")
    assert model.channels == ("a", "b")
    assert tuple(model.shape) == (12, 4, 2)
    again = load_forecaster(folder / "run" / "model")
    values = read_table(table, TableSettings()).values
    found = model.forecast(values)
    np.testing.assert_array_equal(found, again.forecast(values))
    by_column, reading = np.asfortranarray(values), model.model.register_forward_pre_hook(contiguous)
    np.testing.assert_array_equal(found, model.forecast(by_column))  # torch sums up what has another layout otherwise
    np.testing.assert_array_equal(model.forecast(values, memory="carried"), model.forecast(by_column, memory="carried"))
    reading.remove()
    np.testing.assert_array_equal(found, model.forecast(values[-12:]))  # a fresh memory has read the window alone
    scaled = torch.from_numpy((values[-12:] - values[:84].mean(0)) / values[:84].std(0)).float()[None]
    with torch.no_grad():
        expected = model.model(scaled)[0].double().numpy() * values[:84].std(0) + values[:84].mean(0)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    carried = model.forecast(values, memory="carried")
    assert not np.allclose(carried, found)
    np.testing.assert_allclose(carried, model.forecast(values[-len(values) // 12 * 12 :], memory="carried"))
    assert not np.allclose(model.forecast(values, memory="still"), found)
    told = json.loads((folder / "train.json").read_text())
    assert model.told["test"] == told["test"]


def test_wrong_values_are_refused(fitted):
    model = load_forecaster(fitted[0] / "run")
    for values in (np.zeros((11, 2)), np.zeros((12, 3))):
        with pytest.raises(ValueError, match=r"expected \(R, C\) with C = 2 and at least 12 rows"):
            model.forecast(values)
    with pytest.raises(ValueError, match="not finite"):
        model.forecast(np.full((12, 2), np.nan))


def test_a_table_that_is_no_array_is_refused_with_the_way_to_one(fitted, unchecked):
    model = load_forecaster(str(fitted[0] / "run"))
    rows = np.zeros((12, 2))
    assert model.forecast(rows.astype(int)).shape == (4, 2)
    for values, got in ((pd.DataFrame(rows), "DataFrame"), (rows.tolist(), "list"), (rows.astype(str), "an array")):
        with pytest.raises(ValueError, match=rf"got values as {got}.*; expected an array of numbers \(R, C\): frame\["):
            model.forecast(values)


def test_a_forecast_behind_the_last_row(fitted, capsys, tmp_path):
    folder, table = fitted
    args = ["forecast", "predict", folder / "run", table, "--out", tmp_path / "out", "--json", tmp_path / "f.json"]
    code, out, err = titans(capsys, *args)
    assert (code, err) == (0, "")
    rows = rows_of(tmp_path / "out" / "forecast.csv")
    assert [row["date"] for row in rows] == [f"2020-01-06 0{hour}:00:00" for hour in range(4)]
    assert list(rows[0]) == ["date", "a", "b"]
    values = read_table(table, TableSettings()).values
    expected = load_forecaster(folder / "run").forecast(values)
    np.testing.assert_allclose([[float(row["a"]), float(row["b"])] for row in rows], expected, rtol=1e-9)
    assert (tmp_path / "out" / "forecast.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads((tmp_path / "f.json").read_text())
    assert (told["origin"], told["rows"]) == (120, 4)
    assert "mse" not in told
    assert f"plot: {tmp_path / 'out' / 'forecast.png'}" in out
    assert "plot shows" not in out
    assert (
        "plot shows: 1 of 2 channels, the last ones; --plot-channels 2 shows all"
        in titans(capsys, *args, "--plot-channels", 1)[1]
    )
    assert told["notes"] == []
    assert "notes" not in out


@pytest.mark.parametrize("origin", ["118", "2020-01-05 22:00"])
def test_a_forecast_beside_the_truth(fitted, capsys, tmp_path, origin):
    folder, table = fitted
    args = ["forecast", "predict", folder / "run", table, "--out", tmp_path, "--origin", origin, "--memory", "carried"]
    assert titans(capsys, *args, "--json", tmp_path / "f.json", "--quiet") == (0, "", "")
    rows = rows_of(tmp_path / "forecast.csv")
    values = read_table(table, TableSettings()).values
    assert [row["a (truth)"] for row in rows[2:]] == ["", ""]
    np.testing.assert_allclose([float(row["b (truth)"]) for row in rows[:2]], values[118:, 1])
    model = load_forecaster(folder / "run")
    forecast = model.forecast(values[:118], memory="carried")
    np.testing.assert_allclose([float(row["a"]) for row in rows], forecast[:, 0])
    told = json.loads((tmp_path / "f.json").read_text())
    error = (forecast[:2] - values[118:]) / values[:84].std(0)
    assert told["truth_rows"] == 2
    assert told["mse"] == pytest.approx(np.square(error).mean())
    assert told["mae"] == pytest.approx(np.abs(error).mean())


def test_a_table_is_read_as_it_was_fitted(fitted, capsys, tmp_path):
    """A table with a column of words, other separators and sentinels: predict needs no options again."""
    values = read_table(fitted[1], TableSettings()).values
    lines = ["a;b;note", *(f"{a};{b};x".replace(".", ",") for a, b in values.tolist())]
    lines[50] = "-1;-1;x"
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    options = ["--table.separator", ";", "--table.decimal", ",", "--table.channels", "a", "b"]
    options += ["--table.sentinels", "-1", "--table.sentinel", "fill"]
    run = ["--horizon", 4, *QUICK, "--model", "nlinear", "--quiet"]
    code, _, err = titans(capsys, "forecast", "train", tmp_path / "t.csv", "--out", tmp_path / "run", *run, *options)
    assert (code, err) == (0, "")
    found = []
    for name, more in (("plain", []), ("told", options), ("one more", ["--table.missing", "fill"])):
        # what is asked for otherwise is no reason to forget the rest
        args = [tmp_path / "run", tmp_path / "t.csv", "--out", tmp_path / name, "--origin", 52, *more]
        code, _, err = titans(capsys, "forecast", "predict", *args)
        assert (code, err) == (0, "")
        found.append((tmp_path / name / "forecast.csv").read_text())
    assert found[0] == found[1] == found[2]
    (tmp_path / "other.csv").write_text((tmp_path / "t.csv").read_text().replace(",", ".").replace(";", ","))
    usual = ["--table.separator", ",", "--table.decimal", "."]  # what train takes by default is asked for here
    args = [tmp_path / "run", tmp_path / "other.csv", "--out", tmp_path / "other", "--origin", 52, *usual]
    assert titans(capsys, "forecast", "predict", *args)[::2] == (0, "")
    assert (tmp_path / "other" / "forecast.csv").read_text() == found[0]


def test_a_table_without_dates_counts_rows(fitted, capsys, tmp_path):
    folder, table = fitted
    values = read_table(table, TableSettings()).values
    lines = ["b,more,a", *(f"{b},0,{a}" for a, b in values.tolist())]
    (tmp_path / "plain.csv").write_text("\n".join(lines) + "\n")
    code, _, err = titans(capsys, "forecast", "predict", folder / "run", tmp_path / "plain.csv", "--out", tmp_path)
    assert (code, err) == (0, "")
    rows = rows_of(tmp_path / "forecast.csv")
    assert [row["row"] for row in rows] == ["120", "121", "122", "123"]
    np.testing.assert_allclose(float(rows[0]["a"]), load_forecaster(folder / "run").forecast(values)[0, 0])


def test_models_side_by_side(fitted, capsys, tmp_path):
    _, table = fitted
    other = write_csv(tmp_path / "more.csv", 140, 3)
    args = ["forecast", "evaluate", table, other, "--models", "lmm", "nlinear", "seasonal", "--table.period", 12]
    args += ["--horizons", 3, 6, "--seeds", 0, 1, "--streaming", "--out", tmp_path / "out", *QUICK]
    code, out, err = titans(capsys, *args, "--json", tmp_path / "r.json")
    assert (code, err) == (0, "")
    result = json.loads((tmp_path / "r.json").read_text())
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == result
    assert (result["what"], [one["table"] for one in result["tables"]]) == ("forecast", ["waves", "more"])
    assert {"processor", "commit", "versions"} <= result["hardware"].keys()
    runs = [run for one in result["tables"] for who in one["contenders"] for run in who["runs"]]
    assert result["wall_seconds"] == pytest.approx(sum(run["wall_seconds"] for run in runs))
    assert all(run["commits"] == [result["hardware"]["commit"]] for run in runs)
    lmm, nlinear, seasonal = result["tables"][0]["contenders"]
    assert [(run["horizon"], run["seed"]) for run in lmm["runs"]] == [(3, 0), (3, 1), (6, 0), (6, 1)]
    assert [(run["horizon"], run["seed"]) for run in nlinear["runs"]] == [(3, 0), (6, 0)]
    by_seed = [np.mean([run["test"]["mse"] for run in lmm["runs"] if run["seed"] == seed]) for seed in (0, 1)]
    assert lmm["test"]["mse"]["mean"] == {
        "mean": pytest.approx(np.mean(by_seed)),
        "sd": pytest.approx(np.std(by_seed, ddof=1)),
        "seeds": 2,
    }
    assert {"carried", "still"} <= lmm.keys()
    assert lmm["runs"][0]["streaming"]["carried"]["windows"] == lmm["runs"][0]["test"]["windows"]
    assert "carried" not in nlinear
    assert nlinear["runs"][0]["rate"] is None
    assert result["tables"][1]["windows"]["6"] == {"train": 81, "validation": 9, "test": 23}
    assert "waves: test MSE and MAE on scaled values" in out
    assert "lmm carried" in out
    row = next(line for line in out.splitlines() if line.startswith("3 "))
    assert f"{seasonal['test']['mse']['3']['mean']:.3f}  {seasonal['test']['mae']['3']['mean']:.3f}" in row
    assert out.count("\nmean ") == 2


def test_the_page_of_results_has_forecasts(fitted, capsys, tmp_path):
    _, table = fitted
    other = write_csv(tmp_path / "more.csv", 140, 3)
    models = ["lmm", "lmm:theta_bound=0,decay=false", "mamba", "patchtst:lr=0.002", "nlinear", "repeat"]
    args = ["forecast", "evaluate", "--models", *models, "--horizons", 3, 6, "--seeds", 0, 1, "--quiet", *QUICK]
    for name, tables in {"one": [table], "two": [table, other]}.items():
        told = [*args, "--out", tmp_path / name, "--json", tmp_path / "json" / f"{name}.json"]
        assert titans(capsys, *told[:2], *tables, *told[2:], *(["--streaming"] if name == "one" else [])) == (0, "", "")
    render_results(tmp_path / "json", tmp_path / "page.md")
    result = json.loads((tmp_path / "json" / "one.json").read_text())
    page = (tmp_path / "page" / "forecast.md").read_text()
    alone, both = (page.index(f"## Forecasts: {tables}, variants\n") for tables in ("waves", "waves, more"))
    shown = {line.split(" | ")[0]: line for line in page[alone:both].splitlines() if line.startswith("| ")}
    for name, kind, label in (
        ("lmm", "test", "**LMM**"),
        ("lmm", "carried", "**LMM, carried from window to window**"),
        ("lmm", "still", "**LMM, frozen**"),
        (models[1], "test", "**LMM, theta bound 0, no decay**"),
        ("mamba", "test", "Mamba in the memory's place"),
        ("patchtst:lr=0.002", "test", "PatchTST, lr 0.002"),
        ("nlinear", "test", "NLinear, closed form"),
        ("repeat", "test", "last value again"),
    ):
        found = next(one for one in result["tables"][0]["contenders"] if one["name"] == name)
        cells = shown[f"| {label}"].split(" | ")
        assert cells[1] == f"{max(run['parameters'] for run in found['runs']):,}"
        mse, mae = found[kind]["mse"]["mean"], found[kind]["mae"]["mean"]
        spread = [f" ± {one['sd']:.3f}" if name not in ("nlinear", "repeat") else "" for one in (mse, mae)]
        assert cells[2] == {"nlinear": "–", "repeat": "–", "patchtst:lr=0.002": "0.002"}.get(name, "0.001")
        assert cells[5] == f"{mse['mean']:.3f}{spread[0]} / {mae['mean']:.3f}{spread[1]}"
    assert page[both:].count("| waves | ") == page[both:].count("| more | ") == len(models)
    by_table = plots(json.loads((tmp_path / "json" / "two.json").read_text()))[""]
    assert (by_table.x_label, by_table.x_labels) == ("table", ["waves", "more"])
    assert [line.dashed for line in by_table.lines] == [False, False, True, True, True], "naive ones are not drawn"
    assert all(line.spread is not None for line in by_table.lines[:-1])
    assert by_table.lines[-1].spread is None, "a closed form has one value"
    assert {path.name for path in (tmp_path / "json").glob("*.png")} == {"one.png", "two.png"}
    result["settings"]["horizons"] = [3]
    result["tables"][0]["contenders"] = [one for one in result["tables"][0]["contenders"] if ":" not in one["name"]]
    assert heading(result) == "Forecasts: waves, 3 rows ahead"
    assert plots(result) == {}, "one horizon is no line"


def test_a_learning_rate_is_chosen_on_validation_by_the_first_seed(fitted, capsys, tmp_path):
    _, table = fitted
    args = ["forecast", "evaluate", table, "--models", "dlinear", "--horizons", 3, "--seeds", 1, 2, "--quiet"]
    args += ["--rates", 0.01, 1e-7, "--out", tmp_path, *QUICK]
    assert titans(capsys, *args) == (0, "", "")
    trials = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("waves/trials/*/result.json")}
    tried = {rate: trials.pop(f"dlinear-3-lr{rate}-seed1") for rate in ("0.01", "1e-07")}
    assert not trials
    assert not any({"test", "streaming"} & trial.keys() for trial in tried.values()), "no trial is tested"
    best = min(tried, key=lambda rate: tried[rate]["validation"]["mse"])
    finals = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("waves/*/result.json")}
    assert finals.keys() == {f"dlinear-3-lr{best}-seed{seed}" for seed in (1, 2)}
    counted = finals[f"dlinear-3-lr{best}-seed1"]
    for same in ("validation", "steps", "best_step"):
        assert counted[same] == tried[best][same], "it goes on from the trial"
    assert counted["test"]["windows"] == 22
    runs = json.loads((tmp_path / "results.json").read_text())["tables"][0]["contenders"][0]["runs"]
    assert [(run["seed"], run["rate"]) for run in runs] == [(1, float(best)), (2, float(best))]


def test_a_rate_that_a_name_says_stands(fitted, capsys, tmp_path):
    _, table = fitted
    args = ["forecast", "evaluate", table, "--models", "dlinear", "dlinear:lr=0.02", "--horizons", 3, "--quiet", *QUICK]
    for rates in ((0.01, 1e-7), (0.5,)):
        out = tmp_path / str(len(rates))
        assert titans(capsys, *args, "--rates", *rates, "--out", out) == (0, "", "")
        found = json.loads((out / "results.json").read_text())["tables"][0]["contenders"]
        assert found[0]["runs"][0]["rate"] in rates
        assert found[1]["runs"][0]["rate"] == 0.02
        trials = sorted(path.name for path in out.glob("waves/trials/*"))
        assert trials == (["dlinear-3-lr0.01-seed0", "dlinear-3-lr1e-07-seed0"] if len(rates) == 2 else [])


def test_a_rate_that_diverges_is_not_taken(fitted, capsys, tmp_path):
    """Of 1e30 a loss is infinite; again, from what the trials have left, and where no other rate is left."""
    _, table = fitted
    args = ["forecast", "evaluate", table, "--models", "dlinear", "--horizons", 3, "--out", tmp_path, *QUICK]
    args += ["--epochs", 40, "--patience", 99, "--warmup-share", 0, "--quiet"]
    for _ in range(2):
        assert titans(capsys, *args, "--rates", 1e30, 0.01) == (0, "", "")
        runs = json.loads((tmp_path / "results.json").read_text())["tables"][0]["contenders"][0]["runs"]
        assert [run["rate"] for run in runs] == [0.01]
    trial = json.loads((tmp_path / "waves" / "trials" / "dlinear-3-lr1e+30-seed0" / "result.json").read_text())
    assert "steps in a row" in trial["diverged"]
    code, _, err = titans(capsys, *args, "--rates", 1e30, 2e30)
    assert code == 2
    assert "dlinear at horizon 3 of waves diverged with every learning rate (1e+30, 2e+30); give lower --rates" in err


def test_test_rows_change_nothing_but_the_test(fitted, capsys, tmp_path):
    """The ridge, the learning rate and the best step are those of a table whose test rows are others."""
    _, table = fitted
    other = tmp_path / "spoiled" / "waves.csv"
    other.parent.mkdir()
    lines = table.read_text().splitlines()
    spoiled = [",".join([line.split(",")[0], "77", "-55"]) for line in lines[1 + 96 :]]  # 24 of 120 rows are tested
    other.write_text("\n".join([*lines[: 1 + 96], *spoiled]) + "\n")
    found = []
    for path in (table, other):
        out = tmp_path / path.parent.name / "out"
        args = ["forecast", "evaluate", path, "--models", "lmm:shortcut=ridge", "dlinear", "nlinear", "--horizons", 3]
        args += ["--rates", 0.01, 0.001, "--streaming", "--out", out, "--quiet"]
        assert titans(capsys, *args, *QUICK) == (0, "", "")
        found.append(json.loads((out / "results.json").read_text())["tables"][0]["contenders"])
    for before, after in zip(*found, strict=True):
        for one, two in zip(before["runs"], after["runs"], strict=True):
            for chosen in ("rate", "ridge", "best_step", "steps", "validation"):
                assert one[chosen] == two[chosen], chosen
            assert one["test"] != two["test"]


MISTAKES = {
    "windows for a model without a memory": (
        ["evaluate", "TABLE", "--models", "nlinear", "dlinear", "--windows", "2", "--horizons", "4", *QUICK],
        "got windows=2 for 'dlinear', which has no memory to carry between windows",
    ),
    "windows for one model without a memory": (
        ["train", "TABLE", "--model", "attention:windows=2", "--horizon", "4", "--out", "forecast", *QUICK],
        "got windows=2 for 'attention:windows=2', which has no memory",
    ),
    "no table": (["train"], "got no table; expected a CSV file: titans forecast train DATA.csv"),
    "no tables": (["evaluate"], "got no table; expected a CSV file or more"),
    "a table that is not there": (["evaluate", "none.csv"], "got the table 'none.csv', which is no file"),
    "an unknown model": (["evaluate", "TABLE", "--models", "lmn"], "did you mean 'lmm'"),
    "a model twice": (["evaluate", "TABLE", "--models", "lmm", "lmm"], "expected one or more, each once"),
    "a table twice": (["evaluate", "TABLE", "TABLE"], "got two tables of one name"),
    "no season": (
        ["evaluate", "TABLE", "--models", "seasonal", "--lookback", "12", "--horizons", "4", "--table.period", "97"],
        "got a season of 97 rows and a lookback of 12",
    ),
    "too few rows": (["train", "TABLE", "--lookback", "96"], "expected at least 192, one window of 96 rows"),
    "a horizon of none": (["train", "TABLE", "--horizon", "0"], "got horizon=0"),
    "no model": (["predict"], "got no model or no table"),
    "a forecast over its table": (
        ["predict", "RUN", "forecast.csv", "--out", "."],
        "got --out ., where the table would be replaced; expected another folder",
    ),
    "a model that is not there": (
        ["predict", "nowhere", "TABLE"],
        "got the forecaster 'nowhere', which does not exist",
    ),
    "a folder of something else": (["predict", "FOLDER", "TABLE"], "holds no forecast.json"),
    "a channel that is lacking": (["predict", "RUN", "OTHER"], "without the channels 'a', 'b'; expected those that"),
    "an origin too early": (["predict", "RUN", "TABLE", "--origin", "11"], "expected a row from 12 on"),
    "an origin too late": (["predict", "RUN", "TABLE", "--origin", "121"], "to 120"),
    "an origin that is no date": (
        ["predict", "RUN", "TABLE", "--origin", "noon"],
        "got origin='noon'; expected a date",
    ),
    "a date without dates": (["predict", "RUN", "PLAIN", "--origin", "2020-01-02"], "for a table without dates"),
    "an origin behind the table": (
        ["predict", "RUN", "TABLE", "--origin", "2099-01-01"],
        "behind the table, which ends at 2020-01-05T23:00:00",
    ),
    "an origin of no time": (["predict", "RUN", "TABLE", "--origin", "NaT"], "got origin='NaT'; expected a date"),
    "an origin from the end": (["predict", "RUN", "TABLE", "--origin", "-1"], "got origin='-1'; expected a date"),
    "an unknown command": (["predct"], "predct"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(fitted, capsys, tmp_path, monkeypatch, name):
    args, message = MISTAKES[name]
    folder, table = fitted
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.csv").write_text("c,d\n" + "1,2\n" * 20)
    (tmp_path / "plain.csv").write_text("a,b\n" + "1,2\n" * 20)
    paths = {
        "TABLE": table,
        "RUN": folder / "run",
        "FOLDER": tmp_path,
        "OTHER": tmp_path / "other.csv",
        "PLAIN": tmp_path / "plain.csv",
    }
    code, _, err = titans(capsys, "forecast", *(paths.get(arg, arg) for arg in args))
    assert (code, err.count("\n")) == (2, 1)
    assert message in err
    assert not (tmp_path / "forecast").exists()


def test_without_pandas_it_says_how_to_get_it(capsys, monkeypatch):
    without_pandas(monkeypatch)
    code, _, err = titans(capsys, "forecast", "evaluate", "table.csv")
    assert code == 2
    assert "got no pandas, which tables are read with; install it with: pip install 'titans-lm[forecast]'" in err


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("forecast.json", b"{"),
        ("forecast.json", b"[]"),
        ("forecast.json", b'{"format": "another"}'),
        ("model.safetensors", b"xx"),
    ],
)
def test_damaged_models_are_named(fitted, tmp_path, file, content):
    for path in (fitted[0] / "run" / "model").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=r"the forecaster in .* cannot be loaded"):
        load_forecaster(tmp_path)


def test_weights_of_another_model_are_named(fitted, tmp_path):
    for path in (fitted[0] / "run" / "model").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    safetensors.torch.save_file({"x": torch.zeros(1)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match=r"cannot be loaded: .*the weights in .* do not fit this"):
        load_forecaster(tmp_path)
