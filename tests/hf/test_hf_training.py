"""transformers' Trainer and PEFT take the models as they take any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import disk_offload
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from hf.hf_cases import GREEDY, prompt, small_model
from model_cases import MIXED, assert_close
from titans_lm.hf import TitansForCausalLM


class Texts(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = prompt(13, seed=i)[0]
        return {"input_ids": ids, "labels": ids}


def trainer(model: TitansForCausalLM, folder: Path, **settings: Any) -> Trainer:
    arguments = {
        "max_steps": 4,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
    }
    return Trainer(
        model, TrainingArguments(str(folder), **(arguments | settings)), train_dataset=Texts(), eval_dataset=Texts()
    )


@pytest.mark.parametrize("shifted", [False, True])
def test_what_follows_padding_is_no_target(shifted: bool) -> None:
    """Padded on the left a batch has the loss, and the gradients, of one that is padded on the right."""
    model, texts, found = small_model("lmm", dtype=torch.float64), [prompt(n, seed=n)[0] for n in (4, 9)], []
    for left in (False, True):
        ids, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
        for row, words in enumerate(texts):
            there = slice(9 - len(words), 9) if left else slice(0, len(words))
            ids[row, there], mask[row, there] = words, 1
        labels = ids.masked_fill(mask == 0, -100)
        told = {"shift_labels": F.pad(labels[:, 1:], (0, 1), value=-100)} if shifted else {"labels": labels}
        loss = model(ids, mask, **told).loss
        found.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
    for a, b in zip(*found, strict=True):
        assert_close(a, b, 1e-9)


def test_labels_of_some_places_are_those_behind_real_tokens() -> None:
    model, ids, mask = small_model("lmm", dtype=torch.float64), prompt(9, 2), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    kept = torch.arange(2, 8)
    logits = model(ids, mask).logits[:, 2:8]
    labels = ids[:, 2:8].clone()
    expected = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].masked_fill(mask[:, 2:7] == 0, -100).flatten()
    )
    found = model(ids, mask, labels=labels, logits_to_keep=kept).loss  # float32, as transformers' losses are
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    with pytest.raises(ValueError, match=r"got labels int64 \(2, 5\) for logits at \(2, 6\) places; expected as many"):
        model(ids, mask, labels=labels[:, :5], logits_to_keep=kept)


@pytest.mark.parametrize("architecture", MIXED)
def test_the_trainer_trains(architecture: str, tmp_path: Path) -> None:
    model = small_model(architecture)
    before = {name: p.clone() for name, p in model.named_parameters()}
    run = trainer(model, tmp_path, save_strategy="no", max_steps=2)
    run.train()
    assert all(bool((p != before[name]).any()) for name, p in model.named_parameters())
    result = run.evaluate()
    assert result["eval_loss"] > 0
    predicted = run.predict(Texts()).predictions
    assert predicted.shape == (16, 13, 50), "logits and nothing else"


def test_smoothed_labels_are_those_of_the_next_token(tmp_path: Path) -> None:
    model = small_model("lmm")
    run = trainer(model, tmp_path, label_smoothing_factor=0.1)
    batch = {"input_ids": prompt(13, 2), "labels": prompt(13, 2)}
    logits = model(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), label_smoothing=0.1)
    assert_close(run.compute_loss(model, batch), expected, 1e-5)


@pytest.mark.parametrize(
    "settings", [{}, {"activation_checkpointing": True}, {"gradient_accumulation_steps": 2}], ids=str
)
def test_a_run_that_is_taken_up_again_is_the_run(settings: dict[str, Any], tmp_path: Path) -> None:
    set_seed(3)
    whole = small_model("mac").train()
    trainer(whole, tmp_path, **settings).train()
    again = small_model("mac").train()
    trainer(again, tmp_path / "again", **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for (name, a), b in zip(whole.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=0.0, msg=lambda m, name=name: f"{name}: {m}")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    for (name, a), b in zip(whole.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert_close(saved.double()(prompt(9)).logits, whole.eval().double()(prompt(9)).logits, 1e-12)


# PEFT asks transformers by an old name.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("architecture", ["mac", "mag", "lmm", "mac, shared", "mag, shared"])
def test_lora_trains_generates_and_survives_a_trip_to_disk(architecture: str, tmp_path: Path) -> None:
    base = small_model(architecture, num_hidden_layers=1)
    frozen = {name: p.clone() for name, p in base.named_parameters()}
    targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    optimiser = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    ids, losses = prompt(13, 2), []
    model.train()
    for _ in range(6):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(small_model(architecture, num_hidden_layers=1), tmp_path).eval()
    with torch.no_grad():  # one of them has gradients and the other none: two orders of the same sums
        assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, 1e-7)
    written = model.generate(input_ids=ids, max_new_tokens=5, **GREEDY)
    assert torch.equal(written, loaded.generate(input_ids=ids, max_new_tokens=5, **GREEDY))
    assert torch.equal(written, model.generate(input_ids=ids, max_new_tokens=5, use_cache=False, **GREEDY))
    for name, p in base.named_parameters():  # those that PEFT has wrapped by the names that they had
        assert "lora_" in name or torch.equal(p, frozen[name.replace(".base_layer", "")]), name
    # merging rounds otherwise than adding does, and a memory may blow that up: in float64 there is little of it
    merged, precise = model.double().merge_and_unload(), loaded.double()
    assert_close(merged(ids).logits, precise(input_ids=ids).logits, 1e-9)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_lora_on_the_initial_memory_trains_and_merges() -> None:
    """PEFT wraps the list of M_init, which therefore is called and not read."""
    model, ids = small_model("mac"), prompt(13, 2)
    before = model(ids).logits
    targets = ["memory.initial.0", "memory.initial.1"]
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=targets, task_type="CAUSAL_LM"))
    optimiser = torch.optim.SGD((p for p in tuned.parameters() if p.requires_grad), lr=0.1)
    for _ in range(2):
        tuned(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    after = tuned.double()(input_ids=ids).logits
    assert (after - before).norm() > 1e-3 * before.norm()
    assert_close(tuned.merge_and_unload()(ids).logits, after, 1e-9)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_prefix_tuning_is_refused_for_what_it_is(unchecked: None) -> None:
    tuned = get_peft_model(small_model("mac"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="a memory has no keys and values to put a prefix to, as PEFT's prefix tuning"):
        tuned(input_ids=prompt(5))


CACHING = {"memory_caching": "grm", "caching_segment": 4}


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [(name, {}) for name in (*MIXED, "tnt", "mac, shared", "mag, shared")] + [("lmm", CACHING), ("mag", CACHING)],
)
def test_weights_may_stay_on_disk_until_their_module_is_called(
    architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model, ids = small_model(architecture, **settings), prompt(13, 2)
    logits, written = model(ids).logits, model.generate(ids, max_new_tokens=3, **GREEDY)
    disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert model.model.backbone.layers[0].mlp.up_proj.weight.is_meta
    assert_close(model(ids).logits, logits, 1e-4)
    assert torch.equal(model.generate(ids, max_new_tokens=3, **GREEDY), written)
    assert_close(model(ids, state=model.init_state(2)).logits, logits, 1e-4)
