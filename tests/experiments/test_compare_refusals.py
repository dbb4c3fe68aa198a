"""What a comparison refuses by its data and its models, before anything is trained."""

from pathlib import Path

import pytest
from transformers import GPT2Config

from experiments.test_compare import book, small
from titans_lm.experiments.text import run_compare
from titans_lm.prepare.run import prepare
from titans_lm.prepare.settings import PrepareSettings


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for index in range(5):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{index}.txt").write_text(book(index, 200))
    (tmp_path / "test.txt").write_text(book(9, 60))
    return tmp_path


def test_a_test_text_that_the_data_was_prepared_from(texts: Path) -> None:
    prepare(PrepareSettings(source=str(texts / "texts"), out=texts / "tokens"))
    settings = small(texts, texts / "out", data=str(texts / "tokens"), test=texts / "texts" / "3.txt")
    with pytest.raises(ValueError, match=r"the text of the prepared data .* expected a text that nobody is trained"):
        run_compare(settings, lambda _: None)
    assert not (texts / "out").exists()


@pytest.mark.parametrize(("positions", "option"), [(24, "--seq-len"), (48, "--positions")])
def test_learned_positions_that_are_too_few(texts: Path, positions: int, option: str) -> None:
    GPT2Config(vocab_size=259, n_positions=positions, n_embd=16, n_layer=1, n_head=2).save_pretrained(texts / "gpt2")
    settings = small(texts, texts / "out", data=str(texts / "texts"), models=("mac", str(texts / "gpt2")))
    with pytest.raises(ValueError, match=f"learned {positions} positions, .* expected {option} {positions} or fewer"):
        run_compare(settings, lambda _: None)
    assert not (texts / "out").exists()
