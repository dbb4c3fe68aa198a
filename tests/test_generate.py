import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from model_cases import small_config
from titans_lm.data.tokenizer import BOS, EOS, byte_tokenizer
from titans_lm.generate import TextStream, encode_prompt, generate_text
from titans_lm.streaming import Reader
from titans_lm.train.fresh import byte_model


def model_of(architecture="mag"):
    torch.manual_seed(0)
    model = byte_model(small_config(architecture)).eval()
    model.generation_config.eos_token_id = None  # random weights end a text whenever they like
    return model


def words():
    """A tokenizer of another family: words, a start token of its own, no padding token."""
    vocabulary = {word: index for index, word in enumerate(("<s>", "</s>", "<unk>", "to", "be", "or", "not"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("architecture", ["lmm", "mac", "attention", "mag+segment+mal"])
def test_greedy_text_is_the_likeliest_token_every_time(architecture):
    model, written = model_of(architecture), []
    result = generate_text(model, byte_tokenizer(), "hello", max_new_tokens=12, temperature=0.0, write=written.append)
    ids = [BOS, *b"hello"]
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert result.text == bytes(token for token in ids[6:] if token < 256).decode(errors="replace")
    assert "".join(written) == result.text
    assert (result.tokens, result.prompt_tokens) == (12, 6)
    assert result.seconds > 0


def test_a_seed_gives_the_same_text_and_leaves_the_random_numbers():
    model, tokenizer = model_of(), byte_tokenizer()
    before = torch.get_rng_state()
    first = generate_text(model, tokenizer, "x", max_new_tokens=10, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert generate_text(model, tokenizer, "x", max_new_tokens=10, seed=3).text == first.text
    assert generate_text(model, tokenizer, "x", max_new_tokens=10, seed=4).text != first.text
    assert generate_text(model, tokenizer, "x", max_new_tokens=10).text != first.text


def test_the_dials_of_sampling_are_used():
    model, tokenizer = model_of(), byte_tokenizer()
    greedy = generate_text(model, tokenizer, "x", max_new_tokens=8, temperature=0.0).text
    for dials in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        assert generate_text(model, tokenizer, "x", max_new_tokens=8, seed=1, **dials).text == greedy


@pytest.mark.parametrize("penalty", [1.0, 1.5, 100.0])
def test_what_has_been_written_becomes_less_likely_and_the_prompt_does_not(penalty):
    """A positive score is divided by the penalty, a negative one multiplied; with a memory and without."""
    model, ids, new = model_of(), [BOS, *b"hello"], []
    for _ in range(14):
        with torch.no_grad():
            scores = model(torch.tensor([ids + new])).logits[0, -1]
        for token in set(new):
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        new.append(int(scores.argmax()))
    given = {"max_new_tokens": 14, "temperature": 0.0, "repetition_penalty": penalty}
    result = generate_text(model, byte_tokenizer(), "hello", **given)
    memory = Reader(model, byte_tokenizer()).memory
    assert result.text == generate_text(model, byte_tokenizer(), "hello", memory=memory, **given).text
    assert result.text == bytes(token for token in new if token < 256).decode(errors="replace")
    assert (len(set(new)) == 14) == (penalty == 100.0)


def test_a_prompt_starts_a_document():
    tokenizer = byte_tokenizer()
    assert encode_prompt(tokenizer, "é").tolist() == [[BOS, 0xC3, 0xA9]]
    assert encode_prompt(tokenizer, "").tolist() == [[BOS]]
    assert encode_prompt(tokenizer, "<eos>").shape == (1, 6)
    assert encode_prompt(tokenizer, b"\xff\x00").tolist() == [[BOS, 255, 0]]
    assert encode_prompt(tokenizer, b"\xff".decode("utf-8", "surrogateescape")).tolist() == [[BOS, 255]]


def test_no_prompt_at_all_is_a_start_too():
    assert generate_text(model_of(), byte_tokenizer(), max_new_tokens=3, seed=0).tokens == 3


def test_the_text_ends_where_the_model_ends_it():
    model = model_of()
    model.generation_config.eos_token_id = EOS
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[EOS] = 1.0
        model.model.backbone.norm.weight.fill_(1.0)
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: forward(x.abs() + 1.0)  # the end is always the likeliest
    result = generate_text(model, byte_tokenizer(), "x", max_new_tokens=20, temperature=0.0)
    assert (result.text, result.tokens) == ("", 1)


def stream(*chunks):
    written = []
    streamer = TextStream(byte_tokenizer(), written.append)
    streamer.put(torch.tensor([[BOS, 65]]))
    for chunk in chunks:
        streamer.put(torch.tensor(list(chunk)))
    streamer.end()
    return written


def sentence_pieces():
    """A tokenizer whose decoder, as that of Llama 2, drops the first space of what it decodes; "\n" is a byte."""
    letters = ["▁", "▁▁", *"abcdefghijklmnopqrstuvwxyz0123456789():="]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    made = Tokenizer(models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[("▁", "▁")], byte_fallback=True, unk_token="<unk>",
    ))  # fmt: skip
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    kept = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(kept)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_lines_keep_their_first_space_in_what_is_streamed():
    text, tokenizer, written = "def f(x):\n  if x:\n    return é\n return 2\n\n a", sentence_pieces(), []
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    streamer = TextStream(tokenizer, written.append)
    for token in (0, *ids):
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(written) == text
    assert "é" in written


@pytest.mark.parametrize(
    ("dials", "said"),
    [
        ({"temperature": 1e-40}, "got temperature=1e-40; expected 0"),
        ({"seed": 2**63}, "got seed="),
        ({"seed": -1}, "seed"),
    ],
)
def test_dials_that_torch_cannot_take_are_told(dials, said):
    with pytest.raises(ValueError, match=said):
        generate_text(model_of(), byte_tokenizer(), "x", max_new_tokens=2, **dials)


def test_without_an_end_of_its_own_a_model_ends_where_the_tokenizer_does():
    model, tokenizer = model_of(), byte_tokenizer()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[EOS] = 1.0
    model.get_submodule("lm_head").register_forward_hook(lambda *call: call[2].abs())
    assert generate_text(model, tokenizer, "hello", max_new_tokens=6, temperature=0.0).tokens == 1


def test_a_character_comes_out_when_its_last_byte_has_come():
    data = "aé漢🙂b".encode()
    assert stream(*(bytes([byte]) for byte in data)) == ["a", "é", "漢", "🙂", "b"]


def test_bytes_that_are_no_character_are_shown_once_that_is_certain():
    assert stream(b"\xff", b"a") == ["\ufffd", "a"]
    assert stream(b"\xe6", b"\xbc", b"a") == ["\ufffda"]
    assert stream(b"\xe6", b"\xbc") == ["\ufffd"]
    assert stream([65, EOS], [BOS]) == ["A"]


def test_what_is_streamed_is_what_is_returned():
    """Random weights write random bytes: most of them are no UTF-8."""
    written = []
    result = generate_text(model_of(), byte_tokenizer(), "x", max_new_tokens=60, seed=0, write=written.append)
    assert "".join(written) == result.text
    assert "\ufffd" in result.text


def test_models_and_tokenizers_of_others_write_too():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=7, bos_token_id=0, eos_token_id=1, **sizes)).eval()
    tokenizer, written = words(), []
    assert encode_prompt(tokenizer, "to be").tolist() == [[0, 3, 4]]
    assert encode_prompt(tokenizer, b"to be").tolist() == [[0, 3, 4]]
    own = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer.backend_tokenizer.post_processor = own
    assert encode_prompt(tokenizer, "to be").tolist() == [[0, 3, 4]], "the text goes on"
    assert encode_prompt(tokenizer, "to be</s>").tolist()[0][-1] == 1, "the user's own end"
    result = generate_text(model, tokenizer, "to be", max_new_tokens=8, seed=1, write=written.append)
    assert result.text.strip()
    assert "".join(written).split() == result.text.split()
    with pytest.raises(ValueError, match="got a prompt that is not UTF-8"):
        encode_prompt(tokenizer, b"\xff")


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
    ],
)
def test_dials_are_checked(wrong):
    with pytest.raises(ValueError, match=f"got {next(iter(wrong))}="):
        generate_text(model_of(), byte_tokenizer(), "x", **wrong)
