"""Rows that hold several documents: each is read as if alone, whatever a client says it by."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DataCollatorWithFlattening

from hf.hf_cases import EVERY_KIND, prompt, small_model
from model_cases import SHARED, assert_close

LENGTHS = [5, 1, 13, 2]


def positions(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def numbers(lengths: list[int]) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


SAID = {
    "position_ids": lambda lengths: {"position_ids": positions(lengths)},
    "seq_idx": lambda lengths: {"seq_idx": numbers(lengths)},
    "cu_seq_lens": lambda lengths: {
        "cu_seq_lens_q": cumulative(lengths),
        "cu_seq_lens_k": cumulative(lengths),
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
        "position_ids": positions(lengths),
    },
}


@pytest.mark.parametrize(
    ("architecture", "said"),
    [(name, "position_ids") for name in (*EVERY_KIND, *SHARED)] + [("mac", "seq_idx"), ("mac", "cu_seq_lens")],
)
def test_each_document_of_a_row_is_read_as_if_alone(architecture: str, said: str) -> None:
    model, ids = small_model(architecture, torch.float64), prompt(sum(LENGTHS))
    out = model(ids, output_hidden_states=True, output_surprise=True, return_state=True, **SAID[said](LENGTHS))
    parts = ids.split(LENGTHS, dim=1)
    alone = [model(part, output_hidden_states=True, output_surprise=True, return_state=True) for part in parts]
    assert_close(out.logits, torch.cat([one.logits for one in alone], dim=1), 1e-9)
    for told in ("hidden_states", "surprise"):
        for got, *expected in zip(getattr(out, told), *(getattr(one, told) for one in alone), strict=True):
            assert_close(got, torch.cat(expected, dim=1), 1e-9)
    following = prompt(4, seed=1)
    assert_close(model(following, state=out.state).logits, model(following, state=alone[-1].state).logits, 1e-9)


@pytest.mark.parametrize("architecture", ["mac", "attention", "mag+segment+mal"])
def test_gradients_of_packed_documents_are_those_of_the_documents(architecture: str) -> None:
    model, ids = small_model(architecture, torch.float64).train(), prompt(sum(LENGTHS))
    model(ids, position_ids=positions(LENGTHS)).logits.square().sum().backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    sum(model(part).logits.square().sum() for part in ids.split(LENGTHS, dim=1)).backward()
    for name, p in model.named_parameters():
        assert_close(packed[name], p.grad, 1e-9)


@pytest.mark.parametrize("architecture", ["mac", "attention", "lmm"])
def test_rows_restart_apart_from_each_other_with_padding_among_them(architecture: str) -> None:
    model, ids = small_model(architecture, torch.float64), prompt(12, 2)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :3], mask[1, 10:] = 0, 0
    places = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0]])
    logits = model(ids, attention_mask=mask, position_ids=places).logits
    for row, start, stop in ((0, 3, 7), (0, 7, 12), (1, 0, 10)):
        assert_close(logits[row, start:stop], model(ids[row : row + 1, start:stop]).logits[0], 1e-9)


@pytest.mark.parametrize("architecture", ["mac", "attention", "mag"])
def test_a_document_that_a_cache_began_goes_on_until_positions_restart(architecture: str) -> None:
    model, ids = small_model(architecture, torch.float64), prompt(16, 2)
    whole = model(ids[:, :13]).logits
    cache = model(ids[:, :7]).past_key_values
    places = torch.tensor([[7, 8, 9, 10, 11, 12, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    out = model(ids[:, 7:], past_key_values=cache, position_ids=places)
    assert_close(out.logits[0, :6], whole[0, 7:], 1e-9)
    assert_close(out.logits[0, 6:], model(ids[:1, 13:]).logits[0], 1e-9)
    assert_close(out.logits[1], model(ids[1:, 7:]).logits[0], 1e-9)
    assert out.past_key_values.state.position.tolist() == [3, 9]


def test_positions_that_only_count_change_nothing() -> None:
    model, ids = small_model("mac"), prompt(9, 2)
    assert torch.equal(model(ids, position_ids=torch.arange(9)[None]).logits, model(ids).logits)


def test_the_flattening_collator_is_understood() -> None:
    model = small_model("mac", torch.float64)
    rows = [{"input_ids": prompt(length, seed=length)[0].tolist()} for length in (5, 8)]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    loss = model(**batch).loss
    texts = [torch.tensor([row["input_ids"]]) for row in rows]
    expected = sum(model(text, labels=text).loss * (text.shape[1] - 1) for text in texts) / 11
    assert_close(loss, expected, 1e-6)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (r"got position_ids 3 at token 2 of row 0; expected 2: positions count up by 1", {"position_ids": [[0, 1, 3]]}),
        (r"got position_ids 5 at token 0 of row 0; expected 0", {"position_ids": [[5, 6, 7]]}),
        (r"got position_ids \(1, 2\); expected \(B, T\) = \(1, 3\)", {"position_ids": [[0, 1]]}),
        (r"got cu_seq_lens \[0, 2\] for hidden states of 1 rows and 3 tokens", {"cu_seq_lens_q": [0, 2]}),
        (r"got cu_seq_lens \[\] for hidden states", {"cu_seq_lens_q": []}),
        (r"got cu_seq_lens \[3\] for hidden states", {"cu_seq_lens_q": 3}),
        (r"got cu_seq_lens_k other than cu_seq_lens_q", {"cu_seq_lens_q": [0, 3], "cu_seq_lens_k": [0, 1, 3]}),
        (r"got seq_idx \(1, 2\); expected", {"seq_idx": [[0, 0]]}),
    ],
)
def test_what_says_nothing_of_documents_is_refused(message: str, said: dict[str, Any], unchecked: None) -> None:
    with pytest.raises(ValueError, match=message):
        small_model("mac")(prompt(3), **{name: torch.tensor(value) for name, value in said.items()})


@pytest.mark.parametrize("name", ["position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"])
def test_documents_are_said_by_tensors(name: str, unchecked: None) -> None:
    with pytest.raises(ValueError, match=f"got {name} of type list; expected a tensor"):
        small_model("mac")(prompt(3), **{name: [0, 3]})


@pytest.mark.parametrize("left", [0, 3])
def test_padding_with_a_number_of_its_own_starts_no_document(left: int) -> None:
    """Collators that number documents give padding a number too, such as −1."""
    model, ids = small_model("mag", torch.float64), prompt(18)
    sides = (left, 8 - left)
    padded, mask = F.pad(ids, sides), F.pad(torch.ones_like(ids), sides)
    packed = model(padded, attention_mask=mask, seq_idx=F.pad(numbers([11, 7]), sides, value=-1), return_state=True)
    alone = model(ids[:, 11:], return_state=True)
    assert_close(packed.logits[:, left + 11 : left + 18], alone.logits, 1e-9)
    assert packed.state.position.tolist() == [7]


def test_lengths_beside_a_state_are_refused() -> None:
    """They say where documents start, and not whether the first of them goes on."""
    model, ids = small_model("lmm"), prompt(6)
    state = model(ids, return_state=True).state
    with pytest.raises(ValueError, match="got cu_seq_lens_q beside a state that has read tokens; expected no state"):
        model(ids, state=state, cu_seq_lens_q=cumulative([2, 4]))
    assert model(ids, state=model.init_state(1), cu_seq_lens_q=cumulative([2, 4])).logits.shape[1] == 6
