from dataclasses import replace

import pytest
import torch

from titans_lm.data.batches import IGNORED
from titans_lm.data.tasks.batches import TaskBatches
from titans_lm.data.tasks.recall import FILLER, RecallSettings
from titans_lm.demo.recall import growing_gaps
from titans_lm.demo.settings import quick_plan

SETTINGS = {
    "mqar": RecallSettings(pairs=4, symbols=32, length=64, gap=0, answers=False),
    "gap": RecallSettings(pairs=8, symbols=128, length=4 * 8 + 40, gap=40),
    "gap, spread": RecallSettings(pairs=3, symbols=16, length=60, gap=20),
    "least": RecallSettings(pairs=1, symbols=2, length=4),
}


def queries(batch, settings):
    """Every (row, place of the value that was shown, place of the query)."""
    for row, place in (batch["targets"] != IGNORED).nonzero().tolist():
        key = int(batch["input_ids"][row, place])
        shown = batch["input_ids"][row, 0 : 2 * settings.pairs : 2].tolist().index(key)
        yield row, 2 * shown + 1, place


@pytest.mark.parametrize("name", SETTINGS)
def test_every_key_is_asked_once_and_labelled_with_its_value(name):
    settings = SETTINGS[name]
    batch = TaskBatches(settings, batch_size=16)(0)
    assert batch["input_ids"].shape == batch["targets"].shape == (16, settings.length)
    found = list(queries(batch, settings))
    assert len(found) == 16 * settings.pairs
    assert len({(row, shown) for row, shown, _ in found}) == len(found)
    for row, shown, place in found:
        value = batch["input_ids"][row, shown]
        assert batch["targets"][row, place] == value
        assert batch["input_ids"][row, place + 1] == (value if settings.answers else FILLER)


@pytest.mark.parametrize("name", SETTINGS)
def test_no_pair_is_closer_to_its_query_than_the_gap(name):
    settings = SETTINGS[name]
    batches = TaskBatches(settings, batch_size=32)
    distances = [place - shown for step in range(4) for _, shown, place in queries(batches(step), settings)]
    assert min(distances) >= settings.gap + 1


def test_the_gap_and_every_empty_place_hold_the_filler():
    settings = SETTINGS["gap, spread"]
    batch = TaskBatches(settings, batch_size=8)(0)
    start = 2 * settings.pairs
    assert (batch["input_ids"][:, start : start + settings.gap] == FILLER).all()
    symbols = (batch["input_ids"] != FILLER).sum(1)
    assert symbols.tolist() == [4 * settings.pairs] * 8
    assert (batch["targets"] != IGNORED).sum(1).tolist() == [settings.pairs] * 8


def test_keys_and_values_are_different_symbols_of_two_halves():
    settings = SETTINGS["gap"]
    inputs = TaskBatches(settings, batch_size=64)(0)["input_ids"]
    keys, values = inputs[:, 0:16:2], inputs[:, 1:16:2]
    assert (keys.min(), keys.max(), values.min(), values.max()) == (1, 64, 65, 128)
    for rows in (keys, values):
        assert all(len(set(row)) == 8 for row in rows.tolist())
    assert inputs.max() < settings.vocab_size == 129
    assert settings.chance == 1 / 64


def test_a_batch_is_a_function_of_seed_and_step():
    settings = SETTINGS["gap"]
    a, b = TaskBatches(settings, batch_size=4, seed=1), TaskBatches(settings, batch_size=4, seed=1)
    a(0)
    assert torch.equal(a(7)["input_ids"], b(7)["input_ids"])
    assert not torch.equal(a(7)["input_ids"], a(8)["input_ids"])
    assert not torch.equal(a(7)["input_ids"], TaskBatches(settings, batch_size=4, seed=2)(7)["input_ids"])
    assert a.fingerprint == b.fingerprint != TaskBatches(settings, batch_size=4, seed=2).fingerprint


def test_tokens_are_those_of_the_batches_that_are_drawn():
    tasks = [replace(SETTINGS["gap"], length=length) for length in (204, 408)]
    batches = TaskBatches(tasks, batch_size=4, weights=(3.0, 1.0), join_every=5, batch_tokens=1000)
    assert batches.tokens(20) == sum(batches(step)["input_ids"].numel() for step in range(20))
    assert {len(batches(step)["input_ids"]) for step in range(20)} == {4, 2}


def test_small_exponents_ask_early():
    early = RecallSettings(pairs=2, symbols=8, length=204, spread=0.01)
    even = RecallSettings(pairs=2, symbols=8, length=204, spread=1.0)

    def mean_place(settings):
        targets = TaskBatches(settings, batch_size=256)(0)["targets"]
        return float((targets != IGNORED).nonzero()[:, 1].float().mean())

    assert mean_place(early) < 60
    assert 85 < mean_place(even) < 120  # the middle of 4 … 204


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pairs": 0}, "got pairs=0"),
        ({"symbols": 15}, "expected an even number"),
        ({"symbols": 14}, "expected an even number of at least 2 × pairs"),
        ({"length": 31}, r"expected at least 4 × pairs \+ gap = 32"),
        ({"gap": 33}, r"= 65"),
        ({"gap": -1}, "got gap=-1"),
    ],
)
def test_settings_are_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        RecallSettings(**{"pairs": 8, "symbols": 16, "length": 64, **wrong})


def test_the_curriculum_of_the_demo_takes_the_shortest_gap_first_and_then_every_gap_in_turn():
    settings = RecallSettings(pairs=2, symbols=16, length=40, gap=20)
    plan = replace(quick_plan(0).recall, gaps=(0, 10, 20), alone=4, batch_size=8)
    batches = growing_gaps(settings, plan, 5)
    least = []
    for step in range(10):
        batch = batches(step)
        assert batch["input_ids"].shape == (8, 40)
        least.append(min(place - shown for _, shown, place in queries(batch, settings)))
        assert torch.equal(batch["input_ids"], batches(step)["input_ids"])
    # a query stands gap + 1 tokens at least after the value, and in 8 rows one does so
    assert least[:4] == [1, 1, 1, 1]
    assert least[4:] == [11, 21, 1, 11, 21, 1]


VARIANTS = {
    "updates": RecallSettings(pairs=6, symbols=32, length=96, gap=7, updates=4),
    "parts": RecallSettings(pairs=9, symbols=32, length=128, key_tokens=2),
    "passes": RecallSettings(pairs=4, symbols=32, length=64, passes=3, answers=False),
    "fillers": RecallSettings(pairs=4, symbols=32, length=64, gap=9, fillers="random", answers=False),
    "all": RecallSettings(pairs=9, symbols=64, length=160, gap=5, updates=9, key_tokens=2, passes=2, fillers="random"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_last_value_of_a_key_is_asked_for(name):
    """Read token by token: what was written of a key before the gap, and what is asked after it."""
    s = VARIANTS[name]
    written = s.passes * s.pairs + s.updates
    for step in range(4):
        batch = TaskBatches(s, batch_size=16)(step)
        for inputs, targets in zip(batch["input_ids"].tolist(), batch["targets"].tolist(), strict=True):
            known = {}
            for at in range(0, written * s.width, s.width):
                known.setdefault(tuple(inputs[at : at + s.key_tokens]), []).append(inputs[at + s.key_tokens])
            assert len(known) == s.pairs
            times = sorted(len(values) for values in known.values())
            assert times == [s.passes] * (s.pairs - s.updates) + [s.passes + 1] * s.updates
            assert len({value for values in known.values() for value in values}) == s.pairs + s.updates
            asked = {}
            for place, target in enumerate(targets):
                if target != IGNORED:
                    key = tuple(inputs[place - s.key_tokens + 1 : place + 1])
                    assert place - s.key_tokens + 1 >= written * s.width + s.gap
                    assert not s.answers or inputs[place + 1] == target
                    asked[key] = target
            assert asked == {key: values[-1] for key, values in known.items()}


def test_keys_of_two_tokens_share_them():
    s = VARIANTS["parts"]
    inputs = TaskBatches(s, batch_size=8)(0)["input_ids"].numpy()[:, : s.pairs * 3].reshape(8, s.pairs, 3)
    for keys in inputs[..., :2].tolist():
        assert len({tuple(key) for key in keys}) == s.pairs
        assert len({first for first, _ in keys}) < s.pairs


@pytest.mark.parametrize("name", ["fillers", "all"])
def test_random_fillers_are_no_keys_of_the_row(name):
    s = VARIANTS[name]
    found = set()
    always = set(range(1, s.parts + 1)) if s.key_tokens == 2 and s.parts**2 == s.pairs else set()
    for step in range(20):
        batch = TaskBatches(s, batch_size=16)(step)
        blank = RecallSettings(**{**vars(s), "fillers": "one"})
        empty = TaskBatches(blank, batch_size=16)(step)["input_ids"] == FILLER
        assert not (batch["input_ids"] == FILLER).any()
        for inputs, fillers, queries in zip(batch["input_ids"], empty, batch["targets"] != IGNORED, strict=True):
            keys = {id for place in queries.nonzero() for id in inputs[place - s.key_tokens + 1 : place + 1].tolist()}
            assert not keys & set(inputs[fillers].tolist())
            found |= set(inputs[fillers].tolist())
    assert found == set(range(1, s.symbols + 1)) - always, "every other id fills somewhere"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"updates": 9}, "updates=9"),
        ({"updates": 2, "symbols": 16}, r"at least 2 × \(pairs \+ updates\)"),
        ({"updates": 2, "symbols": 32, "length": 35}, "= 36"),
        ({"key_tokens": 3}, "key_tokens=3; expected 1 or 2"),
        ({"passes": 0}, "passes=0"),
        ({"fillers": "none"}, "fillers='none'"),
    ],
)
def test_settings_of_variants_are_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        RecallSettings(**{"pairs": 8, "symbols": 16, "length": 64, **wrong})
