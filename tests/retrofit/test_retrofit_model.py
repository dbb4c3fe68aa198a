"""A retrofitted model beside its base: five families, random weights, float64."""

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from retrofit.retrofit_cases import (
    FAMILIES,
    KIN,
    POSITIONS,
    SINKS,
    VOCAB,
    WINDOW,
    apart,
    base_of,
    some_ids,
    with_memory,
)
from titans_lm.ops.state import state_bytes
from titans_lm.retrofit import FULL, Reach, RetrofitCache, adapter_of, add_memory, load, save

EXACT, CLOSE = 1e-10, 1e-9


@pytest.fixture(scope="module", params=FAMILIES)
def base(request):
    return base_of(request.param)


@pytest.fixture(scope="module")
def model(base):
    return with_memory(base)


@torch.no_grad()
def read(model, ids, cuts=(), **kwargs):
    """Logits of tokens read in pieces, with the cache between them."""
    cache, parts = None, []
    for piece in torch.tensor_split(ids, list(cuts), dim=1):
        output = model(piece, past_key_values=cache, use_cache=True, **kwargs)
        cache, parts = output.past_key_values, [*parts, output.logits]
    return torch.cat(parts, 1), cache


@torch.no_grad()
def test_up_to_the_window_it_is_the_base(base, model):
    ids = some_ids(2, 3 * WINDOW)
    assert apart(model(ids[:, :WINDOW]).logits, base(ids[:, :WINDOW]).logits) <= EXACT
    assert apart(model(ids).logits, base(ids).logits) > 1e-4
    assert apart(model(ids, reach=FULL).logits, base(ids).logits) <= EXACT


@torch.no_grad()
def test_until_it_is_trained_it_is_attention_with_sinks_and_a_window(base):
    fresh, ids = with_memory(base, trained=False), some_ids(2, 2 * WINDOW)
    i, j = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])
    seen = (j <= i) & ((j > i - WINDOW) | (j < SINKS))
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    expected = base(ids, attention_mask=mask.expand(len(ids), 1, -1, -1)).logits
    assert apart(fresh(ids).logits, expected) <= EXACT


@torch.no_grad()
def test_beyond_the_positions_of_the_base_sinks_move_up():
    base = base_of(num_hidden_layers=1)
    whole = base.model.rotary_emb.inv_freq.double()

    def exactly(x, position_ids):
        angles = (position_ids[..., None] * whole).repeat(1, 1, 2)
        return angles.cos(), angles.sin()

    base.model.rotary_emb.forward = exactly
    fresh, ids, step = with_memory(base, trained=False), some_ids(2, 4 * POSITIONS), POSITIONS // 2
    i, j = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])
    seen = (j <= i) & ((j > i - WINDOW) | (j < SINKS))
    mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf).expand(len(ids), 1, -1, -1)
    logits, still = fresh(ids).logits, base(ids, attention_mask=mask).logits
    for start in range(0, ids.shape[1], step):
        moved = torch.arange(ids.shape[1])
        if start:
            moved[:SINKS] += start - step  # sinks are at least this far from the queries, and nearer than POSITIONS
        expected = base(ids, attention_mask=mask, position_ids=moved[None]).logits[:, start : start + step]
        assert apart(logits[:, start : start + step], expected) <= EXACT
    assert apart(logits[:, :POSITIONS], still[:, :POSITIONS]) <= EXACT
    assert apart(logits[:, POSITIONS:], still[:, POSITIONS:]) > 1e-3


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}}


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "settings", "rounded"),
    [("llama", {}, False), ("llama", {}, True), ("llama", DYNAMIC, False), ("phi", {}, False), ("cohere", {}, False)],
    ids=["llama", "rounded-afterwards", "dynamic", "partial", "interleaved"],
)
def test_sinks_move_by_the_angles_that_the_base_has_then(family, settings, rounded):
    model = with_memory(base_of(family, num_hidden_layers=1, **settings), trained=False)
    model = model.half().double() if rounded else model
    model(some_ids(1, 4 * POSITIONS))  # with dynamic scaling, angles have changed then
    rotation = model.model.layers[0].self_attn.rotation
    k = torch.randn(1, SINKS, 2, 6, dtype=torch.float64)
    cos, sin = model.model.rotary_emb(k, torch.tensor([[2 * rotation.step]]))
    width = cos.shape[-1]
    turned = rotation.rotate(k[..., :width], k[..., :width], cos, sin, unsqueeze_dim=2)[1]
    moved = rotation.moved_up(k, 2)
    assert apart(moved[..., :width], turned) <= 1e-5, "float32 angles"
    assert torch.equal(moved[..., width:], k[..., width:])
    assert apart(moved, k) > 0.1


@torch.no_grad()
def test_any_pieces_are_one_pass(model):
    ids = some_ids(2, 5 * WINDOW)
    once = model(ids, use_cache=False).logits
    assert apart(once, model(ids, use_cache=False, reach=Reach(WINDOW, SINKS, memory=False)).logits) > 1e-3
    for cuts in (range(20, ids.shape[1]), [1, 2, 3, 9, 10, 11, 30], [WINDOW], [WINDOW + 1, WINDOW + 1 + SINKS]):
        assert apart(read(model, ids, cuts)[0], once) <= CLOSE


@torch.no_grad()
def test_nothing_leaks_from_the_future_or_from_other_rows(model):
    ids = some_ids(2, 4 * WINDOW)
    changed = ids.clone()
    changed[1, 2 * WINDOW] = ids[1, 2 * WINDOW] % (VOCAB - 1) + 1
    before, after = model(ids).logits, model(changed).logits
    assert apart(before[0], after[0]) == 0.0
    assert apart(before[1, : 2 * WINDOW], after[1, : 2 * WINDOW]) == 0.0
    assert apart(before[1, 3 * WINDOW + 1 :], after[1, 3 * WINDOW + 1 :]) > 1e-6, "the memory has it"


@torch.no_grad()
def test_the_state_stays_as_large_as_with_a_full_window(model):
    ids = some_ids(1, 20 * WINDOW)
    sizes = [read(model, ids[:, :length])[1].state_bytes() for length in (WINDOW, WINDOW + 1, 20 * WINDOW)]
    assert len(set(sizes)) == 1
    stepped = read(model, ids[:, : 3 * WINDOW], range(2 * WINDOW, 3 * WINDOW))[1]
    assert stepped.state_bytes() == sizes[0]
    layer = stepped.layers[0].state
    assert state_bytes(layer.k) == WINDOW * layer.k[:, :1].numel() * 8


@torch.no_grad()
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_with_padding_on_the_left(model, beams):
    ids = some_ids(2, 3 * WINDOW)
    settings = {"max_new_tokens": 6, "num_beams": beams, "do_sample": False}
    short = ids[1:, :11]
    alone = [model.generate(x, **settings) for x in (ids[:1], short)]
    padded = torch.cat((ids[:1], F.pad(short, (ids.shape[1] - short.shape[1], 0))))
    together = model.generate(padded, attention_mask=(padded > 0).long(), **settings)
    for row, expected in zip(together, alone, strict=True):
        assert row[-6:].tolist() == expected[0, -6:].tolist()
    if beams == 1:
        whole = model(alone[0], use_cache=False).logits.argmax(-1)
        assert whole[0, -7:-1].tolist() == alone[0][0, -6:].tolist()


@torch.no_grad()
def test_padding_changes_no_logits(model):
    ids = some_ids(2, 4 * WINDOW)
    pad = 5
    padded = F.pad(ids[1:], (pad, 0))
    both = torch.cat((F.pad(ids[:1], (0, pad)), padded))
    mask = torch.ones_like(both)
    mask[0, -pad:] = mask[1, :pad] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)  # angles in float32 differ with the place, so they are given
    cache, parts = None, []
    for start, stop in ((0, 3), (3, 20), (20, both.shape[1])):
        output = model(
            both[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True,
            position_ids=places[:, start:stop],
        )  # fmt: skip
        cache, parts = output.past_key_values, [*parts, output.logits]
    logits, expected = torch.cat(parts, 1), model(ids, use_cache=False).logits
    assert apart(logits[0, :-pad], expected[0]) <= CLOSE
    assert apart(logits[1, pad:], expected[1]) <= CLOSE


def test_training_leaves_the_base_as_it_was(base):
    model = with_memory(base, lora_rank=0)
    before = {name: x.clone() for name, x in base.state_dict().items()}
    parameters = list(adapter_of(model).parameters())
    assert sum(x.numel() for x in parameters) == sum(x.numel() for x in model.parameters() if x.requires_grad)
    optimiser = torch.optim.AdamW(parameters, lr=1e-2)
    model(some_ids(2, 3 * WINDOW)).logits[:, WINDOW:].square().mean().backward()
    assert all(x.grad is not None and float(x.grad.abs().max()) > 0.0 for x in parameters)
    optimiser.step()
    after = model.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items())


@torch.no_grad()
def test_a_file_holds_the_adapter_alone(base, model, tmp_path):
    path = save(model, tmp_path / "adapter")
    assert path.stat().st_size < sum(x.numel() * 8 for x in adapter_of(model).parameters()) + 8000
    loaded = load(path, copy.deepcopy(base))
    ids = some_ids(1, 3 * WINDOW)
    assert apart(loaded(ids).logits, model(ids).logits) == 0.0
    assert loaded.generate(ids, max_new_tokens=3).tolist() == model.generate(ids, max_new_tokens=3).tolist()
    assert loaded.config._name_or_path == base.config._name_or_path
    wider = load(path, copy.deepcopy(base), window=2 * WINDOW, sinks=0)
    assert apart(wider(ids[:, : 2 * WINDOW]).logits, base(ids[:, : 2 * WINDOW]).logits) <= EXACT


@torch.no_grad()
def test_transformers_loads_and_saves_a_folder(tmp_path):
    base, ids = base_of(), some_ids(1, 3 * WINDOW)
    base.save_pretrained(tmp_path / "base")
    model = with_memory(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    model.save_pretrained(tmp_path / "adapter")
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {"adapter.safetensors", "config.json"}
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="which is no folder"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", base=str(tmp_path / "moved"))
    assert apart(found(ids).logits, model(ids).logits) == 0.0
    settings = {"base": str(tmp_path / "moved"), "output_hidden_states": True, "torch_dtype": torch.float64}
    told = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", **settings)
    assert len(told(ids).hidden_states) == 3
    with pytest.raises(ValueError, match="got attention 'flex_attention', which has no place for a memory"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", attn_implementation="flex_attention", **settings)


def test_a_cache_is_a_value():
    model = with_memory(base_of())
    ids = some_ids(1, 3 * WINDOW)
    _, cache = read(model, ids)
    assert isinstance(cache, RetrofitCache)
    kept = copy.deepcopy(cache)
    first = read_on(model, ids[:, :4], cache)
    assert apart(first, read_on(model, ids[:, :4], kept)) == 0.0
    with pytest.raises(ValueError, match="of a cache that records nothing"):
        cache.crop(3)


@torch.no_grad()
def read_on(model, ids, cache):
    return model(ids, past_key_values=cache).logits


def test_add_memory_says_which_layers_have_one():
    model = with_memory(base_of(num_hidden_layers=4, layer_types=None), layers="every:2", trained=False)
    assert [hasattr(layer.self_attn, "memory") for layer in model.model.layers] == [False, True, False, True]
    chosen = add_memory(base_of(), window=4, layers=[1])
    assert [hasattr(layer.self_attn, "memory") for layer in chosen.model.layers] == [False, True]


@torch.no_grad()
@pytest.mark.parametrize("family", KIN)
def test_kin_of_the_families(family):
    base = base_of(family)
    model, fresh, ids = with_memory(base), with_memory(base, trained=False), some_ids(1, 4 * WINDOW)
    assert apart(model(ids[:, :WINDOW]).logits, base(ids[:, :WINDOW]).logits) <= EXACT
    assert apart(model(ids, reach=FULL).logits, base(ids).logits) <= EXACT
    assert apart(model(ids).logits, fresh(ids).logits) > 1e-3
    once = model(ids, use_cache=False).logits
    assert apart(read(model, ids, [3, WINDOW + 5, WINDOW + 6])[0], once) <= CLOSE
    turning = {"smollm3": [1]}
    rotated = [i for i, layer in enumerate(model.model.layers) if layer.self_attn.rotation is not None]
    assert rotated == turning.get(family, [0, 1])
