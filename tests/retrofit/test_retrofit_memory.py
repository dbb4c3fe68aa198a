"""What the memory of a layer is: against its equations, token by token, and its other forms."""

import copy

import pytest
import torch
from torch.nn import functional as F

from retrofit.retrofit_cases import SINKS, WINDOW, apart, base_of, some_ids, with_memory
from titans_lm.ops.polynomial import polynomial
from titans_lm.retrofit import adapter_of, load, save
from titans_lm.retrofit.attention import Layer, LayerState, Reach, Tokens, read
from titans_lm.retrofit.memory import LayerMemory
from titans_lm.retrofit.settings import AdapterMemory

CLOSE = 1e-9
SQUARED = AdapterMemory(key_degree=2)
OWN = AdapterMemory(key_degree=2, keys="hidden")
DEEP = AdapterMemory(memory_depth=2, memory_expansion=2, chunk_size=4, momentum=True)


@pytest.mark.parametrize(("degree", "own"), [(1, "attention"), (2, "attention"), (1, "hidden"), (2, "hidden")])
def test_a_layer_is_its_equations(degree, own):
    B, T, H, K, D, E = 1, 22, 4, 2, 6, 10
    M = K if own == "hidden" else H  # memories, each for H / M queries
    memory = LayerMemory(E, AdapterMemory(key_degree=degree).of_layer(M, D), own, H).double()
    torch.manual_seed(2)
    for parameter in memory.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    q, k, v = (torch.randn(B, T, heads, D, dtype=torch.float64) for heads in (H, K, K))
    x = torch.randn(B, T, E, dtype=torch.float64)
    layer = Layer(Reach(WINDOW, SINKS), 0.4, 0.0, memory, None)
    with torch.no_grad():
        tokens = Tokens(q, k, v, memory.notes(x), x)
        found, _ = read(tokens, LayerState.start(tokens, layer, whole=False), 0, None, layer)
        unit = x / x.norm(dim=-1, keepdim=True)
        gates = torch.sigmoid(unit @ memory.gate_proj.weight.T + memory.gate_proj.bias)[0]
        opened = 2.0 * torch.sigmoid(unit @ memory.read_proj.weight.T + memory.read_proj.bias)[0]
        for h in range(H):
            queries, keys, values = q[0, :, h], k[0, :, h // 2], v[0, :, h // 2]
            asked, told, after = queries, keys, values
            if own == "hidden":  # one map for both, and the value of the token after
                weight, bias = memory.key_proj.weight.view(K, D, E)[h // 2], memory.key_proj.bias.view(K, D)[h // 2]
                asked = told = F.linear(x[0], weight, bias)
                after = values.roll(-1, 0)
            m = h * M // H
            shares = torch.ones(2) if degree == 1 else memory.key_map.log_shares[m].softmax(-1)

            def mapped(x, shares=shares):
                x = F.normalize(x, dim=0)
                return x if degree == 1 else polynomial(x, shares)

            W = torch.zeros(len(mapped(told[0])), D, dtype=torch.float64)
            for t in range(T):
                seen = [i for i in range(t + 1) if i > t - WINDOW or i < SINKS]
                y = torch.softmax(0.4 * queries[t] @ keys[seen].T, -1) @ values[seen]
                i = t - WINDOW
                if i >= SINKS:
                    theta, alpha = 0.5 * gates[i, m], gates[i, M + m]
                    key = mapped(told[i])
                    error = key @ W - after[i]
                    W = (1.0 - alpha) * W - 2.0 * theta * torch.outer(key, error)
                    y = y + opened[t, h] * (mapped(asked[t]) @ W @ memory.output[h])
                assert apart(found[0, t, h], y) <= CLOSE


@torch.no_grad()
def test_a_memory_that_ends_in_a_norm_learns_values_of_one_size():
    torch.manual_seed(2)
    memory = LayerMemory(10, DEEP.of_layer(2, 4)).double()
    for parameter in memory.parameters():
        parameter.add_(torch.randn_like(parameter))
    q, k, v = torch.randn(3, 1, 9, 2, 4, dtype=torch.float64)
    x = torch.randn(1, 9, 10, dtype=torch.float64)
    same, large, other = (
        memory(q, k, values, memory.notes(x), x, memory.init_state(1), None)[0] for values in (v, 3.0 * v, -v)
    )
    assert apart(large, same) < 1e-4 < 0.01 < apart(other, same)


@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [
        {"memory": DEEP},
        {"memory": SQUARED},
        {"memory": OWN},
        {"memory": OWN, "window": 1, "sinks": 0},
        {"rotary": "after"},
        {"layers": "every:2"},
        {"sinks": 0},
        {"window": 1, "sinks": 3},
    ],
    ids=["deep", "degree-2", "own-keys", "own-keys-window-1", "after-rotary", "every-second", "no-sinks", "window-1"],
)
def test_other_forms_are_one_pass_in_any_pieces_and_with_padding(settings):
    model = with_memory(base_of(), **settings)
    ids = some_ids(2, 4 * WINDOW)
    once = model(ids, use_cache=False).logits
    cache, parts = None, []
    padded = F.pad(ids[1:], (3, 0))
    both = torch.cat((F.pad(ids[:1], (3, 0)), padded))
    mask = torch.ones_like(both)
    mask[:, :3] = 0
    mask[0, 3 * WINDOW] = 0  # a hole; what stands there is no token
    both[0] = torch.cat((both[0, : 3 * WINDOW], both[0, 3 * WINDOW - 1 : -1]))
    for start, stop in ((0, 5), (5, 2 * WINDOW), (2 * WINDOW, 4 * WINDOW), (4 * WINDOW, both.shape[1])):
        output = model(
            both[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True,
            position_ids=(mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, start:],
        )  # fmt: skip
        cache, parts = output.past_key_values, [*parts, output.logits]
    logits = torch.cat(parts, 1)
    assert apart(logits[1, 3:], once[1]) <= CLOSE
    real = logits[0][mask[0].bool()]
    assert apart(real, once[0, : len(real)]) <= CLOSE


@torch.no_grad()
def test_before_rotary_the_place_of_a_text_does_not_count():
    ids = some_ids(1, 3 * WINDOW)
    places = torch.arange(ids.shape[1])[None]
    moved = {}
    for rotary in ("before", "after"):  # a deep memory is no function of products of q and k alone
        model = with_memory(base_of(), memory=DEEP, rotary=rotary)
        moved[rotary] = apart(model(ids, position_ids=places).logits, model(ids, position_ids=places + 50).logits)
    assert moved["before"] <= 1e-4
    assert moved["after"] > 100.0 * moved["before"]


def test_half_precision_and_a_base_that_moves(tmp_path):
    base = base_of().float()
    model = with_memory(base)
    path = save(model, tmp_path)
    half = load(path, copy.deepcopy(base).bfloat16())
    ids = some_ids(1, 3 * WINDOW)
    with torch.no_grad():
        assert half(ids).logits.dtype == torch.bfloat16
        difference = apart(half(ids).logits.float(), model(ids).logits)
        rounded = apart(copy.deepcopy(model).bfloat16()(ids).logits.float(), model(ids).logits)
    assert difference <= 2.0 * rounded
    assert next(adapter_of(half).parameters()).dtype == torch.float32


def test_lora_is_part_of_the_adapter(tmp_path):
    base = base_of()
    model = with_memory(base, lora_rank=2)
    assert any("lora_A" in name for name in adapter_of(model).state_dict())
    loaded = load(save(model, tmp_path), copy.deepcopy(base))
    ids = some_ids(1, 3 * WINDOW)
    with torch.no_grad():
        assert apart(loaded(ids).logits, model(ids).logits) == 0.0
        assert apart(model(ids[:, :WINDOW]).logits, base(ids[:, :WINDOW]).logits) > 1e-6
