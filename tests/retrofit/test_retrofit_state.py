"""The state of a retrofitted model as a value, as a Titans model has it: readers, their memories and their files."""

import copy

import pytest
import torch

from forks import said_by
from retrofit.retrofit_cases import FAMILIES, WINDOW, apart, base_of, some_ids, with_memory
from titans_lm.backbone import frozen_memory
from titans_lm.evaluate.accuracy import bytes_of_state
from titans_lm.evaluate.stream import StatefulReader, reader_for
from titans_lm.hf.naming import CACHE
from titans_lm.ops.state import state_bytes, state_tensors
from titans_lm.retrofit import FULL, Reach, RetrofitCache
from titans_lm.streaming import Memory, Reader, load_memory, save_memory

CLOSE = 1e-9


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return with_memory(base_of(request.param))


@pytest.fixture(scope="module")
def llama():
    return with_memory(base_of())


def shapes(state):
    return [tuple(x.shape) for x in state_tensors(state)]


@torch.no_grad()
def test_a_state_goes_in_and_comes_out(model):
    ids = some_ids(2, 4 * WINDOW)
    once, state, parts = model(ids, use_cache=False).logits, model.init_state(2), []
    start = shapes(state)
    for piece in ids.split([1, WINDOW + 3, 1, 2 * WINDOW - 5, WINDOW], dim=1):
        output = model(piece, state=state, return_state=True, use_cache=False)
        state, parts = output.state, [*parts, output.logits]
        assert shapes(state) == start
    assert apart(torch.cat(parts, 1), once) <= CLOSE
    assert state.position.tolist() == [4 * WINDOW] * 2
    fresh = model.base_model(ids, return_state=True).state
    assert all(
        apart(a.double(), b.double()) <= CLOSE for a, b in zip(state_tensors(fresh), state_tensors(state), strict=True)
    )


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@torch.no_grad()
def test_a_cache_goes_by_the_name_of_any_release(llama, name):
    ids = some_ids(2, 3 * WINDOW)
    once, read = llama(ids).logits[:, -2:], llama(ids[:, :-2], use_cache=True).past_key_values
    for model in (llama, llama.base_model):
        with pytest.raises(ValueError, match="got both cache and past_key_values; expected one of them"):
            model(ids[:, -2:], cache=read, past_key_values=read)
        found = model(ids[:, -2:], **{name: copy.deepcopy(read)})
        assert apart(found[0], once if model is llama else model(ids)[0][:, -2:]) <= CLOSE
    told = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(llama.generate(ids, **{name: read}, **told), llama.generate(ids, **told))


@torch.no_grad()
def test_rows_of_different_lengths_keep_states_of_their_own(model):
    ids, lengths = some_ids(3, 3 * WINDOW), (3, 2 * WINDOW, 3 * WINDOW)
    reader = Reader(model, batch_size=3, piece_len=5)
    reader.feed([ids[row, :length].numpy() for row, length in enumerate(lengths)])
    found = reader.next_logits()
    for row, length in enumerate(lengths):
        alone = Reader(model)
        alone.feed(ids[row : row + 1, :length])
        assert apart(alone.next_logits(), model(ids[row : row + 1, :length]).logits[:, -1]) <= CLOSE
        assert apart(found[row : row + 1], alone.next_logits()) <= CLOSE
    joined = Memory.join([reader.memory.row(2), reader.memory.row(0)])
    assert apart(Reader(model, memory=joined).next_logits(), found[[2, 0]]) <= CLOSE


def test_a_memory_file_goes_on_where_it_was_written(llama, tmp_path):
    ids = some_ids(1, 5 * WINDOW)
    reader = Reader(llama)
    reader.feed(ids[:, : 3 * WINDOW])
    save_memory(reader.memory, tmp_path / "a.memory", llama)
    again = Reader(llama, memory=load_memory(tmp_path / "a.memory", llama))
    for one in (reader, again):
        one.feed(ids[:, 3 * WINDOW :])
    assert torch.equal(reader.next_logits(), again.next_logits())
    other = with_memory(base_of(), window=WINDOW + 1)
    with pytest.raises(ValueError, match="its settings are others"):
        load_memory(tmp_path / "a.memory", other)
    with torch.no_grad():
        next(x for x in other.parameters() if x.requires_grad).mul_(2.0)
    with pytest.raises(ValueError, match="of another model"):
        load_memory(tmp_path / "a.memory", other)


def test_a_memory_of_a_half_precision_model(tmp_path):
    model, ids = with_memory(base_of().bfloat16()), some_ids(1, 3 * WINDOW)
    reader = Reader(model)
    reader.feed(ids)
    save_memory(reader.memory, tmp_path / "a.memory", model)
    again = Reader(model, memory=load_memory(tmp_path / "a.memory", model))
    assert torch.equal(reader.next_logits(), again.next_logits())
    assert torch.equal(
        Reader(model, memory=Memory.join([again.memory, reader.memory])).next_logits()[0], reader.next_logits()[0]
    )


def test_readers_of_evaluations_take_it_for_a_model_with_a_state(llama):
    reader = reader_for(llama, piece_len=7)
    assert isinstance(reader, StatefulReader)
    assert reader.constant
    sizes = [bytes_of_state(llama, length) for length in (WINDOW, 20 * WINDOW)]
    assert sizes[0] == sizes[1]
    assert sizes[0].total == state_bytes(llama.init_state(1))
    assert sizes[0].memory is not None


def test_what_a_state_is_refused_for(llama):
    ids = some_ids(1, 4)
    state = llama.init_state(1)
    with pytest.raises(ValueError, match="both past_key_values and a state"):
        llama(ids, state=state, past_key_values=llama(ids, use_cache=True).past_key_values)
    with pytest.raises(ValueError, match="expected a reach with a window"):
        llama(ids, return_state=True, reach=FULL)


@torch.no_grad()
def test_states_and_caches_of_others_are_refused(llama):
    ids, other = some_ids(2, 4), with_memory(base_of(num_hidden_layers=3))
    wide = with_memory(base_of(num_key_value_heads=4))
    bare = with_memory(base_of(), layers=(0,))
    for mine, stranger, told in (
        (llama, other, "of 3 layers; expected one of this model's 2"),
        (llama, wide, "whose layer 0 has 4 heads of"),
        (bare, llama, "with a memory in layer 1; expected none there"),
    ):
        with pytest.raises(ValueError, match=f"got the state of another model, {told}"):
            mine(ids, state=stranger.init_state(2), return_state=True)
    with pytest.raises(ValueError, match="got a cache of 3 layers; expected one of this model's 2"):
        llama(ids, past_key_values=other(ids, use_cache=True).past_key_values)
    with pytest.raises(ValueError, match="got both past_key_values and a state"):
        llama(ids, state=other.init_state(2), past_key_values=llama(ids, use_cache=True).past_key_values)
    with pytest.raises(ValueError, match="got a state of type list; expected RetrofitState"):
        llama(ids, state=[1], return_state=True)
    for past in ({"state": llama.init_state(2)}, {"past_key_values": llama(ids, use_cache=True).past_key_values}):
        with pytest.raises(ValueError, match="got a state of 2 rows and 1 rows of input"):
            llama(ids[:1], **past)


@torch.no_grad()
def test_a_mask_covers_the_call_or_all_that_was_read(llama):
    ids = some_ids(2, 8)
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, :3] = 0
    expected = llama(ids, attention_mask=mask).logits
    for wrong in (mask[:, 3:], torch.cat((mask, mask), 1), mask[:1]):
        with pytest.raises(ValueError, match=r"got an attention_mask \(.*\) for 2 × 8 tokens after 0; expected"):
            llama(ids, attention_mask=wrong)
    cache = llama(ids[:, :5], attention_mask=mask[:, :5], use_cache=True).past_key_values
    found = llama(ids[:, 5:], attention_mask=mask, past_key_values=cache).logits
    assert apart(found, expected[:, 5:]) < CLOSE


def test_a_model_goes_through_a_file_and_a_copy_as_a_whole(llama, tmp_path):
    ids = some_ids(1, 6)
    torch.save(llama, tmp_path / "model.pt")
    for again in (torch.load(tmp_path / "model.pt", weights_only=False), copy.deepcopy(llama)):
        assert again.generate.args[0] is again
        assert torch.equal(again(ids).logits, llama(ids).logits)
        assert torch.equal(again.generate(ids, max_new_tokens=3), llama.generate(ids, max_new_tokens=3))


@torch.no_grad()
def test_a_state_of_a_reach_without_memory_goes_on(llama):
    ids, reach = some_ids(1, 12), Reach(WINDOW, 2, memory=False)
    state = llama(ids[:, :5], return_state=True, reach=reach).state
    found = llama(ids[:, 5:], state=state, return_state=True, reach=reach).logits
    assert apart(found, llama(ids, return_state=True, reach=reach).logits[:, 5:]) < CLOSE


def test_an_empty_prompt_is_refused(llama):
    with pytest.raises(ValueError, match="got a prompt without a token"):
        llama.generate(torch.zeros(1, 0, dtype=torch.int64), max_new_tokens=2)


def test_who_can_save_a_model_has_told_transformers_of_its_folder(tmp_path):
    """In processes of their own, where nothing has been imported for another reason."""
    file = "'titans_lm.retrofit.file' {} sys.modules"
    for name in ("add_memory", "save"):
        code = f"import sys; assert {file.format('not in')}; from titans_lm.retrofit import {name}; "
        said_by(f"{code}assert {file.format('in')}", tmp_path / name)


@torch.no_grad()
def test_arguments_by_position_are_those_by_name(llama):
    ids, mask = some_ids(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[0, :5] = 0
    by_name = llama.base_model(input_ids=ids, attention_mask=mask, return_state=True)
    by_place = llama.base_model(ids, mask, return_state=True)
    assert by_place.state.position.tolist() == [7, 12]
    for a, b in zip(state_tensors(by_place.state), state_tensors(by_name.state), strict=True):
        assert apart(a.double(), b.double()) == 0.0
    caches = [RetrofitCache(2, keep=5), RetrofitCache(2, keep=5)]
    found = llama.base_model(ids, mask, None, caches[0]).last_hidden_state[:, -1]
    assert apart(found, llama.base_model(ids, attention_mask=mask, past_key_values=caches[1])[0][:, -1]) == 0.0
    with pytest.raises(ValueError, match=r"got an attention_mask \(2, 3\) for 2 × 12 tokens after 0"):
        llama.base_model(ids, mask[:, :3])


@torch.no_grad()
def test_a_call_with_a_state_leaves_no_cache_to_go_on_from(llama):
    """It counts the slots of that call alone, and its rows stand elsewhere."""
    state = llama(some_ids(1, 5), return_state=True).state
    past = llama(some_ids(1, 4), state=state).past_key_values
    with pytest.raises(ValueError, match=r"got past_key_values of a call with a state; expected its state"):
        llama(some_ids(1, 3), past_key_values=past)


@torch.no_grad()
def test_more_sinks_than_window_keep_their_shapes():
    model, ids = with_memory(base_of(), window=4, sinks=8), some_ids(1, 16)
    state, parts, start = model.init_state(1), [], shapes(model.init_state(1))
    for piece in ids.split([5, 1, 1, 4, 5], dim=1):
        output = model(piece, state=state, return_state=True)
        state, parts = output.state, [*parts, output.logits]
        assert shapes(state) == start
    assert apart(torch.cat(parts, 1), model(ids).logits) < CLOSE


@torch.no_grad()
def test_a_frozen_memory_with_momentum_stays(llama):
    model = with_memory(base_of(), memory={"momentum": True})
    state = model(some_ids(1, 20), return_state=True).state
    with frozen_memory(model):
        after = model(some_ids(1, 3), state=state, return_state=True).state
    for one, other in zip(state.layers, after.layers, strict=True):
        assert any(bool(S.any()) for S in one.memory.S)
        assert torch.equal(
            torch.stack([one.memory.M[0], one.memory.S[0]]), torch.stack([*other.memory.M, *other.memory.S])
        )


@torch.no_grad()
def test_layers_may_lie_on_another_device_than_what_is_read_first(llama, monkeypatch):
    """A base that is spread over two GPUs; the second is meta here, where tensors have no numbers."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which does not know meta
    attention = llama.base_model.layers[1].self_attn
    k = torch.empty(1, 2, 2, 6, device="meta", dtype=torch.float64)
    assert attention.rotation.moved_up(k, 1).is_meta
    state = llama(some_ids(1, 5), return_state=True).state
    elsewhere = state.layers[1]
    spread = copy.deepcopy(llama)
    spread.base_model.layers[1].to("meta")
    there = spread.base_model.layers[1].self_attn
    assert there is not attention
    cache = RetrofitCache.around(state, 2, masked=False)
    hidden = torch.empty(1, 1, 24, device="meta", dtype=torch.float64)
    angles = tuple(torch.empty(1, 1, 6, device="meta", dtype=torch.float64) for _ in range(2))
    there(hidden, position_embeddings=angles, attention_mask=None, **{CACHE: cache})
    after = cache.layers[1].state
    assert after.k.is_meta
    assert after.k.shape[2:] == elsewhere.k.shape[2:]
