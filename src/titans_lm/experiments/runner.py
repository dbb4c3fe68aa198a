"""Runs of an experiment, each in a folder of its own that says when it is done; and the record that it writes.

Learning rates are chosen by short trials from a seed that does not count; then every model runs from every seed. A run
that is done is read and not repeated, and one that was stopped goes on.
"""

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from titans_lm.checks import is_mistake
from titans_lm.data.contents import check_contents
from titans_lm.experiments.models import folder_name
from titans_lm.experiments.settings import TRIAL_SEED, Experiment
from titans_lm.report.section import FORMAT, Result
from titans_lm.train.device import commit, hardware, usable_cores
from titans_lm.train.files import made, read_json, write_json
from titans_lm.train.options import plain_settings
from titans_lm.train.parallel import check_alone
from titans_lm.train.progress import Outlook
from titans_lm.train.run import COMMITS, UNKNOWN, begun_with, commits_of, seconds_of
from titans_lm.train.settings import FitSettings
from titans_lm.train.trainer import Diverged

WALL = "wall_seconds"


class Clock:
    """Times a run from here on, and what it had trained before it was stopped; `run` is its folder, if it has one."""

    def __init__(self, run: Path | None = None) -> None:
        self.run, self.before = run, 0.0 if run is None else seconds_of(run)
        self.commit, self.began = commit(), time.monotonic()

    def read(self) -> Result:
        """Give the seconds, training and testing together, and the commits from the first to that of now."""
        seconds = self.before + time.monotonic() - self.began
        known = [] if self.run is None else commits_of(self.run)
        return {WALL: seconds, COMMITS: once([*known, self.commit, commit()])}


def kept(result: Result, *names: str) -> Result:
    """Take parts out of a run's result, as far as it has them, and what it was made with."""
    return {name: result[name] for name in (*names, WALL, COMMITS) if name in result}


def total_provenance(parts: Iterable[Result]) -> Result:
    """Sum the wall seconds of runs, and name their commits where they are others than that of now."""
    parts = list(parts)
    commits = once(name for part in parts for name in part.get(COMMITS, [UNKNOWN]))
    total = {WALL: sum(part[WALL] for part in parts)}
    return total if commits == [commit()] else {**total, COMMITS: commits}


def once(names: Iterable[str]) -> list[str]:
    """Leave every name out that was there before."""
    return list(dict.fromkeys(names))


def write_record(
    path: Path | None, what: str, command: str, settings: Any, parts: Iterable[Result], **found: Any
) -> Result:
    """Give what an experiment found beside what it was made with, and write it; `parts` are the results of its runs."""
    record = {
        "format": FORMAT,
        "what": what,
        "command": command,
        "hardware": hardware(),
        **total_provenance(parts),
        "settings": plain_settings(settings),
        **found,
    }
    if path is not None:
        write_json(path, record)
    return record


def runs_of(models: Iterable[Result]) -> list[Result]:
    """List the trials and the runs of models, as `write_record` takes them."""
    return [part for one in models for part in [*one["tuning"], *one["runs"]]]


RESULT = "result.json"
SPEC, CONTENTS = "asked", "contents"
"""Of a result, what it depends on; and of that the sums of its texts by path."""
Say = Callable[[str], None]
Fit = TypeVar("Fit", bound=FitSettings)


@runtime_checkable
class Job(Protocol):
    """A run: where its result goes, what the result depends on, and how it is come by.

    Its `run` is the folder that it runs in, where that is another; `saved_spec()` is what the settings there say of it.
    """

    name: str
    """The model."""
    folder: Path
    """Where the result goes."""
    rate: float
    counts: bool
    """Whether it is no trial; one that diverges is a result as well."""
    work: int
    """What it takes beside others of its kind: its steps, or 1; 0 is next to nothing."""

    def spec(self) -> Result:
        """Give all that the result depends on, as JSON holds it."""

    def train(self, outlook: Outlook | None = None) -> Result:
        """Train, from where it stopped if it did, and test; `outlook` says how long all takes."""

    def describe(self, result: Result) -> str:
        """Phrase what came out."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a model: a trial of a learning rate with fewer steps, or one that counts."""

    name: str
    folder: Path
    rate: float
    seed: int
    steps: int | None
    """Steps of a trial; None where it counts and has those of the settings."""

    @property
    def counts(self) -> bool:
        return self.steps is None

    def fit(self, base: Fit) -> Fit:
        """Give the settings of the run, from those of its model."""
        run = dataclasses.replace(base, lr=self.rate, seed=self.seed)
        return run if self.steps is None else shorter(run, self.steps, eval_every=0)


def shorter(base: Fit, steps: int, **changes: Any) -> Fit:
    """Give the settings of a trial of so many steps, a quarter of which is warm-up at most."""
    return dataclasses.replace(base, steps=steps, warmup_steps=min(base.warmup_steps, steps // 4), **changes)


def lr_trials(experiment: Experiment) -> list[Run]:
    """List short runs, one for each model and learning rate; none where there is no choice or no step."""
    if len(experiment.rates) == 1 or not experiment.train.steps:
        return []
    folder, steps = experiment.out / "trials", experiment.tune_steps
    return [
        Run(name, folder / f"{folder_name(name)}-{rate:.15g}", rate, TRIAL_SEED, steps)
        for name in experiment.models
        for rate in experiment.rates
    ]


def final_runs(experiment: Experiment, rates: dict[str, float]) -> list[Run]:
    """List the runs that count, one for each model and seed: seed by seed, so that all are as far as another."""
    return [
        Run(name, experiment.out / "runs" / f"{folder_name(name)}-seed{seed}", rates[name], seed, None)
        for seed in experiment.seeds
        for name in experiment.models
    ]


def run_experiment(
    experiment: Experiment, job_of: Callable[[Run], Job], say: Say, key: str, *, most: bool = False
) -> tuple[dict[str, float], dict[str, list[Result]], dict[str, list[Result]]]:
    """Run the trials, choose every model's learning rate by `key` (the least, or the most), and run what counts.

    Gives learning rates, trials and results by model.
    """
    with made(experiment.out):
        jobs = [job_of(run) for run in lr_trials(experiment)]
        at_rates = (final_runs(experiment, dict.fromkeys(experiment.models, rate)) for rate in experiment.rates)
        for run in (*zip(jobs), *zip(*(map(job_of, runs) for runs in at_rates), strict=True)):
            check_begun(run)
        runs = len(experiment.models) * len(experiment.seeds)
        outlook = Outlook("fewer --steps, --models or --seeds", say=say, later=runs * experiment.train.steps)
        trials, best = try_rates(jobs, experiment.jobs, say, key, outlook, most=most)
        outlook.later = 0.0
        rates = dict.fromkeys(experiment.models, experiment.rates[0]) | best
        if experiment.train.steps:
            say("learning rates: " + ", ".join(f"{name} {rate:g}" for name, rate in rates.items()))
        results = run_jobs([job_of(run) for run in final_runs(experiment, rates)], experiment.jobs, say, outlook)
    by_model = {name: [result for result in results if result["name"] == name] for name in experiment.models}
    return rates, {name: trials.get(name, []) for name in experiment.models}, by_model


def try_rates(
    jobs: Sequence[Job], at_once: int, say: Say, key: str, outlook: Outlook, *, most: bool = False
) -> tuple[dict[str, list[Result]], dict[str, float]]:
    """Run trials; give what each learning rate came to by `key`, and the best one, by the trials' model or `place`.

    A trial that diverged came to None. ValueError where all of a model or place did.
    """
    trials: dict[str, list[Result]] = {}
    for job, result in zip(jobs, run_jobs(jobs, at_once, say, outlook), strict=True):
        found = {"rate": job.rate, key: result.get(key), **kept(result)}
        trials.setdefault(getattr(job, "place", job.name), []).append(found)
    return trials, {place: best_rate(place, found, key, most=most) for place, found in trials.items()}


def best_rate(name: str, trials: Iterable[Result], key: str, *, most: bool = False) -> float:
    """Choose the learning rate with the least number, or the most; ValueError where none of them went well."""
    trials = list(trials)
    ended = [trial for trial in trials if trial[key] is not None and np.isfinite(trial[key]).all()]
    if not ended:
        rates = ", ".join(f"{trial['rate']:g}" for trial in trials)
        raise ValueError(f"{name} diverged with every learning rate ({rates}); give lower --rates")
    return (max if most else min)(ended, key=lambda trial: trial[key])["rate"]


def run_jobs(jobs: Sequence[Job], at_once: int, say: Say, outlook: Outlook | None = None) -> list[Result]:
    """Run all jobs and return their results in order; those that were done before are read.

    ValueError under torchrun: every process would write the same folders.
    """
    check_alone()
    outlook = outlook or Outlook("")
    ahead = [0 if (job.folder / RESULT).is_file() else job.work for job in jobs]
    running = _in_turn(jobs, ahead, outlook) if at_once == 1 else _side_by_side(jobs, at_once)
    results = []
    for place, (job, result) in enumerate(zip(jobs, running, strict=True)):
        say(f"{job.folder.name}: {result.get('diverged') or job.describe(result)}")
        if ahead[place]:
            outlook.ended(result[WALL], ahead[place:], at_once)
        results.append(result)
    return results


def _in_turn(jobs: Sequence[Job], ahead: Sequence[int], outlook: Outlook) -> Iterator[Result]:
    for place, job in enumerate(jobs):
        outlook.begin(ahead[place:])
        yield run_job(job, outlook)


def _side_by_side(jobs: Sequence[Job], at_once: int) -> Iterator[Result]:
    threads = max(1, usable_cores() // at_once)
    with ProcessPoolExecutor(at_once, mp_context=get_context("spawn"), initializer=_begin, initargs=(threads,)) as pool:
        waiting = [pool.submit(_run_in_pool, job) for job in jobs]
        try:
            for future in waiting:
                yield future.result()
        except Mistake as error:  # from another process: said as if it had been raised here
            raise ValueError(str(error)) from error
        except BrokenProcessPool as error:
            raise ValueError(
                "got an end of a process of --jobs, perhaps as memory ran out; expected fewer at once: with a smaller "
                "--jobs the same command goes on"
            ) from error
        except KeyboardInterrupt:
            raise KeyboardInterrupt("stopped; the same command goes on") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_STOPPED: list[bool] = []
"""Whether this process of a pool was asked to stop: it would be given the next job otherwise."""


class Mistake(Exception):
    """A user's mistake in a process of a pool: it is told apart there, where its frames are."""


def _run_in_pool(job: Job) -> Result:
    if _STOPPED:
        raise KeyboardInterrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run_job(job)
    except ValueError as error:
        raise (Mistake(str(error)) if is_mistake(error) else RuntimeError(repr(error))) from error
    except KeyboardInterrupt:
        _STOPPED.append(True)
        raise
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _begin(threads: int) -> None:
    """Prepare a process of a pool, which ends with the one that began it, however that ends."""
    import torch

    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that waits for a job would end of it, and the pool with it
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # A process that was killed tells its pool nothing, and a pool that is told nothing waits for ever.
    above = parent_process()
    assert above is not None
    wait([above.sentinel])
    os._exit(1)


def run_job(job: Job, outlook: Outlook | None = None) -> Result:
    """Do a run, from where it stopped if it did; a trial that diverges says so, and that is all.

    Raises ValueError for a folder of other settings, or of texts that held something else; KeyboardInterrupt where it
    is stopped.
    """
    check_begun([job])
    done = job.folder / RESULT
    if done.is_file():
        return read_json(done)
    spec = job.spec()
    clock = Clock(getattr(job, "run", job.folder))  # the result of a trial may lie beside its run
    try:
        found = job.train(outlook)
    except Diverged as error:
        if job.counts:
            raise
        found = {"diverged": str(error)}
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command goes on") from None
    result = {"name": job.name, SPEC: spec, **found, **clock.read()}
    write_json(done, result)
    return result


def check_begun(ways: Sequence[Job]) -> None:
    """Refuse a folder that holds another run than this one in one of several ways, such as learning rates."""
    done = ways[0].folder / RESULT
    saved = getattr(ways[0], "saved_spec", lambda: begun_with(getattr(ways[0], "run", ways[0].folder)))
    before = read_json(done)[SPEC] if done.is_file() else saved()
    if before is None:
        return
    held, noted = _apart(before)
    for job in ways:
        asked, sums = _apart(job.spec())
        if asked == held:
            return check_contents(job.folder, "a run", noted, sums)
    raise ValueError(
        f"{ways[0].folder} holds a run of other settings; give another --out, or those that it was begun with"
    )


def _apart(spec: Result) -> tuple[Result, dict[str, str]]:
    """Give all that a spec says besides the sums of texts, and these."""
    plain = json.loads(json.dumps(spec))
    sums = plain.pop(CONTENTS, None)
    return plain, sums or {}
