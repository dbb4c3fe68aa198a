"""What a synthetic task is. Settings of tasks load nothing heavy: a command line lists them before anything runs."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from titans_lm.data.batches import Batch


@runtime_checkable
class Task(Protocol):
    """Settings of a task, which can draw rows of it.

    A drawn batch has `input_ids` and `targets` (IGNORED where nothing is asked) and may have `answers`: for every
    target the number of the answer in its row that it is a part of. An answer is right where all of its parts are;
    without `answers` every target is an answer of its own.
    """

    @property
    def vocab_size(self) -> int:
        """Ids that rows are made of."""
        ...

    @property
    def length(self) -> int:
        """Tokens of a row."""
        ...

    @property
    def chance(self) -> float:
        """Share of answers that are right as a whole without knowing anything but the task.

        Where an answer has several targets that can be guessed one by one, `token_chance` is their share, if the task
        has it.
        """
        ...

    def draw(self, rng: "np.random.Generator", rows: int) -> "Batch":
        """Draw rows."""
        ...
