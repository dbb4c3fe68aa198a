import math

import pytest
import torch
from torch.nn import functional as F

from model_cases import BOUNDED
from titans_lm.data.batches import IGNORED, DocumentLanes
from titans_lm.data.tasks.babilong import BabiLongSettings
from titans_lm.data.tasks.batches import TaskBatches
from titans_lm.data.tasks.recall import RecallSettings
from titans_lm.data.tokenizer import encode_document
from titans_lm.ops.state import state_tensors
from titans_lm.train.loop import fit
from titans_lm.train.losses import CarriedLoss, TaskLoss, next_token_loss, recall_loss
from titans_lm.train.settings import FitSettings

TEXTS = [b"to be or not to be, that is", b"a", b"one two three four five six seven eight nine", b"xyz" * 7]


def test_targets_are_what_follows_and_nothing_is_shifted(llama):
    model = llama()
    input_ids = torch.randint(0, 256, (2, 7))
    targets = torch.randint(0, 256, (2, 7))
    targets[0, 3:] = IGNORED
    loss, metrics = next_token_loss(model, {"input_ids": input_ids, "targets": targets})
    log_p = model(input_ids).logits.log_softmax(-1)
    wanted = [-log_p[b, t, targets[b, t]] for b, t in (targets != IGNORED).nonzero().tolist()]
    torch.testing.assert_close(loss, torch.stack(wanted).mean())
    assert float(metrics["bits_per_token"]) == pytest.approx(float(loss.detach()) / math.log(2))


def test_it_agrees_with_the_loss_of_transformers(titans):
    model = titans("mag")
    ids = torch.randint(0, 256, (2, 9))
    loss, _ = next_token_loss(model, {"input_ids": ids[:, :-1], "targets": ids[:, 1:]})
    torch.testing.assert_close(loss, model(ids, labels=ids).loss, rtol=1e-5, atol=1e-6)


def test_recall_counts_the_targets_that_are_hit():
    batch = TaskBatches(RecallSettings(pairs=2, symbols=8, length=12, gap=4), batch_size=4)(0)

    class Oracle(torch.nn.Module):
        """Right everywhere, except in the first row."""

        def forward(self, input_ids, **_):
            right = F.one_hot(batch["targets"].clamp(min=0), 9).float() * 10
            right[0] = 0.0
            return type("Output", (), {"logits": right})

    loss, metrics = recall_loss(Oracle(), batch)
    assert metrics["accuracy"] == 0.75
    assert float(loss) == pytest.approx(math.log(9) / 4, rel=1e-2)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_the_text_of_a_task_counts_by_its_weight(llama, weight: float):
    model, batch = llama(), TaskBatches(BabiLongSettings(length=0), batch_size=3)(0)
    loss, metrics = TaskLoss(weight)(model, batch)
    asked, told = recall_loss(model, batch)
    ids = batch["input_ids"]
    words = ids[:, 1:].masked_fill(ids[:, 1:] == 0, IGNORED)  # byte 0 fills rows that are shorter than others
    assert (words == IGNORED).any()
    text, _ = next_token_loss(model, {"input_ids": ids[:, :-1], "targets": words})
    torch.testing.assert_close(loss, asked + weight * text)
    assert metrics["accuracy"] == told["accuracy"]
    if weight:
        assert float(metrics["text_bits_per_token"]) == pytest.approx(float(text.detach()) / math.log(2))


@pytest.mark.parametrize("changes", [{}, {"decay": False}, {"gates": "channel"}, {"memory_depth": 2}])
@pytest.mark.parametrize("architecture", ["lmm", "mac"])
def test_open_gates_have_a_sparsity_penalty(titans, architecture, changes):
    """By what each projection of gates gives to the inputs it gets, one after the other."""
    model = titans(architecture, **changes)
    batch = TaskBatches(RecallSettings(pairs=2, symbols=8, length=12, gap=4), batch_size=4)(0)
    names = {f".{gate}_proj" for gate in ("theta", *(["alpha"] if changes.get("decay", True) else []))}
    gates = [module for name, module in model.named_modules() if name.endswith(tuple(names))]
    means = []
    handles = [
        gate.register_forward_hook(lambda _m, _i, out: means.extend(x.mean() for x in _parts(out))) for gate in gates
    ]
    free, _ = TaskLoss()(model, batch)
    for handle in handles:
        handle.remove()
    loss, told = TaskLoss(gate_l1=3.0)(model, batch)
    assert means
    torch.testing.assert_close(told["gates"], torch.stack(means).mean().detach())
    torch.testing.assert_close(loss, free + 3.0 * torch.stack(means).mean())
    loss.backward()
    paid = [gate.proj.weight.grad.clone() for gate in gates]
    model.zero_grad()
    (free + 3.0 * torch.stack(means).mean()).backward()
    for gate, grad in zip(gates, paid, strict=True):
        torch.testing.assert_close(gate.proj.weight.grad, grad)
    assert not any(gate._forward_hooks for gate in gates)


def test_a_model_without_a_memory_has_no_penalty(llama):
    model, batch = llama(), TaskBatches(BabiLongSettings(length=0), batch_size=3)(0)
    loss, told = TaskLoss(gate_l1=3.0)(model, batch)
    torch.testing.assert_close(loss, TaskLoss()(model, batch)[0])
    assert "gates" not in told


def _parts(out):
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("architecture", BOUNDED)
def test_a_carried_state_predicts_like_one_long_pass(titans, architecture):
    """In float64: pieces with the state carried, against each document read whole."""
    model = titans(architecture).double()
    documents = [encode_document(text) for text in TEXTS]
    batches = DocumentLanes(documents, seq_len=8, batch_size=2, seed=1)
    loss_fn, whole = CarriedLoss(), {}
    for document in batches.documents:
        ids = torch.from_numpy(document.astype("int64"))[None]
        nats = F.cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="none")
        whole[tuple(document.tolist())] = nats.detach()
    known = {tuple(d.tolist()[:4]): tuple(d.tolist()) for d in batches.documents}
    reading = [None, None]
    for step in range(9):
        batch = batches(step)
        wanted = []
        for row in range(2):
            length = int(batch["attention_mask"][row].sum())
            if batch["reset"][row]:
                first = [*batch["input_ids"][row, :length].tolist(), int(batch["targets"][row, length - 1])]
                reading[row] = [known[tuple(first[:4])], 0]
            document, start = reading[row]
            wanted.append(whole[document][start : start + length])
            reading[row][1] += length
        loss, _ = loss_fn(model, batch)
        torch.testing.assert_close(loss.detach(), torch.cat(wanted).mean(), rtol=1e-9, atol=1e-9)


def test_gradients_stop_at_the_step_and_reach_the_initial_memory_at_a_start(titans):
    """Forgetting leads to zero: where it leads to M_init, that has a gradient at every token."""
    model, loss_fn = titans("lmm", forget_to="zero"), CarriedLoss()
    ids = torch.randint(0, 256, (2, 8))
    batch = {"input_ids": ids, "targets": ids, "attention_mask": torch.ones_like(ids)}
    initial = dict(model.named_parameters())["model.backbone.layers.0.memory.initial.0"]
    for reset, expected in (([True, True], True), ([True, False], True), ([False, False], False)):
        model.zero_grad()
        loss, _ = loss_fn(model, batch | {"reset": torch.tensor(reset)})
        loss.backward()
        assert not any(tensor.requires_grad for tensor in state_tensors(loss_fn.state))
        assert bool((initial.grad != 0).any()) == expected


def test_a_row_that_starts_a_document_knows_nothing_of_the_last_one(titans):
    model, loss_fn = titans("mal").eval(), CarriedLoss()
    ids = torch.randint(0, 256, (2, 8))
    batch = {"input_ids": ids, "targets": ids, "attention_mask": torch.ones_like(ids)}
    start, on = torch.tensor([True, True]), torch.tensor([False, False])
    first, _ = loss_fn(model, batch | {"reset": start})
    carried, _ = loss_fn(model, batch | {"reset": on})
    again, _ = loss_fn(model, batch | {"reset": start})
    assert again.item() == first.item() != carried.item()
    loss_fn(model, batch | {"reset": on})
    loss_fn.forget()
    forgotten, _ = loss_fn(model, batch | {"reset": on})
    assert forgotten.item() == first.item()


def test_the_carried_state_goes_through_a_checkpoint(titans):
    model, loss_fn = titans("mac").eval(), CarriedLoss()
    ids = torch.randint(0, 256, (2, 8))
    batch = {
        "input_ids": ids,
        "targets": ids,
        "attention_mask": torch.ones_like(ids),
        "reset": torch.tensor([False] * 2),
    }
    assert loss_fn.state_dict() == {"carried": []}
    loss_fn(model, batch)
    saved = loss_fn.state_dict()
    known, kept = ({x.data_ptr() for x in tensors} for tensors in (state_tensors(loss_fn.state), saved["carried"]))
    assert not known & kept, "training goes on while it is written"
    restored = CarriedLoss()
    restored.load_state_dict(saved)
    assert len(restored.state_dict()["carried"]) == len(saved["carried"]) > 0
    assert restored(model, batch)[0].item() == loss_fn(model, batch)[0].item()
    restored.load_state_dict(saved)
    with pytest.raises(ValueError, match="of another model or batch size"):
        restored(model, {name: part[:1] for name, part in batch.items()})


def test_a_model_without_memory_has_nothing_to_carry(llama):
    ids = torch.randint(0, 256, (1, 4))
    with pytest.raises(ValueError, match="has no init_state; expected a model with memory"):
        CarriedLoss()(llama(), {"input_ids": ids, "targets": ids, "reset": torch.tensor([True])})


@pytest.mark.parametrize(
    ("batch", "found", "message"),
    [
        ([torch.ones(2)], lambda y: (y.sum(), {}), "got a batch .*list.*; expected a dict of tensors, such as"),
        ({"x": [1.0, 1.0]}, lambda y: (y.sum(), {}), "got a batch .*'x': 'list'.*; expected a dict of tensors"),
        ({"x": torch.ones(2)}, lambda y: y.sum(), r"got what is float32 \(\) from loss_fn.*; expected \(loss, met"),
        ({"x": torch.ones(2)}, lambda y: None, "got what is of type NoneType from loss_fn"),
        ({"x": torch.ones(2)}, lambda y: (y, {}), r"got what is float32 \(2,\), of type dict from loss_fn"),
        ({"x": torch.ones(2)}, lambda y: (1.0, {}), "got what is of type float, of type dict from loss_fn"),
        ({"x": torch.ones(2)}, lambda y: (y.sum(), None), r"got what is float32 \(\), of type NoneType from loss_fn"),
        ({"x": torch.ones(2)}, lambda y: (y.sum().detach(), {}), "got a loss without gradients; expected one made of"),
    ],
)
def test_what_is_no_batch_and_no_loss_is_refused(unchecked, batch, found, message):
    settings = FitSettings(steps=1, warmup_steps=0)
    with pytest.raises(ValueError, match=message):
        fit(torch.nn.Linear(2, 2), lambda step: batch, lambda model, own: found(model(own["x"])), settings)
