"""Rows in which passages return: at the gaps that are said, the same for whoever draws them, and of the text."""

import pickle
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from prepare.prepare_cases import prepared, write_texts
from titans_lm.data.batches import IGNORED, DocumentRows, PackedRows, RandomCrops, RereadRows
from titans_lm.data.curriculum import RereadCurriculum
from titans_lm.data.prepared import Split

TOKENS = 5000
SIZES = {"seq_len": 96, "batch_size": 3, "seed": 5}
STEPS = 50
SHORT = RereadCurriculum(first_steps=4, first_len=48, first_passages=(3, 7), first_gaps=(0, 2, 5), first_new=0.3)
TWICE = RereadCurriculum(share=0.5, passages=(8, 20))
BOTH = replace(SHORT, share=0.5, passages=(8, 20))


def cut(tokens: np.ndarray, start: int, stop: int) -> np.ndarray:
    return tokens[start:stop]


def counted(curriculum: RereadCurriculum, **sizes: Any) -> RereadRows:
    """Batches of a text in which every token is its own place."""
    sizes = SIZES | {"steps": STEPS} | sizes
    documents = [np.arange(TOKENS, dtype=np.int64)]
    crops = RandomCrops(documents, **{key: value for key, value in sizes.items() if key in SIZES})
    return RereadRows(crops, partial(cut, documents[0]), TOKENS, curriculum, **sizes)


def rows_of(batch: dict[str, torch.Tensor]) -> np.ndarray:
    """Rows with their last token; the targets are the inputs, one further."""
    assert torch.equal(batch["input_ids"][:, 1:], batch["targets"][:, :-1])
    return torch.cat([batch["input_ids"], batch["targets"][:, -1:]], dim=1).numpy()


def runs(row: np.ndarray) -> list[tuple[int, int]]:
    """Runs of text in a row that counts places: first token, length."""
    starts = [0, *(np.flatnonzero(np.diff(row) != 1) + 1).tolist(), len(row)]
    return [(int(row[a]), b - a) for a, b in pairwise(starts)]


def test_short_passages_return_at_the_gaps_that_are_said() -> None:
    """Whole passages of the row's inside: gap 0 puts one at once behind the other, else text of the gap between."""
    found: dict[int, int] = {}
    for step in range(SHORT.first_steps):
        batch = counted(SHORT)(step)
        assert batch["input_ids"].shape == (6, 48), "as many tokens as a step of the second phase"
        for row in rows_of(batch):
            pieces = runs(row)[:-2]  # the end of a row may cut one
            for (start, length), (gap, size), (again, _) in zip(pieces, pieces[1:], pieces[2:], strict=False):
                if start == again and 3 <= length <= 7:
                    assert size in (2, 5) or gap == start, "between two readings lies a gap, or the passage itself"
                    found[size] = found.get(size, 0) + 1
            for (start, length), (again, _) in pairwise(pieces):
                if start == again:
                    assert 3 <= length <= 7
                    found[0] = found.get(0, 0) + 1
    assert {0, 2, 5} <= found.keys()


@pytest.mark.parametrize("new", [0.0, 1.0])
def test_a_passage_is_new_as_often_as_is_said(new: float) -> None:
    chosen = replace(SHORT, first_gaps=(2,), first_new=new, first_passages=(5, 5))
    for row in rows_of(counted(chosen)(0)):
        passages = {int(row[at]) for at in range(0, len(row), 7)}
        assert len(passages) == (1 if new == 0.0 else 7)


def test_a_share_of_the_later_rows_holds_a_passage_twice_and_is_else_the_text() -> None:
    batches, plain = counted(BOTH, batch_size=8), counted(TWICE, batch_size=8).batches
    twice, gaps = 0, set()
    for step in range(4, 44):
        for row, before in zip(rows_of(batches(step)), rows_of(plain(step - 4)), strict=True):
            changed = np.flatnonzero(row != before)
            if len(changed) == 0:
                continue
            twice += 1
            start, length = int(changed[0]), len(changed)
            assert np.array_equal(changed, start + np.arange(length)), "one stretch is written over"
            assert 8 <= length <= 20
            first = int(np.flatnonzero(row[:start] == row[start])[0])
            assert np.array_equal(row[first : first + length], row[start : start + length])
            gaps.add(start - first - length)
    assert twice == pytest.approx(0.5 * 320, abs=30)
    assert min(gaps) < 8
    assert max(gaps) > 50


def test_a_share_that_falls_goes_from_the_first_to_the_second_over_the_steps_of_the_second_phase() -> None:
    """Thirds of the second phase have 0.83, 0.5 and 0.17 of their rows with a passage twice, after any first phase."""
    for first in (0, 30):
        chosen = replace(SHORT, first_steps=first, share=(1.0, 0.0), passages=(8, 20))
        batches = counted(chosen, batch_size=8, steps=first + 240)
        plain = batches.batches
        twice = [
            sum(not np.array_equal(row, before) for row, before in zip(*map(rows_of, pair), strict=True))
            for pair in ((batches(first + step), plain(step)) for step in range(240))
        ]
        assert (twice[0], twice[-1]) == (8, 0)
        rises = counted(replace(chosen, share=(0.0, 1.0)), batch_size=8, steps=first + 1, accumulate=2)
        ends = [rises.batches(1), rises(2 * first + 1)]
        assert (rows_of(ends[0]) != rows_of(ends[1])).any(1).all(), "the last batch has the second share"
        for third, share in enumerate((5 / 6, 1 / 2, 1 / 6)):
            assert sum(twice[80 * third : 80 * (third + 1)]) == pytest.approx(share * 640, abs=50)
    level, same = counted(replace(TWICE, share=(0.5, 0.5))), counted(TWICE)
    assert all(torch.equal(level(step)["targets"], same(step)["targets"]) for step in range(20))
    longer = {
        counted(replace(TWICE, share=share), steps=steps).fingerprint
        for share in (0.5, (0.5, 0.1))
        for steps in (50, 60)
    }
    assert len(longer) == 3, "a share that changes depends on how many steps there are"


def test_no_gap_is_longer_than_the_longest() -> None:
    batches = counted(replace(TWICE, share=1.0, max_gap=3))
    for step in range(20):
        for row in rows_of(batches(step)):
            (_, before), (start, length) = runs(row)[:2]
            assert 0 <= before - (start - int(row[0])) - length <= 3


def test_several_passages_of_a_row_return_whole_and_side_by_side() -> None:
    chosen = replace(TWICE, share=1.0, repeats=3, passages=(8, 12))
    batches, plain = counted(chosen, seq_len=144), counted(TWICE, seq_len=144).batches
    found, gaps = [], set()
    for step in range(STEPS):
        for row, before in zip(rows_of(batches(step)), rows_of(plain(step)), strict=True):
            places = np.flatnonzero(row != before)
            sources = row[places] - before[0]  # a token of this text is its own place
            assert not set(sources) & set(places), "a passage that returns has not been written over"
            cuts = np.flatnonzero((np.diff(places) != 1) | (np.diff(sources) != 1)) + 1
            lengths = np.diff([0, *cuts, len(places)])
            assert (sources < places).all()
            assert ((lengths >= 8) & (lengths <= 12)).all()
            found.append(len(lengths))
            gaps |= set((places - sources)[[0, *cuts]] - lengths)
    assert set(found) == {2, 3}, "a row that has no room for one more goes without"
    assert np.mean(found) > 2.7
    assert min(gaps) < 8
    assert max(gaps) > 50
    once = counted(replace(TWICE, share=1.0, repeats=1)), counted(replace(TWICE, share=1.0))
    assert all(np.array_equal(*(rows_of(batches(step)) for batches in once)) for step in range(5))


def test_rows_are_a_function_of_seed_and_step() -> None:
    batches = counted(BOTH)
    again = pickle.loads(pickle.dumps(counted(BOTH)))  # as workers get them
    for step in (5, 0, 3, 4, 9):
        assert all(torch.equal(batches(step)[name], again(step)[name]) for name in ("input_ids", "targets"))
    assert not torch.equal(batches(0)["input_ids"], batches(1)["input_ids"])
    assert not torch.equal(batches(0)["input_ids"], counted(BOTH, seed=6)(0)["input_ids"])
    names = {counted(chosen).fingerprint for chosen in (BOTH, SHORT, TWICE, replace(BOTH, share=0.4))}
    assert len(names) == 4, "a run is taken up with the same curriculum or not at all"


def test_steps_of_several_batches_have_as_many_first_steps() -> None:
    batches = counted(BOTH, accumulate=3)
    assert [batches(index)["input_ids"].shape[1] for index in (0, 11, 12)] == [48, 48, 96]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    path = tmp_path_factory.mktemp("reread")
    write_texts(path / "texts", 30)
    return prepared(path / "texts", path / "out", shard_tokens=1500).train


@pytest.mark.parametrize("kind", [PackedRows, DocumentRows])
def test_token_folders_keep_their_rows_their_padding_and_their_order(kind: Any, split: Split) -> None:
    rows = kind(split, **SIZES)
    batches = RereadRows(rows, split.take, split.tokens, replace(BOTH, share=1.0), steps=STEPS, **SIZES)
    whole = np.concatenate(list(split)).tobytes()
    first = batches(0)
    for row in rows_of(first):
        assert np.ascontiguousarray(row[:3].astype(split.dtype)).tobytes() in whole
    changed = 0
    for step in range(8):
        batch, before = batches(4 + step), rows(step)
        assert batch.keys() == before.keys()
        assert torch.equal(batch["sample"], before["sample"])
        assert torch.equal(batch["targets"] == IGNORED, before["targets"] == IGNORED)
        inside = batch["targets"][:, 1:] != IGNORED
        assert torch.equal(batch["input_ids"][:, 1:][inside], batch["targets"][:, :-1][inside])
        changed += int((batch["targets"] != before["targets"]).any(1).sum())
    assert changed > 12


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"share": 1.5}, r"got reread.share=1.5; expected a number from 0.0 to 1.0"),
        ({"first_new": -0.1}, r"got reread.first_new=-0.1; expected a number from 0.0 to 1.0"),
        ({"passages": (9, 8)}, r"got reread.passages=\(9, 8\); expected the shortest, then the longest"),
        ({"first_passages": (0, 8)}, r"got reread.first_passages=0; expected an integer of at least 1"),
        ({"share": (0.5, 1.5)}, r"got reread.share=1.5; expected a number from 0.0 to 1.0"),
        ({"share": (0.5, 0.4, 0.3)}, r"got reread.share=\(0.5, 0.4, 0.3\); expected one number, or two"),
        ({"first_gaps": ()}, r"got reread.first_gaps=\(\); expected one or more"),
        ({"repeats": 0}, r"got reread.repeats=0; expected an integer of at least 1"),
        ({"max_gap": -1}, r"got reread.max_gap=-1; expected an integer of at least 0"),
    ],
)
def test_settings_that_will_not_do(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RereadCurriculum(**settings)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (replace(SHORT, first_len=40), "got reread.first_len=40 and seq_len=96; expected a first_len that divides"),
        (replace(SHORT, first_passages=(3, 30)), "and gaps of 5 in rows of 48 tokens; expected rows of at least 64"),
        (replace(TWICE, passages=(8, 64)), "in rows of 96 tokens; expected rows of at least 127"),
    ],
)
def test_rows_that_hold_no_passage_twice(chosen: RereadCurriculum, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        counted(chosen)
    with pytest.raises(ValueError, match=r"got reread.first_steps=4 in a run of 3 steps; expected a first phase"):
        SHORT.check_run(3, 96)
