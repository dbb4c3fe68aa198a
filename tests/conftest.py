"""What every test stands on: one thread, no network, no screen, a fixed seed, and shapes checked."""

import functools
import gc
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jaxtyping
import pytest
import torch

import typecheck

ROOT = Path(__file__).resolve().parent.parent

gc.disable()  # until everything is imported, which is nothing to collect and a fifth of the time that it takes

# Before anything imports huggingface_hub or matplotlib, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Containers often keep no bytecode: every process that a test starts would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if not torch.cuda.is_available():  # kernels run in Triton's interpreter: to be said before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)
# A killed process loses nothing that it has written; what a machine loses that goes down, no test can see. One test of
# forecasts waited for the disk 2,125 times.
os.fsync = lambda handle: None

# Every annotated function of the package checks its tensors' shapes (typecheck.py). torch.compile cannot
# trace through that: a test that compiles starts a process of its own, where nothing is checked.
# TITANS_TYPECHECK=0 runs the whole suite as users run the package.
if os.environ.get("TITANS_TYPECHECK", "1") != "0":
    HOOK = typecheck.install("titans_lm")
    EVERYTHING = HOOK.should_instrument
    # A kernel is compiled from its own source: nothing may stand around it.
    HOOK.should_instrument = lambda name: EVERYTHING(name) and not name.startswith("titans_lm.ops.triton.kernels")
import transformers  # noqa: E402, F401  its log writes to the stderr of its first import, which must outlive a test

from titans_lm.train import device  # noqa: E402

# Every run says several times at which commit it ran, and git is three processes: it is asked once. A test of its own
# asks again.
device.commit = functools.cache(device.commit)

# The same examples on every machine and in every run; no deadline, since machines differ.
hypothesis.settings.register_profile("titans", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("titans")


# What says something on a GPU only is collected where there is one.
collect_ignore = [] if torch.cuda.is_available() else ["ops/test_triton_gpu.py"]


# Nothing shares a fixture with these: begun last, a test of half a minute would keep one process while others idle.
LONGEST = ("test_compiled.py", "test_stability.py")


def pytest_collection_finish() -> None:
    """What has been imported stays: the garbage collector need not look at it again and again, nor as often."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # many small tensors come and go, and hypothesis is told of every look


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        if "data_dir" in getattr(item, "fixturenames", ()):
            item.add_marker("data")


@pytest.fixture(autouse=True)
def seed() -> None:
    """Draw the same numbers in every test, whichever tests ran before it."""
    typecheck.begin_test()
    random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # the same for a CPU; torch.manual_seed would also note down where each kind of absent device was seeded
        torch.default_generator.manual_seed(0)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Call the package as its users do, without shape checks: for tests of its own answers to wrong input."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("there is no Chromium here (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The project's real data, which is measured with and never shipped: TITANS_DATA, or ../shared/data."""
    path = Path(os.environ.get("TITANS_DATA") or ROOT.parent / "shared" / "data")
    if not path.is_dir():
        pytest.skip(f"the project's real data is not at {path} (set TITANS_DATA)")
    return path
