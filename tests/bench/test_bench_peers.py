import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.bench_cases import check_once, streamed
from titans_lm.bench import peer_side, run
from titans_lm.bench.peers import comparisons, peer_python, peers
from titans_lm.bench.registry import Case, Place
from titans_lm.bench.run import Bench, run_bench
from titans_lm.bench.settings import PEER_CASES, AllSettings, BenchSettings, PeersSettings

VERSION = torch.__version__.partition("+")[0]
STUB = """
import torch
class NeuralMemory(torch.nn.Module):
    def __init__(self, dim, heads=1, chunk_size=1, batch_size=None):
        super().__init__()
        self.W, self.unused = torch.nn.Parameter(torch.zeros(dim, dim)), torch.nn.Parameter(torch.zeros(1))
    def forward(self, x):
        return x @ self.W, None
class MemoryAsContextTransformer(torch.nn.Module):
    def __init__(self, *, num_tokens, dim, depth, segment_len, num_persist_mem_tokens, num_longterm_mem_tokens):
        super().__init__()
        self.W = torch.nn.Embedding(num_tokens, dim)
    def forward(self, x, return_loss=False):
        return self.W(x).square().mean()
    def sample(self, prompt, length, use_cache, show_progress):
        assert use_cache and length > prompt.shape[1]
"""


@pytest.fixture(autouse=True)
def _checked(monkeypatch):
    check_once(monkeypatch)


def fake_python(folder, printed, code=0):
    """Make an environment whose interpreter prints one thing."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f"#!/bin/sh\necho '{printed}'\nexit {code}\n")
    python.chmod(0o755)
    return folder


def test_their_side_measures_as_ours_does(tmp_path, monkeypatch):
    """With a stand-in for the peer: its script runs by its path, without this package."""
    (tmp_path / "titans_pytorch.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    bench = Bench(BenchSettings(quick=True, repeats=1, threads=1), "cpu", lambda _: None)
    _, cases = comparisons(PeersSettings(quick=True, cases=("layer",)), Path(sys.executable), "cpu")[0]
    row = bench.measure(cases[-1])
    assert row["side"] == "titans-pytorch"
    assert row["parameters"] == 16 * 16 + 1
    assert row["tokens_per_second"] > 0
    # What its script does with other cases is asked in this process, which has imported torch.
    monkeypatch.syspath_prepend(tmp_path)

    def here(request, *_):
        return peer_side._measure.answer({**request, "memory_limit": None}, peer_side.work)

    monkeypatch.setattr(run, "ask", here)
    for name in ("mac", "generation"):
        _, cases = comparisons(PeersSettings(quick=True, cases=(name,)), Path(sys.executable), "cpu")[0]
        assert bench.measure(cases[-1])["tokens_per_second"] > 0
    sys.modules.pop("titans_pytorch")


def test_a_peer_that_does_not_run_says_why():
    case = Case(label="x", kind="peer_layer", case={}, python=Path(sys.executable))
    row = Bench(BenchSettings(quick=True), "cpu", lambda _: None).measure(case)
    assert row["error"] == "ModuleNotFoundError: No module named 'titans_pytorch'"


def test_both_sides_have_the_same_sizes_and_the_same_allocator():
    for title, cases in comparisons(PeersSettings(), Path("python"), "cpu"):
        assert len({case.allocator for case in cases}) == 1
        for name in ("width", "rows", "tokens"):
            sizes = {case.case[name] * (case.case["heads"] if name == "width" and case.kind == "op" else 1)
                     for case in cases}  # fmt: skip
            assert len(sizes) == 1, (title, name)
        labels = [case.label for case in cases]
        assert len(labels) == len(set(labels))
    found = [(cases[0].mode, cases[0].allocator) for _, cases in comparisons(PeersSettings(), Path("x"), "cpu")]
    assert found.count(("forward+backward", "default")) == 2, "the layer and the exact rule"
    assert {("forward", "default"), ("train", "default"), ("train", "tuned")} <= set(found)


def test_every_comparison_can_be_asked_for_alone():
    for name in PEER_CASES:
        assert comparisons(PeersSettings(cases=(name,)), Path("python"), "cpu")


def test_an_environment_that_is_there_is_used(tmp_path):
    folder = fake_python(tmp_path / "env", f"{VERSION}+cpu 0.5.5")
    python, versions = peer_python(folder, print)
    assert python == folder / "bin" / "python"
    assert versions == {"torch": VERSION, "titans-pytorch": "0.5.5"}


def test_other_versions_are_refused(tmp_path):
    """pip succeeds, and the versions are still others."""
    with pytest.raises(ValueError, match=r"got .*9\.9\.9.*; expected .*remove the folder"):
        peer_python(fake_python(tmp_path / "env", "9.9.9 0.5.5"), print)


def no_registry(monkeypatch):
    """Let every command fail as pip does without a registry; the commands come back as a list."""
    called = []

    def fails(command, **_):
        called.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")

    monkeypatch.setattr(subprocess, "run", fails)
    return called


def test_without_a_registry_it_says_so_and_measures_nothing(tmp_path, monkeypatch):
    called = no_registry(monkeypatch)
    settings = PeersSettings(peers_env=tmp_path / "env", out=tmp_path / "out", device="cpu", quick=True)
    said = []
    with pytest.raises(ValueError, match=r"No matching distribution found; expected a registry within reach"):
        next(peers(settings, Place("cpu", said.append)))
    assert called == [[sys.executable, "-m", "venv", str(tmp_path / "env")]]
    assert not (tmp_path / "out").exists()


def test_torch_comes_first(tmp_path, monkeypatch):
    fake_python(tmp_path / "env", "")
    called = no_registry(monkeypatch)
    with pytest.raises(ValueError, match="could not make"):
        peer_python(tmp_path / "env", print)
    assert called[1][1:] == ["-m", "pip", "install", "--quiet", f"torch=={VERSION}"]


def test_among_everything_the_rows_of_a_missing_peer_say_why(tmp_path, monkeypatch):
    no_registry(monkeypatch)
    monkeypatch.setattr(run, "ask", lambda *_: streamed(1.0, 1.0))
    settings = AllSettings(quick=True, peers_env=tmp_path / "env", out=tmp_path / "out", device="cpu")
    found = run_bench(settings, lambda _: None)["peers"]
    theirs = [row for row in found["rows"] if row["side"] == "titans-pytorch"]
    assert theirs
    assert all("No matching distribution" in row["error"] for row in theirs)
    assert all("error" not in row for row in found["rows"] if row["side"] != "titans-pytorch")
    parts = ("model", "ops", "peers", "scaling", "tnt", "training")
    assert sorted(os.listdir(tmp_path / "out")) == [f"{part}.json" for part in parts]
