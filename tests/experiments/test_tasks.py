"""Models on a synthetic task: equal rows, equal sizes, an honest table, and nothing done twice."""

import copy
import dataclasses
import json
import shlex
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cli_cases import titans
from experiments.experiment_cases import BabiLongExperiment, NeedleExperiment, RecallExperiment
from experiments.experiment_cases import task_finals as finals
from experiments.experiment_cases import task_trials as trials
from model_cases import small_config
from titans_lm.cli import parse
from titans_lm.commands.measure import command_line
from titans_lm.data.tasks.batches import TaskBatches
from titans_lm.data.tasks.common_words import CommonWordsSettings
from titans_lm.data.tasks.recall import RecallSettings
from titans_lm.evaluate.accuracy import TaskScore, task_score
from titans_lm.experiments.models import model_settings
from titans_lm.experiments.runner import best_rate, run_job
from titans_lm.experiments.settings import TASK_EXPERIMENTS, TaskFit
from titans_lm.experiments.tasks import FILE, FRESH, run_task, task_batches
from titans_lm.report import tasks as scored
from titans_lm.report.page import render_results, without_folders
from titans_lm.report.table import screen
from titans_lm.train.run import RunFolder
from titans_lm.train.sized import sized_for

SIZE = {
    "mqar": "16:2", "tracking": "6", "needle": "300", "babilong": "0",
    "variables": "0x1", "common-words": "200x2",
}  # fmt: skip
"""A small size of each task."""
KINDS = list(TASK_EXPERIMENTS.values())


def small(out: Path, **changes) -> Any:
    train = TaskFit(
        model=small_config("lmm", hidden_size=16, num_hidden_layers=1),
        steps=6,
        warmup_steps=1,
        batch_size=4,
        save_every=2,
    )
    return RecallExperiment(
        **{
            "task": RecallSettings(symbols=16, answers=False), "sizes": ("16:2", "24:2"),
            "test_sizes": ("16:2", "32:3"), "out": out,
            "models": ("lmm", "llama"), "seeds": (0, 1), "rates": (1e-3, 1e-2), "tune_steps": 3,
            "examples": 8, "train": train, **changes,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict]:
    settings = small(tmp_path_factory.mktemp("task") / "out")
    return settings, run_task(settings, command_line(settings), lambda _: None)


def test_all_is_equal_that_should_be(done) -> None:
    settings, result = done
    sizes = [one["parameters"] for one in result["contenders"]]
    assert max(sizes) / min(sizes) < 1.02
    for seed in range(2):
        assert len({one["runs"][seed]["tokens"] for one in result["contenders"]}) == 1, "the same rows for all"
    for one in result["contenders"]:
        assert [trial["rate"] for trial in one["tuning"]] == [1e-3, 1e-2]
        assert one["rate"] == max(one["tuning"], key=lambda trial: trial["right"])["rate"]
        assert list(one["exact"]) == ["16:2", "32:3"]
        assert all(run["tests"]["32:3"]["asked"] == 8 * 3 for run in one["runs"])
    jobs = finals(settings, 9_000, dict.fromkeys(settings.models, 1e-3))
    kernels = [model_settings(settings.train, name, 9_000).model.attention_conv_size for name in ("lmm", "sliding")]
    assert kernels == [1, 4], "attention gets the convolution"
    assert not {job.settings.seed for job in jobs} & {job.settings.seed for job in trials(settings, 9_000)}


def test_where_no_answer_is_right_single_tokens_decide() -> None:
    tried = [{"rate": 1e-3, "right": [0.0, 0.1]}, {"rate": 3e-3, "right": [0.0, 0.3]}, {"rate": 1e-2, "right": None}]
    assert best_rate("lmm", tried, "right", most=True) == 3e-3
    assert best_rate("lmm", [*tried, {"rate": 1.0, "right": [0.1, 0.1]}], "right", most=True) == 1.0


def test_what_is_said_is_what_the_models_do(done) -> None:
    settings, result = done
    from titans_lm.train.checkpoint import load_weights

    for one in result["contenders"]:
        fit = model_settings(settings.train, one["name"], result["parameters_asked_for"])
        model = sized_for(fit, settings.train_tasks[0].vocab_size).model
        load_weights(settings.out / "runs" / f"{one['name']}-seed1" / "model", model)
        score = task_score(model, settings.task.resized("32:3"), examples=8, batch_size=4, seed=1 + 2 * FRESH)
        told = one["runs"][1]["tests"]["32:3"]
        assert (told["hits"], told["right"], told["exact"]) == (score.hits, score.right, score.exact)
        mean = sum(run["tests"]["32:3"]["exact"] for run in one["runs"]) / 2
        assert one["exact"]["32:3"]["mean"] == pytest.approx(mean)


def test_more_models_than_lines_can_tell_apart_are_not_drawn(done) -> None:
    result = copy.deepcopy(done[1])
    assert list(scored.plots(result)) == [""]
    first = result["contenders"][0]
    result["contenders"] = [{**first, "name": f"lmm:chunk_size={size}"} for size in range(2, 13)]
    assert scored.plots(result) == {}
    assert len(scored.tables(result)[0].rows) == 11
    result["contenders"] = [first]
    assert scored.heading(result).endswith(", LMM")


def test_sizes_are_sorted_by_their_numbers() -> None:
    sizes = ["64:4", "512", "512x4", "4096", "64K", "1M"]
    assert sorted(reversed(sizes), key=scored.by_size) == sizes


def test_further_runs_of_a_task_are_rows_of_one_table(done) -> None:
    first, other = done[1] | {"file": "mqar.json"}, copy.deepcopy(done[1]) | {"file": "mqar-more.json"}
    for one in other["contenders"]:
        one["exact"] = {"32:3": one["exact"]["32:3"], "8:1": one["exact"]["16:2"]}
    table = scored.tables({**first, "others": [other]})[1]
    assert table.head[-3:] == ["learning rate", "8:1", "32:3"]
    assert [row[1] for row in table.body] == ["mqar-more"] * len(other["contenders"])
    assert table.said.startswith("**mqar-more** (current, ")
    drawn = scored.plots({**first, "others": [copy.deepcopy(done[1])]})[""]
    assert len(drawn.lines) == len(first["contenders"]), "the same models once"


def test_what_is_equal_is_said(done) -> None:
    result = copy.deepcopy(done[1])
    settings = result["settings"]
    steps = "parameters each, 6 steps of 4 sequences, training sizes 16:2"
    assert f"{steps}, 24:2;" in scored.said(result)
    settings["curriculum"] = True
    assert f"{steps}, 24:2, joining one after the other;" in scored.said(result)
    settings["sizes"] = ["16:2"]
    assert f"{steps};" in scored.said(result)
    settings["train"]["gate_l1"] = 2.0
    assert f"{steps}, sparsity penalty on gates 2;" in scored.said(result)


def test_wall_seconds_and_commits_are_those_of_the_runs(done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of trials and of those that count, training and testing; a call that finds all of them done adds nothing."""
    settings, result = done
    parts = [part for one in result["contenders"] for part in [*one["tuning"], *one["runs"]]]
    assert len(parts) == 2 * (2 + 2)
    assert all(run["wall_seconds"] > run["seconds"] for one in result["contenders"] for run in one["runs"])
    assert result["wall_seconds"] == pytest.approx(sum(part["wall_seconds"] for part in parts))
    assert all(part["commits"] == [result["hardware"]["commit"]] for part in parts)
    assert "commits" not in result
    for place in ("experiments.runner", "train.device"):
        monkeypatch.setattr(f"titans_lm.{place}.commit", lambda: "later")
    again = run_task(settings, "again", lambda _: None)
    assert again["wall_seconds"] == result["wall_seconds"]
    assert again["commits"] == [result["hardware"]["commit"]]
    again["commits"] += ["other"]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mqar.json").write_text(json.dumps(again))
    render_results(tmp_path / "results", tmp_path / "results.md")
    assert f"; commits {result['hardware']['commit']}, other, 20" in (tmp_path / "results" / "recall.md").read_text()


def test_it_does_nothing_twice(done, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, result = done

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("nothing is left to train")

    monkeypatch.setattr("titans_lm.experiments.tasks.fit", fail)
    again = run_task(settings, "again", lambda _: None)
    assert again["contenders"] == result["contenders"]
    with pytest.raises(ValueError, match="holds a run of other settings"):
        run_task(dataclasses.replace(settings, examples=9), "again", lambda _: None)


def test_a_folder_of_other_runs_is_refused_before_anything_is_trained(done, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = done
    monkeypatch.setattr("titans_lm.experiments.tasks.fit", lambda *_, **__: pytest.fail("trained"))
    others = dataclasses.replace(settings, examples=9, tune_steps=settings.tune_steps + 1, rates=(0.5, *settings.rates))
    shutil.rmtree(settings.out / "trials", ignore_errors=True)
    with pytest.raises(ValueError, match=r"runs/.*seed0 holds a run of other settings"):
        run_task(others, "again", lambda _: None)


def test_a_run_that_was_stopped_goes_on(done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import titans_lm.experiments.tasks as tasks

    settings, result = done
    job = finals(settings, result["parameters_asked_for"], {one["name"]: one["rate"] for one in result["contenders"]})[
        0
    ]
    job = dataclasses.replace(job, folder=tmp_path / "run")
    fit = tasks.fit

    def stopping(*args: object, **more: object) -> object:
        fit(*args, **more, on_step=lambda record: record["step"] == 4)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tasks, "fit", stopping)
        with pytest.raises(KeyboardInterrupt, match="the same command goes on"):
            run_job(job)
    other = dataclasses.replace(job, settings=dataclasses.replace(job.settings, lr=1.0))
    with pytest.raises(ValueError, match="holds a run of other settings"):
        run_job(other)
    assert RunFolder.open(job.folder).latest() is not None
    assert run_job(job)["tests"] == result["contenders"][0]["runs"][0]["tests"]


def test_the_page_and_the_screen_say_it(done, tmp_path: Path) -> None:
    settings, result = done
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mqar.json").write_text(json.dumps(result))
    written = render_results(tmp_path / "results", tmp_path / "results.md")
    assert tmp_path / "results" / "mqar.png" in written
    page, shown = (tmp_path / "results" / "recall.md").read_text(), screen(scored.tables(result))
    assert "## Associative recall (MQAR): symbols 16" in page
    assert without_folders(command_line(settings)) in page
    for one, line in zip(result["contenders"], shown[1:], strict=True):
        found = one["exact"]["16:2"]
        cell = f"{100 * found['mean']:.1f} ± {100 * found['sd']:.1f}"
        assert f"| {one['state_bytes']['total']:,}" in page
        assert cell in page
        assert cell in line
    assert len({len(line) for line in shown}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_line_gives_the_same_settings(kind: Any) -> None:
    settings = kind(models=("lmm", "mac:chunk_size=8"), seeds=(4,), train=TaskFit(steps=7, model=small_config("mag")))
    assert parse(shlex.split(command_line(settings))[1:]).what == settings
    plain = kind()
    assert parse(shlex.split(command_line(plain))[1:]).what == plain
    # rows without anything to hide in, as long as they are
    taught, tested = {"babilong": (1, 1), "needle": (1, 0), "variables": (4, 0)}.get(kind.name, (0, 0))
    assert sum(task.length == 0 for task in plain.train_tasks) == taught
    assert sum(task.length == 0 for task in plain.eval_tasks.values()) == tested


@pytest.mark.parametrize("kind", KINDS)
def test_every_task_as_a_command(kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One model, a few steps: it trains, tests and tells."""
    train = dataclasses.replace(small(tmp_path).train, steps=2)
    size = SIZE[kind.name]
    settings = kind(
        models=("sliding",),
        seeds=(0,),
        rates=(1e-3,),
        examples=4,
        sizes=(size,),
        test_sizes=(),
        train=train,
        out=tmp_path,
    )
    args = shlex.split(command_line(settings))[1:]
    code, out, err = titans(capsys, *args, "--json", tmp_path / "copy.json")
    assert code == 0
    assert [line.split("  ")[0] for line in err.splitlines()] == ["sliding-seed0 2/2"], (
        "as titans train where no bar is"
    )
    result = json.loads((tmp_path / FILE).read_text())
    assert json.loads((tmp_path / "copy.json").read_text()) == result
    assert size in out
    assert list(result["contenders"][0]["exact"]) == [size]
    assert f"numbers in {tmp_path / FILE}" in out
    assert f"by guessing {100 * max(result['chance'].values()):.3g} % of " in out


def test_needles_are_tested_at_every_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of lengths, means over depths, and a heat map of both; trials are tested on what is taught."""
    seeds: list[int] = []

    def scored_with(*args: Any, seed: int, **kwargs: Any) -> TaskScore:
        seeds.append(seed)
        return task_score(*args, seed=seed, **kwargs)

    monkeypatch.setattr("titans_lm.experiments.tasks.task_score", scored_with)
    settings = NeedleExperiment(
        models=("lmm", "sliding"), seeds=(0, 1), rates=(1e-3, 3e-3), tune_steps=1, examples=4, sizes=("300", "400x2"),
        test_sizes=("300", "350"), depths=(0.0, 0.5, 1.0), train=dataclasses.replace(small(tmp_path).train, steps=2),
        out=tmp_path / "out",
    )  # fmt: skip
    assert [task.depth for task in settings.eval_tasks.values()] == [0.0, 0.5, 1.0] * 2
    result = run_task(settings, "titans evaluate needle", lambda _: None)
    asked = Counter(seeds[-2 * 2 * 6 :])
    assert len(asked) == 2 * 6, "each depth of each length and seed has needles of its own"
    assert set(asked.values()) == {2}, "both models are asked for the same needles"
    for one in result["contenders"]:
        assert list(one["exact"]) == ["300", "350"]
        assert list(one["by_test"]) == [f"{size}@{depth}" for size in (300, 350) for depth in ("0", "0.5", "1")]
        for run in one["runs"]:
            for test in run["tests"].values():  # so that there is something to see
                test["exact"] = 0.25
    trial = json.loads((tmp_path / "out" / "trials" / "lmm-0.001" / "result.json").read_text())
    assert list(trial["tests"]) == ["300", "400x2"]
    for place, test in enumerate(result["contenders"][0]["by_test"].values()):
        test["mean"] = place / 10
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "needle.json").write_text(json.dumps(result))
    written = render_results(tmp_path / "results", tmp_path / "results.md")
    page = (tmp_path / "results" / "long-context.md").read_text()
    assert "## Needles in a haystack" in page
    assert "needle-depth.png" in page
    assert {path.name for path in written} == {"results.md", "long-context.md", "needle.png", "needle-depth.png"}
    assert [line.label for line in scored.plot(result).lines] == [
        "LMM",
        "sliding window with short convolution",
        "chance",
    ]
    found = scored.heat(result)
    assert found is not None
    lacking = copy.deepcopy(result)
    del lacking["contenders"][1]["by_test"]["350@0.5"]
    (tmp_path / "results" / "needle.json").write_text(json.dumps(lacking))
    assert render_results(tmp_path / "results", tmp_path / "results.md") == written, "with a dash in one of the maps"
    assert found.panels["LMM"] == [pytest.approx([0, 30]), pytest.approx([10, 40]), pytest.approx([20, 50])]
    assert (found.x_labels, found.y_labels) == (["300", "350"], ["0 %", "50 %", "100 %"])
    assert "answers are right by chance in 1.1e-05 % at most" in page


def test_sizes_of_several_needles_or_with_a_depth_have_no_depths_of_their_own() -> None:
    settings = NeedleExperiment(test_sizes=("400", "1024x4", "1024@0.5", "0x2"), depths=(0.0, 1.0))
    told = {size: (task.length, task.keys, task.depth) for size, task in settings.eval_tasks.items()}
    assert told == {
        "400@0": (400, 1, 0.0), "400@1": (400, 1, 1.0), "1024x4": (1024, 4, None), "1024@0.5": (1024, 1, 0.5),
        "0x2": (0, 2, None),
    }  # fmt: skip
    assert list(NeedleExperiment(sizes=("256", "512x4"), test_sizes=(), depths=()).eval_tasks) == ["256", "512x4"]


def test_sizes_join_one_after_another() -> None:
    """Over the first half of the steps; the batches of a curriculum are a pure function of the step as well."""
    settings = BabiLongExperiment(train=TaskFit(steps=80, batch_size=2), models=("lmm",), rates=(1e-3,))
    job = finals(settings, 1000, {"lmm": 1e-3})[0]
    assert task_batches(job, job.settings).join_every == 10
    tasks = [RecallSettings(pairs=1, symbols=4, length=length) for length in (4, 8, 12, 16)]
    batches = TaskBatches(tasks, batch_size=1, join_every=10)
    rare = dataclasses.replace(settings, shares=(97.0, 1.0, 1.0, 1.0))
    assert finals(rare, 1000, {"lmm": 1e-3})[0].shares == rare.shares
    lengths = [batches(step)["input_ids"].shape[1] for step in range(80)]
    assert [set(lengths[:10]), set(lengths[:20]), set(lengths[:30])] == [{4}, {4, 8}, {4, 8, 12}]
    assert set(lengths[30:]) == {4, 8, 12, 16}
    assert lengths == [batches(step)["input_ids"].shape[1] for step in range(80)]
    assert task_batches(dataclasses.replace(job, curriculum=False), job.settings).join_every == 0
    assert task_batches(job, dataclasses.replace(job.settings, accumulate=4)).join_every == 40, "batches"
    assert {TaskBatches(tasks, batch_size=1)(step)["input_ids"].shape[1] for step in range(20)} == {4, 8, 12, 16}


MISTAKES = [
    ({"sizes": ("16",)}, "got the size '16'; expected LENGTH:PAIRS"),
    ({"sizes": ("16:2", "16:2")}, "expected every size once"),
    ({"models": ()}, "got models=()"),
    ({"models": ("lmmm",)}, "lmmm"),
    ({"models": ("lmm:stateful=true",)}, "stateful"),
    ({"examples": 0}, "examples=0"),
    ({"test_tokens": -1}, "test_tokens=-1"),
    ({"shares": (1.0,)}, "got 1 shares for 2 sizes"),
    ({"shares": (1.0, 0.0)}, "shares=0"),
    ({"models": ("lmm", "lmm:intermediate_size=8")}, "got intermediate_size for a variant of 'lmm'"),
]


def test_rows_that_cannot_be_drawn_are_told_before_anything_is_trained(tmp_path: Path) -> None:
    settings = TASK_EXPERIMENTS["common-words"](
        task=CommonWordsSettings(often=6, rarely=1), sizes=("256",), test_sizes=("20",), out=tmp_path / "out"
    )
    with pytest.raises(ValueError, match="another word must fit in"):
        run_task(settings, "", lambda _: None)
    assert not (tmp_path / "out").exists()


VARIANTS = ["--task.updates 12", "--task.key-tokens 2 --task.passes 2", "--task.gap 100", "--task.fillers random"]


@pytest.mark.parametrize("options", VARIANTS)
def test_what_is_set_of_a_task_is_judged_by_its_sizes(options: str) -> None:
    settings = parse(["evaluate", "mqar", *options.split(), "--sizes", "256:16"]).what
    assert (settings.train_tasks[0].length, settings.train_tasks[0].pairs) == (256, 16)
    with pytest.raises(ValueError, match=r"length=16 for pairs=4|expected no more updates"):
        parse(["evaluate", "mqar", "--task.gap", "9", *options.split(), "--sizes", "16:4"])


@pytest.mark.parametrize(("change", "said"), MISTAKES)
def test_mistakes_are_told_before_anything_is_trained(tmp_path: Path, change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(").replace(")", r"\)")):
        run_task(small(tmp_path / "out", **change), "", lambda _: None)
    assert not (tmp_path / "out" / "trials").exists()


def test_long_rows_are_tested_on_as_many_as_fit(tmp_path: Path) -> None:
    sizes = {"sizes": ("16:2",), "test_sizes": ("16:2", "32:2", "64:2", "512:2")}
    settings = small(tmp_path, models=("lmm",), seeds=(0,), rates=(1e-3,), test_tokens=32 * 5, shares=(2.0,), **sizes)
    result = run_task(settings, "titans evaluate mqar", lambda _: None)
    assert "training sizes 16:2 (in the shares 2);" in scored.said(result)
    tests = result["contenders"][0]["runs"][0]["tests"]
    assert {size: (test["rows"], test["answers"]) for size, test in tests.items()} == {
        "16:2": (8, 16), "32:2": (6, 12), "64:2": (2, 4), "512:2": (1, 2),
    }  # fmt: skip
    assert "(6 of 32:2, 2 of 64:2, 1 of 512:2)" in scored.said(result)


@pytest.mark.parametrize("name", ["lm_loss_weight", "gate_l1"])
@pytest.mark.parametrize("wrong", [-0.5, float("inf"), float("nan")])
def test_weights_of_the_loss_are_numbers_from_zero(name: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=f"got {name}={wrong}; expected a finite number of at least 0"):
        TaskFit(**{name: wrong})
