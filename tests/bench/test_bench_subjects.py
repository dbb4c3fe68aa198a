import pytest
import torch
from torch.utils._pytree import tree_leaves

from bench.bench_cases import MODEL, OP, REQUEST
from titans_lm.bench import subjects_model, subjects_op
from titans_lm.bench.processes import work
from titans_lm.bench.settings import MODELS
from titans_lm.hf.naming import CACHE

CPU = torch.device("cpu")


def run(kind, mode, case, **settings):
    return work({**REQUEST, "repeats": 1, "kind": kind, "mode": mode, "case": case, **settings}, CPU)


@pytest.mark.parametrize("mode", ["forward", "forward+backward", "decode"])
def test_the_op(mode):
    row = run("op", mode, OP)
    assert row["tokens"] == (128 if mode == "decode" else 40)
    assert ("share_of_matmul" in row) == (mode != "decode")


def test_backward_counts_as_two_more_forwards():
    one, three = (run("op", mode, OP)["flops"] for mode in ("forward", "forward+backward"))
    assert three == 3 * one


def test_the_op_in_bfloat16_keeps_its_state_in_float32():
    call = subjects_op.make_call({**OP, "forget_to": "init"}, torch.bfloat16, CPU)
    assert {x.dtype for x in call.tensors[:3]} == {torch.bfloat16}
    assert {x.dtype for x in (*call.tensors[3:], *call.weights)} == {torch.float32}
    assert run("op", "forward+backward", OP, dtype="bfloat16")["tokens"] == 40


def test_gradients_are_asked_for_everything_that_learns():
    call = subjects_op.make_call({**OP, "depth": 3}, torch.float32, CPU)
    assert len(call.leaves) == 6 + 3 + 2
    assert all(leaf.requires_grad for leaf in call.leaves)


@pytest.mark.parametrize("layer", subjects_model.LAYERS)
@pytest.mark.parametrize("mode", ["forward", "forward+backward"])
def test_layers(layer, mode):
    row = run("layer", mode, {**OP, "width": 32, "ffn": 16, "shard": 16, "layer": layer})
    assert row["tokens"] == 40
    assert row["parameters"] > 1000


@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    case = {**MODEL, "model": name, **({"layers": 2} if name == "hybrid" else {})}
    modes = ["train", "prefill", "decode", "generate", "loop"] if name in ("mac", "llama") else ["train", "decode"]
    for mode in modes:
        row = run("model", mode, case)
        calls = {"decode": subjects_model.DECODED, "generate": 20, "loop": 20}.get(mode, 1)
        assert row["tokens"] == 2 * (calls if mode == "decode" else 20)
        assert row["milliseconds_per_call"] == pytest.approx(1e3 * row["seconds"]["median"] / calls)


@pytest.mark.parametrize("name", ["lmm:memory_depth=1,key_degree=2", "mamba2"])
def test_a_model_by_the_name_of_compare_is_as_large_as_asked_for(name):
    sized = {"sized": name, "parameters": 150_000, "vocab": 256}
    row = run("model", "train", {**sized, "rows": 1, "tokens": 16})
    assert row["tokens"] == 16
    assert row["parameters"] == pytest.approx(150_000, rel=0.01)


@pytest.mark.parametrize("name", ["attention", "llama"])
def test_full_attention_gets_a_context_that_nobody_read(name, monkeypatch):
    monkeypatch.setattr(subjects_model, "PIECE", 8)
    case = {**MODEL, "model": name, "context": 50}
    model = subjects_model.make_model(case).eval()
    with torch.no_grad():
        carried = subjects_model.read_context(model, case, CPU)
        _, after = subjects_model.read(model, subjects_model.draw(case, 1, CPU), carried)
    kept = after.layers[0].keys if name == "llama" else after.layers[0].k
    assert 51 in kept.shape


def test_every_run_of_decoding_starts_from_the_same_context():
    case = {**MODEL, "model": "llama"}
    model = subjects_model.make_model(case)
    step, _, _ = subjects_model.decode(model, case, CPU)
    seen = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs[CACHE].get_seq_length()), with_kwargs=True
    )
    step()
    step()
    hook.remove()
    assert seen == [*range(9, 9 + subjects_model.DECODED)] * 2


def test_a_context_in_pieces_is_the_context(monkeypatch):
    case = {**MODEL, "model": "mac", "context": 21}
    model = subjects_model.make_model(case).eval()
    states = []
    for piece in (100, 5):
        monkeypatch.setattr(subjects_model, "PIECE", piece)
        text = iter(torch.arange(42).reshape(2, 21).remainder(32).split(min(piece, 21), dim=1))
        monkeypatch.setattr(subjects_model, "draw", lambda *_, text=text: next(text))
        with torch.no_grad():
            states.append(tree_leaves(subjects_model.read_context(model, case, CPU)))
    for a, b in zip(*states, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_mamba2_says_why_it_has_no_long_context(monkeypatch):
    monkeypatch.setattr(subjects_model, "PIECE", 8)
    with pytest.raises(ValueError, match="in one call only"):
        run("model", "decode", {**MODEL, "model": "mamba2"})


@pytest.mark.parametrize("name", ["lmm", "mac"])
def test_streaming_records_every_window(name):
    row = run("stream", "", {**MODEL, "rows": 1, "model": name, "tokens": 60, "window": 20, "piece": 8})
    assert [window["tokens"] for window in row["windows"]] == [20, 40, 60]
    windows = row["windows"]
    assert row["throughput_ratio"] == windows[2]["tokens_per_second"] / windows[1]["tokens_per_second"]
    assert row["memory_ratio"] == windows[2]["memory_bytes"] / windows[0]["memory_bytes"]


def test_the_speed_of_a_stream_is_that_of_its_tokens():
    """Also where the last window is shorter than the others."""
    row = run("stream", "", {**MODEL, "rows": 1, "model": "lmm", "tokens": 25, "window": 20, "piece": 8})
    (_, first), (_, last) = (list(window.values())[:2] for window in row["windows"])
    assert row["tokens_per_second"] == pytest.approx(25 / (20 / first + 5 / last))
