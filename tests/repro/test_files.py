"""A plan goes on only with files that hold what they held when it was begun."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from repro.repro_cases import dna, micro, quiet, series, stop_at, texts
from titans_lm.data.contents import files_sum, text_sum
from titans_lm.repro.plans import Plan, make_plan
from titans_lm.repro.run import plan_contents, run_plan


def one_model(plan: Plan) -> Plan:
    steps = tuple(replace(step, settings=replace(step.settings, models=("lmm",))) for step in plan.steps)
    return replace(plan, steps=steps)


def test_a_plan_notes_what_its_files_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps a text becomes another one: the second step is not run, and the error names the text."""
    data, test = texts(tmp_path)
    out = tmp_path / "out"
    plan = one_model(make_plan("table5", "tiny", out=out, data=data, test=test, sizes=micro()))
    with monkeypatch.context() as patch:
        stop_at("recall", patch)
        with pytest.raises(KeyboardInterrupt):
            run_plan(plan, quiet)
    noted = json.loads((out / "plan.json").read_bytes())
    assert noted["contents"] == {data: text_sum(data), str(test): text_sum(test)}
    before = test.read_text()
    test.write_text(before.upper())
    with pytest.raises(ValueError, match="held something else") as told:
        run_plan(plan, quiet)
    assert str(told.value) == (
        f"{out} holds a plan that was begun when {test} held something else; give another --out, or bring back what "
        "it was begun with"
    )
    assert not (out / "recall" / "results.json").exists()
    test.write_text(before)
    assert run_plan(plan, quiet)["differs"] == plan.differs


def test_every_kind_of_step_names_what_it_reads(tmp_path: Path) -> None:
    data, test = texts(tmp_path)
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions" / "piqa.jsonl").write_text("{}\n")
    series(tmp_path / "series" / "ETTh1.csv", channels=2)
    dna(tmp_path / "dna" / "human_nontata_promoters.test.tsv")
    asked = make_plan("table1", "tiny", data=data, test=test, questions=tmp_path / "questions", sizes=micro())
    assert plan_contents(asked) == {
        data: text_sum(data), str(test): text_sum(test),
        str(tmp_path / "questions"): files_sum(tmp_path / "questions"),
    }  # fmt: skip
    hidden = make_plan("table2", "tiny", data=data, test=test)
    assert plan_contents(hidden) == {data: text_sum(data), str(test): text_sum(test)}
    for table, name in (("table3", "series/ETTh1.csv"), ("table4", "dna/human_nontata_promoters.test.tsv")):
        path = tmp_path / name
        plan = make_plan(table, "small", data=str(path.parent))
        assert plan_contents(plan) == {str(path): files_sum(path)}
        path.write_text(f"{path.read_text()}\n")
        assert plan_contents(plan) == {str(path): files_sum(path)}
    assert plan_contents(make_plan("figure8", "tiny")) == {}
