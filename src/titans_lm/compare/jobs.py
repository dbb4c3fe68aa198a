"""Runs one after another or side by side, each in a folder of its own that says when it is done."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, TypeVar, runtime_checkable

from titans_lm.compare.settings import CompareSettings, trained_model, variant
from titans_lm.compare.spent import Clock, spent
from titans_lm.compare.task_settings import TaskSettings
from titans_lm.data.contents import check_contents, unnoted
from titans_lm.train.baselines import baseline_names
from titans_lm.train.files import write_json
from titans_lm.train.settings import ModelSettings
from titans_lm.train.trainer import Diverged

RESULT = "result.json"
CONTENTS, UNNOTED = "contents", "contents_unnoted"
"""Of what a run was asked for, the sums of its texts by path; and those of which it did not note them."""
TRIAL_SEED = 1_000
"""Seed of the trials: none of those that count."""
Result = dict[str, Any]
Say = Callable[[str], None]


@runtime_checkable
class Job(Protocol):
    """A run: where its result goes, what the result depends on, and how it is come by."""

    @property
    def name(self) -> str:
        """Name the contender."""
        ...

    @property
    def folder(self) -> Path:
        """Tell the folder of the run."""
        ...

    @property
    def rate(self) -> float:
        """Tell the learning rate."""
        ...

    @property
    def counts(self) -> bool:
        """Say whether it is no trial; one that diverges is a result as well."""
        ...

    def asked(self) -> Result:
        """Tell all that the result depends on, as JSON holds it."""
        ...

    def begun(self) -> Result | None:
        """Tell what a run in the folder that is not done was begun with, if it says so."""
        ...

    def train(self) -> Result:
        """Train, from where it stopped if it did, and test."""
        ...

    def told(self, result: Result) -> str:
        """Phrase what came out."""
        ...


Contest = CompareSettings | TaskSettings
"""Settings of a comparison, whatever is compared."""
Fit = TypeVar("Fit", bound=ModelSettings)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One run of a contender: a trial of a learning rate with fewer steps, or one that counts."""

    name: str
    folder: Path
    rate: float
    seed: int
    steps: int | None = None
    """Steps of a trial; None where it counts and has those of the settings."""

    def applied(self, base: Fit) -> Fit:
        """Give the settings of the run."""
        run = dataclasses.replace(base, lr=self.rate, seed=self.seed)
        if self.steps is None:
            return run
        warmup = min(base.warmup_steps, self.steps // 4)
        return dataclasses.replace(run, steps=self.steps, warmup_steps=warmup, eval_every=0)


def trial_attempts(contest: Contest) -> list[Attempt]:
    """List short runs, one for each contender and learning rate; none where there is no choice or no step."""
    if len(contest.rates) == 1 or not contest.train.steps:
        return []
    return [
        Attempt(
            name, contest.out / "trials" / f"{folder_name(name)}-{rate:g}", rate, TRIAL_SEED, contest.tune_steps
        )
        for name in contest.models
        for rate in contest.rates
    ]  # fmt: skip


def final_attempts(contest: Contest, rates: dict[str, float]) -> list[Attempt]:
    """List the runs that count, one for each contender and seed: seed by seed, so that all are as far as another."""
    return [
        Attempt(name, contest.out / "runs" / f"{folder_name(name)}-seed{seed}", rates[name], seed)
        for seed in contest.seeds
        for name in contest.models
    ]


def folder_name(name: str) -> str:
    """Name a folder by a contender; one that is a path gets letters of its own, as others may end alike."""
    trained = trained_model(name)
    if trained is not None:
        plain = re.sub(r"[^\w.,-]", "-", trained.name)
        return f"{plain}-{_path_sum(trained.path.resolve())}"
    named = variant(name)
    if named.changes:
        return re.sub(r"[^\w.=,-]", "-", name)
    if named.is_ours or name in baseline_names():
        return name
    path = Path(name).resolve()
    shown = path.parent.name if path.suffix else path.name
    return f"{shown}-{_path_sum(path)}"


def _path_sum(path: Path) -> str:
    return hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()


def work(jobs: Sequence[Job], at_once: int, say: Say) -> list[Result]:
    """Run all jobs and return their results in order; those that were done before are read."""
    return list(_one_by_one(jobs, say) if at_once == 1 else _side_by_side(jobs, at_once, say))


def _one_by_one(jobs: Sequence[Job], say: Say) -> Iterator[Result]:
    for job in jobs:
        yield _tell(job, run_job(job), say)


def _side_by_side(jobs: Sequence[Job], at_once: int, say: Say) -> Iterator[Result]:
    threads = max(1, (os.cpu_count() or 1) // at_once)
    with ProcessPoolExecutor(at_once, mp_context=get_context("spawn"), initializer=_begin, initargs=(threads,)) as pool:
        waiting = [pool.submit(_run_in_pool, job) for job in jobs]
        try:
            for job, future in zip(jobs, waiting, strict=True):
                yield _tell(job, future.result(), say)
        except ValueError as error:  # from another process: said as if it had been raised here
            raise ValueError(str(error)) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_STOPPED: list[bool] = []
"""Whether this process of a pool was asked to stop: it would be given the next job otherwise."""


def _run_in_pool(job: Job) -> Result:
    if _STOPPED:
        raise KeyboardInterrupt
    try:
        return run_job(job)
    except KeyboardInterrupt:
        _STOPPED.append(True)
        raise


def _begin(threads: int) -> None:
    """Prepare a process of a pool, which ends with the one that began it, however that ends."""
    import torch

    torch.set_num_threads(threads)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A process that was killed tells its pool nothing, and a pool that is told nothing waits for ever.
    above = parent_process()
    assert above is not None
    wait([above.sentinel])
    os._exit(1)


def _tell(job: Job, result: Result, say: Say) -> Result:
    if result.get("diverged"):
        say(f"{job.folder.name}: {result['diverged']}")
        return result
    unknown = result.get(UNNOTED)
    note = f"; begun by an earlier version, which did not note what {', '.join(unknown)} held" if unknown else ""
    say(f"{job.folder.name}: {job.told(result)}{note}")
    return result


def run_job(job: Job) -> Result:
    """Do a run, from where it stopped if it did; a trial that diverges says so, and that is all.

    Raises ValueError for a folder of other settings, or of texts that held something else; KeyboardInterrupt where it
    is stopped. A run of an earlier version that did not note what its texts held is taken by its settings alone, and
    the result says so.
    """
    done, asked = job.folder / RESULT, job.asked()
    if done.is_file():
        result = json.loads(done.read_bytes())
        return {**result, **_check_same(job, result["asked"], asked)}
    begun = job.begun()
    noted = {} if begun is None else _check_same(job, begun, asked)
    clock = Clock(getattr(job, "run", job.folder))  # the result of a trial may lie beside its run
    try:
        kept = job.train()
    except Diverged as error:
        if job.counts:
            raise
        kept = {"diverged": str(error)}
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command goes on") from None
    kept = {"name": job.name, "asked": asked, **kept, **noted, **clock.read()}
    write_json(done, kept)
    return kept


def _check_same(job: Job, before: Result, asked: Result) -> Result:
    """Refuse another run; give the paths of which it was not noted what they held, if any, as a part of a result."""
    now = json.loads(json.dumps(asked))
    parts = before, now
    by_path = isinstance(now.get(CONTENTS), dict)
    if by_path:
        parts = tuple({key: value for key, value in part.items() if key != CONTENTS} for part in parts)
    if parts[0] != parts[1]:
        other = "matched_by" in now and "matched_by" not in before
        which = "a size matched by the MLP's width alone (before D43)" if other else "other settings"
        raise ValueError(f"{job.folder} holds a run of {which}; give another --out, or those that it was begun with")
    if not by_path:
        return {}
    check_contents(job.folder, "a run", before.get(CONTENTS), now[CONTENTS])
    unknown = unnoted(before.get(CONTENTS), now[CONTENTS])
    return {UNNOTED: unknown} if unknown else {}


def tune(
    contest: Contest, trials: Sequence[Job], say: Say, key: str, *, most: bool = False
) -> tuple[dict[str, list[Result]], dict[str, float]]:
    """Run the trials; give what each learning rate came to by `key`, and every contender's best (the most, or least).

    Without trials there is one rate, and nothing to tell of it. A trial that diverged came to None.
    """
    tried: dict[str, list[Result]] = {}
    for job, result in zip(trials, work(trials, contest.jobs, say), strict=True):
        tried.setdefault(job.name, []).append({"rate": job.rate, key: result.get(key), **spent(result)})
    rates = dict.fromkeys(contest.models, contest.rates[0])
    rates |= {name: best_rate(name, found, key, most=most) for name, found in tried.items()}
    if contest.train.steps:
        say("learning rates: " + ", ".join(f"{name} {rate:g}" for name, rate in rates.items()))
    return tried, rates


def best_rate(name: str, tried: list[Result], key: str, *, most: bool = False) -> float:
    """Choose the learning rate with the least number, or the most; ValueError where none of them went well."""
    ended = [one for one in tried if one[key] is not None]
    if not ended:
        rates = ", ".join(f"{one['rate']:g}" for one in tried)
        raise ValueError(f"{name} diverged with every learning rate ({rates}); give lower --rates")
    return (max if most else min)(ended, key=lambda one: one[key])["rate"]
