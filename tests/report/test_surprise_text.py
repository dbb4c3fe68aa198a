"""Files as tokens and as pieces that can be shown."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from hf.hf_cases import words
from report.surprise_cases import TOKENIZER, as_text
from titans_lm.data.tokenizer import BOS, EOS, byte_vocabulary
from titans_lm.report.surprise.text import characters, read_file, token_text
from titans_lm.streaming import TokenStream


def byte_pairs() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that has one word of two, and so is none of ours."""
    vocabulary = {**byte_vocabulary(), "Th": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("T", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", clean_up_tokenization_spaces=False)


def test_characters_and_the_bytes_they_stand_for() -> None:
    data = "aé\n€".encode() + b"\xff\x00b"
    found = list(characters(data))
    assert [shown for shown, _ in found] == ["a", "é", "\n", "€", "\\xff", "\\x00", "b"]
    assert b"".join(data[place] for _, place in found) == data
    assert [shown for shown, _ in characters("\u200b\u00a0".encode())] == ["\\xe2\\x80\\x8b", "\\xc2\\xa0"]


def test_bytes_and_the_characters_they_make() -> None:
    text = as_text("aé\n".encode() + b"\xff\x1b")
    assert text.ids.tolist() == [BOS, 97, 0xC3, 0xA9, 10, 0xFF, 0x1B]
    assert text.says == ("<bos>", "a", "\\xc3", "\\xa9", "\n", "\\xff", "\\x1b")
    assert text.pieces == ("<bos>", "a", "é", "\n", "\\xff", "\\x1b")
    assert text.starts.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert text.marks == 1


def test_a_cut_leaves_characters_whole() -> None:
    text = as_text("aé€b".encode())
    assert [text.pieces_within(n) for n in range(9)] == [1, 1, 2, 2, 3, 3, 3, 4, 5]
    assert text.pieces_within(10**9) == len(text.pieces)


def test_words_keep_what_stands_between_them() -> None:
    text = token_text("x", b"  w1 w2\n\n w3 \n", words())
    assert text.ids.tolist() == [1, 2, 3]
    assert text.says == ("w1", "w2", "w3")
    assert text.pieces == ("  w1", " w2", "\n\n w3 \n")
    assert text.starts.tolist() == [0, 1, 2, 3]


def test_a_character_of_several_tokens_is_one_piece() -> None:
    text = token_text("x", "The é€\x00".encode(), byte_pairs(), [257])
    assert text.ids.tolist() == [257, 256, *b"e ", *"é€".encode(), 0]
    assert text.pieces == ("<s>", "Th", "e", " ", "é", "€", "\\x00")
    assert text.starts.tolist() == [0, 1, 2, 3, 4, 6, 9, 10]
    assert text.says[1:4] == ("Th", "e", " ")


def test_long_texts_are_cut_into_the_same_tokens_as_for_reading() -> None:
    data = b"".join(b"w%d w%d  \n" % (i % 30 + 1, i % 17 + 1) for i in range(20_000))
    text = token_text("x", data, words())
    assert text.ids.tolist() == TokenStream(data, words()).take(10**6).tolist()
    assert "".join(text.pieces).encode() == data
    assert text.starts.tolist() == list(range(len(text.ids) + 1))


def test_a_tokenizer_that_knows_no_places_still_says_what_its_tokens_are() -> None:
    tokenizer = ByT5Tokenizer()
    text = token_text("x", b"ab", tokenizer)
    assert text.pieces == ("a", "b")
    assert text.ids.tolist() == tokenizer("ab", add_special_tokens=False).input_ids


def test_a_file_is_a_document_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xfe!")
    assert read_file(tmp_path / "text", TOKENIZER).ids.tolist() == [BOS, 0xFE, ord("!")]
    after = read_file(tmp_path / "text", TOKENIZER, after_open_document=True)
    assert after.ids.tolist() == [EOS, BOS, 0xFE, ord("!")]
    assert (after.pieces[:2], after.marks, after.name) == (("<eos>", "<bos>"), 2, str(tmp_path / "text"))
    with pytest.raises(ValueError, match="which is not UTF-8"):
        read_file(tmp_path / "text", words())
    (tmp_path / "text").write_bytes(b"")
    with pytest.raises(ValueError, match="which is empty; expected some text"):
        read_file(tmp_path / "text", TOKENIZER)
    with pytest.raises(ValueError, match="which is not there"):
        read_file(tmp_path / "none", TOKENIZER)
    with pytest.raises(ValueError, match="which is a folder"):
        read_file(tmp_path, TOKENIZER)
