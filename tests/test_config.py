"""Settings: what follows from them, and every refusal with what was got and what is known."""

import dataclasses
import inspect
import math
import re
from typing import Any, get_args

import pytest

from model_cases import ARCHITECTURES, MEMORIES, MIXED, STACKS, small_config
from titans_lm.beyond_config import CachingConfig, TNTConfig
from titans_lm.config import (
    HYBRID,
    Architecture,
    BackboneConfig,
    MemoryConfig,
    check_known,
    log_spaced,
    nearest,
)
from titans_lm.data.tasks.needle import NeedleSettings
from titans_lm.former import drop_former
from titans_lm.retrofit import AdapterSettings
from titans_lm.train.settings import FitSettings

WRONG = [
    ("hidden_size", 0, "hidden_size=0"),
    ("hidden_size", 6.0, "hidden_size=6.0"),
    ("num_attention_heads", 3, "expected a width that the heads divide"),
    ("num_attention_heads", True, "num_attention_heads=True"),
    ("memory_depth", 0, "at least 1"),
    ("memory_depth", 5, "expected 1 to 4 layers"),
    ("memory_expansion", 0, "at least 1"),
    ("memory_activation", "gelo", "did you mean 'gelu'"),
    ("memory_objective", "l1", "expected one of l2, dot"),
    ("memory_backend", "cuda", "one of auto, reference, chunked"),
    ("forget_to", "initial", "did you mean 'init'"),
    ("gates_see_keys", "yes", "expected True or False"),
    ("gates", "channels", "did you mean 'channel'"),
    ("gate_rank", 0, "at least 1"),
    ("chunk_size", 0, "at least 1"),
    ("chunk_size", "16", "chunk_size='16'"),
    ("omega_window", 0, "omega_window=0; expected an integer of at least 1"),
    ("conv_size", 0, "at least 1"),
    ("theta_bound", 1.5, "from 0.0 to 1.0"),
    ("theta_bound", math.nan, "theta_bound=nan"),
    ("theta_stretch", -0.1, "from 0.0 to 1.0"),
    ("theta_init", 1.0, "above 0 and below 1"),
    ("theta_later_init", 0.0, "above 0 and below 1"),
    ("threshold_init", 0.0, "threshold_init=0.0; expected a number above 0 and below 1"),
    ("alpha_stretch", 1.1, "from 0.0 to 1.0"),
    ("eta_max", 1.0, "from 0.0 to 0.999"),
    ("alpha_init", 2.0, "above 0 and below 1"),
    ("alpha_init", 0.0, "above 0 and below 1"),
    ("alpha_init", (0.1, 1.0), "alpha_init=(0.1, 1.0); expected a number above 0 and below 1"),
    ("alpha_init", (0.3, 0.1), "two that ascend"),
    ("alpha_init", (0.1,), "two that ascend"),
    ("alpha_init", "0.1", "or a pair of them"),
    ("eta_init", 1.0, "above 0 and below 1"),
    ("theta_init", (0.5, 0.5), "two that ascend"),
    ("time_scales", "shift", "did you mean 'shifted'"),
    ("architecture", "MAC", "did you mean 'mac'"),
    ("architecture", "transformer", "one of lmm, mac, mag, mal, tnt, attention, sliding, segment"),
    ("architecture", "hybrids", "did you mean 'hybrid'"),
    ("layer_types", ("lmm", "slidng"), "layer_types='slidng'; did you mean 'sliding'"),
    (
        "layer_types",
        ("lmm", "hybrid"),
        "layer_types='hybrid'; expected one of lmm, mac, mag, mal, tnt, attention, sliding, segment",
    ),
    ("layer_types", (), "layer_types of 0 blocks and num_hidden_layers=2; expected 1 to 2 blocks"),
    ("layer_types", ("lmm", "mac", "lmm"), "layer_types of 3 blocks and num_hidden_layers=2; expected 1 to 2 blocks"),
    ("layer_types", "lmm", "layer_types='lmm'; expected a list of blocks"),
    ("layer_types", 2, "layer_types=2; expected a list of blocks"),
    ("num_hidden_layers", 0, "at least 1"),
    ("intermediate_size", 0, "at least 1"),
    ("segment_len", 0, "at least 1"),
    ("window", 0, "at least 1"),
    ("num_persistent", -1, "at least 0"),
    ("rotary_fraction", 1.1, "from 0.0 to 1.0"),
    ("attention_conv_size", 0, "at least 1"),
    ("rope_theta", 0.0, "above 0"),
    ("norm_eps", 0, "above 0"),
    ("momentum", "false", "expected True or False"),
    ("decay", None, "expected True or False"),
    ("decay_first", 1, "expected True or False"),
    ("memory_norm", "no", "expected True or False"),
    ("gating", "mutul", "did you mean 'mutual'"),
    ("gating", "memori", "did you mean 'memory'"),
    ("memory_reads_residual", "yes", "expected True or False"),
    ("memory_reads_embeddings", 1, "expected True or False"),
    ("shared_qkv", 1, "expected True or False"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=[f"{n}={v}" for n, v, _ in WRONG])
def test_a_wrong_setting_is_refused_with_what_was_got(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match="got ") as refusal:
        small_config(**({"architecture": "mac"} | {name: value}))
    assert message in str(refusal.value)


def test_an_unknown_setting_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown setting 'memory_deph' for MemoryConfig; did you mean 'memory_depth'"):
        check_known(MemoryConfig, {"memory_deph": 2})
    for kind, name, near in (
        (MemoryConfig, "hidden_sise", "hidden_size"), (BackboneConfig, "windw", "window"),
        (FitSettings, "step", "steps"), (AdapterSettings, "sink", "sinks"), (NeedleSettings, "book", "books"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"unknown setting '{name}' for {kind.__name__}; did you mean '{near}'"):
            kind(**{name: 3})
    check_known(BackboneConfig, dataclasses.asdict(BackboneConfig()))


def test_far_from_every_name_all_are_listed() -> None:
    assert nearest("xyz", ["b", "a"]) == "expected one of a, b"


@pytest.mark.parametrize("architecture", STACKS)
def test_only_mac_needs_segments_that_end_where_chunks_end(architecture: str) -> None:
    if "mac" in architecture:
        with pytest.raises(ValueError, match="multiple of chunk_size"):
            small_config(architecture, segment_len=10, chunk_size=4)
    else:
        assert small_config(architecture, segment_len=10, chunk_size=4).segment_len == 10


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_blocks_that_can_share_may_share(architecture: str) -> None:
    if architecture in ("mac", "mag"):
        assert small_config(architecture, shared_qkv=True, attention_conv_size=4).shared_qkv
        with pytest.raises(ValueError, match=r"got attention_conv_size=3 with shared_qkv=True and conv_size=4"):
            small_config(architecture, shared_qkv=True, attention_conv_size=3)
    else:
        with pytest.raises(ValueError, match=f"got shared_qkv=True with architecture='{architecture}'.*mac, mag"):
            small_config(architecture, shared_qkv=True)


def test_forgetting_that_is_off_asks_nothing_of_its_start() -> None:
    assert not MemoryConfig(decay=False, alpha_init=0.0).decay
    first = {"memory_depth": 1, "chunk_size": 1, "forget_to": "zero", "decay_first": True}
    with pytest.raises(ValueError, match=r"got alpha_init=0.9995; expected a number above 0 and below 0.999"):
        MemoryConfig(**first, alpha_init=0.9995)
    with pytest.raises(ValueError, match=r"got alpha_init=\(0.001, 0.1\) with decay=False, which never forgets"):
        MemoryConfig(decay=False, alpha_init=(0.001, 0.1))


def test_a_pair_is_spread_over_heads_and_where_asked_over_the_blocks_too() -> None:
    assert log_spaced((0.001, 1.0), 4) == pytest.approx([0.001, 0.01, 0.1, 1.0])
    stack = [log_spaced((1e-5, 1.0), 2, place, 3) for place in range(3)]
    assert [value for head in zip(*stack, strict=True) for value in head] == pytest.approx(
        [10.0**-k for k in range(5, -1, -1)]
    )
    assert log_spaced((0.01, 1.0), 1) == pytest.approx([0.1])
    assert log_spaced(0.3, 2, 1, 4) == [0.3, 0.3]
    assert MemoryConfig(alpha_init=[0.001, 0.1]) == MemoryConfig(alpha_init=(0.001, 0.1))  # type: ignore[arg-type]


def test_forgetting_first_is_for_what_it_is_exact_for() -> None:
    """Only of a linear memory that takes tokens one by one is the gradient at the decayed memory had by θ and v."""
    linear = {"memory_depth": 1, "chunk_size": 1, "forget_to": "zero", "decay_first": True}
    assert MemoryConfig(**linear).decay_first
    wrong = [{"memory_depth": 2}, {"chunk_size": 2}, {"forget_to": "init"}, {"memory_objective": "dot"}]
    wrong += [{"memory_norm": True}, {"memory_residual": True}, {"decay": False}, {"gates": "channel"}]
    for change in wrong:
        with pytest.raises(ValueError, match="got decay_first=True; expected with it decay, memory_depth=1"):
            MemoryConfig(**{**linear, **change})
    assert (MemoryConfig(**linear).alpha_max, MemoryConfig().alpha_max) == (0.999, 1.0), "it divides by 1 − α"


def test_settings_that_are_no_more_are_taken_where_nothing_changes() -> None:
    settings = {"memory_targets": "rms", "theta_fan_in": None, "alpha_max": 1.0, "memory_depth": 2}
    assert drop_former(settings) == {"memory_depth": 2}
    assert drop_former({"alpha_max": 0.999, "decay_first": True}) == {"decay_first": True}
    with pytest.raises(ValueError, match=r"got memory_targets='unit', a setting that is no more: .*expected 'rms' or"):
        drop_former({"memory_targets": "unit"})
    with pytest.raises(ValueError, match=r"got memory_reads_persistent=False, .* num_persistent=0 has none to read"):
        drop_former({"memory_reads_persistent": False})


def test_architectures_are_all_known_and_five_have_a_memory() -> None:
    assert get_args(Architecture) == (*ARCHITECTURES, "hybrid")
    assert [a for a in STACKS if small_config(a).has_memory] == [*MEMORIES, *MIXED]
    assert not small_config("sliding+segment").has_memory


@pytest.mark.parametrize("depth", [2, 3, 4, 7])
def test_the_hybrid_repeats_its_blocks_over_any_depth(depth: int) -> None:
    config = small_config("hybrid", num_hidden_layers=depth)
    assert config.blocks == (HYBRID * depth)[:depth]
    assert sum(count for _, count in config.by_block()) == depth


def test_a_hybrid_has_room_for_a_memory() -> None:
    with pytest.raises(ValueError, match="got architecture='hybrid' and num_hidden_layers=1; expected as many layers"):
        small_config("hybrid", num_hidden_layers=1)


def test_layer_types_say_what_the_stack_is() -> None:
    """They win over architecture, which becomes the name of what they are."""
    given = BackboneConfig(architecture="mal", layer_types=["lmm", "sliding"], num_hidden_layers=5)  # JSON has lists
    assert given.blocks == ("lmm", "sliding", "lmm", "sliding", "lmm")
    assert (given.architecture, given.layer_types) == ("hybrid", ("lmm", "sliding"))
    assert BackboneConfig(layer_types=("lmm", "lmm")) == BackboneConfig(architecture="lmm")
    assert [(c.architecture, c.layer_types, n) for c, n in given.by_block()] == [("lmm", None, 3), ("sliding", None, 2)]


def test_another_architecture_has_blocks_of_its_own() -> None:
    given = BackboneConfig(layer_types=("lmm", "sliding"))
    assert given.with_architecture("mac").blocks == ("mac",) * 4
    assert given.with_architecture("hybrid") == given
    assert BackboneConfig(architecture="mac").with_architecture("hybrid").blocks == (*HYBRID, HYBRID[0])


def test_a_stack_needs_what_one_of_its_blocks_needs() -> None:
    stack = small_config("lmm+attention+segment")
    assert stack.has_memory
    assert stack.has_segments
    assert stack.state_grows
    assert stack.memory_begins_persistent
    assert not small_config("mac+sliding").memory_begins_persistent


def test_settings_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        small_config("mac").window = 3  # type: ignore[misc]


def test_every_setting_is_documented() -> None:
    """The docstring under each field becomes the help of the command line."""
    source = "".join(map(inspect.getsource, (CachingConfig, TNTConfig, MemoryConfig, BackboneConfig)))
    for field in dataclasses.fields(BackboneConfig):
        assert re.search(rf'^    {field.name}: .* = .*\n    """\w', source, re.MULTILINE), field.name


def test_memory_widths_follow_depth_and_expansion() -> None:
    def widths(**settings: Any) -> tuple[int, ...]:
        return MemoryConfig(hidden_size=12, num_attention_heads=3, **settings).memory_widths

    assert widths(memory_depth=1) == (4, 4)
    assert widths(memory_depth=2) == (4, 16, 4)
    assert widths(memory_depth=4, memory_expansion=2) == (4, 8, 8, 8, 4)


def test_a_linear_memory_is_bare_unless_asked() -> None:
    linear, deep = MemoryConfig(memory_depth=1), MemoryConfig(memory_depth=2)
    assert (linear.use_residual, linear.use_norm) == (False, False)
    assert (deep.use_residual, deep.use_norm) == (True, True)
    asked = MemoryConfig(memory_depth=1, memory_residual=True, memory_norm=True)
    assert (asked.use_residual, asked.use_norm) == (True, True)
    refused = MemoryConfig(memory_depth=2, memory_residual=False, memory_norm=False)
    assert (refused.use_residual, refused.use_norm) == (False, False)


def test_the_step_is_bounded_by_chunk_and_momentum() -> None:
    config = MemoryConfig(theta_bound=0.9, eta_max=0.8, chunk_size=16)
    assert config.theta_max == pytest.approx(0.9 * 0.2 / (16 + 8))
    assert dataclasses.replace(config, momentum=False).theta_max == pytest.approx(0.9 / 16)
    assert dataclasses.replace(config, chunk_size=1).theta_max == pytest.approx(0.9 * 0.2 / 9)
    exact = dataclasses.replace(config, chunk_size=1, momentum=False)
    assert exact.theta_max == 0.5
    assert dataclasses.replace(exact, decay=False).theta_max == 0.9


@pytest.mark.parametrize("eta", [0.0, 0.5, 0.8, 0.95, 0.99])
@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_the_largest_step_can_be_taken_for_ever(chunk: int, eta: float) -> None:
    """One unit key over and over, gates at their bounds: the error of a linear memory never grows (derivation, 12)."""
    theta = MemoryConfig(theta_bound=0.99, eta_max=eta, chunk_size=chunk, decay=False).theta_max
    error, surprise = 1.0, 0.0
    sizes = []
    for _ in range(2000):
        anchor = error
        for _ in range(chunk):
            surprise = eta * surprise - theta * 2.0 * anchor
            error += surprise
        sizes.append(abs(error))
    assert max(sizes) < 1.5
    assert max(sizes[-500:]) < 0.999 * max(sizes[:500])


@pytest.mark.parametrize(("width", "expected"), [(64, 192), (256, 704), (768, 2048)])
def test_the_mlp_is_as_wide_as_llamas(width: int, expected: int) -> None:
    assert BackboneConfig(hidden_size=width).mlp_width == expected
    assert BackboneConfig(hidden_size=width, intermediate_size=5).mlp_width == 5


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 0), (0.3, 2), (0.5, 4), (0.99, 8), (1.0, 10)])
def test_turned_channels_come_in_pairs(fraction: float, expected: int) -> None:
    config = BackboneConfig(hidden_size=20, num_attention_heads=2, rotary_fraction=fraction)
    assert config.rotary_dim == expected


def test_lookahead_needs_a_convolution_of_its_own() -> None:
    with pytest.raises(ValueError, match="got lookahead_values=True with conv_size=1; expected 2 or more"):
        MemoryConfig(lookahead_values=True, conv_size=1)
    with pytest.raises(ValueError, match="got lookahead_values=True with shared_qkv=True; expected one"):
        BackboneConfig(architecture="mag", lookahead_values=True, shared_qkv=True)
    assert MemoryConfig(lookahead_values=True, conv_size=2).lookahead_values


@pytest.mark.parametrize(
    ("name", "value"),
    [("gates", "channel"), ("memory_objective", "huber"), ("memory_backend", "triton"), ("decay_first", True)],
)
def test_what_no_window_goes_with_is_refused(name: str, value: object) -> None:
    more = {"memory_depth": 1, "chunk_size": 1, "forget_to": "zero"} if name == "decay_first" else {}
    assert MemoryConfig(**{name: value}, **more).omega_window == 1
    with pytest.raises(ValueError, match=f"got omega_window=4 with {name}={value!r}; expected a window of 1, or"):
        MemoryConfig(omega_window=4, **{name: value}, **more)
