"""What a retrofitted model has read can be taken back, to the bit, and so drafts change no text."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hf.hf_cases import shallow_model
from model_cases import assert_close, named_tensors
from retrofit.retrofit_cases import FAMILIES, SINKS, VOCAB, WINDOW, base_of, some_ids, with_memory
from titans_lm.retrofit import Reach, RetrofitCache
from titans_lm.streaming import Reader

CALLS = {"one": [40], "several": [5, 20, 15], "tokens": [5] + [1] * 35}
NEW = {"llama": 72}
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}


@torch.no_grad()
def read(model: Any, ids: Tensor, calls: list[int], keep: int = 0, mask: Any = None, **reach: Any) -> RetrofitCache:
    """Read in calls of these lengths, as far as the ids go."""
    cache, start = RetrofitCache(model.config.num_hidden_layers, keep=keep), 0
    for length in calls:
        piece = ids[:, start : start + length]
        if piece.shape[1]:
            seen = None if mask is None else mask[:, : start + piece.shape[1]]
            model(piece, attention_mask=seen, past_key_values=cache, **reach)
        start += length
    return cache


def assert_equal(a: RetrofitCache, b: RetrofitCache) -> None:
    assert a.get_seq_length() == b.get_seq_length()
    for one, other in zip(a.layers, b.layers, strict=True):
        for (name, x), (_, y) in zip(named_tensors(one.state), named_tensors(other.state), strict=True):
            assert torch.equal(x, y), name


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_cropped_cache_is_that_of_reading_less(family: str, calls: list[int]) -> None:
    model, ids = with_memory(base_of(family)).float(), some_ids(2, 40)
    whole = read(model, ids, calls, keep=64)
    for tokens in (1, 5, 16, 33):
        cache = copy.deepcopy(whole)
        cache.crop(-tokens)
        assert_equal(cache, read(model, ids[:, : 40 - tokens], calls))


def test_padding_and_another_reach_go_back_too() -> None:
    model, ids = with_memory(base_of()), some_ids(2, 30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :4] = 0
    reach = Reach(WINDOW // 2, SINKS)
    cache = read(model, ids, [12, 18], 30, mask, reach=reach)
    cache.crop(15)
    assert_equal(cache, read(model, ids[:, :15], [12, 18], 0, mask[:, :15], reach=reach))


def test_a_long_call_is_kept_at_its_end_alone() -> None:
    model, ids = with_memory(base_of()), some_ids(2, 60)
    cache = RetrofitCache(2, keep=16)
    with torch.no_grad():
        out = model(ids, past_key_values=cache, output_hidden_states=True)
        plain = model(ids, use_cache=False, output_hidden_states=True)
    assert_close(out.logits, plain.logits, 1e-9)
    for a, b in zip(out.hidden_states, plain.hidden_states, strict=True):
        assert_close(a, b, 1e-9)
    assert sum(call.count[0] for call in cache.history.calls) == 16
    cache.crop(-16)
    assert_equal(cache, read(model, ids[:, :44], [44]))


def test_what_cannot_be_cropped_is_refused() -> None:
    cache = read(with_memory(base_of()), some_ids(1, 30), [20, 10], 12)
    with pytest.raises(ValueError, match=r"got crop\(-31\) of a cache that has read 30 tokens"):
        cache.crop(-31)
    with pytest.raises(ValueError, match=r"expected a RetrofitCache with keep=13 or more"):
        cache.crop(-13)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore")  # transformers', of what it calls itself
@pytest.mark.parametrize("family", FAMILIES)
def test_drafted_text_is_that_of_plain_greedy(family: str) -> None:
    blocks = 2 if family == "mistral" else 1  # the others differ from it inside a block
    model, ids, new = with_memory(base_of(family, num_hidden_layers=blocks)), some_ids(1, 12), NEW.get(family, 32)
    plain = model.generate(ids, max_new_tokens=new, **GREEDY)
    assert plain.shape == (1, 12 + new)
    assert torch.equal(model.generate(ids, max_new_tokens=new, prompt_lookup_num_tokens=5, **GREEDY), plain)
    read = RetrofitCache(model.config.num_hidden_layers)
    model(ids[:, :5], past_key_values=read, use_cache=True)
    with pytest.raises(ValueError, match="got tokens to draft and a cache that has read 5"):
        model.generate(ids, past_key_values=read, prompt_lookup_num_tokens=5, **GREEDY)
    draft: Any = base_of("llama", hidden_size=16, intermediate_size=8, num_hidden_layers=1)
    draft = with_memory(draft) if family in ("llama", "mistral") else draft  # or one of transformers alone
    draft.generation_config.num_assistant_tokens = 2
    assert torch.equal(model.generate(ids, max_new_tokens=new, assistant_model=draft, **GREEDY), plain)


@pytest.mark.filterwarnings("ignore")  # transformers', of what it calls itself
@pytest.mark.parametrize("seed", range(4))
def test_a_titans_model_drafts_for_models_that_count_positions(seed: int) -> None:
    base = base_of(num_hidden_layers=1)
    draft = shallow_model("lmm", torch.float64, vocab_size=VOCAB)
    draft.generation_config.num_assistant_tokens = 3
    ids = torch.randint(1, VOCAB, (1, 12), generator=torch.Generator().manual_seed(seed))
    for model in (base, with_memory(base)):
        plain = model.generate(ids, max_new_tokens=20, **GREEDY)
        assert torch.equal(model.generate(ids, max_new_tokens=20, assistant_model=draft, **GREEDY), plain)


def test_a_prompt_that_a_cache_has_read_is_refused() -> None:
    model, ids = with_memory(base_of()), some_ids(1, 12)
    read = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="got a prompt of 12 tokens and a cache that has read 12; expected"):
        model.generate(ids, past_key_values=read, max_new_tokens=2, **GREEDY)


def test_rows_that_cannot_be_gone_on_with_are_refused() -> None:
    """One that ended before the other, and has read the padding behind its end; one that has padding alone."""
    model, ids = with_memory(base_of()), some_ids(2, 11)
    free = model.generate(ids, max_new_tokens=12, **GREEDY)
    end = next(int(token) for token in free[0, 12:] if token not in free[1])
    out = model.generate(ids, max_new_tokens=12, eos_token_id=end, return_dict_in_generate=True, **GREEDY)
    said = torch.cat([out.sequences, some_ids(2, 5)], dim=1)
    with pytest.raises(
        ValueError, match=r"past_key_values whose row 0 has read 22 tokens, some of which the mask leaves"
    ):
        model.generate(
            said, attention_mask=(said != 0).long(), past_key_values=out.past_key_values, max_new_tokens=2, **GREEDY
        )
    mask = torch.ones_like(ids)
    mask[1] = 0
    with pytest.raises(ValueError, match="got nothing but padding in row 1"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2, **GREEDY)


def test_a_reader_takes_back_what_it_read() -> None:
    model, ids = with_memory(base_of()), some_ids(1, 50)
    reader, shorter = Reader(model, piece_len=9, keep=30), Reader(model, piece_len=9)
    reader.feed(ids)
    reader.undo(23)
    shorter.feed(ids[:, :27])
    assert (reader.memory.tokens, reader.memory.pending.tolist()) == (shorter.memory.tokens, [int(ids[0, 26])])
    for (name, x), (_, y) in zip(named_tensors(reader.memory.state), named_tensors(shorter.memory.state), strict=True):
        assert torch.equal(x, y), name


def test_a_draft_may_be_for_a_text_with_the_id_of_padding() -> None:
    """Its target's text has no padding, and may have that id anywhere."""
    model, ids = with_memory(base_of()).float(), some_ids(1, 9)
    plain = model.generate(ids, max_new_tokens=8, do_sample=False)
    pad = int(plain[0, 12])
    mask = torch.ones_like(ids)
    drafted = model.generate(
        ids, attention_mask=mask, assistant_model=with_memory(base_of()).float(), max_new_tokens=8, do_sample=False,
        pad_token_id=pad,
    )  # fmt: skip
    assert torch.equal(drafted, plain)


def test_a_cache_is_used_or_not_given() -> None:
    model, ids = with_memory(base_of()), some_ids(1, 9)
    cache = read(model, ids, [5])
    with pytest.raises(ValueError, match="got past_key_values and use_cache=False; expected one of them"):
        model.generate(ids, past_key_values=cache, use_cache=False, max_new_tokens=3, **GREEDY)
