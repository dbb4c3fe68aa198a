"""Models small enough to train in a test: ours, and one of another family."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from model_cases import stack_named
from titans_lm.config import BackboneConfig
from titans_lm.hf import TitansForCausalLM
from titans_lm.train.fresh import byte_model


@pytest.fixture(scope="session")
def titans() -> Callable[..., TitansForCausalLM]:
    """Make a byte model of any architecture; the same weights every time it is called."""

    def make(architecture: str = "lmm", **settings: object) -> TitansForCausalLM:
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "memory_expansion": 2,
            "intermediate_size": 32,
            "chunk_size": 4,
            "segment_len": 8,
            "window": 8,
            "num_persistent": 2,
        }
        return byte_model(BackboneConfig(**(sizes | stack_named(architecture) | settings)))

    return make


@pytest.fixture(scope="session")
def llama() -> Callable[[], PreTrainedModel]:
    """Make a small Llama over bytes; the same weights every time it is called."""

    def make() -> PreTrainedModel:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=259, tie_word_embeddings=True, **sizes))

    return make


OWNER = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("process 7 on the moon", file=file, end="", flush=True)
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def other_owner() -> Callable[[Path], AbstractContextManager[None]]:
    """Let another process have a lock file."""

    @contextmanager
    def owned(path: Path) -> Iterator[None]:
        command, pipe = [sys.executable, "-S", "-c", OWNER, str(path)], subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdout.readline()
            yield
            process.stdin.close()

    return owned
