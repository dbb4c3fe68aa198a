"""Batches of one synthetic task or of several, and what drawing them is made of."""

from collections.abc import Sequence

import numpy as np

from titans_lm.config import check_at_least
from titans_lm.data.batches import Batch
from titans_lm.data.tasks.task import Task


class TaskBatches:
    """Batches of a task, each a pure function of (seed, step).

    With several tasks every batch is of one of them, drawn with the given weights (equal ones where none are given).
    With `join_every` they are a curriculum: task i is drawn from step i × join_every on. With `batch_tokens` a task of
    long rows is drawn with fewer of them: as many as that many tokens hold, one at least.
    """

    def __init__(
        self,
        task: Task | Sequence[Task],
        *,
        batch_size: int,
        seed: int = 0,
        weights: Sequence[float] | None = None,
        join_every: int = 0,
        batch_tokens: int = 0,
    ) -> None:
        check_at_least("batch_size", batch_size, 1)
        check_at_least("batch_tokens", batch_tokens, 0)
        check_at_least("join_every", join_every, 0)
        self.tasks = list(task) if isinstance(task, Sequence) else [task]
        if not self.tasks or (weights is not None and len(weights) != len(self.tasks)):
            raise ValueError(
                f"got {len(self.tasks)} tasks and {len(weights or ())} weights; expected at least one task, and as "
                "many weights where they are given"
            )
        shares = np.ones(len(self.tasks)) if weights is None else np.asarray(weights, np.float64)
        if not (np.isfinite(shares).all() and (shares > 0).all()):
            raise ValueError(f"got weights={weights!r}; expected finite numbers above 0")
        self.shares, self.seed, self.join_every = shares / shares.sum(), seed, join_every
        held = [batch_tokens // max(1, task.length) if batch_tokens else batch_size for task in self.tasks]
        self.rows = [min(batch_size, max(1, rows)) for rows in held]
        told = " | ".join(map(str, self.tasks))
        self.fingerprint = f"{told} batch_size={batch_size} seed={seed}"
        if len(self.tasks) > 1:
            self.fingerprint += f" shares={self.shares.tolist()}"
        if join_every:
            self.fingerprint += f" join_every={join_every}"
        if batch_tokens:
            self.fingerprint += f" batch_tokens={batch_tokens}"

    def __call__(self, step: int) -> Batch:
        rng, which = self._choose(step)
        return self.tasks[which].draw(rng, self.rows[which])

    def tokens(self, steps: int) -> int:
        """Tokens of the first batches; a task without text has those of a row that is drawn."""
        rows = np.zeros(len(self.tasks), np.int64)
        for step in range(steps):
            which = self._choose(step)[1]
            rows[which] += self.rows[which]
        rng = np.random.default_rng(0)
        lengths = [task.length or task.draw(rng, 1)["input_ids"].shape[1] for task in self.tasks]
        return int(rows @ np.array(lengths))

    def _choose(self, step: int) -> tuple[np.random.Generator, int]:
        """The random numbers of a step, and its task."""
        rng = np.random.default_rng([self.seed, step])
        count = min(len(self.tasks), 1 + step // self.join_every) if self.join_every else len(self.tasks)
        shares = self.shares[:count] / self.shares[:count].sum()
        return rng, int(rng.choice(count, p=shares)) if len(self.tasks) > 1 else 0
