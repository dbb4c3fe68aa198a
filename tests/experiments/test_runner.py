"""Processes side by side, and what results were made with."""

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from titans_lm.checks import check_at_least
from titans_lm.experiments import runner
from titans_lm.experiments.runner import (
    CONTENTS,
    RESULT,
    _run_in_pool,
    best_rate,
    check_begun,
    kept,
    run_job,
    run_jobs,
    shorter,
    total_provenance,
)
from titans_lm.report.section import commits
from titans_lm.train.progress import Outlook
from titans_lm.train.run import RunFolder, begun_with, commits_of, seconds_of
from titans_lm.train.settings import FitSettings
from titans_lm.train.trainer import Diverged

fcntl = pytest.importorskip("fcntl", reason="locks of POSIX")
PARENT = """
import fcntl, time
from dataclasses import dataclass
from pathlib import Path

from titans_lm.experiments.runner import run_jobs


@dataclass(frozen=True)
class Endless:
    folder: Path
    name: str = "endless"
    rate: float = 0.0
    counts: bool = True
    work: int = 1

    def spec(self):
        return {}

    def train(self, outlook=None):
        with (self.folder / "held").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            (self.folder / "begun").touch()
            time.sleep(600)

    def describe(self, result):
        return ""


if __name__ == "__main__":
    here = Path(__file__).parent
    run_jobs([Endless(here / name) for name in ("first", "second")], 2, print)
"""


def let_go(path: Path) -> bool:
    """Whether no process holds the lock of a file."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def wait_for(what, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)


def test_runs_side_by_side_end_with_the_command_that_was_killed(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "parent.py").write_text(PARENT)
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py"])
    try:
        wait_for(lambda: all((folder / "begun").exists() for folder in folders))
        assert not any(let_go(folder / "held") for folder in folders)
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: all(let_go(folder / "held") for folder in folders), 60.0)


@dataclass(frozen=True)
class Training:
    """A run of three logged steps that are said to have taken 100 seconds each; told so, it is stopped after one."""

    folder: Path
    stop: bool = False
    diverges: bool = False
    name: str = "slow"
    rate: float = 0.0
    counts: bool = False
    work: int = 1

    def spec(self) -> dict:
        return {"name": self.name}

    def train(self, outlook=None) -> dict:
        run = RunFolder.open(self.folder) if begun_with(self.folder) else RunFolder.create(self.folder, self.spec())
        run.note_settings()  # as `fit` does
        for step in range(len(run.metrics.read()) + 1, 4):
            run.metrics.append({"step": step, "seconds": 100.0 * step})
            if self.stop:
                raise KeyboardInterrupt
        if self.diverges:
            raise Diverged("the loss is no number")
        time.sleep(0.05)
        return {"seconds": 300.0}

    def describe(self, result: dict) -> str:
        return ""


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the sources be at the commit that stands first in this list."""
    names = ["aaa"]
    for place in ("titans_lm.experiments.runner", "titans_lm.train.run"):
        monkeypatch.setattr(f"{place}.commit", lambda: names[0])
    return names


def test_a_result_says_how_long_it_took_and_at_which_commit(tmp_path: Path, at: list[str]) -> None:
    result = run_job(Training(tmp_path))
    assert result["commits"] == ["aaa"]
    assert 0.05 <= result["wall_seconds"] < 50.0, "the time that went by, and not what training says of itself"
    at[0] = "bbb"
    assert run_job(Training(tmp_path)) == result == json.loads((tmp_path / RESULT).read_text()), "it was made then"
    assert run_job(Training(tmp_path / "bad", diverges=True))["commits"] == ["bbb"], "one that diverged says it too"


def test_a_run_that_was_stopped_names_the_commits_of_its_parts(tmp_path: Path, at: list[str]) -> None:
    """And counts what it had trained before."""
    with pytest.raises(KeyboardInterrupt):
        run_job(Training(tmp_path, stop=True))
    assert (commits_of(tmp_path), seconds_of(tmp_path)) == (["aaa"], 100.0)
    at[0] = "bbb"
    result = run_job(Training(tmp_path))
    assert result["commits"] == commits_of(tmp_path) == ["aaa", "bbb"]
    assert 100.05 <= result["wall_seconds"] < 150.0
    assert (commits_of(tmp_path / "nothing"), seconds_of(tmp_path / "nothing")) == ([], 0.0)


def test_the_time_that_is_left_is_told_by_jobs_that_were_not_done_before(tmp_path: Path, at: list[str]) -> None:
    run_job(Training(tmp_path / "done"))
    with pytest.raises(KeyboardInterrupt):
        run_job(Training(tmp_path / "stopped", stop=True))
    jobs = [Training(tmp_path / name, work=work) for name, work in (("done", 1), ("stopped", 1), ("new", 3))]
    said: list[str] = []
    run_jobs(jobs, 1, str, Outlook("fewer --seeds", say=said.append))
    assert said == ["about 5 minutes of training to go here; for a look: fewer --seeds"]


def test_what_results_are_made_of_is_summed_up(at: list[str]) -> None:
    new = {"wall_seconds": 2.0, "commits": ["aaa"], "loss": 1.0}
    assert kept(new) == {"wall_seconds": 2.0, "commits": ["aaa"]}
    assert total_provenance([new, new]) == {"wall_seconds": 4.0}, "all at the commit that hardware names"
    parts = [new, {"wall_seconds": 3.0, "commits": ["bbb", "aaa"]}, {"wall_seconds": 5.0}]
    assert total_provenance(parts) == {"wall_seconds": 10.0, "commits": ["aaa", "bbb", "unknown"]}
    at[0] = "ccc"
    assert total_provenance([new]) == {"wall_seconds": 2.0, "commits": ["aaa"]}, "put together at another commit"


def test_the_page_names_all_commits() -> None:
    assert commits({}, {"commit": "aaa"}) == commits({"commits": None}, {"commit": "aaa"}) == "commit aaa"
    assert commits({"commits": ["aaa", "bbb+"]}, {"commit": "ccc"}) == "commits aaa, bbb+"


def test_a_short_trial_warms_up_for_a_quarter_of_its_steps_at_most() -> None:
    base = FitSettings(steps=1000, warmup_steps=50)
    assert [shorter(base, steps).warmup_steps for steps in (8, 400)] == [2, 50]


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_a_trial_that_diverged_is_not_chosen(bad: float | None) -> None:
    trials = [{"rate": 0.1, "bits": bad}, {"rate": 0.2, "bits": 2.0}, {"rate": 0.3, "bits": bad}]
    assert best_rate("lmm", trials, "bits") == best_rate("lmm", trials, "bits", most=True) == 0.2
    with pytest.raises(ValueError, match="lmm diverged with every learning rate"):
        best_rate("lmm", trials[:1], "bits")


def test_what_changed_since_a_run_was_begun_is_named_whatever_its_rate(tmp_path: Path) -> None:
    class Way:
        name, folder, rate, counts, work, train, describe = "lmm", tmp_path, 0.0, True, 1, str, str

        def __init__(self, lr: float, text: str) -> None:
            self.asked: Any = {"lr": lr, CONTENTS: {"text": text}}

        def spec(self) -> Any:
            return self.asked

        def saved_spec(self) -> Any:
            return {"lr": 0.1, CONTENTS: {"text": "before"}}

    for rates in ((0.1, 0.2), (0.2, 0.1)):
        with pytest.raises(ValueError, match="was begun when text held something else"):
            check_begun([Way(lr, "after") for lr in rates])
        check_begun([Way(lr, "before") for lr in rates])
    with pytest.raises(ValueError, match="holds a run of other settings"):
        check_begun([Way(0.2, "before"), Way(0.3, "before")])


def test_a_process_of_a_pool_hears_ctrl_c_in_its_jobs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for a job would end of it, and its pool would end the others in the middle of a step."""
    heard = []
    monkeypatch.setattr(runner, "run_job", lambda job: heard.append(signal.getsignal(signal.SIGINT)) or {})
    before = signal.getsignal(signal.SIGINT)
    try:
        _run_in_pool(Training(Path()))
        heard.append(signal.getsignal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.default_int_handler, signal.SIG_IGN]


@pytest.mark.parametrize(
    ("fails", "kind", "message"),
    [
        (lambda _: check_at_least("steps", 0, 1), ValueError, r"^got steps=0; expected"),
        (lambda _: int("x"), RuntimeError, "invalid literal"),
        (KeyboardInterrupt, KeyboardInterrupt, "^stopped; the same command goes on$"),
        (BrokenProcessPool, ValueError, r"^got an end of a process of --jobs.*with a smaller --jobs"),
    ],
)
def test_what_happens_in_a_pool_is_told_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: Any, kind: type[BaseException], message: str
) -> None:
    """A user's mistake as one, and a bug, which is one in one process too, as a bug."""

    class Pool(ThreadPoolExecutor):
        def __init__(self, at_once: int, **_: Any) -> None:
            super().__init__(at_once)

    def run(job: Any) -> Any:
        found = fails(job)
        raise found if isinstance(found, BaseException) else AssertionError

    monkeypatch.setattr(runner, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(runner.signal, "signal", lambda *_: None)
    monkeypatch.setattr(runner, "_STOPPED", [])
    monkeypatch.setattr(runner, "run_job", run)
    with pytest.raises(kind, match=message):
        run_jobs([Training(tmp_path)], 2, print)


def test_several_processes_of_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"got WORLD_SIZE=2, several processes; expected one: models of sequences"):
        run_jobs([], 1, print)
