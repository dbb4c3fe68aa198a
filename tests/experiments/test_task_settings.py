"""What is taught and what is tested are apart, and rows are tried without holding many long ones."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.experiment_cases import BabiLongExperiment, NeedleExperiment
from titans_lm.cli import parse
from titans_lm.data.batches import Batch
from titans_lm.data.tasks.babilong import BabiLongSettings
from titans_lm.data.tasks.needle import NeedleSettings
from titans_lm.data.tasks.task import Task
from titans_lm.experiments.tasks import TOKENS_AT_ONCE, try_rows

NUMBER = 8
"""Sentences of each book, and rows that are drawn of each size."""


def book(path: Path, word: str) -> Path:
    path.write_text(" ".join(f"The {word} of place {number} is old." for number in range(NUMBER)))
    return path


def questions(path: Path, room: str) -> Path:
    path.write_text(f"1 Mary went to the {room}.\n2 John moved to the {room}.\n3 Where is Mary? \t{room}\t1\n")
    return path


def said(tasks: Iterable[Task]) -> list[str]:
    """The text of some rows of every size, but for the 0s that fill a row."""
    drawn = [task.draw(np.random.default_rng(place), NUMBER)["input_ids"] for place, task in enumerate(tasks)]
    return [bytes(row.tolist()).rstrip(b"\0").decode() for rows in drawn for row in rows]


@pytest.mark.parametrize("kind", [NeedleExperiment, BabiLongExperiment])
def test_books_to_teach_and_books_to_test_are_apart(kind: Any, tmp_path: Path) -> None:
    task = {NeedleExperiment: NeedleSettings, BabiLongExperiment: BabiLongSettings}[kind]
    taught, tested = book(tmp_path / "one.txt", "harbour"), book(tmp_path / "two.txt", "chimney")
    sizes = {"sizes": ("900", "1000"), "test_sizes": ("900", "1100")}
    settings = kind(task=task(books=taught), test_books=tested, **sizes)
    learned, asked = said(settings.train_tasks), said(settings.eval_tasks.values())
    assert len(asked) == NUMBER * (10 if kind is NeedleExperiment else 2), "every size, of needles at five depths"
    assert all("harbour" in text and "chimney" not in text for text in learned)
    assert all("chimney" in text and "harbour" not in text for text in asked)
    assert said(settings.trial_tasks.values()) == learned, "a learning rate is chosen by what is taught"
    same = kind(task=task(books=taught), **sizes)
    assert all("harbour" in text for text in said(same.eval_tasks.values())), "without other books, the same"
    with pytest.raises(ValueError, match=r"got test_books without task\.books; expected books to train in as well"):
        kind(test_books=tested)


def test_questions_to_teach_and_questions_to_test_are_apart(tmp_path: Path) -> None:
    taught, tested = questions(tmp_path / "train.txt", "garden"), questions(tmp_path / "test.txt", "office")
    options = ["evaluate", "babilong", "--task.source", str(taught), "--sizes", "0", "400", "--test-sizes", "0", "500"]
    settings = parse([*options, "--test-source", str(tested)]).what
    learned, asked = said(settings.train_tasks), said(settings.eval_tasks.values())
    assert all("garden" in text and "office" not in text for text in learned)
    assert all("office" in text and "garden" not in text for text in asked)
    assert said(settings.trial_tasks.values()) == learned
    for other, how in ((None, "no"), (taught, "the same")):
        told = (
            f"got task.source={str(taught)!r} and {how} test_source, which would test on the questions that are taught"
        )
        with pytest.raises(ValueError, match=re.escape(told)):
            BabiLongExperiment(task=BabiLongSettings(source=taught), test_source=other)
    around = taught.parent / "x" / ".." / taught.name
    with pytest.raises(ValueError, match="and the same test_source"):
        BabiLongExperiment(task=BabiLongSettings(source=taught), test_source=around)
    drawn = BabiLongExperiment(test_source=tested, sizes=("0",), test_sizes=("0",))  # taught by stories that are drawn
    assert len({text.rsplit(" ", 1)[1] for text in said(drawn.train_tasks)}) > 1
    assert {text.rsplit(" ", 1)[1] for text in said(drawn.eval_tasks.values())} == {"office."}


def test_few_long_rows_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is trained; a row of ten million tokens takes 400 MB while it is drawn."""
    drawn: dict[int, int] = {}

    def draw(task: NeedleSettings, rng: np.random.Generator, rows: int) -> Batch:
        drawn[task.length] = rows
        return {"input_ids": torch.zeros(rows, task.length or 70, dtype=torch.int8)}

    monkeypatch.setattr(NeedleSettings, "draw", draw)
    settings = NeedleExperiment(sizes=("0x8", "1024"), test_sizes=("256K", "1M", "10M", "32M"))
    assert try_rows(settings) == 32 << 20, "the longest"
    assert drawn == {0: 64, 1024: 64, 1 << 18: 64, 1 << 20: 16, 10 << 20: 1, 32 << 20: 1}
    assert all(rows * length <= TOKENS_AT_ONCE for length, rows in drawn.items() if rows > 1)
