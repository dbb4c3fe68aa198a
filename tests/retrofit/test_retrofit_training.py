"""Training an adapter: rows whose passages return, the losses, and a run that is stopped and taken up."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
import torch

from retrofit.retrofit_cases import SINKS, WINDOW, base_of, some_ids, with_memory
from titans_lm.cli import main
from titans_lm.data.tokenizer import VOCAB_SIZE, byte_tokenizer
from titans_lm.distill.rows import ReturningRows, Text, open_texts
from titans_lm.distill.settings import RetrofitSettings
from titans_lm.distill.start import BATCHES, RIDGE, start_memories
from titans_lm.distill.train import Distillation, Gap, HeadLoss, checkpoint_blocks, retrofit
from titans_lm.prepare.run import prepare
from titans_lm.prepare.settings import PrepareSettings
from titans_lm.retrofit import FULL, AdapterSettings, Reach, adapter_of, load
from titans_lm.retrofit.cache import as_base, nats
from titans_lm.retrofit.file import FILE, read_adapter
from titans_lm.retrofit.memory import LayerMemory
from titans_lm.retrofit.settings import AdapterMemory

SETTINGS = RetrofitSettings(
    adapter=AdapterSettings(window=WINDOW, sinks=SINKS), seq_len=48, passages=(4, 8), grow_steps=4, steps=4, lr=1e-2,
    warmup_steps=1, eval_rows=1, eval_every=0, save_every=0, device="cpu",
)  # fmt: skip


def text_of(ids):
    return Text(ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    base_of(vocab_size=VOCAB_SIZE).float().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    (path / "text.txt").write_text(" ".join(f"{n * n} ships sailed on day {n}." for n in range(60)))
    (path / "short.txt").write_text("too short\n")
    return path


def test_a_prepared_folder_has_its_own_held_out_part(folder, tmp_path):
    prepare(PrepareSettings(source=str(folder / "text.txt"), out=tmp_path / "tokens", held_out=0.3))
    settings = dataclasses.replace(SETTINGS, data=str(tmp_path / "tokens"))
    assert [text.tokens > 100 for text in open_texts(settings, byte_tokenizer())] == [True, True]
    with pytest.raises(ValueError, match=r"got valid='other\.txt' with a prepared folder"):
        open_texts(dataclasses.replace(settings, valid="other.txt"), byte_tokenizer())


def test_passages_return_after_they_have_left_the_window():
    settings = dataclasses.replace(
        SETTINGS, seq_len=400, returning=1.0, batch_size=2, windows=(8, 12), sink_counts=(0, 3)
    )
    rows = ReturningRows(text_of(np.arange(10_000)), settings)
    for step, farthest in ((0, None), (4, 400)):
        batch = rows(step)
        window, reach = int(batch["window"][0]), farthest or 2 * int(batch["window"][0])
        assert window in (8, 12)
        assert set(batch["sinks"].tolist()) <= {0, 3}
        assert torch.equal(batch["input_ids"][:, 1:], batch["targets"][:, :-1])
        ids, again = (batch[name].tolist() for name in ("targets", "again"))
        for row, marks in zip(ids, again, strict=True):
            assert any(marks)
            for i, marked in enumerate(marks):
                if marked:  # the text is 0, 1, 2, …: what returns is what was there before
                    before = [i - j for j in range(i) if row[j] == row[i]]
                    assert window < min(before) <= reach
    assert torch.equal(rows(4)["input_ids"], rows(4)["input_ids"])
    changes = {"seq_len": 399, "batch_size": 3, "seed": 1, "windows": (8,), "sink_counts": (3,), "returning": 0.9,
               "passages": (4, 7), "grow_steps": 5}  # fmt: skip
    others = (dataclasses.replace(settings, **{name: value}) for name, value in changes.items())
    named = {ReturningRows(text_of(np.arange(10_000)), other).fingerprint for other in (settings, *others)}
    assert len(named) == 1 + len(changes), "a run goes on with its own rows alone"
    plain = ReturningRows(text_of(np.arange(10_000)), dataclasses.replace(settings, returning=0.0))(0)
    assert not plain["again"].any()
    assert bool((plain["input_ids"].diff() == 1).all())


def test_the_loss_is_what_it_says():
    model = with_memory(base_of())
    tokens = some_ids(1, SETTINGS.seq_len + 1)
    batch = {
        "input_ids": tokens[:, :-1], "targets": tokens[:, 1:],
        "window": torch.tensor([WINDOW]), "sinks": torch.tensor([SINKS]),
        "again": torch.zeros(1, SETTINGS.seq_len, dtype=torch.bool),
    }  # fmt: skip
    loss, metrics = Distillation(model, 2.0, 0.5)(model, batch)
    with torch.no_grad():
        full, ours = (model(batch["input_ids"], reach=r).logits[:, WINDOW:] for r in (FULL, Reach(WINDOW, SINKS)))
    p, q = full.log_softmax(-1), ours.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    text = -q.gather(-1, batch["targets"][:, WINDOW:, None]).mean()
    assert float(loss.detach()) == pytest.approx(float(2.0 * kl + 0.5 * text), rel=1e-5)
    assert float(metrics["kl"]) == pytest.approx(float(kl), rel=1e-5)
    optimiser = torch.optim.Adam(adapter_of(model).parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss, _ = Distillation(model, 1.0, 0.0)(model, batch)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    assert all((x.grad is not None) == x.requires_grad for x in model.parameters())


def test_own_keys_start_as_principal_components():
    memory = LayerMemory(10, AdapterMemory(keys="hidden").of_layer(2, 4), "hidden", 4).double()
    states = torch.randn(300, 3).double() @ torch.randn(3, 10).double() + 0.01 * torch.randn(300, 10) + 5.0
    memory.start_keys(states)
    keys = memory.key_proj(states).detach()
    assert torch.equal(keys[:, :4], keys[:, 4:])
    covariance = keys[:, :4].T.cov()
    torch.testing.assert_close(keys.mean(0), torch.zeros(8).double())
    torch.testing.assert_close(covariance, covariance[0, 0] * torch.eye(4).double())
    plain = (states - states.mean(0)) / states.std(0)
    first = keys[:, :3]
    left = plain - first @ torch.linalg.lstsq(first, plain).solution
    assert left.square().mean() < 1e-3
    with pytest.raises(ValueError, match="expected keys='hidden'"):
        LayerMemory(10, AdapterMemory().of_layer(2, 4)).start_keys(states)


@torch.no_grad()
def test_answers_start_as_least_squares_of_what_the_window_misses():
    """The first layer gets the same whatever is beyond: all that counts can be read off what leaves its attention."""
    model = with_memory(base_of(), layers=(0,), trained=False, memory={"keys": "hidden", "key_degree": 2})
    rows, seen = ReturningRows(text_of(some_ids(1, 900)[0].numpy()), SETTINGS), []
    attention = model.model.layers[0].self_attn
    (share,) = start_memories(model, rows).values()
    attention.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0][:, WINDOW:]))
    W = attention.memory.output.clone()
    attention.memory.output.copy_(torch.eye(W.shape[1]))
    kinds = {kind: [torch.zeros_like(W), torch.zeros_like(W), 0.0, 0.0] for kind in (False, True)}
    for step in range(BATCHES):
        for reach in (FULL, Reach(WINDOW, SINKS, memory=False), Reach(WINDOW, SINKS)):
            model(rows(step)["input_ids"], reach=reach)
        full, windowed, ours = (x.unflatten(-1, (4, -1)) for x in seen[-3:])
        m, missing = ours - windowed, full - windowed
        left = (missing - torch.einsum("bthd,hde->bthe", m, W)).square().sum()
        found = [torch.einsum("bthd,bthe->hde", m, x) for x in (m, missing)]
        kind = kinds[bool(rows(step)["again"].any())]
        kind[:] = [x + y for x, y in zip(kind, (*found, missing.square().sum(), left), strict=True)]
    assert all(kind[2] > 0 for kind in kinds.values())
    squares, products = (sum(kind[i] / kind[2] for kind in kinds.values()) for i in (0, 1))
    ridge = RIDGE * squares.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * W
    torch.testing.assert_close(squares @ W + ridge, products)
    assert share == pytest.approx(sum(float(1.0 - left / missed) for _, _, missed, left in kinds.values()) / 2)
    assert W.abs().max() > 0.01
    assert "watch" not in attention.__dict__


@pytest.mark.parametrize("weights", [(2.0, 0.5), (1.0, 0.0), (0.0, 1.0)])
def test_the_gradient_that_is_made_beside_the_loss_is_that_of_autograd(weights):
    torch.manual_seed(0)
    head = torch.nn.Linear(12, 31).double().requires_grad_(False)
    ours, taught = torch.randn(2, 300, 12, dtype=torch.float64, requires_grad=True), torch.randn(2, 300, 12).double()
    targets = torch.randint(0, 31, (2, 300))
    rows = torch.tensor([1.0, 0.2])
    loss, (kl, text) = HeadLoss.apply(ours, taught if weights[0] else None, targets, head, weights, rows)
    q, p = head(ours).log_softmax(-1), head(taught).log_softmax(-1)
    terms = (p.exp() * (p - q)).sum(-1).mean(1), -q.gather(-1, targets[..., None])[..., 0].mean(1)
    expected = (rows.double() * (weights[0] * terms[0] + weights[1] * terms[1])).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    means = terms[0].mean() if weights[0] else kl * 0, terms[1].mean()
    torch.testing.assert_close(torch.stack((kl, text)), torch.stack(means))
    found, made = (torch.autograd.grad(3.0 * one, ours)[0] for one in (loss, expected))
    torch.testing.assert_close(found, made, rtol=1e-10, atol=1e-14)


def test_checkpointed_blocks_give_the_same_gradients():
    rows = ReturningRows(text_of(some_ids(1, 900)[0].numpy()), SETTINGS)
    gradients = []
    for checkpointed in (False, True):
        model = with_memory(base_of())
        if checkpointed:
            checkpoint_blocks(model)
            assert model.model.layers[0].training
        loss, _ = Distillation(model, 1.0, 0.0)(model, rows(4))
        loss.backward()
        gradients.append([x.grad for x in adapter_of(model).parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_the_share_of_the_gap_is_zero_for_the_windowed_base():
    settings = dataclasses.replace(SETTINGS, eval_rows=1)
    gap = Gap(with_memory(base_of(), trained=False), ReturningRows(text_of(some_ids(1, 900)[0].numpy()), settings))
    found = gap()
    for kind in ("text", "returns"):
        assert found[f"{kind}_share"] == pytest.approx(0.0, abs=1e-9)
        assert found[f"{kind}_windowed"] != found[f"{kind}_full"]
        [batch] = gap.batches[kind]
        with as_base(gap.model):
            cost = nats(gap.model, batch["input_ids"], batch["targets"], FULL)
        counted = cost[batch["again"]] if kind == "returns" else cost[:, WINDOW:]
        assert found[f"{kind}_full"] == pytest.approx(float(counted.mean()))


def test_of_rows_in_which_nothing_can_return_the_text_alone_is_measured():
    settings = dataclasses.replace(SETTINGS, seq_len=WINDOW + SINKS + 1, returning=0.0)
    found = Gap(with_memory(base_of()), ReturningRows(text_of(some_ids(1, 900)[0].numpy()), settings))()
    assert "text_share" in found
    assert "returns_share" not in found


@pytest.mark.parametrize("keys", ["attention", "hidden"])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(keys, folder, tmp_path):
    asked = dataclasses.replace(
        SETTINGS, model=str(folder), data=str(folder / "text.txt"), held_out=0.2, out=tmp_path, save_every=2,
        adapter=AdapterSettings(window=WINDOW, sinks=SINKS, memory={"keys": keys}),
    )  # fmt: skip
    whole = retrofit(asked)
    assert (whole["steps"], whole["tokens"]) == (4, 4 * 48)
    header, adapter = read_adapter(tmp_path / "model" / FILE)
    assert (tmp_path / "model" / FILE).stat().st_size < 4 * whole["parameters"] + 8000
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert {"text_share", "returns_share", "returns_full"} <= lines[-1].keys()
    shutil.rmtree(tmp_path / "checkpoints" / "step-000004")
    shutil.rmtree(tmp_path / "model")
    again = retrofit(asked, resume=True)
    header_again, adapter_again = read_adapter(tmp_path / "model" / FILE)
    assert header_again == header
    assert all(torch.equal(x, adapter_again[name]) for name, x in adapter.items())
    assert again["text_share"] == whole["text_share"]
    with torch.no_grad():
        assert load(tmp_path / "model")(some_ids(1, 20)).logits.isfinite().all()


def test_the_command_and_what_is_refused(folder, tmp_path, capsys):
    small = [
        "--adapter.window", "8", "--seq-len", "48", "--passages", "4", "8", "--steps", "1", "--eval-rows", "1",
        "--device", "cpu",
    ]  # fmt: skip
    beside = ["--workers", "1"]
    main(["retrofit", str(folder), str(folder / "text.txt"), "--out", str(tmp_path / "run"), *small, *beside])
    assert "share of the gap recovered" in capsys.readouterr().out
    own = ["--adapter.memory.keys", "hidden", "--adapter.layers", "best:1", "--steps", "2", "--save-every", "0"]
    main(["retrofit", str(folder), str(folder / "text.txt"), "--out", str(tmp_path / "own"), *small, *own])
    said = (told := capsys.readouterr()).out + told.err
    shares = dict(re.findall(r"([-.\d]+) in layer (\d)", said.split("these shares: ")[1]))
    assert sorted(shares.values()) == ["0", "1"]
    header, trained = read_adapter(tmp_path / "own" / "model" / FILE)
    kept = shares[max(shares, key=float)]
    assert (header["settings"]["layers"], f"layers with a memory: {kept}" in said) == ([int(kept)], True)
    assert all(f"/{kept}/" in name for name in trained)
    with pytest.raises(SystemExit):
        main(["retrofit", "--resume", str(tmp_path / "own"), "--adapter.layers", "best:1"])
    assert "got layers='best:1' for a run that goes on" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "own" / "checkpoints")
    with pytest.raises(SystemExit):
        main(["retrofit", "--resume", str(tmp_path / "own")])
    assert "is finished and whose checkpoints are gone" in capsys.readouterr().err
    (tmp_path / "own" / "metrics.jsonl").unlink()  # a run that got no further than its start is started again
    main(["retrofit", "--resume", str(tmp_path / "own")])
    again = read_adapter(tmp_path / "own" / "model" / FILE)[1]
    assert all(torch.equal(x, again[name]) for name, x in trained.items())
    main(["retrofit", "--resume", str(tmp_path / "own"), "--steps", "3"])
    kept_now = json.loads((tmp_path / "own" / "settings.json").read_text())
    assert (kept_now["steps"], kept_now["adapter"]["layers"]) == (3, [int(kept)])
    for changes, said in (
        ({"data": str(folder / "short.txt")}, "expected more than seq_len=48"),
        ({"data": None}, "got no data"),
        ({"out": None}, "got no model or no --out"),
        (
            {
                "data": str(folder / "text.txt"),
                "adapter": AdapterSettings(window=WINDOW, layers="best:3", memory={"keys": "hidden"}),
            },
            "expected best:2 at most",
        ),
        ({"model": "no-such-model"}, "cannot be loaded"),
    ):
        with pytest.raises(ValueError, match=said):
            retrofit(dataclasses.replace(SETTINGS, **{"model": str(folder), "out": tmp_path / "b"} | changes))
