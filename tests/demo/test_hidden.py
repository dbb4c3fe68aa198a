"""What is hidden in a text, where it stands, and what is known of it by the end of a part."""

from pathlib import Path

import numpy as np
import pytest

from titans_lm.data.tasks.stories import PEOPLE, ROOMS
from titans_lm.data.tasks.vocabulary import encode_words, word_tokenizer
from titans_lm.demo.hidden import Hidden, count_tokens, drawn_facts, hide, long_text, own_facts, sentences_of

SENTENCES = sentences_of("It rains.  Nobody\ncame! “Why?” the man said. He left. " * 40)


def hidden(seed: int = 0) -> Hidden:
    rng = np.random.default_rng(seed)
    return hide(rng, SENTENCES, list(map(count_tokens, SENTENCES)), drawn_facts(rng, 3, 2, 6))


def test_everything_is_said_between_sentences_and_where_it_is_said_to_be() -> None:
    made = hidden()
    text = " ".join("".join(made.parts).split())
    tokens = encode_words(f"{text} ").tolist()
    assert len(tokens) == made.ends[-1]
    assert [token for part in made.parts for token in word_tokenizer()(part).input_ids] == tokens
    for fact, place in zip(made.facts, made.places, strict=True):
        said = encode_words(fact.sentence).tolist()
        assert tokens[place : place + len(said)] == said
    left = sentences_of(text)
    for fact in made.facts:
        left.remove(fact.sentence)
    assert left == SENTENCES


def test_a_draw_is_told_by_its_seed() -> None:
    assert hidden(1).parts == hidden(1).parts != hidden(2).parts
    made = hidden(1)
    assert len({fact.about for fact in made.facts if fact.kind == "number"}) == 6
    assert {fact.about for fact in made.facts if fact.kind == "place"} == set(PEOPLE)
    assert {fact.answer for fact in made.facts if fact.kind == "place"} <= set(ROOMS)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_no_room_is_the_answer_to_more_than_a_quarter(parts: int) -> None:
    for seed in range(20):
        rng, before = np.random.default_rng(seed), np.random.default_rng(seed)
        told = drawn_facts(rng, parts, 3, 6)
        at: dict[str, str] = {}
        answers = []
        for facts in told:
            at |= {fact.about: fact.answer for fact in facts if fact.kind == "place"}
            answers += at.values()
            for fact in facts:
                assert fact.sentence.split()[0] in (*PEOPLE, "The")
                assert fact.kind == "number" or fact.sentence.endswith(f" the {fact.answer}.")
        assert len(answers) == len(PEOPLE) * parts
        assert max(map(answers.count, ROOMS)) <= parts
        assert drawn_facts(before, parts, 3, 6) == told


def test_by_the_end_of_a_part_the_last_that_was_said_is_known() -> None:
    made = hidden()
    for part, end in enumerate(made.ends):
        known = made.known(part)
        assert {about for kind, about in known if kind == "place"} == set(PEOPLE)
        for (kind, about), (fact, ago) in known.items():
            later = [
                place
                for one, place in zip(made.facts, made.places, strict=True)
                if (one.kind, one.about) == (kind, about) and end - ago < place < end
            ]
            assert (fact.about, later) == (about, [])
            assert 0 < ago <= end


def test_facts_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "facts.txt"
    path.write_text("Peter went back to the cellar.\n\n  The secret number of old house is 12.\n")
    assert [(fact.kind, fact.question, fact.answer) for fact in own_facts(path)] == [
        ("place", "Where is Peter?", "cellar"),
        ("number", "What is the secret number of old house?", "12"),
    ]
    for text, told in (("Mary is in the garden.\n", "line 1: got 'Mary is in"), ("\n", "which are none")):
        path.write_text(text)
        with pytest.raises(ValueError, match=told):
            own_facts(path)


def test_the_library_has_enough_to_read(tmp_path: Path) -> None:
    sentences, counts = long_text(None, 220_000)
    assert 220_000 <= sum(counts) < 240_000
    assert long_text(None, 1000)[0] == sentences[: len(long_text(None, 1000)[0])]
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(ValueError, match="which is empty"):
        long_text(empty, 1000)
    empty.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot be read"):
        long_text(empty, 1000)


def test_a_text_without_sentences_hides_nothing() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="got a text of 2 sentences that does not divide into 4 parts"):
        hide(rng, ["One.", "Two."], [3, 3], drawn_facts(rng, 4, 1, 1))
