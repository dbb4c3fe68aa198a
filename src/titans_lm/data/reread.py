"""Batches in which passages of the training text return, by step: a pure function of the seed and the step (D40)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titans_lm.data.batches import IGNORED, Batch, as_batch
from titans_lm.data.curriculum import RereadCurriculum

STREAM = 0x52455245
"""Set beside seed and step, so that what is drawn here is not what the batches of the second phase draw."""
TRIES = 8
"""How often a place is drawn for one more passage of a row, until it touches none of those before."""


class RereadRows:
    """Short rows of returning passages for the first steps, then the rows of other batches, some with a passage twice.

        passage gap passage gap new passage …    (B seq_len / T₁, T₁)   the first phase, T₁ = first_len
        … passage … passage …                    (B, seq_len)           a share of the rows of the second phase

    Passages and gaps of the first phase come from random places of the text. In the second, passages of the row are
    written over what stands at their gaps, so that the rest is the row as it was. `batches` begin at their own step 0
    where the first phase ends: no row of theirs is left out.
    """

    def __init__(
        self,
        batches: Callable[[int], Batch],
        take: Callable[[int, int], np.ndarray],
        tokens: int,
        curriculum: RereadCurriculum,
        *,
        steps: int,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        accumulate: int = 1,
    ) -> None:
        """`take(start, stop)` are tokens of a text of so many `tokens`; each of `steps` has `accumulate` batches."""
        curriculum.check_run(steps, seq_len)
        self.batches, self.take, self.tokens, self.curriculum, self.seed = batches, take, tokens, curriculum, seed
        self.first = curriculum.first_steps * accumulate
        self.second = max(1, (steps - curriculum.first_steps) * accumulate - 1)
        self.rows = batch_size * seq_len // curriculum.first_len
        longest = max(curriculum.first_passages[1], *curriculum.first_gaps)
        if self.first and tokens < longest:
            raise ValueError(
                f"got {tokens:,} tokens to train on and passages or gaps of {longest}; expected a longer text"
            )
        named: Any = batches
        over = f" {self.second}" if isinstance(curriculum.share, tuple) else ""
        self.fingerprint = f"{named.fingerprint} {self.first} {self.rows} {curriculum}{over}"

    def __call__(self, step: int) -> Batch:
        rng = np.random.default_rng([self.seed, step, STREAM])
        if step >= self.first:
            share = self.curriculum.share_at(min(1.0, (step - self.first) / self.second))
            return self._twice(self.batches(step - self.first), share, rng)
        rows = np.stack([self._short_row(rng) for _ in range(self.rows)])
        return as_batch(input_ids=rows[:, :-1], targets=rows[:, 1:])

    def _short_row(self, rng: np.random.Generator) -> np.ndarray:
        """T₁ + 1 tokens: a passage and a gap in turn, the passage new with a probability, else the last one."""
        chosen, length = self.curriculum, self.curriculum.first_len + 1
        parts, filled, passage = [], 0, None
        while filled < length:
            if passage is None or rng.random() < chosen.first_new:
                passage = self._anywhere(rng, int(rng.integers(chosen.first_passages[0], chosen.first_passages[1] + 1)))
            parts += [passage, self._anywhere(rng, int(rng.choice(chosen.first_gaps)))]
            filled += len(parts[-1]) + len(parts[-2])
        return np.concatenate(parts)[:length]

    def _anywhere(self, rng: np.random.Generator, length: int) -> np.ndarray:
        start = int(rng.integers(0, self.tokens - length + 1))
        return self.take(start, start + length)

    def _twice(self, batch: Batch, share: float, rng: np.random.Generator) -> Batch:
        inputs, targets = batch["input_ids"].clone(), batch["targets"].clone()
        for ids, following in zip(inputs, targets, strict=True):
            count = int((following != IGNORED).sum())  # padding stands at the right
            if rng.random() < share:
                row = torch.cat([ids[:1], following[:count]])
                self._read_again(row, rng)
                ids[:count], following[:count] = row[:-1], row[1:]
        return {**batch, "input_ids": inputs, "targets": targets}

    def _read_again(self, row: Tensor, rng: np.random.Generator) -> None:
        """Write passages of a row over later parts of it, none over another, as far as the row has room for them."""
        shortest, longest = self.curriculum.passages
        longest = min(longest, len(row) // 2)
        if longest < shortest:
            return
        taken = np.zeros(len(row), dtype=bool)
        for _ in range(self.curriculum.repeats):
            for _ in range(TRIES):
                first, again = self._places(rng, len(row), shortest, longest)
                if not (taken[first].any() or taken[again].any()):
                    row[again] = row[first].clone()
                    taken[first] = taken[again] = True
                    break

    def _places(self, rng: np.random.Generator, width: int, shortest: int, longest: int) -> tuple[slice, slice]:
        """Where a passage stands in a row of so many tokens, and where it returns."""
        length = int(rng.integers(shortest, longest + 1))
        room, most = width - 2 * length, self.curriculum.max_gap
        gap = int(rng.integers(0, (room if most is None else min(most, room)) + 1))
        start = int(rng.integers(0, room - gap + 1))
        again = start + length + gap
        return slice(start, start + length), slice(again, again + length)
