"""Training through compiled blocks gives the losses of training without.

Run by test_compiled.py in a process without the checks of conftest.py, which torch.compile cannot trace through.
"""

import dataclasses
import shutil

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from model_cases import small_config
from titans_lm.data.batches import RandomCrops
from titans_lm.data.tokenizer import encode_document
from titans_lm.train.fresh import byte_model
from titans_lm.train.loop import fit
from titans_lm.train.losses import next_token_loss
from titans_lm.train.settings import FitSettings

BATCHES = RandomCrops([encode_document(b"to and fro and to " * 20)], seq_len=16, batch_size=2)
SETTINGS = FitSettings(steps=4, warmup_steps=1, lr=1e-2, eval_every=0, save_every=0)
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.filterwarnings("default")  # torch warns of its own code while it traces
def test_compiled_blocks_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_block = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda block: compile_block(block, backend="aot_eager"))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config, told = LlamaConfig(vocab_size=259, tie_word_embeddings=True, **sizes), []
    for compiled in (False, True):
        torch.manual_seed(0)
        losses: list[float] = []
        settings = dataclasses.replace(SETTINGS, compile=compiled)
        model = LlamaForCausalLM(config)
        fit(model, BATCHES, next_token_loss, settings, on_step=lambda record, into=losses: into.append(record["loss"]))
        told.append(losses)
        assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) is compiled
    assert told[1] == pytest.approx(told[0], rel=1e-4)
    assert told[0][-1] < told[0][0]


def test_our_own_blocks_are_not_compiled() -> None:
    with pytest.raises(ValueError, match="gradients are written by hand"):
        fit(byte_model(small_config("mac")), BATCHES, next_token_loss, dataclasses.replace(SETTINGS, compile=True))
