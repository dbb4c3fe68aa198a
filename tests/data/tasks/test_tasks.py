"""Rows of the synthetic tasks, read back by programs that know the rules and nothing of how rows are made."""

from itertools import permutations

import numpy as np
import pytest
import torch

from titans_lm.data.batches import IGNORED, Batch
from titans_lm.data.tasks.batches import TaskBatches
from titans_lm.data.tasks.common_words import CommonWordsSettings
from titans_lm.data.tasks.recall import RecallSettings
from titans_lm.data.tasks.task import Task
from titans_lm.data.tasks.tracking import TrackingSettings, elements, products
from titans_lm.data.tasks.variables import VariablesSettings

TASKS: list[Task] = [
    RecallSettings(),
    RecallSettings(updates=3, key_tokens=2, passes=2, fillers="random", length=128),
    *(TrackingSettings(group=group, length=12) for group in ("parity", "s3", "a5", "s5")),
    VariablesSettings(chains=3, hops=1, length=700),
    VariablesSettings(name="words", tokenizer="words", length=300),
    CommonWordsSettings(common=2, often=3, rarely=1, length=200),
    CommonWordsSettings(common=3, often=5, rarely=2, word="words", tokenizer="words", length=300),
]
NAMES = [f"{type(task).__name__}-{number}" for number, task in enumerate(TASKS)]


def rows_of(task: Task, steps: int = 4, rows: int = 8) -> list[Batch]:
    return [TaskBatches(task, batch_size=rows, seed=5)(step) for step in range(steps)]


@pytest.mark.parametrize("task", TASKS, ids=NAMES)
def test_rows_are_what_the_task_says(task: Task) -> None:
    assert isinstance(task, Task)
    for batch in rows_of(task):
        assert batch["input_ids"].shape == batch["targets"].shape
        assert batch["input_ids"].shape[1] <= task.length
        assert 0 <= batch["input_ids"].min() <= batch["input_ids"].max() < task.vocab_size
        asked = batch["targets"] != IGNORED
        assert asked.any(1).all()
        assert batch["targets"][asked].max() < task.vocab_size
        if "answers" in batch:
            assert torch.equal(batch["answers"] != IGNORED, asked)
    assert 0.0 < task.chance < 1.0


@pytest.mark.parametrize("task", TASKS, ids=NAMES)
def test_a_batch_is_a_function_of_seed_and_step(task: Task) -> None:
    one, other = TaskBatches(task, batch_size=4, seed=1), TaskBatches(task, batch_size=4, seed=1)
    one(0)
    assert torch.equal(one(7)["input_ids"], other(7)["input_ids"])
    assert one(7)["input_ids"].tolist() != one(8)["input_ids"].tolist()
    assert one.fingerprint == other.fingerprint != TaskBatches(task, batch_size=4, seed=2).fingerprint


@pytest.mark.parametrize("group", ["parity", "s3", "a5", "s5"])
def test_products_make_a_group(group: str) -> None:
    table, sizes = products(group), {"parity": 2, "s3": 6, "a5": 60, "s5": 120}
    count = len(table)
    assert count == sizes[group] == len(set(elements(group)))
    everything = np.arange(count)
    assert all(sorted(row) == everything.tolist() for row in (*table.tolist(), *table.T.tolist()))
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(0, count, (3, 200))
    assert (table[table[a, b], c] == table[a, table[b, c]]).all()
    assert (table != table.T).any() == (group != "parity"), "only parity commutes"


def test_words_are_multiplied_from_the_left() -> None:
    task = TrackingSettings(group="s5", length=9)
    batch, listed = rows_of(task)[0], list(permutations(range(5)))
    for row, products_so_far in zip(batch["input_ids"].tolist(), batch["targets"].tolist(), strict=True):
        things = list(range(5))  # things[i] is where i has gone
        for element, said in zip(row, products_so_far, strict=True):
            things = [listed[element][thing] for thing in things]
            assert listed[said] == tuple(things)


def test_parity_is_that_of_the_ones_so_far() -> None:
    batch = rows_of(TrackingSettings(group="parity", length=30))[0]
    assert torch.equal(batch["targets"], batch["input_ids"].cumsum(1) % 2)


def guessed(task: Task, said: int) -> float:
    """Say the same to everything that is asked: the share that is right."""
    asked = [batch["targets"][batch["targets"] != IGNORED] for batch in rows_of(task, steps=40, rows=100)]
    return float((torch.cat(asked) == said).float().mean())


GUESSES = [
    (RecallSettings(pairs=2, symbols=8, length=12), 6),
    (RecallSettings(pairs=2, symbols=8, length=24, updates=1, key_tokens=2), 6),
    (TrackingSettings(group="s3", length=4), 4),
]


@pytest.mark.parametrize(("task", "said"), GUESSES)
def test_chance_is_what_guessing_gives(task: Task, said: int) -> None:
    assert guessed(task, said) == pytest.approx(task.chance, rel=0.1)


def shown(doc: str) -> list[tuple[list[int], list[int]]]:
    """Read the examples of a docstring: inputs and targets."""
    lines = [line.split() for line in doc.splitlines() if line.strip().startswith(("input_ids", "targets"))]
    rows = [[int(token.replace("−", "-")) for token in tokens] for _, *tokens in lines]
    return list(zip(rows[::2], rows[1::2], strict=True))


EXAMPLES = [
    (RecallSettings, 0, {"pairs": 2, "symbols": 8, "gap": 4, "length": 12}),
    (RecallSettings, 1, {"pairs": 2, "symbols": 8, "gap": 2, "length": 12, "updates": 1}),
    (RecallSettings, 2, {"pairs": 2, "symbols": 8, "gap": 3, "length": 16, "key_tokens": 2}),
    (TrackingSettings, 0, {"group": "parity", "length": 6}),
]


@pytest.mark.parametrize(("kind", "which", "settings"), EXAMPLES)
def test_docstrings_show_rows_that_can_be_drawn(kind: type, which: int, settings: dict) -> None:
    inputs, targets = shown(kind.__doc__ or "")[which]
    rng, task = np.random.default_rng(0), kind(**settings)
    for _ in range(200):
        batch = task.draw(rng, 64)
        rows = zip(batch["input_ids"].tolist(), batch["targets"].tolist(), strict=True)
        if (inputs, targets) in list(rows):
            return
    raise AssertionError("such a row is never drawn")


def test_several_tasks_take_turns_by_their_weights() -> None:
    tasks = [RecallSettings(pairs=2, length=length) for length in (16, 32, 64)]
    batches = TaskBatches(tasks, batch_size=2, weights=(1, 1, 8))
    lengths = [batches(step)["input_ids"].shape[1] for step in range(300)]
    assert [lengths[i] for i in (3, 77)] == [batches(i)["input_ids"].shape[1] for i in (3, 77)]
    counts = [lengths.count(length) for length in (16, 32, 64)]
    assert counts[2] > 200
    assert min(counts) > 10
    assert batches.fingerprint != TaskBatches(tasks, batch_size=2).fingerprint


def test_long_rows_make_batches_of_fewer() -> None:
    tasks = [RecallSettings(pairs=2, length=length) for length in (16, 64, 512)]
    batches = TaskBatches(tasks, batch_size=8, batch_tokens=256)
    shapes = {tuple(batches(step)["input_ids"].shape) for step in range(40)}
    assert shapes == {(8, 16), (4, 64), (1, 512)}
    assert batches.fingerprint != TaskBatches(tasks, batch_size=8).fingerprint


MISTAKES = [
    (lambda: TaskBatches([RecallSettings()], batch_size=2, batch_tokens=-1), "batch_tokens=-1"),
    (lambda: TaskBatches([], batch_size=2), "expected at least one task"),
    (lambda: TaskBatches([RecallSettings()], batch_size=2, weights=(1, 2)), "as many weights"),
    (lambda: TaskBatches([RecallSettings()] * 2, batch_size=2, weights=(1, 0)), "above 0"),
    (lambda: TrackingSettings(group="s4"), "group='s4'"),
]


@pytest.mark.parametrize(("make", "said"), MISTAKES)
def test_settings_are_checked(make, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
