"""Mamba2's recurrence in chunks beside the recurrence itself, and beside transformers'."""

import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2

from titans_lm.config import BackboneConfig
from titans_lm.train import mamba2
from titans_lm.train.baselines import fit_baseline, make_baseline
from titans_lm.train.mamba2 import chunk_scan
from titans_lm.train.run import load_model

THEIRS = modeling_mamba2.mamba2_chunk_scan
LIMITS = {"dt_softplus": True, "dt_limit": (0.1, 2.0), "return_final_states": True}


def drawn(T, dtype=torch.float64, *, H=6, P=3, G=2, N=4):
    torch.manual_seed(T)
    shapes = [(2, T, H, P), (2, T, H), (H,), (2, T, G, N), (2, T, G, N), (H,), (H,), (2, H, P, N)]
    x, dt, A, B, C, D, bias, state = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return x, dt, -A.exp(), B, C, D, bias, state


def by_token(x, dt, A, B, C, D, bias, state):
    """S_t = exp(Δ_t A) S_{t−1} + Δ_t x_t B_tᵀ, y_t = S_t C_t + D x_t, as it is written."""
    dt = torch.nn.functional.softplus(dt + bias).clamp(*LIMITS["dt_limit"])
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    ys = []
    for t in range(x.shape[1]):
        written = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        state = (dt[:, t] * A).exp()[..., None, None] * state + written
        ys.append((state @ C[:, t, ..., None])[..., 0] + D[:, None] * x[:, t])
    return torch.stack(ys, 1), state


def scan(given, chunk, run=chunk_scan):
    *needed, D, bias, state = given
    return run(*needed, chunk, D=D, dt_bias=bias, initial_states=state, **LIMITS)


@pytest.mark.parametrize(("T", "chunk"), [(1, 8), (16, 8), (19, 8), (19, 1), (5, 32)])
def test_chunks_are_the_recurrence_in_values_and_gradients(T, chunk):
    given = [one.requires_grad_() for one in drawn(T)]
    found, expected = scan(given, chunk), by_token(*given)
    weights = [torch.randn_like(one) for one in expected]
    grads = [
        torch.autograd.grad(sum((y * w).sum() for y, w in zip(ys, weights, strict=True)), given)
        for ys in (found, expected)
    ]
    for one, other in zip((*found, *grads[0]), (*expected, *grads[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_it_stands_in_for_that_of_transformers():
    assert THEIRS is not chunk_scan
    given = drawn(75, torch.float32, G=1)
    for one, other in zip(scan(given, 16), scan(given, 16, THEIRS), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    x, dt, A, B, C = given[:5]
    plain = chunk_scan(x, dt.exp(), A, B, C, 16)
    torch.testing.assert_close(plain, THEIRS(x, dt.exp(), A, B, C, 16), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("installed", [False, True])
def test_a_baseline_runs_on_it_where_there_are_no_kernels(installed, monkeypatch, tmp_path):
    monkeypatch.setattr(modeling_mamba2, "mamba2_chunk_scan", THEIRS)
    monkeypatch.setattr(mamba2, "find_spec", lambda name: object() if installed and name == "mamba_ssm" else None)
    like = BackboneConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = make_baseline(fit_baseline("mamba2", like, 50, 20_000))
    assert modeling_mamba2.mamba2_chunk_scan is (THEIRS if installed else chunk_scan)
    ids = torch.randint(0, 50, (2, 40))
    found = model(ids).logits, model.generate(ids, max_new_tokens=5, do_sample=False)
    monkeypatch.setattr(modeling_mamba2, "mamba2_chunk_scan", THEIRS)
    torch.testing.assert_close(found[0], model(ids).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[1], model.generate(ids, max_new_tokens=5, do_sample=False))
    model.save_pretrained(tmp_path)
    load_model(tmp_path, "cpu")
    assert modeling_mamba2.mamba2_chunk_scan is (THEIRS if installed else chunk_scan)
