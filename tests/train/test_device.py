import re
import subprocess

import pytest
import torch

from titans_lm.train import device, parallel
from titans_lm.train.device import choose_device, commit, environment, machine_memory, mixed_precision, to_device


def test_auto_takes_a_gpu_where_there_is_one():
    assert choose_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["tpu9", "cuda:99", "xla", "", "CPU", "meta"])
def test_a_device_that_is_not_there_is_an_error(name):
    with pytest.raises(ValueError, match=rf"got device='{name}'; this machine has \d+ CUDA devices"):
        choose_device(name)


def test_a_process_of_several_looks_at_its_own_gpu_alone(monkeypatch):
    """Looking at another opens a context there, of some hundred MB."""
    asked = []
    monkeypatch.setattr(parallel, "choose_device", lambda name: asked.append(name) or torch.device("cpu"))
    for name, value in (("WORLD_SIZE", "8"), ("LOCAL_RANK", "3")):
        monkeypatch.setenv(name, value)
    for name, value in (("is_initialized", True), ("get_rank", 3), ("get_world_size", 8)):
        monkeypatch.setattr(parallel.dist, name, lambda value=value: value)
    for name in ("cuda", "cuda:1", "cpu"):
        assert parallel.open_distributed(name).rank == 3
    assert asked == ["cuda:3", "cuda:3", "cpu"]


def test_precision_follows_the_device_unless_it_is_named():
    x = torch.ones(2, 2)
    for precision, dtype in (("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with mixed_precision(precision, torch.device("cpu")):
            assert (x @ x).dtype == dtype
    with pytest.raises(ValueError, match="got precision='fp8'"):
        mixed_precision("fp8", torch.device("cpu"))


def test_a_batch_moves_as_a_whole():
    moved = to_device({"a": torch.ones(2), "b": torch.zeros(1)}, torch.device("meta"))
    assert {name: part.device.type for name, part in moved.items()} == {"a": "meta", "b": "meta"}


def test_the_environment_names_what_ran():
    found = environment()
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert {"python", "platform", "gpus", "titans-lm", "transformers"} <= found.keys()


def test_the_commit_is_that_of_the_sources(tmp_path, monkeypatch):
    """Of the whole package, with a mark where it differs; a package that a checkout does not hold is not of it."""

    def git(*args):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *args], cwd=tmp_path, check=True, capture_output=True)

    package = tmp_path / "package"
    for name in ("__init__.py", "train/device.py", "ops/state.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    monkeypatch.setattr("titans_lm.train.device.__file__", str(package / "train" / "device.py"))
    assert commit.__wrapped__() == "unknown"
    git("init")
    git("commit", "--allow-empty", "-m", "first")
    assert commit.__wrapped__() == "unknown", "there is a checkout around it, which does not know it"
    git("add", ".")
    git("commit", "-m", "second")
    clean = commit.__wrapped__()
    assert re.fullmatch("[0-9a-f]{12}", clean)
    (tmp_path / "notes").write_text("beside the package")
    assert commit.__wrapped__() == clean
    (package / "ops" / "state.py").write_text("changed = True")
    assert commit.__wrapped__() == f"{clean}+"


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_memory_is_what_a_container_may_have(file, tmp_path, monkeypatch):
    monkeypatch.setattr(device, "CONTROL_GROUP", tmp_path)
    all_of_it = machine_memory()
    assert all_of_it > 2**20
    limit = tmp_path / file
    limit.parent.mkdir(exist_ok=True)
    for said, memory in (("max\n", all_of_it), ("1048576\n", 2**20), (f"{2**63}\n", all_of_it)):
        limit.write_text(said)
        assert machine_memory() == memory
