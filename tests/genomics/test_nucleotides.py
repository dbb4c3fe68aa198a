"""Letters as ids: which are read as what, and what is said about the others."""

import numpy as np
import pytest

from titans_lm.genomics.nucleotides import IUPAC, PAD, N, decode, encode, reverse_complement


def test_letters_have_their_ids_in_capitals_or_not() -> None:
    assert encode("ACGTN", "s").tolist() == [0, 1, 2, 3, 4]
    assert encode("acgtn", "s").tolist() == [0, 1, 2, 3, 4]
    assert encode("AUu", "s").tolist() == [0, 3, 3], "RNA's U stands where DNA has T"
    assert encode("A", "s").dtype == np.uint8


def test_codes_for_several_bases_are_read_as_n() -> None:
    assert encode(IUPAC + IUPAC.lower(), "s").tolist() == [N] * 20
    assert encode("ARC", "s").tolist() == [0, N, 1]


@pytest.mark.parametrize(
    ("text", "unknown", "letter", "position"),
    [("ACXT", "iupac", "X", 3), ("-ACT", "iupac", "-", 1), ("ACGé", "iupac", "é", 4), ("ACR", "error", "R", 3)],
)
def test_what_is_no_nucleotide_is_named_with_its_place(text: str, unknown: str, letter: str, position: int) -> None:
    with pytest.raises(
        ValueError, match=f"got '{letter}' at position {position} of the sequence 'chr7'; expected ACGTN"
    ):
        encode(text, "chr7", unknown)


def test_everything_may_be_read_as_n(unchecked: None) -> None:
    assert encode("A-é*R1", "s", "n").tolist() == [0, N, N, N, N, N]
    with pytest.raises(ValueError, match=r"got unknown='N'; did you mean 'n'\?"):
        encode("A", "s", "N")


def test_no_letters_are_no_sequence() -> None:
    with pytest.raises(ValueError, match="got the sequence 'empty' without a nucleotide in it"):
        encode("", "empty")


def test_the_other_strand() -> None:
    assert decode(reverse_complement(encode("AACGTN", "s"))) == "NACGTT"
    row = np.array([0, 1, PAD], np.uint8)
    assert reverse_complement(row).tolist() == [PAD, 2, 3], "padding is no nucleotide"
    tokens = encode("ACGTTTGANC", "s")
    assert (reverse_complement(reverse_complement(tokens)) == tokens).all()


def test_ids_become_letters_again() -> None:
    assert decode(np.array([0, 1, 2, 3, 4, PAD], np.uint8)) == "ACGTN"
