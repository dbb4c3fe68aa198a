"""The recipes say what the paper says, and their sizes are what they are called by."""

import dataclasses
from itertools import pairwise

import pytest

from recipes.recipe_cases import ARCHITECTURES, NAMES, OURS, PAPER, estimate_of, settings_of
from titans_lm.config import BackboneConfig
from titans_lm.recipes.find import read_recipe, recipe_names
from titans_lm.train.fresh import model_without_weights
from titans_lm.train.settings import small_model

every_recipe = pytest.mark.parametrize("name", NAMES)
NOT_USED = {
    "lmm": {"segment_len", "window", "attention_conv_size"}, "mac": {"window"}, "mag": {"segment_len"},
    "mal": {"segment_len"}, "hybrid": {"segment_len"},
}  # fmt: skip


def test_there_is_one_for_every_size_and_architecture() -> None:
    assert sorted(NAMES) == sorted(recipe_names())


def test_a_file_holds_a_size_for_all_architectures() -> None:
    """Of one size, only the architecture differs, its MLP, and what its attention sees."""
    own = {"architecture", "intermediate_size", "segment_len", "window", "attention_conv_size"}
    for size in (*OURS, *PAPER):
        recipes = [read_recipe(f"{size}-{architecture}") for architecture in ARCHITECTURES]
        shared = [{**one, "model": {n: v for n, v in one["model"].items() if n not in own}} for one in recipes]
        assert all(one == shared[0] for one in shared)


@every_recipe
def test_it_names_settings_that_exist_and_all_that_matter(name: str) -> None:
    settings, architecture = settings_of(name), name.split("-")[1]
    assert settings.model.architecture == architecture
    assert (settings.data, settings.out) == (None, None)
    small = small_model()
    changed = {field.name for field in dataclasses.fields(small) if getattr(small, field.name) != field.default}
    assert changed - NOT_USED[architecture] <= read_recipe(name)["model"].keys(), "it would come from the small model"
    assert not NOT_USED[architecture] & read_recipe(name)["model"].keys()


def parameters_by_hand(c: BackboneConfig, vocab_size: int) -> int:
    """Parameters of a language model with depth-2 memories, gates per layer and all else by default."""
    E, H, D = c.hidden_size, c.num_attention_heads, c.head_dim
    networks = H * sum(a * b for a, b in pairwise((D, c.memory_expansion * D, D)))
    memory = 5 * E * E + networks + 2 * E + 3 * c.conv_size * E + 3 * (E + 1) * 2 * H + D
    attention, gate = 4 * E * E + 3 * c.attention_conv_size * E, E * E + 2 * E
    mixers = {
        "lmm": memory, "mac": memory + attention + gate, "mag": memory + attention + gate,
        "mal": memory + attention + E, "sliding": attention,
    }  # fmt: skip
    block = 2 * E + 3 * E * c.mlp_width + c.num_persistent * E
    embeddings = E * sum({"sliding": 0, "lmm": 1, "mal": 1}.get(name, 2) for name in c.blocks[1:])  # norms (D56)
    return vocab_size * E + E + sum(block + mixers[name] for name in c.blocks) + embeddings


@every_recipe
def test_it_has_as_many_parameters_as_its_name_says(name: str) -> None:
    """Within 1 % at the paper's sizes and 2 % at ours, and no other width of the MLP on the grid is nearer."""
    size, settings = name.split("-")[0], settings_of(name)
    c, parameters = settings.model, estimate_of(name)["parameters"]
    assert parameters == parameters_by_hand(c, settings.vocab_size)
    nominal, band, grid = (PAPER[size].parameters, 0.01, 64) if size in PAPER else (OURS[size], 0.02, 32)
    assert abs(parameters - nominal) <= band * nominal
    assert c.mlp_width == c.intermediate_size
    assert c.mlp_width % grid == 0
    assert abs(parameters - nominal) <= 3 * c.hidden_size * c.num_hidden_layers * grid / 2


def test_a_model_without_weights_takes_no_memory() -> None:
    settings = settings_of("tiny-mac")
    model = model_without_weights(settings.model, settings.vocab_size)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize("name", [name for name in NAMES if name.split("-")[0] in PAPER])
def test_it_is_the_recipe_of_the_paper(name: str) -> None:
    settings, size = settings_of(name), PAPER[name.split("-")[0]]
    c = settings.model
    assert (c.num_hidden_layers, c.hidden_size, c.num_attention_heads) == (size.blocks, size.width, size.heads)
    assert (settings.lr, settings.weight_decay, settings.clip) == (size.lr, 0.1, 1.0)
    assert (settings.seq_len, settings.vocab_size, settings.precision) == (4096, 32_000, "bfloat16")
    step = settings.batch_size * settings.seq_len * settings.accumulate
    assert step == 2**19, "half a million tokens"
    assert abs(settings.steps * step - size.tokens) <= step / 2
    assert settings.warmup_steps == round(0.02 * settings.steps)
    assert (c.memory_depth, c.memory_expansion, c.chunk_size, c.conv_size, c.num_persistent) == (2, 4, 16, 4, 128)
    if c.architecture == "mac":
        assert c.segment_len == 512
    if c.architecture in ("mag", "mal", "hybrid"):
        assert c.window == 2048
    assert estimate_of(name)["memory_bytes"]["total"] < 0.95 * 80e9, "its comment says that 80 GB should hold it"


@pytest.mark.parametrize("name", [name for name in NAMES if name.split("-")[0] in OURS])
def test_small_ones_read_bytes(name: str) -> None:
    settings = settings_of(name)
    assert settings.vocab_size == 259
    assert settings.seq_len >= 2 * max(settings.model.segment_len, settings.model.window), "a row outlasts attention"
