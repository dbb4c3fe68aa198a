"""A folder with an adapter is a model like any other: commands load it, read and write with it, and serve it."""

import json
import shutil

import pytest
import torch

from cli_cases import titans
from question_cases import write_questions
from retrofit.retrofit_cases import WINDOW, apart, base_of, some_ids, with_memory
from serve.serve_cases import NAME, Expected, complete, serving, small_engine, text_of
from titans_lm.backbone import frozen_memory
from titans_lm.data.tokenizer import VOCAB_SIZE, byte_tokenizer
from titans_lm.retrofit import Reach, load, save
from titans_lm.streaming import Reader, load_memory
from titans_lm.train.run import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, an adapter beside it, and texts."""
    path = tmp_path_factory.mktemp("retrofit")
    base = base_of(vocab_size=VOCAB_SIZE, max_position_embeddings=1024).float()  # lm-eval cuts texts at these
    with torch.no_grad():
        base.lm_head.weight[127:] = base.lm_head.weight[:32] = 0.0  # what it writes can be read
    base.save_pretrained(path / "base")
    model = with_memory(load_model(path / "base"))
    save(model, path / "model")
    for name in ("base", "model"):
        byte_tokenizer().save_pretrained(path / name)
    for name in ("held", "others"):
        (path / name).mkdir()
        for n in range(2):
            (path / name / f"{n}.txt").write_text(" ".join(f"{name} {n} {i * i}" for i in range(60)))
    return path


def test_one_call_loads_it(folder):
    ids = some_ids(1, 3 * WINDOW)
    with torch.no_grad():
        assert apart(load_model(folder / "model")(ids).logits, load(folder / "model")(ids).logits) == 0.0


def test_info(folder, capsys, tmp_path):
    code, out, _ = titans(capsys, "info", folder / "model", "--json", tmp_path / "info.json")
    found = json.loads((tmp_path / "info.json").read_text())
    assert (code, found["model"]) == (0, "LlamaForCausalLM")
    assert found["state_bytes"] == sum(found["state_bytes_by_layer"]) + 8
    assert "state bytes" in out
    adapter = found["adapter"]
    assert (adapter["base"], adapter["window"]) == (str(folder / "base"), WINDOW)
    assert adapter["bytes"] == 4 * adapter["parameters"] < found["parameters"]


def test_a_base_that_was_moved_is_named_in_the_config(folder, tmp_path):
    model, base = (
        shutil.copytree(folder / "model", tmp_path / "model"),
        shutil.copytree(folder / "base", tmp_path / "b"),
    )
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base": str(tmp_path / "gone")}))
    with pytest.raises(ValueError, match=r'as "base" in the adapter.s config\.json'):
        load_model(model)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base": str(base)}))
    assert load_model(model).config._name_or_path == str(base)


def test_read_then_generate(folder, capsys, tmp_path):
    book, memory, after = folder / "held" / "0.txt", tmp_path / "a.memory", tmp_path / "b.memory"
    code, *_ = titans(capsys, "read", book, "--model", folder / "model", "--out", memory, "--quiet")
    assert code == 0
    model = load_model(folder / "model")
    reader = Reader(model, byte_tokenizer())
    reader.read(book)
    assert torch.equal(Reader(model, memory=load_memory(memory, model)).next_logits(), reader.next_logits())
    asked = "--max-new-tokens", 6, "--temperature", 0, "--quiet"
    code, out, _ = titans(
        capsys, "generate", folder / "model", "--prompt", " and", "--memory", memory, "--save-memory", after, *asked
    )
    assert (code, len(out)) == (0, 7)
    assert load_memory(after, model).tokens == (reader.tokens + 4 + 6,)
    prompt = book.read_text()
    code, out, _ = titans(capsys, "generate", folder / "model", "--prompt-file", book, *asked)
    assert out.strip("\n") == Expected(model).says(prompt, 6)
    code, _, err = titans(capsys, "generate", folder / "base", "--prompt", "x", "--memory", memory)
    assert code == 2
    assert "whose memory is a value" in err


def test_evaluate(folder, capsys, tmp_path):
    models = f"base={folder / 'base'}", f"memory={folder / 'model'}"
    shared = "--text", folder / "held", "--quiet"
    code, *_ = titans(
        capsys, "evaluate", "perplexity", *models, *shared, "--near", 64, 128, "--far", 128, 256, "--reset-every", 64,
        "--out", tmp_path / "p",
    )  # fmt: skip
    found = json.loads((tmp_path / "p" / "perplexity.json").read_text())
    base, memory = found["models"]
    assert (code, base["carries"], memory["carries"], memory["memory"]) == (0, False, True, True)
    assert [reading["mode"] for reading in memory["readings"]] == ["on", "reset", "off"]
    code, *_ = titans(
        capsys, "evaluate", "reread", *models, *shared, "--between", folder / "others", "--lengths", 16, "--distances",
        32, 128, "--passages", 4, "--rows", 4, "--context", 8, "--out", tmp_path / "r",
    )  # fmt: skip
    found = json.loads((tmp_path / "r" / "reread.json").read_text())
    assert code == 0
    assert [model["kind"] for model in found["models"]] == ["llama", "titans-retrofit"]
    assert [one["distance"] for one in found["models"][1]["lengths"][0]["distances"]] == [32, 128]


def test_texts_shorter_than_the_window_score_as_the_base_does(folder, capsys, tmp_path):
    save(with_memory(load_model(folder / "base"), window=2048), tmp_path / "wide")
    byte_tokenizer().save_pretrained(tmp_path / "wide")
    write_questions(tmp_path, items=4)
    code, _, err = titans(
        capsys, "evaluate", "lm-eval", folder / "base", tmp_path / "wide", "--local", tmp_path / "local", "--tasks",
        "piqa", "lambada_openai", "--json", tmp_path / "scores.json", "--quiet",
    )  # fmt: skip
    assert code == 0, err
    base, wide = json.loads((tmp_path / "scores.json").read_text())["models"]
    for task, scores in base["tasks"].items():
        for name, score in scores["metrics"].items():
            assert wide["tasks"][task]["metrics"][name] == pytest.approx(score, rel=1e-4), (task, name)


@torch.no_grad()
def test_a_frozen_memory_says_nothing(folder):
    model, ids = load_model(folder / "model"), some_ids(1, 4 * WINDOW)
    reach = Reach(WINDOW, model.retrofit.sinks, memory=False)
    with frozen_memory(model):
        assert apart(model(ids).logits, model(ids, reach=reach).logits) <= 1e-6
    assert apart(model(ids).logits, model(ids, reach=reach).logits) > 1e-2


def test_surprise_is_refused(folder, capsys, tmp_path):
    code, _, err = titans(
        capsys, "surprise", folder / "held" / "0.txt", "--model", folder / "model", "--out", tmp_path / "s"
    )
    assert code == 2
    assert "once it has left the window" in err


def test_a_conversation_goes_on_beyond_the_window_and_over_a_restart(folder, tmp_path):
    model = load_model(folder / "model").double()
    expected = Expected(model)
    for session in range(2):
        engine = small_engine(tmp_path, model)
        with serving(engine) as client:
            for turn in range(3):
                text = f"turn {session} {turn} "
                assert text_of(complete(client, text, conversation="long")) == expected.says(text, 8)
            answer = client.post("/v1/chat/completions", json={
                "model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0,
            })  # fmt: skip
            assert answer.status_code == 200, answer.text
        engine.close()
    assert expected.memory is not None
    assert expected.memory.tokens[0] > 8 * WINDOW
