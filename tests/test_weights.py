"""The models that ship: what their cards say is there, and they answer what they were taught from a memory file."""

import json
from pathlib import Path

import numpy as np
import pytest

import titans_lm
from cli_cases import titans
from serve.serve_cases import NAME, serving
from titans_lm.ask import answer
from titans_lm.backbone import frozen_memory
from titans_lm.demo.hidden import drawn_facts, hide, long_text
from titans_lm.demo.search import MODELS
from titans_lm.evaluate.bits_per_byte import token_bits
from titans_lm.serve.engine import Engine
from titans_lm.serve.settings import ServeSettings
from titans_lm.serve.store import Store
from titans_lm.streaming import Reader
from titans_lm.train.shipped import FOLDER, shipped_names

TEXT = "It rained. {} Nobody came to the door.\n" + "The river runs past the mill and the cart stands there.\n" * 40
MOST = 25 * 2**20
"""Bytes that all of them may take."""


def test_they_are_there_and_small() -> None:
    assert set(MODELS.values()) <= set(shipped_names())
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < MOST


@pytest.mark.parametrize("name", shipped_names())
def test_a_card_says_what_it_must(name: str) -> None:
    card = (FOLDER / name / "README.md").read_text(encoding="utf-8")
    for part in ("## Form", "## Data", "## Training", "titans evaluate", "Commit", "Tokens", "## Scores", "## Limits"):
        assert part in card, part
    config = json.loads((FOLDER / name / "config.json").read_text())
    model, tokenizer = titans_lm.pretrained(name)
    assert len(tokenizer) == config["vocab_size"]
    assert tokenizer.pad_token_id == config["pad_token_id"] == model.generation_config.pad_token_id
    assert "auto_map" not in config, "no code lies beside it"
    assert f"{sum(x.numel() for x in model.parameters()):,} parameters" in card


NUMBER = "secret number of brave otter"
ASKED = [
    ("facts", "Sandra journeyed to the kitchen.", "Where is Sandra?", "kitchen."),
    ("needles", f"The {NUMBER} is 4821937.", f"What is the {NUMBER}?", "4821937."),
]


@pytest.mark.parametrize(("model", "said", "question", "right"), ASKED)
def test_a_file_is_asked(
    model: str, said: str, question: str, right: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, kept = tmp_path / "notes.txt", tmp_path / "notes.memory"
    path.write_text(TEXT.format(said))
    given = ["--model", f"pretrained:{model}"]
    code, out, _ = titans(capsys, "ask", path, question, "--out", kept, *given)
    assert (code, out.splitlines()[-1]) == (0, right)
    assert titans(capsys, "ask", question, "--memory", kept, *given) == (0, f"{right}\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "model"), MODELS.items())
def test_most_of_what_is_hidden_in_prose_is_found(kind: str, model: str) -> None:
    rng = np.random.default_rng(0)
    sentences, counts = long_text(None, 12_000)
    made = hide(rng, sentences, counts, drawn_facts(rng, 1, 0, 8))
    owner, tokenizer = titans_lm.pretrained(model)
    reader = Reader(owner, tokenizer)
    reader.read(made.parts[0])
    known = [fact for (of, _), (fact, _) in made.known(0).items() if of == kind]
    said = [answer(owner, tokenizer, fact.question, reader.memory).text.strip(" .") for fact in known]
    assert sum(a == fact.answer for a, fact in zip(said, known, strict=True)) >= 0.75 * len(known)


def test_a_server_is_asked_about_a_document(tmp_path: Path) -> None:
    model, tokenizer = titans_lm.pretrained("facts")
    settings = ServeSettings(out=tmp_path)
    engine = Engine(model, tokenizer, Store(tmp_path, model, in_memory=4, most=20), settings)
    with serving(engine) as client:
        [card] = client.get("/v1/models").json()["data"]
        assert (card["id"], card["temperature"]) == (NAME, 0.0)
        text = TEXT.format("Mary went to the garden.\nJohn moved to the office.")
        client.post("/v1/memories", json={"name": "notes", "text": text}).raise_for_status()
        for who, where in (("Mary", "garden."), ("John", "office.")):
            asked = {
                "messages": [{"role": "user", "content": f"Where is {who}?"}],
                "memory": "notes", "temperature": 0, "conversation": "one",
            }  # fmt: skip
            found = client.post("/v1/chat/completions", json=asked).json()["choices"][0]
            assert (found["message"]["content"].strip(), found["finish_reason"]) == (where, "stop")


PASSAGE = (
    "The ferryman had been told to wait for a lady in a grey cloak, and he waited until the lamp in his window burned "
    "blue. When she came at last she gave him a brass key, and asked to be set down beyond the third mill, where no "
    "path was. He asked nothing, for his father had rowed such guests before him, and had died a rich man."
)
BETWEEN = (
    "In the village they spoke of nothing but the harvest. The rain had come too early, the barns were not mended, and "
    "the priest said from his pulpit that pride was the root of it. Old Hannah counted her hens and found them eleven; "
    "she counted again and found them ten, and she said to her neighbour that foxes were honest beside lawyers. "
) * 4


def test_books_reads_english_and_a_passage_is_cheaper_the_second_time() -> None:
    """After nearly 400 tokens of something else, without attention to look back with; with its memory frozen, less."""
    model, tokenizer = titans_lm.pretrained("books")
    passage, between = tokenizer(" " + PASSAGE).input_ids, tokenizer(" " + BETWEEN).input_ids
    text = np.array([tokenizer.bos_token_id, *passage, *between, *passage])
    assert len(between) > 380
    assert model.config.architecture == "lmm"

    def gain() -> float:
        bits = token_bits(model, [text])[0]
        return float(bits[1 : len(passage)].sum() - bits[1 - len(passage) :].sum()) / (len(passage) - 1)

    first = token_bits(model, [text[: 1 + len(passage)]])[0].sum() / len(PASSAGE.encode())
    assert first < 2.0, "bits per byte"
    learned = gain()
    with frozen_memory(model):
        frozen = gain()
    assert learned > frozen + 0.08
