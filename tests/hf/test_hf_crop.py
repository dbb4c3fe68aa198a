"""Caches that go back: to the bits of reading less, and so to drafts that plain decoding would have written."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from hf.hf_cases import GREEDY, STACKS, VOCABULARY, prompt, shallow_model, small_model
from model_cases import ARCHITECTURES, MIXED, assert_close, named_tensors
from titans_lm.backbone import Backbone, frozen_memory
from titans_lm.hf import TitansCache, TitansForCausalLM
from titans_lm.ops.state import state_tensors

CALLS = {"one": [40], "several": [13, 20, 7], "tokens": [5] + [1] * 35}
NEW = 72


def assert_equal(a: Any, b: Any) -> None:
    for (name, x), (_, y) in zip(named_tensors(a), named_tensors(b), strict=True):
        assert torch.equal(x, y), name


@torch.no_grad()
def read(model: TitansForCausalLM, ids: Tensor, calls: list[int], cache: TitansCache, mask: Any = None) -> TitansCache:
    """Read in calls of these lengths, as far as the ids go."""
    start = 0
    for length in calls:
        piece = ids[:, start : start + length]
        if piece.shape[1]:
            model(piece, None if mask is None else mask[:, start : start + length], cache)
        start += length
    return cache


@pytest.mark.parametrize(
    ("architecture", "calls"),
    [
        pytest.param(architecture, calls, id=f"{architecture}-{name}")
        for architecture in STACKS
        for name, calls in CALLS.items()
        if architecture not in MIXED or name == "several"
    ],
)
def test_a_cropped_cache_is_that_of_reading_less(architecture: str, calls: list[int]) -> None:
    model, ids = shallow_model(architecture, attention_conv_size=2), prompt(40, 2)
    whole = read(model, ids, calls, TitansCache(keep=64))
    shorter, start = TitansCache(), 0
    for length in calls:  # read once, and on from the last whole call to each place to come to
        for tokens in (33, 16, 5, 1):
            if start < 40 - tokens <= start + length:
                less = read(model, ids[:, start : 40 - tokens], [length], copy.deepcopy(shorter))
                cache = copy.deepcopy(whole)
                cache.crop(-tokens)
                assert cache.get_seq_length() == less.get_seq_length() == 40 - tokens
                assert_equal(cache.state, less.state)
        read(model, ids[:, start : start + length], [length], shorter)
        start += length
    assert start == 40


@pytest.mark.parametrize("architecture", ["mac", "lmm+attention+mac"])
def test_a_crop_goes_on_and_goes_back_again(architecture: str) -> None:
    model, ids, other = small_model(architecture, torch.float64), prompt(40), prompt(9, seed=1)
    cache = read(model, ids, [9, 20, 11], TitansCache(keep=40))
    cache.crop(-3)
    cache.crop(-14)
    cache.crop(20)
    logits = read_on(model, other, cache)
    assert_close(logits, model(torch.cat([ids[:, :20], other], 1)).logits[:, 20:], 1e-9)
    cache.crop(-cache.get_seq_length())
    assert cache.state is None
    assert_close(read_on(model, ids, cache), model(ids).logits, 1e-9)


@torch.no_grad()
def read_on(model: TitansForCausalLM, ids: Tensor, cache: TitansCache) -> Tensor:
    return model(ids, past_key_values=cache).logits


def test_padding_goes_back_too() -> None:
    model, ids = small_model("mac"), prompt(30, 2)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :4] = mask[1, 11:17] = 0
    cache = read(model, ids, [12, 18], TitansCache(keep=30), mask)
    cache.crop(15)
    assert_equal(cache.state, read(model, ids[:, :15], [12, 18], TitansCache(), mask[:, :15]).state)
    assert cache.state.position.tolist() == [11, 11]


def test_rows_and_copies_have_pasts_of_their_own() -> None:
    model, ids = small_model("mac"), prompt(20, 2)
    cache = read(model, ids, [8, 12], TitansCache(keep=20))
    fork = copy.deepcopy(cache)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0]))
    cache.crop(6)
    assert_equal(cache.state, read(model, ids[[1, 0], :6], [8, 12], TitansCache()).state)
    fork.crop(10)
    assert_equal(fork.state, read(model, ids[:, :10], [8, 12], TitansCache()).state)
    fork.reset()
    assert not fork.history.calls, "nobody can go back to them"
    fork.crop(0)
    with pytest.raises(ValueError, match="has read 0 tokens"):
        fork.crop(-1)


def test_a_call_that_was_broken_off_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    model, ids = small_model("lmm"), prompt(20)
    cache = read(model, ids, [8], TitansCache(keep=20))
    with monkeypatch.context() as now:
        now.setattr(Backbone, "forward", stopped)
        with pytest.raises(KeyboardInterrupt):
            read(model, ids[:, 8:], [12], cache)
    read(model, ids[:, 8:], [12], cache)
    cache.crop(6)
    assert_equal(cache.state, read(model, ids[:, :6], [8], TitansCache()).state)


def test_no_graph_is_kept() -> None:
    model, cache = small_model("lmm"), TitansCache(keep=8)
    for _ in range(2):
        model(prompt(4), past_key_values=cache)
    assert len(cache.history.calls) == 2
    assert not any(x.requires_grad for call in cache.history.calls for x in state_tensors(call.inputs))


def test_a_long_call_is_kept_at_its_end_alone() -> None:
    model, ids = small_model("mac", torch.float64), prompt(100, 2)
    cache = TitansCache(keep=16)
    with torch.no_grad():
        out = model(ids, past_key_values=cache, output_hidden_states=True, output_surprise=True)
        plain = model(ids, output_hidden_states=True, output_surprise=True)
    assert_close(out.logits, plain.logits, 1e-9)
    for a, b in zip((*out.hidden_states, *out.surprise), (*plain.hidden_states, *plain.surprise), strict=True):
        assert_close(a, b, 1e-9)
    assert sum(call.count[0] for call in cache.history.calls) == 16
    cache.crop(-16)
    assert_equal(cache.state, read(model, ids[:, :84], [84], TitansCache()).state)


@pytest.mark.parametrize("keep", [1, 16, 100])
def test_what_is_kept_does_not_grow(keep: int) -> None:
    model, cache = shallow_model("lmm"), TitansCache(keep=keep)
    for length in [1] * (2 * keep + 50) + [3] * (keep + 10):
        read(model, prompt(length), [length], cache)
        assert sum(call.count[0] for call in cache.history.calls) <= 2 * keep + 3
        assert len(cache.history.states) <= 2 * keep.bit_length() + 2


@pytest.mark.parametrize("keep", [7, 64])
def test_to_go_back_is_to_read_no_more_than_was_taken_back(keep: int) -> None:
    length = 2 * keep + 22
    model, ids = shallow_model("lmm"), prompt(length)
    cache = read(model, ids, [1] * length, TitansCache(keep=keep))
    for tokens in range(1, keep + 1):
        _, _, again = copy.deepcopy(cache.history).back((length - tokens,), (length,))
        assert sum(count for _, (count,) in again) <= tokens


def test_what_cannot_be_cropped_is_refused() -> None:
    model, ids = small_model("mac"), prompt(30)
    cache = read(model, ids, [20, 10], TitansCache(keep=12))
    for tokens in (-31, 31):
        with pytest.raises(ValueError, match=rf"got crop\({tokens}\) of a cache that has read 30 tokens; expected -30"):
            cache.crop(tokens)
    for tokens in (-13, 17):
        with pytest.raises(ValueError, match=r"take back 12 tokens.*token 17 of 30 is no longer kept.*keep=13 or more"):
            cache.crop(tokens)
    cache.crop(-12)
    with pytest.raises(ValueError, match="no longer kept"):
        cache.crop(-12)
    plain = read(model, ids, [30], TitansCache())
    plain.crop(0)
    with pytest.raises(ValueError, match="of a cache that records nothing: token 29 of 30 is no longer kept"):
        plain.crop(-1)
    plain.activate_past_recording()
    read(model, ids, [30], plain)
    plain.crop(-30)
    with pytest.raises(ValueError, match="token 29 of 30 is no longer kept"):
        plain.crop(-1)
    with pytest.raises(ValueError, match="got keep=-1"):
        TitansCache(keep=-1)


def test_a_cache_in_a_file_has_no_model_to_go_back_with() -> None:
    model = small_model("mac")
    cache = read(model, prompt(20), [20], TitansCache(keep=8))
    again = pickle.loads(pickle.dumps(cache))
    assert_equal(again.state, cache.state)
    assert_equal(model(prompt(3), None, again).logits, model(prompt(3), None, copy.deepcopy(cache)).logits)
    other = pickle.loads(pickle.dumps(cache))
    with pytest.raises(ValueError, match="of a cache whose model is gone"):
        other.crop(-2)
    copy.deepcopy(cache).crop(-2)


def test_packed_rows_are_not_gone_back_into() -> None:
    model, ids = small_model("mac"), prompt(20)
    cache = read(model, ids[:, :6], [6], TitansCache(keep=40))
    places = torch.cat([torch.arange(6, 10), torch.arange(10)])[None]
    model(prompt(14), past_key_values=cache, position_ids=places)
    with pytest.raises(ValueError, match="token 19 of 20 is no longer kept"):
        cache.crop(-1)


def draft(dtype: torch.dtype, vocab_size: int = VOCABULARY) -> TitansForCausalLM:
    """Another model with random weights, whose guesses are mostly wrong."""
    model = small_model("lmm", dtype, hidden_size=8, num_hidden_layers=1, chunk_size=3, vocab_size=vocab_size)
    model.generation_config.num_assistant_tokens = 2
    return model


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")  # some thousand passes; others have their shapes and types checked
@pytest.mark.filterwarnings("ignore")  # transformers', of what it calls itself
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "sliding+mac"])
def test_drafted_text_is_that_of_plain_greedy(architecture: str) -> None:
    model, ids, new = shallow_model(architecture, torch.float64), prompt(12), NEW if architecture == "mac" else 32
    plain = model.generate(ids, max_new_tokens=new, **GREEDY)
    assert plain.shape == (1, 12 + new)
    assert torch.equal(model.generate(ids, max_new_tokens=new, prompt_lookup_num_tokens=5, **GREEDY), plain)
    assert torch.equal(model.generate(ids, max_new_tokens=new, assistant_model=draft(torch.float64), **GREEDY), plain)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", ["mac", "lmm+attention+mac"])
def test_drafted_text_is_that_of_plain_greedy_in_float32(architecture: str) -> None:
    model, ids = shallow_model(architecture), prompt(12)
    read = model(ids[:, :5], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="got tokens to draft and a cache that has read 5"):
        model.generate(ids, past_key_values=read, prompt_lookup_num_tokens=5, **GREEDY)
    embedded = model.get_input_embeddings()(ids)
    for drafts in ({"prompt_lookup_num_tokens": 5}, {"assistant_model": draft(torch.float32)}):
        with pytest.raises(ValueError, match="got tokens to draft and inputs_embeds; expected one of them"):
            model.generate(ids, inputs_embeds=embedded, **drafts, **GREEDY)
    plain = model.generate(ids, max_new_tokens=24, **GREEDY)
    assert torch.equal(model.generate(ids, max_new_tokens=24, prompt_lookup_num_tokens=5, **GREEDY), plain)
    assert torch.equal(model.generate(ids, max_new_tokens=24, assistant_model=draft(torch.float32), **GREEDY), plain)


@pytest.mark.filterwarnings("ignore")
def test_a_draft_may_write_the_id_of_padding() -> None:
    model, ids = shallow_model("lmm", torch.float64), prompt(12)
    model.config.tie_word_embeddings = False
    model.generation_config.pad_token_id = pad = int(model.generate(ids, max_new_tokens=9, **GREEDY)[0, -1])
    plain = model.generate(ids, max_new_tokens=30, **GREEDY)
    assert int((plain[0, 12:] == pad).sum()) > 1
    for helper in (model, draft(torch.float64)):
        helper.generation_config.pad_token_id = pad
        settings = {"attention_mask": torch.ones_like(ids), "assistant_model": helper, "max_new_tokens": 30}
        assert torch.equal(model.generate(ids, **settings, **GREEDY), plain)


@pytest.mark.filterwarnings("ignore")
def test_a_model_drafts_for_itself_and_its_cache_can_be_continued() -> None:
    model, ids = shallow_model("mac", torch.float64), prompt(300)
    plain = model.generate(ids, max_new_tokens=40, **GREEDY)
    settings = GREEDY | {"assistant_model": model, "max_new_tokens": 23, "return_dict_in_generate": True}
    out = model.generate(ids, **settings)
    assert torch.equal(out.sequences, plain[:, :323])
    cache = out.past_key_values
    assert cache.get_seq_length() == 322, "the last token has not been read"
    assert torch.equal(model.generate(out.sequences, past_key_values=cache, max_new_tokens=17, **GREEDY), plain)


@pytest.mark.parametrize("architecture", ["lmm", "mac"])
def test_what_was_read_frozen_is_read_so_again(architecture: str) -> None:
    model, ids, caches = shallow_model(architecture), prompt(20, 2), [TitansCache(keep=20), TitansCache()]
    with frozen_memory(model):
        for cache, length in zip(caches, (20, 9), strict=True):
            read(model, ids[:, :length], [20], cache)
    caches[0].crop(9)
    assert_equal(caches[0].state, caches[1].state)
