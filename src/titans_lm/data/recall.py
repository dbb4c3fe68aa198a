"""Associative recall: pairs of a key and a value, a stretch of nothing, then the keys again (MQAR, Zoology).

What a model must do is keep the pairs over the gap. Attention that sees the pairs can look them up; attention whose
window is shorter than the gap cannot, unless layers hand the pair on: n layers of window W see n (W − 1) tokens back.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from titans_lm.config import check_at_least
from titans_lm.data.batches import IGNORED, Batch

FILLER = 0


@dataclass(frozen=True, kw_only=True)
class RecallSettings:
    """Settings of one recall task."""

    pairs: int = 8
    """Pairs D of a key and its value."""
    symbols: int = 128
    """Symbols: ids 1 … symbols/2 are keys, the rest up to `symbols` values; id 0 is the filler."""
    length: int = 64
    """Tokens of an example."""
    gap: int = 0
    """Filler tokens between the last pair and the first place where a key can be asked."""
    answers: bool = True
    """Whether the value follows its key in the query area; the label is there either way."""
    spread: float = 0.01
    """Exponent a: a key is asked at slot i of the query area with chance ∝ i^(a − 1); small a asks early."""

    def __post_init__(self) -> None:
        check_at_least("pairs", self.pairs, 1)
        check_at_least("gap", self.gap, 0)
        if self.symbols % 2 or self.symbols < 2 * self.pairs:
            raise ValueError(
                f"got symbols={self.symbols} and pairs={self.pairs}; expected an even number of at least 2 × pairs"
            )
        if self.slots < self.pairs:
            raise ValueError(
                f"got length={self.length}; expected at least 4 × pairs + gap = {4 * self.pairs + self.gap}"
            )

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    @property
    def chance(self) -> float:
        """Accuracy of guessing a value."""
        return 2.0 / self.symbols

    @property
    def slots(self) -> int:
        """Places of two tokens where a key can be asked."""
        return (self.length - 2 * self.pairs - self.gap) // 2


class RecallBatches:
    """Batches of the task, each a pure function of (seed, step).

    With `RecallSettings(pairs=2, symbols=8, gap=4, length=12)`, keys 1 to 4, values 5 to 8:

        input_ids     3    8    1    5    0    0    0    0    1    5    3    8
        targets    −100 −100 −100 −100 −100 −100 −100 −100    5 −100    8 −100

    The query of key 1 is gap + 1 tokens after its value at least, for every key and whichever order they are asked in.
    Zoology's MQAR is `gap=0, answers=False` with a longer query area. Give another `seed` to draw examples to test on:
    with 8 of 64 keys and values each, two examples never agree.
    """

    def __init__(self, settings: RecallSettings, *, batch_size: int, seed: int = 0) -> None:
        check_at_least("batch_size", batch_size, 1)
        self.settings, self.batch_size, self.seed = settings, batch_size, seed
        self.fingerprint = f"{settings} batch_size={batch_size} seed={seed}"

    def __call__(self, step: int) -> Batch:
        s, rows = self.settings, self.batch_size
        rng = np.random.default_rng([self.seed, step])
        keys = 1 + _draw(rng, np.zeros(s.symbols // 2), rows, s.pairs)
        values = 1 + s.symbols // 2 + _draw(rng, np.zeros(s.symbols // 2), rows, s.pairs)
        slots = _draw(rng, (s.spread - 1.0) * np.log(np.arange(1, s.slots + 1)), rows, s.pairs)
        places = 2 * s.pairs + s.gap + 2 * slots

        inputs = np.full((rows, s.length), FILLER, np.int64)
        targets = np.full((rows, s.length), IGNORED, np.int64)
        inputs[:, 0 : 2 * s.pairs : 2], inputs[:, 1 : 2 * s.pairs : 2] = keys, values
        np.put_along_axis(inputs, places, keys, axis=1)
        np.put_along_axis(targets, places, values, axis=1)
        if s.answers:
            np.put_along_axis(inputs, places + 1, values, axis=1)
        return {"input_ids": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}


class RecallCurriculum:
    """Batches of the task with gaps that grow: first the shortest alone, then every gap in turn.

    Trained on a long gap alone, a model learns which values occurred and stays there: what the filler writes hides
    what a pair has written. With short gaps among them it first learns to bind a key to its value, then to keep it.
    The length of an example stays that of `settings`, and so does the vocabulary.
    """

    def __init__(
        self, settings: RecallSettings, *, gaps: tuple[int, ...], alone: int, batch_size: int, seed: int = 0
    ) -> None:
        check_at_least("alone", alone, 0)
        if not gaps:
            raise ValueError("got no gaps; expected at least one")
        self.stages = [
            RecallBatches(replace(settings, gap=gap), batch_size=batch_size, seed=seed + i)
            for i, gap in enumerate(gaps)
        ]
        self.alone = alone
        self.fingerprint = f"alone={alone} " + " | ".join(stage.fingerprint for stage in self.stages)

    def __call__(self, step: int) -> Batch:
        stage = 0 if step < self.alone else step % len(self.stages)
        return self.stages[stage](step)


def _draw(rng: np.random.Generator, log_weights: np.ndarray, rows: int, count: int) -> np.ndarray:
    """Draw `count` different indices per row, one after the other with the given weights (Gumbel's trick)."""
    noise = rng.gumbel(size=(rows, len(log_weights)))
    return np.argsort(-(log_weights + noise), axis=1)[:, :count].astype(np.int64)
