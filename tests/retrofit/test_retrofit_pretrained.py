"""With real weights: SmolLM2-135M-Instruct, which `make pretrained` fetches and converts."""

import os
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from titans_lm.retrofit import FULL, Reach, add_memory

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("TITANS_SMOLLM2", ROOT / "build" / "smollm2" / "model"))
WINDOW, SINKS = 64, 4
pytestmark = [
    pytest.mark.pretrained,
    pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no SmolLM2 in {FOLDER}: make pretrained fetches it"),
]


@pytest.fixture(scope="module")
def model():
    return add_memory(AutoModelForCausalLM.from_pretrained(FOLDER).eval(), window=WINDOW, sinks=SINKS)


@pytest.fixture(scope="module")
def ids():
    text = (ROOT / "LICENSE").read_text()
    return AutoTokenizer.from_pretrained(FOLDER)(text[:1500], return_tensors="pt").input_ids[:, : 4 * WINDOW]


@torch.no_grad()
def test_it_goes_on_as_the_base_does_inside_the_window(model, ids):
    base = AutoModelForCausalLM.from_pretrained(FOLDER).eval()
    settings = {"max_new_tokens": 12, "do_sample": False}
    short = ids[:, : WINDOW - 12]
    assert model.generate(short, **settings).tolist() == base.generate(short, **settings).tolist()


@torch.no_grad()
def test_sinks_hold_a_windowed_model_together(model, ids):
    def nats(reach):
        logits = model(ids, use_cache=False, reach=reach).logits[0, WINDOW:-1]
        return float(F.cross_entropy(logits, ids[0, WINDOW + 1 :]))

    full, windowed, without = nats(FULL), nats(Reach(WINDOW, SINKS)), nats(Reach(WINDOW, 0))
    assert full < windowed < without
    assert windowed - full < 0.5 * (without - full)
