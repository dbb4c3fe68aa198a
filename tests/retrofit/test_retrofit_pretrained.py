"""With real weights: SmolLM2-135M-Instruct, which `make pretrained` fetches and converts."""

import os
import threading
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from titans_lm.retrofit import FULL, Reach, add_memory, save
from titans_lm.serve.engine import Engine
from titans_lm.serve.schema import Chat
from titans_lm.serve.settings import ServeSettings
from titans_lm.serve.store import Store
from titans_lm.train.run import load_model

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


def test_a_chat_goes_on_beyond_the_window(model, tmp_path):
    save(model, tmp_path / "model")
    tokenizer, loaded = AutoTokenizer.from_pretrained(FOLDER), load_model(tmp_path / "model")
    store = Store(tmp_path / "store", loaded, in_memory=1, most=4)
    engine, answers, history = Engine(loaded, tokenizer, store, ServeSettings()), [], []
    try:
        for turn in range(3):
            history.append({"role": "user", "content": f"Question {turn}: what is the capital of France?"})
            chat = Chat(messages=history, conversation="long", max_tokens=12, temperature=0.0)
            answers.append(engine.answer(chat, lambda _: None, threading.Event()))
            history.append({"role": "assistant", "content": answers[-1].text})
    finally:
        engine.close()
    assert "Paris" in answers[0].text
    assert [one.prompt_tokens < 48 for one in answers] == [True] * 3, "only what is new is read"
    assert answers[-1].memory_tokens > WINDOW
