"""Plans run, go on where they were stopped, and say our numbers beside the paper's."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest

from bench.bench_cases import check_once, work_here
from cli_cases import titans
from repro.repro_cases import micro, named_sets, quiet, stop_at, texts
from titans_lm.repro import plans, run, show
from titans_lm.repro.plans import Plan, make_plan, merged, published
from titans_lm.repro.run import run_plan
from titans_lm.repro.show import plan_lines, result_lines


def cut(plan: Plan, names: tuple[str, ...]) -> Plan:
    """Leave only some models of a plan."""
    steps = tuple(
        replace(step, settings=replace(step.settings, models=names)) if hasattr(step.settings, "models") else step
        for step in plan.steps
    )
    return replace(plan, steps=steps)


def test_a_plan_of_two_steps(tmp_path: Path) -> None:
    """Numbers of the table are those of the commands' own files; what was left out is not measured."""
    data, test = texts(tmp_path)
    made = make_plan("table5", "tiny", out=tmp_path / "out", data=data, test=test, sizes=micro())
    plan = cut(made, ("lmm", "lmm:decay=false"))
    said: list[str] = []
    result = run_plan(plan, said.append)
    assert json.loads((tmp_path / "out" / "repro.json").read_text())["tables"] == result["tables"]
    found = json.loads((tmp_path / "out" / "text" / "compare.json").read_text())
    bits = [run["test"]["bits_per_byte"] for run in found["contenders"][1]["runs"]]
    rows = {row["title"]: row["cells"] for row in result["tables"][0]["rows"]}
    columns = [column["title"] for column in result["tables"][0]["columns"]]
    cell = rows["w/o weight decay"][1]
    assert cell["ours"] == {"mean": pytest.approx(mean(bits)), "sd": pytest.approx(stdev(bits)), "seeds": 2}
    assert rows["LMM"][columns.index("ppl")] == {"ours": None, "paper": 27.01}
    assert rows["LMM"][columns.index("MQAR 32:2 %, not in the paper")]["ours"]["seeds"] == 2
    assert rows["linear memory"][1] == {"ours": None, "paper": None}
    assert any(line.startswith("step 2 of 2, recall: ") for line in said)

    lines = result_lines(result)
    ours = next(i for i, line in enumerate(lines) if line.startswith("w/o weight decay"))
    assert f"{mean(bits):.3f} ± {stdev(bits):.3f}" in lines[ours]
    assert "not measured" in lines[ours]
    assert lines[ours + 1].split() == ["paper", "29.04", "–", "45.11", "85.60", "–"]
    assert "How the setting differs from the paper's:" in lines
    assert any("bits per byte of a local text stand in for ppl" in line for line in lines)


def test_what_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between steps and within one, the same call goes on; other settings are refused."""
    data, test = texts(tmp_path)
    given = {"data": data, "test": test, "out": tmp_path / "out"}
    plan = cut(make_plan("table5", "tiny", sizes=micro(), **given), ("lmm",))
    do = run._do
    stop_at("recall", monkeypatch)
    with pytest.raises(KeyboardInterrupt, match="the same command goes on"):
        run_plan(plan, quiet)
    assert not (tmp_path / "out" / "repro.json").exists()
    before = (tmp_path / "out" / "text" / "compare.json").stat().st_mtime_ns
    ran: list[str] = []

    def counted(step, *rest):
        ran.append(step.name)
        do(step, *rest)

    monkeypatch.setattr(run, "_do", counted)
    said: list[str] = []
    result = run_plan(plan, said.append)
    assert ran == ["recall"]
    assert any(line.startswith("step 1 of 2, text: done before") for line in said)
    assert (tmp_path / "out" / "text" / "compare.json").stat().st_mtime_ns == before
    assert run_plan(plan, quiet) == result
    assert ran == ["recall"]
    begun = json.loads((tmp_path / "out" / run.PLAN).read_text())
    for step in begun["steps"]:  # as earlier versions wrote the same settings
        step["argv"] = [word.replace("--steps", "--train.steps") for word in step["argv"]]
    (tmp_path / "out" / run.PLAN).write_text(json.dumps(begun))
    assert run_plan(plan, quiet) == result
    other = cut(
        make_plan("table5", "tiny", sizes=merged(micro(), {"mqar": {"train": {"steps": 3}}}), **given), ("lmm",)
    )
    with pytest.raises(ValueError, match="holds a plan of other settings"):
        run_plan(other, quiet)


def test_needles_stand_beside_the_lengths_they_are_to(tmp_path: Path) -> None:
    plan = cut(make_plan("table2", "tiny", out=tmp_path, sizes=micro()), ("mac",))
    result = run_plan(plan, quiet)
    columns = {column["title"]: column["paper_column"] for column in result["tables"][0]["columns"]}
    assert columns["PK 16K, ours 192"] == "PK 16K"
    row = next(row for row in result["tables"][0]["rows"] if row["title"] == "MAC")
    cells = dict(zip(columns, row["cells"], strict=True))
    assert cells["PK 16K, ours 192"]["paper"] == 98.4
    assert 0 <= cells["PK 16K, ours 192"]["ours"]["mean"] <= 100
    assert cells["W 4K"] == {"ours": None, "paper": 98.2}


def test_facts_in_a_text(tmp_path: Path) -> None:
    data, test = texts(tmp_path)
    facts = cut(make_plan("figure6", "tiny", out=tmp_path / "6", data=data, test=test, sizes=micro()), ("lmm",))
    table, paper = run_plan(facts, quiet)["tables"]
    row = next(row for row in table["rows"] if row["title"] == "LMM")
    assert [cell["ours"]["seeds"] for cell in row["cells"]] == [1, 1]
    assert paper["rows"][0]["cells"][-1] == {"ours": None, "paper": 77}


def test_depth_by_position(tmp_path: Path) -> None:
    data, test = texts(tmp_path)
    plan = make_plan("figure7", "tiny", out=tmp_path / "out", data=data, test=test, sizes=micro())
    plan = cut(plan, ("lmm:memory_depth=1", "lmm:memory_depth=3"))
    rows = {row["title"]: row["cells"] for row in run_plan(plan, quiet)["tables"][0]["rows"]}
    found = json.loads((tmp_path / "out" / "text" / "compare.json").read_text())["contenders"][1]["runs"]
    first = [run["test"]["by_position"][0]["bits_per_byte"] for run in found]
    assert rows["LMM, 3 layers"][1]["ours"]["mean"] == pytest.approx(mean(first))
    assert rows["LMM, 2 layers"][1]["ours"] is None


@pytest.mark.slow
def test_whole_models_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_once(monkeypatch)
    work_here(monkeypatch, "train")
    plan = make_plan("figure9", "tiny", out=tmp_path, sizes=micro())
    plan = cut(plan, ("lmm",))
    whole, op = run_plan(plan, quiet)["tables"]
    rows = {row["title"]: row["cells"] for row in whole["rows"]}
    assert all(cell["ours"]["mean"] > 0 for cell in rows["LMM"])
    assert rows["MAC"][0]["ours"] is None
    assert all(cell["ours"]["mean"] > 0 for cell in op["rows"][0]["cells"])
    assert (tmp_path / "model.json").is_file()


def test_questions_of_a_folder(tmp_path: Path) -> None:
    """Models of table 1 are asked, and scores stand in the paper's columns."""
    data, test = texts(tmp_path)
    folder = tmp_path / "questions"
    folder.mkdir()
    item = {"query": "Question: how to open a door\n", "choices": ["pull", "sing to it"], "gold": 0}
    (folder / "piqa.jsonl").write_text(f"{json.dumps(item)}\n" * 3)
    plan = make_plan("table1", "tiny", out=tmp_path / "out", data=data, test=test, questions=folder, sizes=micro())
    text, asked = cut(plan, ("lmm",)).steps
    runs = (str(text.settings.out / "runs" / "lmm-seed0"),)
    asked = replace(asked, settings=replace(asked.settings, models=runs, tasks=("piqa",)))
    result = run_plan(replace(plan, steps=(text, asked)), quiet, quiet=True)
    titles = [column["title"] for column in result["tables"][0]["columns"]]
    rows = {row["title"]: dict(zip(titles, row["cells"], strict=True)) for row in result["tables"][0]["rows"]}
    scores = json.loads((tmp_path / "out" / "questions.json").read_text())["models"][0]["tasks"]["piqa"]
    assert scores["items"] == 2, "the limit"
    assert rows["LMM"]["PIQA"] == {
        "ours": {"mean": 100 * scores["metrics"]["acc"]["value"], "sd": None, "seeds": 1}, "paper": 65.85
    }  # fmt: skip
    assert rows["LMM"]["Hella (n)"] == {"ours": None, "paper": 40.91}
    assert rows["MAC"]["PIQA"] == {"ours": None, "paper": 66.39}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = titans(capsys, "repro")
    assert (code, err) == (0, "")
    assert "table5    Ablations (table 5)" in out
    code, out, err = titans(capsys, "repro", "table5", "--scale", "paper", "--json", "plan.json")
    assert (code, err) == (0, "")
    assert "titans train 400m-lmm data/fineweb-edu --model.no-momentum --out runs/repro/table5-paper" in out
    assert "Linear memory          paper  28.49" in out
    steps = {step["name"]: step for step in json.loads(Path("plan.json").read_text())["steps"]}
    linear = steps["400m-linear"]
    assert f"  {linear['parameters'][0]:,} parameters; {linear['trained_on']:,} tokens" in out.splitlines()
    assert "parameters" not in steps["needles"]
    code, out, err = titans(capsys, "repro", "table5", "--dry-run")
    assert (code, err) == (0, "")
    assert "titans evaluate mqar" in out
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"], "nothing is run"
    assert titans(capsys, "repro", "table2", "--dry-run", "--quiet") == (0, "", "")
    code, out, err = titans(capsys, "repro", "tabel5")
    assert (code, out) == (2, "")
    assert "did you mean 'table5'?" in err


@pytest.mark.slow
def test_the_command_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check_once(monkeypatch)
    work_here(monkeypatch)
    monkeypatch.setattr(plans, "read_amounts", lambda *_: micro())
    args = ["repro", "figure8", "--out", tmp_path / "out", "--json", tmp_path / "x.json"]
    code, out, err = titans(capsys, *args)
    assert (code, err) == (0, "")
    assert "paper: figure 8 prints no numbers" in out
    rows = json.loads((tmp_path / "out" / "repro.json").read_text())["tables"][0]["rows"]
    assert [row["cells"][0]["ours"] is None for row in rows] == [True, False, True, True], "one depth is run"
    found = rows[1]["cells"][0]["ours"]
    assert f"memory of 2 layers ours {found['mean']:,.0f}" in " ".join(out.split())
    rows = json.loads((tmp_path / "out" / "op-24.json").read_text())["rows"]
    assert found["mean"] in [row["tokens_per_second"] for row in rows if row["case"]["depth"] == 2]
    assert f"numbers in {tmp_path / 'out' / 'repro.json'}" in out
    assert json.loads((tmp_path / "x.json").read_text()) == json.loads((tmp_path / "out" / "repro.json").read_text())
    assert titans(capsys, *args, "--quiet") == (0, "", "")


@pytest.mark.parametrize("command", ["evaluate mqar", "bench ops", "forecast evaluate", "genomics evaluate"])
def test_steps_are_as_quiet_as_their_plan(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step starts is told; what it is and what it is kept by are not changed."""
    runs = {
        "evaluate mqar": "experiments.tasks.run_task", "bench ops": "bench.run.run_bench",
        "forecast evaluate": "forecast.evaluate.evaluate_forecasters",
        "genomics evaluate": "genomics.evaluate.run_evaluation",
    }  # fmt: skip
    seen = []
    monkeypatch.setattr(f"titans_lm.{runs[command]}", lambda settings, *_: seen.append(settings) or {})
    settings = plans.COMMANDS[command][0](out=tmp_path)
    if command.startswith("bench"):
        settings = replace(settings, json=tmp_path / "x.json")
    step = plans.Step(name="one", what="", command=command, settings=settings)
    for told in (True, False):
        run._do(step, quiet, told)
        assert seen.pop() == replace(settings, quiet=told)
    assert "--quiet" not in run.command_of(step)


@pytest.mark.parametrize("scale", ["tiny", "small", "paper"])
@pytest.mark.parametrize("table", published())
def test_plans_are_shown(table: str, scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How large steps are is counted on models, and has tests of its own."""
    monkeypatch.setattr(show, "work_of", lambda _: None)
    plan = make_plan(table, scale, data=named_sets(tmp_path, table, whole=True))
    lines = plan_lines(plan)
    assert "How the setting differs from the paper's:" in lines
    assert sum(line.startswith("  titans ") for line in lines) == len(plan.steps)
    assert any("numbers go to" in line for line in lines) == (scale != "paper")
    assert any("printed and not run" in line for line in lines) == (scale == "paper")
