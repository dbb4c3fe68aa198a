"""A class or a score for a text: the last real token's output through a linear map."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from hf.hf_cases import EVERY_KIND, SIZES, prompt, small_model
from model_cases import assert_close, stack_named, wake
from titans_lm.hf import TitansConfig, TitansForSequenceClassification


def classifier(architecture: str, labels: int = 3) -> TitansForSequenceClassification:
    torch.manual_seed(0)
    config = TitansConfig(**(SIZES | stack_named(architecture)), num_labels=labels, pad_token_id=0)
    model = TitansForSequenceClassification(config).double().eval()
    wake(model, 0.2)
    return model


@pytest.mark.parametrize("architecture", EVERY_KIND)
@pytest.mark.parametrize("side", ["left", "right"])
def test_each_row_is_scored_by_its_last_real_token(architecture: str, side: str) -> None:
    model, lengths = classifier(architecture), [3, 13, 1]
    ids = torch.zeros(3, 13, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, slice(13 - length, None) if side == "left" else slice(0, length)] = prompt(length, seed=row)[0]
    by_pad, by_mask = model(ids).logits, model(ids, attention_mask=(ids != 0).long()).logits
    assert torch.equal(by_pad, by_mask)
    for row, length in enumerate(lengths):
        text = prompt(length, seed=row)
        assert_close(by_pad[row], model(text).logits[0], 1e-9)
        assert_close(by_pad[row], model.score(model.model(text).last_hidden_state[0, -1]), 1e-9)


def test_losses_are_those_of_transformers() -> None:
    model, ids = classifier("mac"), prompt(9, 4)
    out = model(ids, labels=torch.tensor([0, 2, 1, 1]))
    assert_close(out.loss, F.cross_entropy(out.logits, torch.tensor([0, 2, 1, 1])), 1e-9)
    reward = classifier("mac", 1)
    loss, logits, *_ = reward(ids, labels=torch.ones(4).double(), return_dict=False)
    assert_close(loss, (logits[:, 0] - 1.0).square().mean(), 1e-9)


def test_trainer_divides_the_loss_among_the_batches_of_a_step(tmp_path: Path) -> None:
    rows = [{"input_ids": prompt(9, seed=i)[0], "labels": torch.tensor(i % 3)} for i in range(4)]
    found = []
    for batch, steps in ((4, 1), (2, 2)):
        options = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=batch, gradient_accumulation_steps=steps, max_steps=1,
            logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(classifier("lmm").float(), options, train_dataset=rows)
        trainer.train()
        found.append([trainer.state.log_history[0][name] for name in ("loss", "grad_norm")])
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def test_trainer_keeps_positions_and_embeddings(tmp_path: Path) -> None:
    rows = [{"inputs_embeds": torch.zeros(5, 16), "position_ids": torch.tensor([0, 1, 2, 0, 1]), "labels": 0}] * 2
    options = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, dataloader_pin_memory=False)
    trainer = Trainer(classifier("lmm"), options, train_dataset=rows)
    batch = next(iter(trainer.get_train_dataloader()))
    assert set(batch) == {"inputs_embeds", "position_ids", "labels"}
    model, ids, places = classifier("lmm"), prompt(5, 2), torch.tensor([[0, 1, 2, 0, 1]] * 2)
    embedded = model.model.embed_tokens(ids)
    assert torch.equal(model(inputs_embeds=embedded, position_ids=places).logits, model(ids[:, 3:]).logits)


def test_it_trains_and_survives_a_trip_to_disk(tmp_path: Path) -> None:
    model, ids = classifier("mac").train(), prompt(9, 4)
    model(ids, labels=torch.tensor([0, 2, 1, 1])).loss.backward()
    assert all(bool(p.grad.abs().sum() > 0) for p in model.parameters())
    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert isinstance(loaded, TitansForSequenceClassification)
    assert_close(loaded(ids).logits, model(ids).logits, 1e-9)


def test_a_language_model_becomes_a_classifier(tmp_path: Path) -> None:
    language = small_model("mac")
    language.save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=2)
    assert model(prompt(5, 2)).logits.shape == (2, 2)
    assert torch.equal(model.model.embed_tokens.weight, language.model.embed_tokens.weight)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("classes", "problem", "labels", "message"),
    [
        (3, None, torch.tensor([0, 3]), "got labels of no class: .*; expected 0 to 2"),
        (3, None, torch.tensor([0, -1]), "got labels of no class: .*; expected 0 to 2"),
        (3, None, torch.tensor([0]), r"got labels int64 \(1,\) for 2 rows and 3 scores each; .* int64 \(2,\), the"),
        (3, None, torch.tensor([0, 1]).int(), r"got labels int32 \(2,\) for .*; expected for single_label_.* int64"),
        (3, None, torch.tensor([0.0, 1.0]), r"got labels float32 \(2,\) .* floating point \(2, 3\) \(or int64 \(2,\)"),
        (3, None, [0, 1], "got labels of type list for 2 rows"),
        (3, "multi_label_classification", torch.zeros(2, 3).long(), r"got labels int64 \(2, 3\) .* floating point"),
        (3, "regression", torch.zeros(1), r"got labels float32 \(1,\) .* for regression floating point \(2, 3\)"),
        (1, None, torch.zeros(1), r"got labels float32 \(1,\) .* expected for regression floating point \(2,\)"),
        (3, "ranking", torch.zeros(2), "got problem_type='ranking'"),
    ],
)
def test_labels_that_are_none_of_the_scores_are_refused(
    classes: int, problem: str | None, labels: Any, message: str
) -> None:
    model = classifier("lmm", classes)
    model.config.problem_type = problem
    with pytest.raises(ValueError, match=message):
        model(prompt(6, 2), labels=labels)


def test_a_row_without_a_token_is_refused() -> None:
    model, ids = classifier("mac"), prompt(6, 2)
    with pytest.raises(ValueError, match="got a row without a real token"):
        model(torch.tensor([[3, 4], [0, 0]]))
    read, mask = model(ids, use_cache=True).past_key_values, torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0  # of what comes after the cache
    with pytest.raises(ValueError, match="got a row without a real token"):
        model(ids[:, :3], mask, past_key_values=read)
