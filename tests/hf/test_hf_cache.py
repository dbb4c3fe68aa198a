"""The cache object: a state and a count of slots, in the form that transformers passes around."""

import copy

import pytest
import torch

from hf.hf_cases import BOUNDED, prompt, small_model
from model_cases import assert_close, named_tensors
from titans_lm.hf import TitansCache
from titans_lm.hf.naming import CACHE
from titans_lm.ops.state import state_bytes


def filled(architecture: str = "mac", rows: int = 2) -> TitansCache:
    cache = small_model(architecture)(prompt(11, rows)).past_key_values
    assert isinstance(cache, TitansCache)
    return cache


def test_a_new_cache_is_empty() -> None:
    cache = TitansCache()
    assert cache.state is None
    assert cache.get_seq_length() == 0
    assert cache.state_bytes() == 0


def test_a_cache_counts_slots_and_its_state_tokens() -> None:
    model, ids = small_model("mac"), prompt(11, 2)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :4] = 0
    cache = model(ids, mask).past_key_values
    assert cache.get_seq_length() == 11
    assert cache.state.position.tolist() == [7, 11]
    assert model(ids, past_key_values=cache).past_key_values is cache
    assert cache.get_seq_length() == 22
    assert cache.get_max_length() == -1
    assert cache.layers[0].get_mask_sizes(3) == (25, 0)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_goes_by_the_name_of_any_release(name: str) -> None:
    model, ids = small_model("mac"), prompt(11, 2)
    whole, read = model(ids).logits[:, -2:], model(ids[:, :9], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="got both cache and past_key_values; expected one of them"):
        model(ids[:, 9:], cache=read, past_key_values=read)
    with pytest.raises(ValueError, match="got both cache and past_key_values; expected one of them"):
        model.generate(ids, cache=read, past_key_values=read, max_new_tokens=3, do_sample=False)
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    found = model.generate(ids, **{name: copy.deepcopy(read)}, max_new_tokens=3, do_sample=False)
    assert torch.equal(found, expected)
    for reader in (model, model.model):
        out = reader(ids[:, 9:], **{name: copy.deepcopy(read)})
        assert out[CACHE] is out.past_key_values
        assert out.past_key_values.get_seq_length() == 11
        assert_close(out[0], whole if reader is model else model.model(ids)[0][:, -2:], 1e-5)


@pytest.mark.parametrize("architecture", BOUNDED)
def test_a_cache_does_not_grow(architecture: str) -> None:
    model = small_model(architecture)
    cache = model(prompt(10)).past_key_values
    before = cache.state_bytes()
    assert before == state_bytes(cache.state) > 0
    with torch.no_grad():
        model(prompt(390), past_key_values=cache)
    assert cache.state_bytes() == before


def test_a_cache_can_start_from_a_state() -> None:
    model, ids = small_model("mac"), prompt(11, 2)
    read = model(ids, return_state=True, use_cache=False).state
    cache = TitansCache(read, 11)
    assert cache.get_seq_length() == 11
    following = prompt(3, 2, seed=1)
    expected = model(torch.cat([ids, following], dim=1)).logits[:, 11:]
    assert_close(model(following, past_key_values=cache).logits, expected, 1e-5)


def test_a_cache_holds_no_graph() -> None:
    assert not any(x.requires_grad for _, x in named_tensors(filled().state))


def test_a_copy_is_another_memory() -> None:
    model, cache = small_model("mac"), filled()
    fork = copy.deepcopy(cache)
    before = [x.clone() for _, x in named_tensors(cache.state)]
    model(prompt(5, 2), past_key_values=fork)
    assert (cache.get_seq_length(), fork.get_seq_length()) == (11, 16)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, named_tensors(cache.state), strict=True))


def test_rows_can_be_repeated_and_picked_as_beams_do() -> None:
    cache = filled()
    before = cache.state
    cache.batch_repeat_interleave(2)
    for (_, a), (_, b) in zip(named_tensors(before), named_tensors(cache.state), strict=True):
        assert torch.equal(b, a[[0, 0, 1, 1]])
    cache.reorder_cache(torch.tensor([3, 0]))
    for (_, a), (_, b) in zip(named_tensors(before), named_tensors(cache.state), strict=True):
        assert torch.equal(b, a[[1, 0]])
    cache.batch_select_indices(torch.tensor([1]))
    for (_, a), (_, b) in zip(named_tensors(before), named_tensors(cache.state), strict=True):
        assert torch.equal(b, a[[0]])


def test_an_empty_cache_has_no_rows_to_pick() -> None:
    cache = TitansCache()
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([0]))
    assert cache.state is None


def test_a_cache_can_be_emptied_and_moved() -> None:
    cache = filled()
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    assert {x.device.type for _, x in named_tensors(cache.state)} == {"cpu"}
    cache.reset()
    assert cache.state is None
    assert cache.get_seq_length() == 0


def test_no_layer_is_written_or_cropped_by_others() -> None:
    cache = filled()
    with pytest.raises(ValueError, match="a layer cannot be cropped alone"):
        cache.layers[0].crop(-1)
    with pytest.raises(ValueError, match="written by the model's forward"):
        cache.update(torch.zeros(1), torch.zeros(1), 0)


def test_a_cache_is_seen_as_what_it_is() -> None:
    cache = filled()
    assert not cache.is_compileable
    assert len(cache) == 1
