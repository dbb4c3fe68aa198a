"""Models of other libraries, as large as ours, through the same trainer."""

import dataclasses
import os
import signal

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from model_cases import small_config
from titans_lm.config import BackboneConfig
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.train.baselines import Knob, baseline_names, fit_baseline, make_baseline, nearest_size
from titans_lm.train.fresh import count_parameters
from titans_lm.train.language import train_language_model
from titans_lm.train.progress import ProgressReport
from titans_lm.train.settings import LanguageSettings
from titans_lm.train.sized import sized_model


class StopAt(ProgressReport):
    """Press Ctrl-C after a step."""

    def __init__(self, step: int) -> None:
        super().__init__(quiet=True)
        self.step = step

    def update(self, record: dict) -> None:
        if record["step"] == self.step:
            os.kill(os.getpid(), signal.SIGINT)


LIKE = BackboneConfig(architecture="mac", hidden_size=128, num_attention_heads=4, num_hidden_layers=3, window=64)


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


LIKE_SMALL = small_config("mac", hidden_size=32, num_attention_heads=2)


@pytest.mark.parametrize("name", baseline_names())
def test_it_has_as_many_parameters_as_ours(name: str) -> None:
    target = count_parameters(LIKE, 259)
    config = fit_baseline(name, LIKE, 259, target, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    assert abs(parameters(make_baseline(config)) / target - 1.0) <= 0.01
    assert (config.vocab_size, config.eos_token_id, config.tie_word_embeddings) == (259, 2, True)


@pytest.mark.parametrize("name", baseline_names())
def test_it_looks_back_and_not_ahead(name: str) -> None:
    """What it says of a token depends on those before it, and on none after."""
    torch.manual_seed(0)
    like = dataclasses.replace(LIKE, hidden_size=32, num_hidden_layers=2)
    model = make_baseline(fit_baseline(name, like, 64, count_parameters(like, 64))).double().eval()
    ids = torch.randint(0, 64, (1, 24))
    other = ids.clone()
    other[0, 12] = (other[0, 12] + 1) % 64
    with torch.no_grad():
        a, b = (model(input_ids=x, use_cache=False).logits[0] for x in (ids, other))
    torch.testing.assert_close(a[:12], b[:12])
    assert not torch.allclose(a[20], b[20])


def test_a_window_is_as_wide_as_ours() -> None:
    torch.manual_seed(0)
    like = dataclasses.replace(LIKE, hidden_size=32, num_hidden_layers=1, window=4)
    model = make_baseline(fit_baseline("mistral", like, 64, count_parameters(like, 64))).double().eval()
    ids = torch.randint(0, 64, (1, 10)).repeat(2, 1)
    ids[1, 2] = (ids[1, 2] + 1) % 64
    with torch.no_grad():
        a, b = model(input_ids=ids, use_cache=False).logits
    changed = (a - b).abs().amax(-1) > 1e-9
    assert changed.nonzero().flatten().tolist() == [2, 3, 4, 5], "the token itself and three before it are seen"


def test_the_chunk_of_mamba2_changes_nothing_but_its_speed() -> None:
    like = dataclasses.replace(LIKE, hidden_size=32, num_hidden_layers=1)
    config = fit_baseline("mamba2", like, 64, count_parameters(like, 64))
    assert config.chunk_size == 32
    ids, outputs = torch.randint(0, 64, (2, 70)), []
    for chunk in (32, 256):
        torch.manual_seed(0)
        config.chunk_size = chunk
        model = make_baseline(config).double().eval()
        outputs.append(model(input_ids=ids, use_cache=False).logits)
    torch.testing.assert_close(*outputs)


def test_the_hybrid_has_no_experts_and_attention_at_the_end() -> None:
    config = fit_baseline("qwen3-next", dataclasses.replace(LIKE, num_hidden_layers=6), 259, 2_000_000)
    assert [kind[0] for kind in config.layer_types] == list("lllflf")
    assert not any("expert" in name for name, _ in make_baseline(config).named_parameters())


@pytest.mark.parametrize("target", [7, 8, 30, 299, 300, 301, 5000])
def test_the_nearest_size(target: int) -> None:
    def count(size: int) -> int:
        return size * size + 3

    found = nearest_size(count, Knob("width", 16, 2), target)
    assert found % 2 == 0
    assert all(abs(count(found) - target) <= abs(count(other) - target) for other in range(2, 200, 2))
    below = nearest_size(count, Knob("width", 16, 2), target, below=True)
    assert below == max((other for other in range(2, 200, 2) if count(other) <= target), default=2)


def test_what_cannot_be_made_small_enough() -> None:
    with pytest.raises(ValueError, match=r"'llama' does not fit: .* of twice as much it has .* expected 1,000 or"):
        fit_baseline("llama", LIKE, 259, 1000)


def test_the_rule_of_another_is_our_block() -> None:
    """DeltaNet and Gated DeltaNet are LMM with β = 2 θ up to 1 and a step for every token, and keep what is shared."""
    later = {"architecture": "lmm", "memory_depth": 1, "omega_window": 4, "key_degree": 2, "memory_caching": "grm"}
    for name, decay in (("delta-net", False), ("gated-delta-net", True)):
        settings = LanguageSettings(baseline=name, model=dataclasses.replace(LIKE, conv_size=3, **later))
        sized = sized_model(settings, byte_tokenizer())
        model = sized.model.config.backbone_config()
        assert (model.architecture, model.conv_size, model.decay, model.decay_first) == ("lmm", 3, decay, decay)
        assert (model.omega_window, model.key_degree, model.memory_caching) == (1, 1, None)
        assert (model.memory_widths, model.chunk_size, model.theta_max) == ((model.head_dim,) * 2, 1, 0.5)
    assert (sized.shape.blocks, sized.shape.heads) == (3, 4)


def test_shapes_are_those_of_the_models() -> None:
    shapes = {
        name: sized_model(LanguageSettings(baseline=name, model=LIKE), byte_tokenizer()).shape
        for name in baseline_names()
    }
    for name in ("llama", "mistral", "qwen3-next"):
        shape = shapes[name]
        assert (shape.blocks, shape.heads, shape.heads * shape.head_dim) == (3, 4, shape.hidden_size)
        assert 2.0 <= shape.mlp_ratio == shape.mlp_width / shape.hidden_size < 3.2
    assert [shapes[name].mlp_width for name in ("mamba", "mamba2")] == [None, None]
    assert [shapes[name].blocks for name in ("mamba", "mamba2")] == [6, 6]


def test_an_unknown_name_gets_a_hint() -> None:
    for name, meant in (("mambo2", "mamba2"), ("DeltaNet", "delta-net"), ("gated_deltanet", "gated-delta-net")):
        with pytest.raises(ValueError, match=rf"'{name}'; did you mean '{meant}'.*config.json"):
            fit_baseline(name, LIKE, 259, 10**6)


def test_a_config_of_ones_own_is_taken_as_it_is(tmp_path) -> None:
    config = AutoConfig.for_model("gpt2", n_embd=24, n_layer=1, n_head=2, vocab_size=100)
    config.save_pretrained(tmp_path)
    settings = LanguageSettings(baseline=str(tmp_path), model=small_config("mac"))
    sized = sized_model(settings, byte_tokenizer())
    assert sized.model.config.n_embd == 24
    assert sized.model.config.vocab_size == 259
    assert sized.asked == count_parameters(small_config("mac"), 259)
    assert f"{sized.parameters / sized.asked - 1:+.2%} from the {sized.asked:,} asked for" in sized.describe()
    assert sized.describe().endswith("1 blocks of width 24, 2 heads of 12")


def test_a_config_that_cannot_be_read(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    with pytest.raises(ValueError, match=r"whose config cannot be read.*nobody"):
        fit_baseline(str(tmp_path), LIKE, 259, 10**6)


def test_ours_can_be_asked_for_a_size() -> None:
    settings = LanguageSettings(model=LIKE, parameters=800_000)
    sized = sized_model(settings, byte_tokenizer())
    assert abs(sized.parameters - 800_000) <= 3 * sized.shape.hidden_size * 3 // 2
    assert sized.asked == 800_000
    assert sized_model(LanguageSettings(model=LIKE), byte_tokenizer()).asked is None


def test_a_baseline_carries_no_state() -> None:
    with pytest.raises(ValueError, match=r"baseline='mamba2'.*no state"):
        LanguageSettings(baseline="mamba2", stateful=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", baseline_names())
def test_it_trains_evaluates_and_goes_on(name: str, tmp_path) -> None:
    """A run of four steps, and one that was stopped after two, end at the same weights."""
    text = tmp_path / "text.txt"
    text.write_text("It learns by the same loop as all others do. " * 60)
    settings = LanguageSettings(
        data=str(text), out=tmp_path / "whole", baseline=name, model=LIKE_SMALL, steps=4, warmup_steps=1,
        seq_len=32, batch_size=2, eval_every=0, save_every=2, eval_bytes=200,
    )  # fmt: skip
    whole = train_language_model(settings)
    assert abs(whole["parameters"] / whole["parameters_asked_for"] - 1.0) < 0.05
    assert 0.0 < whole["held_out_bits_per_byte"] < 9.0
    half = dataclasses.replace(settings, out=tmp_path / "half")
    with pytest.raises(KeyboardInterrupt):
        train_language_model(half, progress=StopAt(2))
    assert train_language_model(half, resume=True)["steps"] == 4
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / run / "model") for run in ("whole", "half"))
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
