"""Every plan consists of commands that the command line understands, and says how it differs from the paper."""

import os
import shlex
from itertools import product
from pathlib import Path

import pytest

from repro.repro_cases import named_sets, texts
from titans_lm.bench.kinds import op_cases
from titans_lm.cli import parse
from titans_lm.experiments.models import folder_name
from titans_lm.experiments.tasks import FILE as TASK_FILE
from titans_lm.experiments.text import FILE as COMPARE_FILE
from titans_lm.experiments.text import command_line
from titans_lm.questions import TASKS
from titans_lm.repro.plans import COMMANDS, Plan, default_test, list_tables, make_plan, published, table_name
from titans_lm.repro.run import READS, command_of
from titans_lm.train.options import plain_settings

TABLES = tuple(published())


@pytest.fixture
def questions(tmp_path: Path, request: pytest.FixtureRequest) -> Path | None:
    """A folder of questions, for the tests and tables that ask some."""
    callspec = getattr(request.node, "callspec", None)
    given = callspec.params if callspec else {}
    if given.get("table", "table1") != "table1" or given.get("scale") == "paper":
        return None
    (tmp_path / "questions").mkdir()
    return tmp_path / "questions"


@pytest.mark.parametrize("scale", ["tiny", "small", "paper"])
@pytest.mark.parametrize("table", TABLES)
def test_commands_mean_the_settings_that_are_run(
    table: str, scale: str, questions: Path | None, tmp_path: Path
) -> None:
    """What is shown to a user, typed, has the settings that a plan runs."""
    data = None if scale == "paper" else named_sets(tmp_path, table)
    plan = make_plan(table, scale, data=data, questions=questions)
    assert plan.steps
    for step in plan.steps:
        command = parse(shlex.split(command_of(step))[1:])
        command = getattr(command, "what", command)
        told, expected = plain_settings(command), plain_settings(step.settings)
        assert {name: told[name] for name in expected} == expected
        if scale == "paper" and step.recipe:
            assert command.recipe == step.recipe
    assert len({step.name for step in plan.steps}) == len(plan.steps)
    assert len(plan.differs) >= 1
    if scale != "paper":
        assert len({step.file for step in plan.steps}) == len(plan.steps)
        assert all(plan.out in step.file.parents for step in plan.steps)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_cells_point_to_steps_and_to_the_paper(table: str, scale: str, questions: Path | None, tmp_path: Path) -> None:
    found = published()[table]
    plan = make_plan(table, scale, data=named_sets(tmp_path, table), questions=questions)
    steps = {step.name for step in plan.steps}
    contenders = {name for step in plan.steps for name in getattr(step.settings, "models", ())}
    for one in plan.tables:
        for column in one.columns:
            assert (column.step is None) == (column.read is None)
            assert column.step is None or column.step in steps
            assert column.read is None or column.read in READS
            assert column.paper is None or column.paper in found.columns
            assert column.step or column.paper, "a column that nobody fills"
        if table in ("table1", "table2", "table5"):
            assert {row.model for row in one.rows} <= contenders
    shown = found.groups[found.shown]["rows"] if found.groups else {}
    rows = {row.paper for one in plan.tables for row in one.rows if row.paper}
    if table in ("table1", "table3", "table4", "table5"):
        assert rows <= shown.keys()
    if table == "table5":
        assert [row.paper for row in plan.tables[0].rows] == list(shown)


def test_names_of_files_are_those_that_commands_write(questions: Path | None) -> None:
    files = {file for *_, file in COMMANDS.values()}
    assert files == {COMPARE_FILE, TASK_FILE, None}
    plan = make_plan("table1", "tiny", questions=questions)
    text, asked = plan.steps
    assert all(folder_name(name) == name for name in text.settings.models)
    assert set(asked.settings.tasks) <= set(TASKS)
    scores = [column.at for column in plan.tables[0].columns if column.read == "score"]
    assert all(metric in TASKS[task].metrics for task, metric in scores)
    assert {task for task, _ in scores} == set(asked.settings.tasks)
    assert command_of(text) == command_line(text.settings)


def test_questions_are_asked_of_the_runs_of_the_first_seed(questions: Path | None) -> None:
    plan = make_plan("table1", "tiny", questions=questions)
    text, asked = plan.steps
    assert asked.settings.models == tuple(str(text.settings.out / f"runs/{m}-seed0") for m in text.settings.models)
    assert [step.name for step in make_plan("table1", "tiny").steps] == ["text"]


def test_the_paper_s_switches_are_ours() -> None:
    """Table 5 takes one thing away from LMM at a time, at every scale the same."""
    rows = make_plan("table5", "tiny").tables[0].rows[4:]
    told = [dict(part.split("=") for part in row.model.partition(":")[2].split(",") if part) for row in rows]
    steps = {step.name: step for step in make_plan("table5", "paper", data="tokens").steps}
    whole = plain_settings(steps["400m-lmm"].settings)["model"]
    for switch, name in zip(
        told, ("linear", "no-convolution", "no-momentum", "no-decay", "no-persistent"), strict=True
    ):
        model = plain_settings(steps[f"400m-{name}"].settings)["model"]
        changed = {setting: str(value).lower() for setting, value in model.items() if value != whole[setting]}
        assert changed == switch


def test_a_name_that_is_no_recipe_is_another_model_as_large_as_lmm() -> None:
    steps = {step.name: step for step in make_plan("table1", "paper", data="tokens").steps}
    assert (steps["400m-mamba2"].recipe, steps["400m-mamba2"].settings.baseline) == ("400m-lmm", "mamba2")
    assert (steps["400m-mac"].recipe, steps["400m-mac"].settings.baseline) == ("400m-mac", None)


@pytest.mark.parametrize("table", ["table1", "table2", "table5", "figure6"])
def test_all_questions_are_asked_of_all_runs(table: str) -> None:
    """What is trained at the paper's sizes is what lm-eval is given."""
    steps = make_plan(table, "paper", data="tokens").steps
    trained = [str(step.settings.out) for step in steps if step.command == "train"]
    asked = [name for step in steps if step.command == "evaluate lm-eval" for name in step.settings.models]
    assert set(asked) == set(trained)


MISTAKES = {
    "almost": ("tabel5", {}, "did you mean 'table5'? expected one of table1, table2, table3, table4, table5"),
    "nothing like": ("xyz", {}, "got the table 'xyz'; expected one of table1, table2"),
    "no tables": (
        "table3",
        {},
        "got no folder of data for table3; .* of ETTm1.csv, .*zhouhaoyi/ETDataset",
    ),
    "no sequences": ("table4", {}, "got no folder of data for table4; .* human_nontata_promoters, .*genomic_bench"),
    "text for tables": ("table3", {"test": Path("x")}, "got --test x, which table3 .* expected --data"),
    "no test": ("table1", {"data": "x"}, "got --data x without --test"),
    "no test in books": ("figure6", {"data": "x"}, "got --data x without --test"),
    "the same text": ("table2", {"data": __file__, "test": Path(__file__)}, "one in the other; expected a text that"),
    "test in data": (
        "table1",
        {"data": str(Path(__file__).parent), "test": Path(__file__)},
        "got --data .* and --test .*, one in the other; expected a text that is not taught",
    ),
    "a test that is taught": (
        "table1",
        {"test": Path(os.__file__)},
        "got --data stdlib and --test .*os.py, one in the",
    ),
    "data in test": ("figure6", {"data": __file__, "test": Path(__file__).parents[1]}, "one in the other"),
    "no such data": ("table1", {"data": "nowhere", "test": Path("x")}, "got --data nowhere, which does not exist"),
    "no such test": ("table1", {"test": Path("nowhere")}, "got --test nowhere, which does not exist"),
    "text for speed": ("figure8", {"data": "x"}, "got --data x, which figure8 .* does not read; expected no text"),
    "questions for needles": ("table2", {"questions": Path("x")}, "got --local x, which table2 .* expected --data"),
    "no questions": ("table1", {"questions": Path("nowhere")}, "got --local nowhere, which is no folder"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_before_anything_runs(name: str) -> None:
    table, given, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        make_plan(table, "tiny", **given)


def test_questions_need_lm_eval_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titans_lm.repro.plans.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"got --local without lm-eval.*pip install 'titans-lm\[eval\]'"):
        make_plan("table1", "tiny", questions=tmp_path)


def test_no_such_scale() -> None:
    with pytest.raises(ValueError, match="did you mean 'tiny'"):
        make_plan("table1", "tini")


def test_names_of_tables() -> None:
    assert table_name("table6") == table_name("babilong") == "figure6"
    assert [line.split()[0] for line in list_tables()] == list(TABLES) == list(published())


def hidden_in(table: str, **given: object) -> list[tuple[Path | None, Path | None]]:
    """Give the texts that each step teaches in and tests in, in the tasks that rows are drawn from."""
    plan: Plan = make_plan(table, "tiny", **given)  # type: ignore[arg-type]
    found = []
    for step in plan.steps:
        (taught,) = {task.books for task in step.settings.train_tasks}
        (tested,) = {task.books for task in step.settings.eval_tasks.values()}
        found.append((taught, tested))
    return found


@pytest.mark.parametrize("table", ["table2", "figure6"])
def test_facts_are_hidden_in_the_data_and_tested_in_the_test(table: str, tmp_path: Path) -> None:
    """What is tested in is not taught in; by default Python's help is taught, and a file of torch held out."""
    data, test = texts(tmp_path)
    assert hidden_in(table, data=data, test=test)[-1] == (Path(data), test)
    taught, tested = hidden_in(table)[-1]
    assert taught is not None
    assert (taught.name, tested) == ("topics.py", default_test())
    assert hidden_in(table, test=test)[-1] == (taught, test)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "tokens.json").write_text("{}")
    assert hidden_in(table, data=str(tmp_path / "tokens"), test=test)[-1] == (taught, test)
    plan = make_plan(table, "tiny", data=data, test=test)
    assert f"--test-books {test}" in command_of(plan.steps[-1])
    assert any(f"taught in {data} and tested in {test}, which is not taught" in line for line in plan.differs)


def test_the_pass_key_has_no_text_to_hold_out() -> None:
    plan = make_plan("table2", "small")
    assert [step.name for step in plan.steps] == ["needle-PK", "needle-N", "needle-W"]
    assert [step.settings.test_books for step in plan.steps] == [None, default_test(), default_test()]
    assert "PK: taught and tested in the same five sentences, over and over" in plan.differs


def test_without_python_s_help_another_text_is_taught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    assert hidden_in("figure6") == [(tmp_path / "argparse.py", default_test())]


@pytest.mark.parametrize("scale", ["tiny", "small"])
def test_figure_8_measures_all_that_it_shows(scale: str) -> None:
    plan = make_plan("figure8", scale)
    assert any("with 6 heads" in sentence for sentence in plan.differs)
    [table], steps = plan.tables, {step.name: step for step in plan.steps}
    for column, row in product(table.columns, table.rows):
        cases = op_cases(steps[column.step].settings)
        rows = [{**vars(case), "tokens_per_second": number} for number, case in enumerate(cases, 1)]
        found = READS[column.read]({"rows": rows}, row.model, *column.at)
        case = cases[int(found["mean"]) - 1].case
        assert (case["heads"], case["width"], case["depth"]) == (6, 64, int(row.model))
