"""Associative recall: pairs of a key and a value, a stretch of nothing, then the keys again (MQAR, Zoology).

What a model must do is keep the pairs over the gap. Attention that sees the pairs can look them up; attention whose
window is shorter than the gap cannot, unless layers hand the pair on: n layers of window W see n (W − 1) tokens back.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from titans_lm.checks import KnownSettings, check_fields
from titans_lm.data.tasks.task import SizedTask, TaskPlan

if TYPE_CHECKING:
    import numpy as np

    from titans_lm.data.batches import Batch


FILLER = 0
Fillers = Literal["one", "random"]


@dataclass(frozen=True, kw_only=True)
class RecallSettings(SizedTask, KnownSettings):
    """Settings of one recall task.

    With `pairs=2, symbols=8, gap=4, length=12`, keys 1 to 4, values 5 to 8:

        input_ids     3    8    1    5    0    0    0    0    1    5    3    8
        targets    −100 −100 −100 −100 −100 −100 −100 −100    5 −100    8 −100

    The query of key 1 is gap + 1 tokens after its value at least, for every key and whichever order they are asked in.
    Zoology's MQAR is `gap=0, answers=False` with a longer query area. Rows of another seed are other rows: with 8 of 64
    keys and values each, two examples never agree.

    With `updates=1` (forgetting MQAR; gap=2) a key comes once more with another value, which is then asked for:

        input_ids     3    8    1    5    3    6    0    0    3    6    1    5
        targets    −100 −100 −100 −100 −100 −100 −100 −100    6 −100    5 −100

    With `key_tokens=2` (compositional MQAR; gap=3, length=16) a key is made of ids that other keys share:

        input_ids     1    2    8    1    1    5    0    0    0    1    1    5    1    2    8    0
        targets    −100 −100 −100 −100 −100 −100 −100 −100 −100 −100    5 −100 −100    8 −100 −100

    With `passes=2` the list of pairs comes twice before the gap.
    """

    size_fields = "length", "pairs"
    size_form = r"(\d+):(\d+)", "LENGTH:PAIRS, as in 64:4"
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
    updates: int = 0
    """Keys that come again with another value after all pairs; the last value counts."""
    key_tokens: int = 1
    """Tokens of a key: 1, or 2 for keys made of parts that they share."""
    passes: int = 1
    """How often the list of pairs is read before the gap."""
    fillers: Fillers = "one"
    """What stands where nothing is said: one id, or random ones that are no key of the row."""

    def __post_init__(self) -> None:
        check_fields(self, zero=["gap", "updates"])
        if self.key_tokens not in (1, 2):
            raise ValueError(f"got key_tokens={self.key_tokens!r}; expected 1 or 2")
        if self.updates > self.pairs:
            raise ValueError(f"got updates={self.updates} and pairs={self.pairs}; expected no more updates than pairs")
        if self.symbols % 2 or self.symbols < 2 * (self.pairs + self.updates):
            more = " + updates" if self.updates else ""
            raise ValueError(
                f"got symbols={self.symbols} and pairs={self.pairs}; expected an even number of at least "
                + (f"2 × (pairs{more})" if more else "2 × pairs")
            )
        if self.key_tokens == 2 and self.parts > self.symbols // 2:
            raise ValueError(f"got symbols={self.symbols}; expected {2 * self.parts} or more for keys of two parts")
        if self.slots < self.pairs:
            least = self.start + self.width * self.pairs
            formula = "4 × pairs + gap"
            if self.start != 2 * self.pairs + self.gap:
                formula = "(key_tokens + 1) × ((passes + 1) × pairs + updates) + gap"
            raise ValueError(f"got length={self.length} for pairs={self.pairs}; expected at least {formula} = {least}")

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    @property
    def chance(self) -> float:
        """Accuracy of guessing a value."""
        return 2.0 / self.symbols

    @property
    def width(self) -> int:
        """Tokens of a key and its value."""
        return self.key_tokens + 1

    @property
    def parts(self) -> int:
        """Ids that first and second parts of keys of two tokens are drawn from; a part is in √pairs on average."""
        return max(2, 1 + math.isqrt(self.pairs - 1))  # the root, rounded up

    @property
    def start(self) -> int:
        """Where the first key can be asked."""
        return self.width * (self.passes * self.pairs + self.updates) + self.gap

    @property
    def slots(self) -> int:
        """Places of a key and its value where a key can be asked."""
        return (self.length - self.start) // self.width

    def draw(self, rng: "np.random.Generator", rows: int) -> "Batch":
        """Draw rows of the task; targets stand at the last token of a key that is asked."""
        import numpy as np

        from titans_lm.data.batches import IGNORED, as_batch

        keys = self._keys(rng, rows)
        half = self.symbols // 2
        values = 1 + half + _different(rng, np.zeros(half), rows, self.pairs + self.updates)
        slots = _different(rng, (self.spread - 1.0) * np.log(np.arange(1, self.slots + 1)), rows, self.pairs)
        told = np.concatenate([keys, values[:, : self.pairs, None]], axis=2)  # rows × pairs × width
        shown = [told.reshape(rows, -1)] * self.passes
        final = told.copy()
        if self.updates:
            changed = _different(rng, np.zeros(self.pairs), rows, self.updates)[..., None]
            again = np.take_along_axis(told, changed, axis=1)
            again[..., -1] = values[:, self.pairs :]
            np.put_along_axis(final, changed, again, axis=1)
            shown.append(again.reshape(rows, -1))
        inputs = np.full((rows, self.length), FILLER, np.int64)
        targets = np.full((rows, self.length), IGNORED, np.int64)
        written = np.concatenate(shown, axis=1)
        inputs[:, : written.shape[1]] = written
        places = self.start + self.width * slots
        for token in range(self.width if self.answers else self.key_tokens):
            np.put_along_axis(inputs, places + token, final[..., token], axis=1)
        np.put_along_axis(targets, places + self.key_tokens - 1, final[..., -1], axis=1)
        if self.fillers == "random":
            inputs = self._filled(rng, inputs, keys)
        return as_batch(input_ids=inputs, targets=targets)

    def _keys(self, rng: "np.random.Generator", rows: int) -> "np.ndarray":
        """Draw the keys of each row: rows × pairs × key_tokens."""
        import numpy as np

        if self.key_tokens == 1:
            return 1 + _different(rng, np.zeros(self.symbols // 2), rows, self.pairs)[..., None]
        both = _different(rng, np.zeros(self.parts**2), rows, self.pairs)
        return 1 + np.stack(np.divmod(both, self.parts), axis=2)

    def _filled(self, rng: "np.random.Generator", inputs: "np.ndarray", keys: "np.ndarray") -> "np.ndarray":
        """Put a random id at every empty place, but none that a key of the row is made of."""
        import numpy as np

        allowed = np.ones((len(inputs), self.symbols + 1), bool)
        allowed[:, FILLER] = False
        np.put_along_axis(allowed, keys.reshape(len(inputs), -1), False, axis=1)
        order = np.argsort(~allowed, axis=1, kind="stable")  # those that are allowed first
        drawn = (rng.random(inputs.shape) * allowed.sum(1, keepdims=True)).astype(np.int64)
        return np.where(inputs == FILLER, np.take_along_axis(order, drawn, axis=1), inputs)


def _different(rng: "np.random.Generator", log_weights: "np.ndarray", rows: int, count: int) -> "np.ndarray":
    """Draw `count` different indices per row, one after the other with the given weights (Gumbel's trick)."""
    return (-(log_weights + rng.gumbel(size=(rows, len(log_weights))))).argsort(axis=1)[:, :count]


@dataclass(frozen=True, kw_only=True)
class RecallTask(TaskPlan):
    """Train and test models on associative recall (MQAR): pairs of a key and a value, then the keys again.

    Begin with `titans evaluate mqar --models lmm attention sliding`. Sizes are LENGTH:PAIRS.
    """

    name: ClassVar[str] = "mqar"
    title: ClassVar[str] = "Associative recall (MQAR)"
    task: RecallSettings = field(
        default_factory=lambda: RecallSettings(symbols=256, answers=False, pairs=64, length=4096)
    )
    sizes: tuple[str, ...] = ("64:4", "128:8")
