"""Two processes train what one trains; killed and taken up again, by as many or by fewer, they lose nothing."""

import json
import multiprocessing.connection
import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from cli_cases import environment
from forks import forks
from prepare.prepare_cases import prepared, write_texts
from titans_lm.train.loop import StopRequest
from train.several import forked

SCRIPT = Path(__file__).parent / "several.py"
STEPS = 12
DEFAULT = {"model": "mac", "rows": "packed", "settings": {"steps": STEPS}}


class Ended(NamedTuple):
    failed: bool
    said: str


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("several")
    write_texts(path / "texts", 60)
    prepared(path / "texts", path / "out")
    return path / "out"


@pytest.fixture(scope="module")
def one(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """What one process does, without torchrun."""
    return trained(data, tmp_path_factory.mktemp("one") / "run")


def train(data: Path, run: Path, processes: int = 1, **case: Any) -> Ended:
    """Run a case by processes that are forked from one that has loaded the libraries: loading takes most of the time.

    Where one dies the others are killed, as torchrun does.
    """
    server, logs = forks(), [run.with_name(f"{run.name}-{rank}.log") for rank in range(processes)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {**DEFAULT, "data": str(data), "run": str(run), **case}
    started = [
        server.Process(target=forked, args=(given, rank, processes, port, str(log))) for rank, log in enumerate(logs)
    ]
    for process in started:
        process.start()
    left = set(started)
    while left:
        over = multiprocessing.connection.wait([process.sentinel for process in left], timeout=300)
        done = {process for process in left if process.sentinel in over}
        for process in done:
            process.join()
        left -= done
        if not done or any(process.exitcode for process in done):
            for process in left:
                process.kill()
    return Ended(any(process.exitcode for process in started), "".join(log.read_text() for log in logs))


def torchrun(data: Path, run: Path, processes: int, **case: Any) -> Ended:
    """Run a case as anybody would."""
    given = {**DEFAULT, "data": str(data), "run": str(run), **case}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launcher, str(SCRIPT), json.dumps(given)]
    variables = {**environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    return Ended(done.returncode != 0, done.stderr)


def trained(data: Path, run: Path, processes: int = 1, **case: Any) -> list[dict[str, float]]:
    done = train(data, run, processes, **case)
    assert not done.failed, done.said[-3000:]
    return records(run)


def records(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(found: list[dict[str, float]]) -> list[float]:
    return [record["loss"] for record in found]


CASES = [
    ("mac", "packed", "fsdp"),
    ("lmm", "documents", "ddp"),
    ("mag", "lanes", "ddp"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "rows", "parallel"), CASES)
def test_two_processes_give_the_curve_of_one(data: Path, tmp_path: Path, model: str, rows: str, parallel: str) -> None:
    """The same batches in all; rows of documents are padded, so the halves of a batch differ in what they count."""
    case = {"model": model, "rows": rows}
    settings = {"steps": STEPS, "parallel": parallel, "accumulate": 2 if model == "mac" else 1}
    one = trained(data, tmp_path / "one", 1, settings=settings, **case)
    two = trained(data, tmp_path / "two", 2, settings=settings, **case)
    assert len(one) == len(two) == STEPS
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert [r["grad_norm"] for r in two] == pytest.approx([r["grad_norm"] for r in one], rel=1e-4)
    assert [r["tokens"] for r in two] == [r["tokens"] for r in one]
    for kept in ("model", "checkpoints/step-000009"):
        models = [AutoModelForCausalLM.from_pretrained(tmp_path / name / kept) for name in ("one", "two")]
        for (name, a), (_, b) in zip(*(m.state_dict().items() for m in models), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
def test_parameters_that_a_short_text_does_not_use_stop_nobody(data: Path, tmp_path: Path) -> None:
    """Memory caching weighs segments, of which a row of 16 tokens has one."""
    more = {"model": "lmm", "memory": {"memory_caching": "grm"}, "settings": {"steps": 3}}
    one, two = (trained(data, tmp_path / str(n), n, **more) for n in (1, 2))
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_process_is_killed_and_the_run_goes_on_bit_for_bit(data: Path, tmp_path: Path, parallel: str) -> None:
    """With dropout, and with batches made by processes beside.

    One makes the batches of the run that is killed, two those of the whole one: each loads the libraries.
    """
    settings = {"steps": STEPS, "parallel": parallel, "workers": 1}
    case = {"model": "llama", "settings": settings}
    start = torchrun if parallel == "ddp" else train
    whole = trained(data, tmp_path / "whole", 2, model="llama", settings={**settings, "workers": 2})
    rng = random.Random(parallel)
    killed = start(
        data, tmp_path / "run", 2, kill={"step": rng.randint(4, STEPS - 1), "rank": rng.randint(0, 1)}, **case
    )
    assert killed.failed
    again = trained(data, tmp_path / "run", 2, **case)
    assert losses(again) == losses(whole)
    assert [record["step"] for record in again] == list(range(1, STEPS + 1))


CHANGES = [
    ((2, "fsdp"), (1, "auto")),
    ((1, "auto"), (2, "fsdp")),
    ((2, "ddp"), (1, "auto")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_another_number_of_processes_goes_on(
    data: Path, one: list[dict[str, float]], tmp_path: Path, first: tuple, second: tuple
) -> None:
    train(
        data, tmp_path / "run", first[0], settings={"steps": STEPS, "parallel": first[1]}, kill={"step": 8, "rank": 0}
    )
    assert (tmp_path / "run" / "checkpoints" / "step-000006").is_dir()
    again = trained(data, tmp_path / "run", second[0], settings={"steps": STEPS, "parallel": second[1]})
    assert losses(again) == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.slow
def test_killed_five_times_in_a_row_it_reads_every_row_once(data: Path, tmp_path: Path) -> None:
    """Killed at random, mostly between two checkpoints, a run ends as one that was never killed."""
    settings = {"steps": 18}
    whole = trained(data, tmp_path / "whole", 2, settings=settings)
    rng, saved = random.Random(1), 0
    for _ in range(5):
        kill = {"step": rng.randint(saved + 1, saved + 4), "rank": rng.randint(0, 1)}
        assert train(data, tmp_path / "run", 2, settings=settings, kill=kill).failed
        checkpoints = tmp_path / "run" / "checkpoints"
        saved = max((int(path.name[5:]) for path in checkpoints.glob("step-*")), default=0)
    assert 0 < saved < 18
    again = trained(data, tmp_path / "run", 2, settings=settings)
    assert losses(again) == losses(whole)
    assert [record["step"] for record in again] == list(range(1, 19))
    rows = [row for record in again for row in record["rows"]]
    assert rows == [row for record in whole for row in record["rows"]]
    assert len(rows) == 4 * 18 == len(set(rows)), "no row of the text is lost or read twice"


@pytest.mark.parametrize("by", ["torchrun", "a person"])
def test_one_wish_to_stop_may_come_twice(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """torchrun passes on the SIGTERM that a scheduler sends to all processes of a job, its workers among them."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7") if by == "torchrun" else monkeypatch.delenv(
        "TORCHELASTIC_RUN_ID", raising=False
    )
    with StopRequest() as stop, nullcontext() if by == "torchrun" else pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop
