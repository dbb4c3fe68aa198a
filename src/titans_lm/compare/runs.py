"""The runs of a comparison, each in a folder of its own that says when it is done."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from titans_lm.compare.score import score_run
from titans_lm.compare.settings import CompareSettings, variant
from titans_lm.train.baselines import baseline_names
from titans_lm.train.files import write_json
from titans_lm.train.run import SETTINGS
from titans_lm.train.settings import LanguageSettings, plain_settings
from titans_lm.train.trainer import Diverged

RESULT = "result.json"
TRIAL_SEED = 1_000
"""Seed of the trials: none of those that count."""
Result = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """A run to train, and the text to score it on, if any."""

    name: str
    settings: LanguageSettings
    test: Path | None = None
    positions: int = 0
    test_bytes: int = 0

    @property
    def folder(self) -> Path:
        assert self.settings.run is not None
        return self.settings.run

    def asked(self) -> Result:
        """What the result depends on."""
        told = plain_settings(self)
        return {**told, "settings": _without_run(told["settings"])}


def _without_run(settings: Result) -> Result:
    return {name: value for name, value in settings.items() if name != "run"}


def contender(settings: CompareSettings, name: str, parameters: int) -> LanguageSettings:
    """Give the settings of one contender, without seed and learning rate.

    Ours without a memory get the short convolution that the memory has, on the q, k and v of their attention, so that
    it is no advantage of the memory's.
    """
    shared, named = dataclasses.replace(settings.train, data=settings.data, parameters=parameters), variant(name)
    if not named.is_ours:
        return dataclasses.replace(shared, baseline=name)
    model = dataclasses.replace(shared.model, architecture=named.base)
    if not model.has_memory:
        model = dataclasses.replace(model, attention_conv_size=model.conv_size)
    return named.changed(dataclasses.replace(shared, model=model, baseline=None))


def trials(settings: CompareSettings, parameters: int) -> list[Job]:
    """List short runs, one for each contender and learning rate; none where there is no choice."""
    jobs: list[Job] = []
    if len(settings.rates) == 1:
        return jobs
    for name in settings.models:
        base = contender(settings, name, parameters)
        warmup = min(base.warmup_steps, settings.tune_steps // 4)
        for rate in settings.rates:
            run = settings.out / "trials" / f"{folder_name(name)}-{rate:g}"
            trial = dataclasses.replace(
                base, run=run, lr=rate, steps=settings.tune_steps, warmup_steps=warmup, seed=TRIAL_SEED
            )
            jobs.append(Job(name, trial))
    return jobs


def finals(settings: CompareSettings, parameters: int, rates: dict[str, float]) -> list[Job]:
    """List the runs that count, one for each contender and seed: seed by seed, so that all are as far as another."""
    return [
        Job(
            name,
            dataclasses.replace(
                contender(settings, name, parameters),
                run=settings.out / "runs" / f"{folder_name(name)}-seed{seed}",
                lr=rates[name],
                seed=seed,
            ),
            settings.test,
            settings.positions,
            settings.test_bytes,
        )
        for seed in settings.seeds
        for name in settings.models
    ]


def folder_name(name: str) -> str:
    """Name a folder by a contender; one that is a path gets letters of its own, as others may end alike."""
    named = variant(name)
    if named.changes:
        return re.sub(r"[^\w.=,-]", "-", name)
    if named.is_ours or name in baseline_names():
        return name
    path = Path(name).resolve()
    shown = path.parent.name if path.suffix else path.name
    return f"{shown}-{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"


def work(jobs: list[Job], at_once: int, say: Say) -> list[Result]:
    """Run all jobs and return their results in order; those that were done before are read."""
    return list(_one_by_one(jobs, say) if at_once == 1 else _side_by_side(jobs, at_once, say))


def _one_by_one(jobs: list[Job], say: Say) -> Iterator[Result]:
    for job in jobs:
        yield _tell(job, run_job(job), say)


def _side_by_side(jobs: list[Job], at_once: int, say: Say) -> Iterator[Result]:
    threads = max(1, (os.cpu_count() or 1) // at_once)
    with ProcessPoolExecutor(
        at_once, mp_context=get_context("spawn"), initializer=_use_threads, initargs=(threads,)
    ) as pool:
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


def _use_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _tell(job: Job, result: Result, say: Say) -> Result:
    if result.get("diverged"):
        say(f"{job.folder.name}: {result['diverged']}")
        return result
    bits = result.get("test", {}).get("bits_per_byte")
    tested = "" if bits is None else f", {bits:.4f} on the test"
    say(
        f"{job.folder.name}: {result['held_out_bits_per_byte']:.4f} bits per byte held out{tested}; "
        f"{result['parameters']:,} parameters, {result['seconds'] / 60:.1f} minutes"
    )
    return result


def run_job(job: Job) -> Result:
    """Train a run, from where it stopped if it did, and score it; a trial that diverges says so, and that is all.

    Raises ValueError for a folder of other settings; KeyboardInterrupt where it is stopped.
    """
    done, begun, asked = job.folder / RESULT, job.folder / SETTINGS, job.asked()
    if done.is_file():
        result = json.loads(done.read_bytes())
        _check_same(job, result["asked"], asked)
        return result
    if begun.is_file():
        _check_same(job, _without_run(json.loads(begun.read_bytes())), asked["settings"])
    try:
        kept = _trained(job, resume=begun.is_file())
    except Diverged as error:
        if job.test is not None:
            raise
        kept = {"diverged": str(error)}
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command goes on") from None
    kept = {"name": job.name, "asked": asked, **kept}
    write_json(done, kept)
    return kept


def _check_same(job: Job, before: Result, asked: Result) -> None:
    if before != json.loads(json.dumps(asked)):
        raise ValueError(
            f"{job.folder} holds a run of other settings; give another --out, or those that it was begun with"
        )


def _trained(job: Job, *, resume: bool) -> Result:
    from titans_lm.train.language import train_language_model

    result = train_language_model(job.settings, resume=resume)
    kept = {name: value for name, value in result.items() if name not in ("run", "model", "settings")}
    if job.test is not None:
        sizes = {"positions": job.positions, "most_bytes": job.test_bytes}
        kept["test"] = score_run(job.folder, job.test, device=job.settings.device, **sizes)
    return kept
