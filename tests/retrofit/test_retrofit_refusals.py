"""What a memory cannot be put beside, and files that are not what they should be: one line each."""

import copy
import json

import pytest
import safetensors.torch
import torch
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    DiffLlamaConfig,
    DynamicCache,
    Gemma2Config,
    GPT2Config,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MambaConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama import modeling_llama

from retrofit.retrofit_cases import FAMILIES, SIZES, base_of, some_ids, with_memory
from titans_lm.distill.settings import RetrofitSettings
from titans_lm.retrofit import FULL, Reach, RetrofitCache, add_memory, load, save
from titans_lm.retrofit.add import check_windows
from titans_lm.retrofit.attention import padding_mask
from titans_lm.retrofit.cache import check_head
from titans_lm.retrofit.file import FORMAT, VERSION, load_base, read_adapter
from titans_lm.retrofit.settings import AdapterSettings

TINY_EYE = CLIPVisionConfig(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)


def small(config):
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_layers_that_are_run_again_are_given_no_cache() -> None:
    """Neither is one begun that would stay empty, without a word."""
    model, ids = with_memory(base_of()).train(), some_ids(1, 12)
    plain = model(ids, labels=ids).loss
    model.gradient_checkpointing_enable()
    assert torch.equal(model(ids, labels=ids).loss, plain)
    with torch.no_grad():
        assert model(ids).past_key_values is None
    calls = (
        lambda: model(ids, past_key_values=RetrofitCache(2)), lambda: model(ids, use_cache=True),
        lambda: model(ids, return_state=True), lambda: model.init_state(1),
        lambda: model.generate(ids, max_new_tokens=2),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match="got a cache or a state in training with gradient checkpointing"):
            call()
    assert model.eval()(ids, use_cache=True).past_key_values.get_seq_length() == 12


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: small(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)), "0 of whose 1 layers have q_proj"),
        (lambda: small(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1)), "nothing recurrent"),
        (
            lambda: T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1)),
            "encoder-decoder",
        ),
        (
            lambda: LlavaForConditionalGeneration(LlavaConfig(vision_config=TINY_EYE, text_config=FAMILIES["llama"])),
            "reads more than text",
        ),
        (lambda: with_memory(base_of()), "has a memory already"),
        (lambda: torch.nn.Linear(2, 2), "got a Linear; expected a model of transformers"),
        (
            lambda: AutoModelForCausalLM.from_config(Gemma2Config(**SIZES, head_dim=8), attn_implementation="eager"),
            "whose softmax is capped",
        ),
        (lambda: small(DiffLlamaConfig(**SIZES)), "whose softmax has weights of its own, lambda_q1"),
    ],
    ids=["gpt2", "mamba", "t5", "llava", "twice", "linear", "gemma2", "diffllama"],
)
def test_models_that_it_cannot_be_put_beside(model, said):
    with pytest.raises(ValueError, match=said):
        add_memory(model(), window=4)


def test_a_model_without_rotary_positions():
    model = base_of()
    del model.model.rotary_emb
    with pytest.raises(ValueError, match="without rotary positions"):
        add_memory(model, window=4)


def test_a_model_with_a_rotation_of_its_own(monkeypatch):
    monkeypatch.delattr(modeling_llama, "apply_rotary_pos_emb")
    with pytest.raises(ValueError, match="got a LlamaForCausalLM, whose rotation is unknown; expected a model like"):
        add_memory(base_of(), window=4)


def test_another_implementation_of_attention():
    model = base_of()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="load the base with 'sdpa'"):
        add_memory(model, window=4)


def test_attention_is_not_exchanged_afterwards():
    model = with_memory(base_of())
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="got attention 'sdpa' for a model with a memory"):
        model(some_ids(1, 3))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"window": 0}, "got window=0; expected an integer of at least 1"),
        ({"window": 17}, "got window=17 for layer 0, whose own window has 16 tokens"),
        ({"window": 4, "sinks": -1}, "got sinks=-1"),
        ({"window": 4, "layers": [2]}, "got layer 2; expected 0 to 1"),
        ({"window": 4, "layers": "every:3"}, "got layers='every:3' with 2 layers; expected all"),
        ({"window": 4, "layers": ()}, "expected one layer at least"),
        ({"window": 4, "layers": 1}, "got layers=1; expected all, every:N, best:N, or a list"),
        ({"window": 4, "layers": [0, 0]}, "expected every number once"),
        ({"window": 4, "layers": "best:1"}, "expected best:1 or more with keys='hidden'"),
        ({"window": 4, "layers": "best:0", "memory": {"keys": "hidden"}}, "expected best:1 or more"),
        ({"window": 4, "layers": "best:1", "memory": {"keys": "hidden"}}, "expected numbers: titans retrofit alone"),
        ({"window": 4, "layers": "best:x", "memory": {"keys": "hidden"}}, "expected all"),
        ({"window": 4, "memory": 3}, "got memory=3; expected settings by name"),
        ({"window": 4, "rotary": "befor"}, "did you mean 'before'"),
        ({"window": 4, "memory": {"memory_dept": 2}}, "did you mean 'memory_depth'"),
        ({"window": 4, "memory": {"alpha_init": 1.5}}, "got alpha_init=1.5"),
    ],
)
def test_settings_that_cannot_be(settings, said):
    with pytest.raises(ValueError, match=said):
        add_memory(base_of("mistral"), **settings)


def test_calls_that_cannot_be_read():
    model, ids = with_memory(base_of()), some_ids(2, 6)
    size = model.config.vocab_size
    for call, said in (
        (lambda: model(ids + size), rf"got token ids from \d+ to \d+; expected 0 to {size - 1}"),
        (lambda: model(ids - size), rf"got token ids from -\d+ to -\d+; expected 0 to {size - 1}"),
        (lambda: model(ids[:, :0]), r"got tokens int64 \(2, 0\); expected ids \(B, T\) or embeddings"),
        (lambda: model(ids[0]), r"got tokens int64 \(6,\); expected ids \(B, T\)"),
        (lambda: model(ids.float()), r"got tokens float32 \(2, 6\); expected ids"),
        (lambda: model(ids[:, :1] + size), rf"got token ids from \d+ to \d+; expected 0 to {size - 1}"),
        (
            lambda: model.base_model(ids, past_key_values=RetrofitCache(2, keep=4), return_dict=False),
            "got return_dict=False and a call longer than the cache's keep",
        ),
        (lambda: model(ids.tolist()), "got tokens of type list; expected a tensor"),
        (lambda: model(ids, output_attentions=True), "got output_attentions=True; attention beside a memory keeps no"),
        (lambda: model.generate(ids[0], max_new_tokens=2), r"got a prompt int64 \(6,\); expected ids \(B, T\)"),
        (lambda: model.init_state(0), "got batch_size=0; expected an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_a_cache_and_a_mask_of_another_kind():
    base = base_of()
    ids = some_ids(1, 6)
    other = base(ids, use_cache=True).past_key_values
    model = with_memory(base)
    for foreign in (other, DynamicCache()):  # one that stays empty would be begun again at every call
        with pytest.raises(ValueError, match="got a DynamicCache for a model with a memory; expected none at first"):
            model(ids, past_key_values=foreign)
    with pytest.raises(ValueError, match="got return_state and return_dict=False"):
        model(ids, return_state=True, return_dict=False)
    with pytest.raises(ValueError, match="got a mask of shape"):
        model(ids, attention_mask=torch.zeros(1, 1, 6, 6, dtype=torch.float64))
    for more in ({"use_cache": False}, {}, {"return_state": True}, {"attention_mask": torch.ones_like(ids)}):
        with torch.no_grad(), pytest.raises(ValueError, match="one text per row"):
            model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), **more)
    for more in (
        {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]])},
        {"cu_seq_lens_q": torch.tensor([0, 3, 6]), "cu_seq_lens_k": torch.tensor([0, 3, 6])},
        {"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2]])},
    ):
        with torch.no_grad(), pytest.raises(ValueError, match="one text per row"):
            model(ids, **more)
    padded = torch.tensor([[0, 0, 1, 1, 1, 1]])
    model(ids, attention_mask=padded, position_ids=(padded.cumsum(1) - 1).masked_fill(padded == 0, 1))
    hole = torch.tensor([[1, 1, 0, 0, 1, 1]])
    model(ids, attention_mask=hole, position_ids=torch.arange(6)[None])
    with pytest.raises(ValueError, match=r"got an attention_mask \(1, 4\) for 1 × 6 tokens"):
        model(ids, attention_mask=hole[:, :4], position_ids=torch.arange(6)[None])
    with pytest.raises(ValueError, match=r"got position_ids \(1, 5\) for 1 × 6 tokens; expected \(1, 6\) or"):
        model(ids, position_ids=torch.arange(5)[None])
    read = model(ids, position_ids=torch.arange(6)[None], use_cache=True).past_key_values
    model(ids, position_ids=torch.arange(6, 12)[None], past_key_values=read)


def test_nothing_is_taken_for_packed_rows_while_it_is_compiled(monkeypatch):
    """transformers says of every trace that its mask cannot be left out."""
    told = {"q_length": 6, "allow_is_causal_skip": False}
    with pytest.raises(ValueError, match="got packed rows"):
        padding_mask(None, **told)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert padding_mask(None, **told) is None


def test_an_adapter_whose_base_has_no_name_asks_for_it(tmp_path):
    base = base_of()
    model = with_memory(copy.deepcopy(base))
    model.config._name_or_path = ""
    save(model, tmp_path)
    with pytest.raises(ValueError, match=r"whose base had no name; give it: load\(adapter, base\)"):
        load(tmp_path)
    with pytest.raises(ValueError, match="got output_loading_info"):
        load(tmp_path, tmp_path, output_loading_info=True)
    ids = some_ids(1, 20)
    assert torch.equal(load(tmp_path, base)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("length", [5, 8, 20])
@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_is_not_read_at_another_reach(length, padded):
    model = with_memory(base_of(), window=8, sinks=2)
    ids = some_ids(2, length)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0 if padded else 1
    cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
    one = torch.ones(2, length + 1, dtype=torch.int64)
    longer = [Reach(16, 2)] if length > 8 else []  # before a window is full, nothing is lost by a longer one
    for reach in (Reach(4, 2), Reach(8, 1), Reach(8, 2, memory=False), FULL, *longer):
        with pytest.raises(ValueError, match="begun with another reach"):
            model(ids[:, :1], attention_mask=one, past_key_values=copy.deepcopy(cache), reach=reach)
    model(ids[:, :1], attention_mask=one, past_key_values=cache, reach=Reach(8, 2))
    state = model(ids, return_state=True).state
    for reach in (Reach(4, 2), Reach(8, 1), FULL, *longer):
        with pytest.raises(ValueError, match="begun with another reach"):
            model(ids[:, :1], state=state, return_state=True, reach=reach)


def test_a_base_in_float16_is_refused_with_the_way_out(tmp_path):
    base = base_of()
    path = save(with_memory(base), tmp_path)
    assert load(path, copy.deepcopy(base).bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="in float32 or bfloat16: float16 rounds otherwise"):
        load(path, copy.deepcopy(base).half())


def test_a_base_is_not_written_over(tmp_path):
    base = base_of()
    base.save_pretrained(tmp_path / "base")
    before = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    model = with_memory(base)
    with pytest.raises(ValueError, match="holds a model of type 'llama'; expected a folder of its own"):
        model.save_pretrained(tmp_path / "base")
    assert {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()} == before
    with pytest.raises(ValueError, match="got push_to_hub"):
        model.save_pretrained(tmp_path / "mine", push_to_hub=True)
    model.save_pretrained(save_directory=tmp_path / "mine", is_main_process=False)
    assert not (tmp_path / "mine").exists()
    for _ in range(2):
        model.save_pretrained(save_directory=tmp_path / "mine")
    assert load(tmp_path / "mine", tmp_path / "base").retrofit.window == model.retrofit.window


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
def test_a_lora_of_others_is_no_part_of_the_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    base = base_of()
    for wrapped in (peft.get_peft_model(copy.deepcopy(base), lora), copy.deepcopy(base)):
        if not isinstance(wrapped, peft.PeftModel):
            wrapped.add_adapter(lora)
        with pytest.raises(ValueError, match="with an adapter of PEFT; expected the base alone"):
            add_memory(wrapped, window=4)
    fresh = copy.deepcopy(base)
    model = with_memory(base, lora_rank=2)
    path = save(model, tmp_path / "before")
    model.add_adapter(lora, "theirs")
    model.set_adapter(["titans", "theirs"])  # PEFT makes the last one the only active one
    other = save(model, tmp_path / "after")
    assert safetensors.torch.load_file(path).keys() == safetensors.torch.load_file(other).keys()
    load(other, base)
    model, ids = with_memory(copy.deepcopy(fresh)), some_ids(1, 20)
    expected = model(ids).logits
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj", "gate_proj"]))  # the memory has one too
    assert torch.equal(load(save(model, tmp_path / "gates"), copy.deepcopy(fresh))(ids).logits, expected)
    model = with_memory(fresh)
    saving = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["memory"]))
    with pytest.raises(ValueError, match="among PEFT's modules_to_save"):
        save(saving.get_base_model(), tmp_path / "saved")


@pytest.mark.parametrize(
    ("reach", "match"),
    [
        (8, r"got reach=8; expected titans_lm.retrofit.Reach\(window, sinks, memory\)"),
        ((8, 2), r"got reach=\(8, 2\); expected titans_lm.retrofit.Reach"),
        (Reach(0, 0), "got reach.window=0; expected an integer of at least 1"),
        (Reach("8"), "got reach.window='8'; expected an integer of at least 1"),
        (Reach(2.5), "got reach.window=2.5; expected an integer"),
        (Reach(8, -1), "got reach.sinks=-1; expected an integer of at least 0"),
        (Reach(8, memory="no"), "got reach.memory='no'; expected True or False"),
    ],
)
def test_a_reach_that_cannot_be(reach, match):
    with pytest.raises(ValueError, match=match):
        with_memory(base_of())(some_ids(1, 6), reach=reach)


def test_drafts_by_the_first_layers_leave_a_model_as_it_is():
    model, ids = with_memory(base_of()), some_ids(1, 12)
    before, layers = model(ids).logits, model.config.num_hidden_layers
    with pytest.raises(ValueError, match="got assistant_early_exit; expected none"):
        model.generate(ids, max_new_tokens=4, do_sample=False, assistant_early_exit=1)
    assert model.config.num_hidden_layers == layers
    assert torch.equal(model(ids).logits, before)


def test_a_base_that_is_offloaded(tmp_path):
    model = with_memory(base_of())
    save(model, tmp_path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(ValueError, match="got a base with offloaded weights"):
        load(tmp_path, empty)


def test_windows_longer_than_those_of_the_base(tmp_path):
    base, ids = base_of("mistral"), some_ids(1, 30)  # of windows of 16
    model = with_memory(base)
    with pytest.raises(ValueError, match="got a reach of 20 for a layer whose own window has 16 tokens"):
        model(ids, reach=Reach(20, 2))
    assert torch.equal(model(ids, reach=Reach(20, 2, False)).logits, base(ids).logits)
    with pytest.raises(ValueError, match="got window=32 for layer 0, whose own window has 16"):
        check_windows(model, (8, 32))


def test_a_base_that_scales_its_logits_is_not_trained():
    with pytest.raises(ValueError, match="scales or caps its logits"):
        check_head(with_memory(base_of("cohere")))
    check_head(with_memory(base_of()))


def test_an_adapter_of_another_base_or_none(tmp_path):
    base = base_of()
    path = save(with_memory(base), tmp_path / "mine")
    other = base_of()
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 0.1
    with pytest.raises(ValueError, match="of other weights"):
        load(path, other)
    with pytest.raises(ValueError, match="does not exist"):
        load(tmp_path / "none", base)
    with pytest.raises(ValueError, match="which is no folder"):
        load(path, tmp_path / "no-model")
    header, tensors = read_adapter(path)
    tensors.popitem()
    metadata = {"format": FORMAT, "version": str(VERSION), "header": json.dumps(header)}
    safetensors.torch.save_file(tensors, tmp_path / "less.safetensors", metadata)
    with pytest.raises(ValueError, match="it is damaged"):
        load(tmp_path / "less.safetensors", base)
    assert not hasattr(base, "retrofit"), "it is as it was, and takes a whole one"
    load(path, base_of())
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="damaged or not whole"):
        load(torn, base)
    safetensors.torch.save_file({"x": torch.zeros(1)}, torn)
    with pytest.raises(ValueError, match="which is no adapter"):
        load(torn, base)
    with pytest.raises(ValueError, match="without a memory"):
        save(base, torn)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seq_len": 256}, "expected rows of at least 513"),
        ({"seq_len": 256, "returning": 0.0}, "expected rows of at least 257"),
        ({"distill": 0.0}, "expected a loss"),
        ({"seq_len": 600, "sink_counts": (0, 400)}, "and 400 sinks; expected rows of at least 657"),
        ({"passages": (9, 3)}, "the shortest, then the longest"),
        ({"windows": (0,)}, "got windows=0"),
    ],
)
def test_settings_of_training(settings, said):
    with pytest.raises(ValueError, match=said):
        RetrofitSettings(**settings)


def test_settings_go_through_json():
    settings = AdapterSettings(layers=[0, 1], memory={"alpha_init": [0.001, 0.1]})
    again = AdapterSettings(**json.loads(json.dumps(vars(settings) | {"memory": vars(settings.memory)})))
    assert (again.layers, again.memory.alpha_init) == ((0, 1), (0.001, 0.1))
    assert again == settings
    assert hash(again) == hash(settings)
    assert SIZES["num_hidden_layers"] == 2


def test_a_base_that_is_not_whole_or_damaged(tmp_path):
    base_of().save_pretrained(tmp_path)
    config, weights = (tmp_path / "config.json").read_text(), (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(config), "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"lacks model\.layers\.2\..*: not all of it is there"):
        load_base(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(config), "hidden_size": "x"}))
    with pytest.raises(ValueError, match=r"the base .* cannot be loaded"):
        load_base(tmp_path)
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(weights[:-10])
    with pytest.raises(ValueError, match=r"the base .* cannot be loaded"):
        load_base(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"whose config\.json is none; expected a new folder"):
        save(with_memory(base_of()), tmp_path)
