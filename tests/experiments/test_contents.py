"""What was begun with other texts is not gone on with, in comparisons and in tasks; what is the same is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.experiment_cases import NeedleExperiment, finals
from model_cases import small_config
from titans_lm.data.contents import text_sum
from titans_lm.data.tasks.needle import NeedleSettings
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.experiments.settings import CompareSettings, TaskFit
from titans_lm.experiments.tasks import run_task
from titans_lm.experiments.text import run_compare
from titans_lm.train import language
from titans_lm.train.settings import LanguageSettings


def quiet(_: str) -> None:
    pass


def texts(folder: Path) -> CompareSettings:
    (folder / "train.txt").write_text("the memory learns while it reads " * 40)
    (folder / "test.txt").write_text("and forgets what does not come again " * 3)
    train = LanguageSettings(
        model=small_config("lmm", hidden_size=16, num_hidden_layers=1), steps=4, warmup_steps=1, seq_len=32,
        batch_size=2, eval_every=0, save_every=2, eval_bytes=100,
    )  # fmt: skip
    return CompareSettings(
        data=str(folder / "train.txt"), test=folder / "test.txt", out=folder / "out", models=("lmm",), seeds=(0,),
        rates=(1e-3,), positions=64, train=train,
    )  # fmt: skip


def noted(settings: CompareSettings) -> dict[str, Any]:
    return json.loads((settings.out / "runs" / "lmm-seed0" / "result.json").read_bytes())


def test_a_comparison_of_other_texts_is_refused(tmp_path: Path) -> None:
    """More seeds later are of the same texts, or there is an error that names the one that is not."""
    settings = texts(tmp_path)
    first = run_compare(settings, quiet)["contenders"]
    assert noted(settings)["asked"]["contents"] == {
        str(settings.data): text_sum(str(settings.data)), str(settings.test): text_sum(str(settings.test))
    }  # fmt: skip
    assert settings.test is not None
    before = settings.test.read_text()
    more = replace(settings, seeds=(0, 1))
    settings.test.write_text(before.replace("what", "that"))
    with pytest.raises(ValueError, match="held something else") as told:
        run_compare(more, quiet)
    assert str(told.value) == (
        f"{settings.out / 'runs' / 'lmm-seed0'} holds a run that was begun when {settings.test} held something else; "
        "give another --out, or bring back what it was begun with"
    )
    assert not (settings.out / "runs" / "lmm-seed1").exists()
    settings.test.write_text(before)
    assert run_compare(more, quiet)["contenders"][0]["runs"][0] == first[0]["runs"][0]
    Path(str(settings.data)).write_text("another text " * 40)
    with pytest.raises(ValueError, match=r"begun when .*train\.txt held something else"):
        run_compare(more, quiet)


def test_a_run_that_was_stopped_is_not_gone_on_with(tmp_path: Path) -> None:
    settings = texts(tmp_path)
    fit = language.fit

    def stopping(*args: Any, **more: Any) -> None:
        fit(*args, **{**more, "on_step": lambda record: record["step"] == 2})
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language, "fit", stopping)
        with pytest.raises(KeyboardInterrupt):
            run_compare(settings, quiet)
    data = Path(str(settings.data))
    before = data.read_text()
    data.write_text(before.upper())
    with pytest.raises(ValueError, match=r"lmm-seed0 holds a run that was begun when .*train\.txt held"):
        run_compare(settings, quiet)
    data.write_text(before)
    assert run_compare(settings, quiet)["contenders"][0]["runs"][0]["steps"] == 4


def test_the_config_of_a_baseline_counts(tmp_path: Path) -> None:
    settings = texts(tmp_path)
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (job,) = finals(replace(settings, models=(str(folder),)), 9_000, {str(folder): 1e-3})
    before = job.spec()["contents"]
    assert set(before) == {str(settings.data), str(settings.test), str(folder / "config.json")}
    (folder / "config.json").write_text("{} ")
    after = job.spec()["contents"]
    assert [path for path in before if before[path] != after[path]] == [str(folder / "config.json")]


def test_a_task_of_another_tokenizer_or_text_is_refused(tmp_path: Path) -> None:
    folder, book, test = tmp_path / "tokenizer", tmp_path / "book.txt", tmp_path / "test.txt"
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    book.write_text("Rain fell. The road was wet. " * 20)
    test.write_text("Snow lay. The road was white. " * 20)
    settings = NeedleExperiment(
        task=NeedleSettings(tokenizer=str(folder), books=book), test_books=test, sizes=("300",), test_sizes=("300",),
        depths=(0.5,), out=tmp_path / "out", models=("lmm",), seeds=(0,), rates=(1e-3,), examples=2,
        train=TaskFit(
            model=small_config("lmm", hidden_size=16, num_hidden_layers=1), steps=1, warmup_steps=0, batch_size=2
        ),
    )  # fmt: skip
    first = run_task(settings, "x", quiet)["contenders"]
    more = replace(settings, seeds=(0, 1))
    before = test.read_text()
    test.write_text(before.replace("white", "clear"))
    with pytest.raises(ValueError, match=r"lmm-seed0 holds a run that was begun when .*test\.txt held something else"):
        run_task(more, "x", quiet)
    test.write_text(before)
    files = {path: path.read_bytes() for path in folder.iterdir()}
    tokenizer.model_max_length = 5  # another file, and the same tokens
    tokenizer.save_pretrained(folder)
    assert run_task(settings, "x", quiet)["contenders"] == first
    tokenizer.add_tokens(["road"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"was begun when .*/tokenizer held something else; give another --out"):
        run_task(more, "x", quiet)
    for path in folder.iterdir():
        path.unlink() if path not in files else path.write_bytes(files[path])
    assert run_task(more, "x", quiet)["contenders"][0]["runs"][0] == first[0]["runs"][0]


def test_a_text_that_is_taught_is_no_test(tmp_path: Path) -> None:
    taught = tmp_path / "text" / "novel.txt"
    taught.parent.mkdir()
    taught.write_text("nothing is lost\n" * 40)
    for test in (taught, taught.parent, taught.parent / ".." / "text" / "novel.txt"):
        settings = CompareSettings(data=str(taught), test=test, out=tmp_path / "out")
        with pytest.raises(ValueError, match="one in the other; expected a text that nobody is trained or tuned on"):
            run_compare(settings, lambda _: None)
    other = tmp_path / "other.txt"
    other.write_text("all is found\n" * 40)
    settings = CompareSettings(data=str(taught), test=other, out=tmp_path / "out")
    settings = replace(settings, train=replace(settings.train, valid=str(other)))
    with pytest.raises(
        ValueError, match=r"got the validation text .*other\.txt' and the test text .* one in the other"
    ):
        run_compare(settings, lambda _: None)
    assert not (tmp_path / "out").exists()
