import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from titans_lm.data.tokenizer import (
    BOS,
    EOS,
    PAD,
    VOCAB_SIZE,
    byte_tokenizer,
    byte_vocabulary,
    decode_bytes,
    encode_bytes,
    encode_document,
    is_byte_tokenizer,
)

EVERY_BYTE = bytes(range(256))
TEXT = "a\té\r\n\n  漢字 🙂 <eos> end"


def test_the_alphabet_is_the_byte_level_alphabet_of_tokenizers():
    assert set(byte_vocabulary()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_vocabulary().values()) == list(range(256))


@pytest.mark.parametrize("text", ["", "a", " a", TEXT, "\x00\x7f", "<bos><eos><pad>"])
def test_the_id_of_a_token_is_its_byte(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_tokens_stand_after_the_bytes():
    tokenizer = byte_tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)
    assert (BOS, EOS, PAD) == (256, 257, 258)
    assert len(tokenizer) == VOCAB_SIZE == 259
    assert tokenizer.decode([BOS, *b"ab", EOS], skip_special_tokens=True) == "ab"


def test_it_loads_again_without_code_of_ours(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    assert loaded(TEXT).input_ids == list(TEXT.encode())
    assert loaded.decode(loaded(TEXT).input_ids) == TEXT
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (BOS, EOS, PAD)
    assert is_byte_tokenizer(loaded)


def test_any_bytes_come_back():
    ids = encode_bytes(EVERY_BYTE)
    assert ids.tolist() == list(range(256))
    assert decode_bytes(ids) == EVERY_BYTE
    assert decode_bytes([BOS, 255, EOS, 0, PAD]) == b"\xff\x00"


def test_a_document_is_framed():
    assert encode_document(b"ab").tolist() == [BOS, 97, 98, EOS]
    assert encode_document(b"ab", eos=False).tolist() == [BOS, 97, 98]
    assert encode_document(b"").dtype == np.uint16


def test_other_tokenizers_are_told_apart():
    words = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    assert not is_byte_tokenizer(PreTrainedTokenizerFast(tokenizer_object=words))
    assert is_byte_tokenizer(byte_tokenizer())
