"""Embedding, backbone and head as a Hugging Face model: outputs, losses, files, and refusals."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache
from transformers.modeling_outputs import ModelOutput

from hf.hf_cases import EVERY_KIND, MEMORIES, SIZES, VOCABULARY, prompt, small_model
from model_cases import assert_close, named_tensors, small_config, wake
from titans_lm.hf import TitansCache, TitansConfig, TitansForCausalLM, TitansModel
from titans_lm.train.fresh import language_model

every_architecture = pytest.mark.parametrize("architecture", EVERY_KIND)


@every_architecture
def test_logits_are_the_head_on_the_backbone_on_the_embedding(architecture: str) -> None:
    model, ids = small_model(architecture), prompt(21, 2)
    y, _ = model.model.backbone(model.model.embed_tokens(ids))
    out = model(ids)
    assert_close(out.logits, y @ model.lm_head.weight.T, 1e-5)
    assert torch.equal(model(inputs_embeds=model.model.embed_tokens(ids)).logits, out.logits)
    assert out.loss is None
    assert out.state is None
    assert out.surprise is None
    assert isinstance(out.past_key_values, TitansCache)
    assert isinstance(model(ids.int()).logits, Tensor)


@every_architecture
def test_the_loss_predicts_the_next_token(architecture: str) -> None:
    model, ids = small_model(architecture), prompt(21, 2)
    labels = ids.clone()
    labels[0, :5] = -100
    out = model(ids, labels=labels)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    assert_close(out.loss, expected, 1e-6)
    total = model(ids, labels=labels, num_items_in_batch=7).loss
    assert_close(total, expected * (2 * 20 - 4) / 7, 1e-4)


def test_labels_may_be_shifted_already() -> None:
    model, ids = small_model("mac"), prompt(21, 2)
    shifted = F.pad(ids[:, 1:], [0, 1], value=-100)
    expected = model(ids, labels=ids).loss
    assert torch.equal(model(ids, shift_labels=shifted).loss, expected)
    assert torch.equal(model(ids, labels=ids, shift_labels=shifted).loss, expected)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"input_ids": [[1, 2]]}, "got input_ids of type list; expected a tensor, rows first"),
        ({"input_ids": None, "inputs_embeds": [[[0.5]]]}, "got inputs_embeds of type list; expected a tensor"),
        ({"attention_mask": [[1] * 5] * 2}, "got attention_mask of type list; expected a tensor"),
        ({"labels": prompt(5, 2).T}, r"got labels int64 \(5, 2\) for logits at \(2, 5\) places; expected as many"),
        ({"labels": prompt(5, 2).flatten()}, r"got labels int64 \(10,\) for logits at \(2, 5\) places"),
        ({"labels": prompt(5, 2).float()}, r"got labels float32 \(2, 5\) for logits .*; expected as many token ids"),
        ({"labels": [[1] * 5] * 2}, "got labels of type list for logits"),
        ({"shift_labels": prompt(5, 2).T}, r"got shift_labels int64 \(5, 2\) for logits at \(2, 5\) places"),
        ({"labels": prompt(5, 2), "logits_to_keep": 3}, r"got labels int64 \(2, 5\) for logits at \(2, 3\) places"),
    ],
)
def test_what_is_no_tensor_and_labels_of_other_places_are_refused(told: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_model("lmm")(**({"input_ids": prompt(5, 2)} | told))


def test_a_config_says_what_a_call_does_not() -> None:
    model, ids = small_model("mac"), prompt(9)
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == 3
    assert model(ids, output_hidden_states=False).hidden_states is None
    model.config.return_dict = False
    assert isinstance(model(ids), tuple)
    assert isinstance(model.model(ids), tuple)
    assert isinstance(model(ids, return_dict=True), ModelOutput)


def test_logits_to_keep_are_the_last_or_those_named() -> None:
    model, ids = small_model("mac"), prompt(21, 2)
    whole = model(ids).logits
    assert_close(model(ids, logits_to_keep=3).logits, whole[:, -3:], 1e-6)
    assert_close(model(ids, logits_to_keep=torch.tensor([0, 4])).logits, whole[:, [0, 4]], 1e-6)
    assert model(ids, logits_to_keep=0).logits.shape == (2, 21, VOCABULARY)


def test_outputs_may_be_a_tuple() -> None:
    model, ids = small_model("mac"), prompt(9)
    out = model(ids, labels=ids, use_cache=False)
    assert list(out) == ["loss", "logits"], "what is not asked for is not there, and the loss comes first"
    loss, logits = model(ids, labels=ids, use_cache=False, return_dict=False)
    assert torch.equal(loss, out.loss)
    assert torch.equal(logits, out.logits)
    assert model.model(ids, use_cache=False, return_dict=False)[0].shape == (1, 9, 16)


@every_architecture
@pytest.mark.parametrize("padded", [False, True])
def test_hidden_states_lead_from_the_embedding_to_the_head(architecture: str, padded: bool) -> None:
    model, ids = small_model(architecture), prompt(21, 2)
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[0, :9] = 0 if padded else 1
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    assert len(out.hidden_states) == len(model.model.backbone.layers) + 1
    assert torch.equal(out.hidden_states[0], model.model.embed_tokens(ids))
    assert_close(model.lm_head(out.hidden_states[-1]), out.logits, 1e-6)
    alone = model(ids[:1, 9 * padded :], output_hidden_states=True)
    for got, expected in zip(out.hidden_states, alone.hidden_states, strict=True):
        assert_close(got[:1, 9 * padded :], expected, 1e-5)


@every_architecture
def test_surprise_has_a_number_for_every_token_head_and_layer(architecture: str) -> None:
    model, ids = small_model(architecture), prompt(21, 2)
    surprise = model(ids, output_surprise=True).surprise
    assert len(surprise) == sum(name in MEMORIES for name in model.config.backbone_config().blocks)
    for size in surprise:
        assert size.shape == (2, 21, 2, 2)
        assert bool((size > 0).all())


@every_architecture
def test_an_array_of_masks_counts_as_padding_on_any_side(architecture: str) -> None:
    model, ids = small_model(architecture, torch.float64), prompt(21, 3)
    mask = torch.ones(3, 21, dtype=torch.long)
    mask[0, :9], mask[1, 15:], mask[2, 4:10] = 0, 0, 0
    for kind in (torch.long, torch.bool, torch.float32):
        logits = model(ids, attention_mask=mask.to(kind)).logits
        for row in range(3):
            real = mask[row].bool()
            assert_close(logits[row, real], model(ids[row, real][None]).logits[0])


@every_architecture
def test_gradients_flow_through_the_returned_state(architecture: str) -> None:
    model, ids = small_model(architecture).train(), prompt(26, 2)
    whole = model(ids, labels=ids).loss
    whole.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    first = model(ids[:, :13], return_state=True)
    second = model(ids[:, 13:], state=first.state, return_state=True)
    assert first.past_key_values is None
    logits = torch.cat([first.logits, second.logits], dim=1)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for name, p in model.named_parameters():
        assert_close(p.grad, expected[name], 1e-4)
    assert second.state.position.tolist() == [26, 26]


def test_a_cache_is_made_for_reading_and_not_for_training() -> None:
    model, ids = small_model("mac"), prompt(5)
    assert model(ids).past_key_values is not None
    assert model(ids, use_cache=False).past_key_values is None
    model.train()
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values is not None
    for _, x in named_tensors(model(ids, use_cache=True).past_key_values.state):
        assert not x.requires_grad


@pytest.mark.parametrize("architecture", ["mac", "mag+segment+mal"])  # test_backbone_state.py has every kind
def test_gradient_checkpointing_changes_nothing_and_is_used(architecture: str) -> None:
    model, ids = small_model(architecture).train(), prompt(21, 2)
    calls: list[int] = []
    for block in model.model.backbone.layers:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        calls.clear()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    blocks = len(model.model.backbone.layers)
    assert len(calls) == blocks
    model.activation_checkpointing_enable()
    checkpointed = gradients()
    assert len(calls) == 2 * blocks
    model.activation_checkpointing_disable()
    again = gradients()
    blocks = len(model.model.backbone.layers)
    assert len(calls) == blocks
    for a, b, c in zip(plain, checkpointed, again, strict=True):
        assert_close(a, b, 1e-6)
        assert_close(a, c, 0.0)


def test_gradient_checkpointing_takes_the_settings_of_transformers() -> None:
    model, ids = small_model("mac", torch.float64).train(), prompt(26, 2)
    calls: list[int] = []
    for block in model.model.backbone.layers:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(1))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        calls.clear()
        first = model(ids[:, :13], return_state=True)
        model(ids[:, 13:], labels=ids[:, 13:], state=first.state).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.activation_checkpointing_enable({"use_reentrant": True})
    for a, b in zip(plain, gradients(), strict=True):
        assert_close(a, b)
    assert len(calls) == 8, "gradients of the state between both calls are there, for reentry was not used"
    model.activation_checkpointing_enable(every_n_layers=2)
    for a, b in zip(plain, gradients(), strict=True):
        assert_close(a, b)
    assert len(calls) == 6, "one block of two was computed again, in both calls"
    used: list[dict[str, Any]] = []
    model._set_gradient_checkpointing(True, lambda block, *args, **kwargs: used.append(kwargs) or block(*args))
    gradients()
    assert used == [{"use_reentrant": False}] * 4, "transformers' own function, with which it offloads, is called"


def assert_same_model(loaded: Any, model: Any, ids: Tensor) -> None:
    """The same weights to the bit, and the same function.

    Outputs are compared in copies of higher precision: weights of a file lie where the file has them, and products of
    tensors that are aligned otherwise may be summed in another order.
    """
    for (name, a), b in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b), name
    a, b = (deepcopy(m).double()(ids)[0] for m in (model, loaded))
    assert_close(a, b, 1e-12)


@every_architecture
def test_a_model_is_the_same_after_a_trip_to_disk(architecture: str, tmp_path: Path) -> None:
    model, ids = small_model(architecture), prompt(21, 2)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys(), "tied weights are written once"  # noqa: SIM118
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, TitansForCausalLM)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert not loaded.training
    assert_same_model(loaded, model, ids)
    trunk = AutoModel.from_pretrained(tmp_path)
    assert isinstance(trunk, TitansModel)
    assert_same_model(trunk, model.model, ids)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        (architecture, settings)
        for architecture in ("lmm", "mac")
        for settings in (
            {"tie_word_embeddings": False},
            {"num_persistent": 0},
            {"memory_depth": 1},
            {"gates": "channel", "gate_rank": 3, "attention_conv_size": 3},
        )
    ]
    + [("mac", {"shared_qkv": True, "gating": "memory"}), ("mag", {"shared_qkv": True})],
    ids=str,
)
def test_every_kind_of_model_survives_a_trip_to_disk(
    architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model, ids = small_model(architecture, **settings), prompt(21, 2)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_model(loaded, model, ids)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == settings.get("tie_word_embeddings", True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("architecture", ["mac", "lmm", "mag+segment+mal"])
def test_a_model_can_be_loaded_in_another_precision(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, ids = small_model(architecture), prompt(21, 2)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert loaded.dtype == dtype
    out = loaded(ids)
    assert out.logits.dtype == dtype
    assert_close(out.logits.float(), model(ids).logits, 1e-4 if dtype == torch.float64 else 0.5)
    precision = torch.promote_types(dtype, torch.float32)
    made = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
    assert made.dtype == dtype
    initial = {p.dtype for m in (loaded, made) for name, p in m.named_parameters() if "initial" in name}
    assert initial == {precision}, "M_init starts a state, and states are never less than float32"
    assert {x.dtype for _, x in named_tensors(out.past_key_values.state) if x.is_floating_point()} == {precision}


def test_the_attention_that_is_used_may_be_asked_for(tmp_path: Path) -> None:
    model, ids = small_model("mac"), prompt(9)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert_same_model(loaded, model, ids)


def test_weights_start_as_the_backbone_says() -> None:
    """Also those that from_pretrained finds missing and those of a model made by a config."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(TitansConfig(architecture="mac", **SIZES))
    block = model.model.backbone.layers[0]
    assert bool((block.memory.norm_weight == 1).all())
    assert block.memory.q_proj.weight.std().item() == pytest.approx(16**-0.5, rel=0.2)
    for output in (block.memory.o_proj, block.attention.o_proj, block.gate.o_proj, block.mlp.down_proj):
        expected = (800 * model.config.num_hidden_layers * output.in_features) ** -0.5
        assert output.weight.std().item() == pytest.approx(expected, rel=0.2)
    gate, config = block.memory.theta_proj, model.config
    shares = (1.0 + 2.0 * gate.stretch) * torch.sigmoid(gate.proj.bias).view(gate.heads, 2) - gate.stretch
    assert_close(shares, torch.tensor([[config.theta_init, config.theta_later_init]] * gate.heads), 1e-6)


def test_missing_weights_are_drawn_and_others_kept(tmp_path: Path) -> None:
    model = small_model("mac")
    wake(model)
    # of θ's gate the weight alone: a bias that was read stays beside a weight that is drawn
    missing = "alpha_proj", "persistent", "initial", "norm_weight", "q_proj", "theta_proj.proj.weight"
    weights = {k: v for k, v in model.state_dict().items() if not any(name in k for name in missing)}
    model.save_pretrained(tmp_path, state_dict=weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, p in loaded.named_parameters():
        if any(part in name for part in missing):
            assert bool(p.isfinite().all()), name
            assert bool(p.any()), name
        else:
            assert torch.equal(p, model.get_parameter(name)), name
    alpha = torch.sigmoid(loaded.model.backbone.layers[0].memory.alpha_proj.proj.bias)
    reach = loaded.config.alpha_stretch
    expected = (loaded.config.alpha_init + reach) / (1.0 + 2.0 * reach)
    assert_close(alpha, torch.full_like(alpha, expected), 1e-6)


@every_architecture
@pytest.mark.parametrize(("depth", "conv"), [(1, 4), (2, 1)])
def test_keys_start_as_queries_wherever_a_model_is_made(architecture: str, depth: int, conv: int) -> None:
    sizes = {"memory_depth": depth, "attention_conv_size": conv, "conv_size": conv}
    model = language_model(small_config(architecture, **sizes), VOCABULARY)
    pairs = [(module.q_proj, module.k_proj) for module in model.modules() if hasattr(module, "k_proj")]
    assert pairs
    for q_proj, k_proj in pairs:
        assert torch.equal(q_proj.weight, k_proj.weight), "D32, D34; transformers draws all weights once more"


@pytest.mark.parametrize("size", [60, 40])
def test_the_vocabulary_can_be_resized(size: int) -> None:
    model, ids = small_model("mac"), prompt(9) % 40
    before = model(ids).logits
    model.resize_token_embeddings(size, mean_resizing=False)
    assert model.config.vocab_size == size
    assert model.lm_head.weight is model.model.embed_tokens.weight
    after = model(ids).logits
    assert after.shape == (1, 9, size)
    assert_close(after[..., :40], before[..., :40], 1e-6)


@every_architecture
def test_parameters_are_those_of_the_backbone_and_the_embedding(architecture: str) -> None:
    model = small_model(architecture)
    backbone = sum(p.numel() for p in model.model.backbone.parameters())  # test_backbone.py has the formula
    assert model.num_parameters() == backbone + VOCABULARY * 16
    untied = small_model(architecture, tie_word_embeddings=False)
    assert untied.num_parameters() == backbone + 2 * VOCABULARY * 16


@pytest.mark.usefixtures("unchecked")
class TestRefusals:
    def refuse(self, message: str, *arguments: Any, **named: Any) -> None:
        with pytest.raises(ValueError, match=message):
            small_model("mac")(*arguments, **named)

    def test_ids_outside_the_vocabulary(self) -> None:
        self.refuse(r"got token ids from 3 to 50; expected 0 to 49", torch.tensor([[3, 50]]))
        self.refuse(r"got token ids from -1 to 3; expected 0 to 49", torch.tensor([[3, -1]]))
        self.refuse(
            r"got labels that are no token ids: .*50.*; expected 0 to 49", torch.tensor([[3, 4]]),
            labels=torch.tensor([[3, 50]]),
        )  # fmt: skip

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8])
    def test_ids_that_are_no_integers(self, dtype: torch.dtype) -> None:
        self.refuse(r"got input_ids .*; expected int32 or int64 \(B, T\)", torch.ones(1, 3, dtype=dtype))

    def test_ids_of_another_rank(self) -> None:
        self.refuse(r"got input_ids torch.int64 \(3,\); expected", torch.ones(3, dtype=torch.long))

    def test_both_or_none_of_ids_and_embeddings(self) -> None:
        self.refuse("both or none of input_ids and inputs_embeds")
        self.refuse("both or none of input_ids and inputs_embeds", prompt(3), inputs_embeds=torch.zeros(1, 3, 16))

    def test_embeddings_of_another_width(self) -> None:
        self.refuse("with E = 16", inputs_embeds=torch.zeros(1, 3, 15))

    @pytest.mark.parametrize("shape", [(1, 4), (1, 2), (2, 3), (1, 1, 3, 3), (3,)])
    def test_masks_of_another_shape(self, shape: tuple[int, ...]) -> None:
        self.refuse(r"got attention_mask of shape .*; expected \(B, T\) = \(1, 3\)", prompt(3), torch.ones(shape))

    def test_a_cache_of_another_kind(self) -> None:
        self.refuse(
            "got past_key_values of type DynamicCache; expected TitansCache", prompt(3), past_key_values=DynamicCache()
        )

    def test_both_a_cache_and_a_state(self) -> None:
        state = small_model("mac").init_state(1)
        self.refuse("got both past_key_values and state", prompt(3), past_key_values=TitansCache(), state=state)
        with pytest.raises(ValueError, match=r"takes a state as past_key_values=TitansCache\(state\)"):
            small_model("mac").generate(prompt(3), max_new_tokens=2, state=state)

    def test_a_state_of_another_batch_or_model(self) -> None:
        self.refuse("got a state of 2 rows and 1 rows of input", prompt(3), state=small_model("mac").init_state(2))
        self.refuse("got the state of another model", prompt(3), state=small_model("lmm").init_state(1))
        self.refuse(
            "got the state of another model", prompt(3), past_key_values=small_model("lmm")(prompt(3)).past_key_values
        )

    def test_attention_weights(self) -> None:
        self.refuse("output_attentions", prompt(3), output_attentions=True)

    def test_arguments_that_mean_nothing_here(self) -> None:
        self.refuse(
            r"got unknown arguments \['token_type_ids'\]; .*(position_ids|seq_idx)", prompt(3), token_type_ids=prompt(3)
        )


@every_architecture
@pytest.mark.parametrize("length", [0, 1])
def test_no_token_and_one_token_are_texts(architecture: str, length: int) -> None:
    model, ids = small_model(architecture), prompt(5)
    first = model(ids[:, :length])
    assert first.logits.shape == (1, length, VOCABULARY)
    rest = model(ids[:, length:], past_key_values=first.past_key_values)
    assert_close(torch.cat([first.logits, rest.logits], dim=1), model(ids).logits, 1e-5)
