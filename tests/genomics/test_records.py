"""Letters as ids; sequences from FASTA, tables, folders and intervals; and what is said about bad ones."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from titans_lm.genomics.records import IUPAC, PAD, N, Sequences, decode, encode, read_sequences, reverse_complement
from titans_lm.genomics.settings import ReadSettings

USUAL = ReadSettings()


def read(path: Path, **settings: object) -> Sequences:
    return read_sequences(path, ReadSettings(**settings))


def texts(data: Sequences) -> list[str]:
    return [decode(tokens) for tokens in data.tokens]


def put(path: Path, text: str) -> Path:
    """Write a file, compressed where its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


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


@pytest.mark.parametrize("name", ["a.fa", "a.fasta.gz", "a.FNA"])
def test_fasta(tmp_path: Path, name: str) -> None:
    data = read(put(tmp_path / name, ">one first of all\nACG\nT\n\n>two\r\nnnA\r\n>three\n;a remark\nR\n"))
    assert data.names == ("one", "two", "three")
    assert texts(data) == ["ACGT", "NNA", "N"]
    assert data.labels is None
    assert data.counts() == {}
    with pytest.raises(ValueError, match=r"got 3 sequences without classes; expected a table .*label=CLASS"):
        data.with_labels()


@pytest.mark.parametrize("name", ["a.fa", "a.fa.gz", "a.tsv", "a.csv.gz"])
def test_a_byte_order_mark_is_no_letter(tmp_path: Path, name: str) -> None:
    comma = "," if ".csv" in name else "\t"
    text = ">x\nAC\n" if ".fa" in name else f"seq{comma}name\nAC{comma}x\n"
    data = read(put(tmp_path / name, "\ufeff" + text))
    assert (data.names, texts(data)) == (("x",), ["AC"])


@pytest.mark.parametrize("name", ["a.tsv", "a.csv"])
def test_sequences_of_a_table_may_be_long(tmp_path: Path, name: str) -> None:
    [tokens] = read(put(tmp_path / name, "seq\n" + "ACGT" * 40_000 + "\n")).tokens
    assert len(tokens) == 160_000


def test_what_is_no_row_of_a_table_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titans_lm.genomics.records.LONGEST", 100)
    with pytest.raises(ValueError, match=r"got line 2 of .*a\.tsv, which is no row of a table: .*expected columns"):
        read(put(tmp_path / "a.tsv", "seq\tlabel\n" + "A" * 101 + "\t1\n"))


def test_fasta_with_classes(tmp_path: Path) -> None:
    data = read(put(tmp_path / "a.fa", ">x label=tail\nAC\n>y more label=head\nGT\n>z label=tail\nA\n"))
    assert data.classes == ("head", "tail")
    assert data.with_labels().tolist() == [1, 0, 1]
    assert data.counts() == {"head": 1, "tail": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no sequence; expected FASTA"),
        ("ACGT\n", "got 'ACGT' in line 1 of .*; expected a header"),
        (">a\nAC\n>b\n>c\nA\n", "got the sequence 'b' without a nucleotide"),
        (">a\nAC\n>b here\nAZ\n", "got 'Z' at position 2 of the sequence 'b'"),
        (">a label=x\nAC\n>b\nAC\n", "got the sequence 'b' in .* without a class; expected one for each, or for none"),
    ],
)
def test_bad_fasta(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(put(tmp_path / "a.fa", text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.tsv", "seq\tlabel\nACGT\t1\nAC\t0\nNN\t1\n"),
        ("a.tsv.gz", "label\tsequence\n1\tACGT\n0\tAC\n1\tNN\n"),
        ("a.csv", "id,class,seq\nline 2,1,acgt\nline 3,0,AC\nline 4,1, NN \n"),
    ],
)
def test_tables(tmp_path: Path, name: str, text: str) -> None:
    data = read(put(tmp_path / name, text))
    assert texts(data) == ["ACGT", "AC", "NN"]
    assert data.names == ("line 2", "line 3", "line 4")
    assert data.classes == ("0", "1")
    assert data.with_labels().tolist() == [1, 0, 1]


def test_columns_by_name_and_tables_without_classes(tmp_path: Path) -> None:
    path = put(tmp_path / "a.csv", "dna,kind,seq\nAC,b,GG\nGT,a,TT\n")
    data = read(path, sequence_column="dna", label_column="kind")
    assert (texts(data), data.classes) == (["AC", "GT"], ("a", "b"))
    assert read(path).labels is None
    with pytest.raises(ValueError, match=r"got the column 'dma', which .* does not have; did you mean 'dna'\?"):
        read(path, sequence_column="dma")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "which is empty; expected a row with the names of columns"),
        ("seq\tlabel\n", "which holds no sequence; expected at least one"),
        ("dna\tlabel\nAC\t1\n", "with the columns dna, label; expected one named seq or sequence"),
        ("seq\tlabel\nAC\t1\nAC\n", "got line 3 of .* with more or fewer than 2 columns"),
        ("seq\tlabel\nAC\t1\t2\n", "got line 2 of .* with more or fewer than 2 columns"),
        ("seq\tlabel\nAC\t1\nA-C\t0\n", "got '-' at position 2 of the sequence 'line 3'"),
        ("seq\tlabel\nAC\t1\n\t0\n", "got the sequence 'line 3' without a nucleotide"),
        ("seq\tlabel\nAC\t1\nAC\t\n", "got the sequence 'line 3' in .* without a class"),
        ("id\tregion\tstart\tend\tstrand\n1\tc\t0\t1\t+\n", "got intervals in .*; expected sequences"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(put(tmp_path / "a.tsv", text))


def test_a_single_class_tells_nothing_apart(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got the single class '1'; expected at least two"):
        read(put(tmp_path / "a.tsv", "seq\tlabel\nAC\t1\n")).with_labels()


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    """As GenomicBenchmarks leaves it: a file for each sequence, classes in the order of their names."""
    for name, text in {"positive/2.txt": "GG\n", "positive/10.txt": "TT", "negative/0.txt.gz": "AC\nGT\n"}.items():
        put(tmp_path / "train" / name, text)
    put(tmp_path / "train" / "other" / "some.fa.gz", ">a\nAA\n>b\nCC\n")
    data = read(tmp_path / "train")
    assert data.classes == ("negative", "other", "positive")
    assert data.names == ("negative/0", "other/a", "other/b", "positive/2", "positive/10")
    assert texts(data) == ["ACGT", "AA", "CC", "GG", "TT"]
    assert data.with_labels().tolist() == [0, 1, 1, 2, 2]
    with pytest.raises(
        ValueError, match=r"whose folders train are splits and no classes; expected one of these, such as .*train"
    ):
        read(tmp_path)


def test_a_file_for_each_class(tmp_path: Path) -> None:
    put(tmp_path / "b.fa", ">1\nAC\n")
    put(tmp_path / "a.fasta.gz", ">1\nGT\n>2\nGG\n")
    data = read(tmp_path)
    assert (data.classes, data.names) == (("a", "b"), ("a/1", "a/2", "b/1"))


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which holds no folder of a class"):
        read(tmp_path)
    (tmp_path / "empty").mkdir()
    put(tmp_path / "full" / "0.txt", "AC")
    with pytest.raises(
        ValueError, match=r"got the class 'empty' without a sequence in .*; expected at least one, or no folder"
    ):
        read(tmp_path)
    put(tmp_path / "empty" / "0.txt", "A!")
    with pytest.raises(ValueError, match="got '!' at position 2 of the sequence 'empty/0'"):
        read(tmp_path)
    (tmp_path / "empty" / "0.txt").rename(tmp_path / "empty" / "0.doc")
    with pytest.raises(ValueError, match=r"got .*0\.doc, which is no kind of file that is read here"):
        read(tmp_path)


INTERVALS = "id,region,start,end,strand\n7,chr1,1,4,+\n8,chr2,0,3,-\n9,chr1,4,6,-\n"


def test_intervals_are_cut_out_of_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GenomicBenchmarks' repository has them: positions from 0, the end excluded, − from the other strand."""
    import titans_lm.genomics.records as module

    records, opened = module.fasta_records, []
    monkeypatch.setattr(module, "fasta_records", lambda path: opened.append(path) or records(path))
    put(tmp_path / "set" / "positive.csv.gz", INTERVALS)
    put(tmp_path / "set" / "negative.csv.gz", "id,region,start,end,strand\n1,chr2,1,2,+\n")
    reference = put(tmp_path / "genome.fa.gz", ">chr1 first\nACG\nTTA\n>chr2\nAAC\n>chr3\nA\n")
    data = read(tmp_path / "set", reference=reference)
    assert opened == [reference], "once for all classes"
    assert data.classes == ("negative", "positive")
    assert dict(zip(data.names, texts(data), strict=True)) == {
        "negative/1": "A", "positive/7": "CGT", "positive/8": "GTT", "positive/9": "TA",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("intervals", "said"),
    [
        ("id,start\n1,2\n", "with the columns id, start; expected those of intervals"),
        (INTERVALS.replace("1,4", "4,4"), "got start '4', end '4', strand '\\+' in line 2"),
        (INTERVALS.replace("0,3,-", "0,3,?"), "strand '\\?' in line 3"),
        (INTERVALS.replace("0,3,-", "-1,3,-"), "got start '-1'"),
        (INTERVALS.replace("chr2", "chrX"), "got intervals on 'chrX', which .* does not hold"),
        (INTERVALS.replace("4,6", "4,9"), "got the interval '9' up to 9 of chr1, which has 6 nucleotides"),
    ],
)
def test_bad_intervals(tmp_path: Path, intervals: str, said: str) -> None:
    put(tmp_path / "set" / "a.csv", intervals)
    reference = put(tmp_path / "genome.fa", ">chr1\nACGTTA\n>chr2\nAAC\n")
    with pytest.raises(ValueError, match=said):
        read(tmp_path / "set", reference=reference)


def test_intervals_need_a_reference(tmp_path: Path) -> None:
    put(tmp_path / "set" / "a.csv", INTERVALS)
    with pytest.raises(ValueError, match=r"got intervals in .* and no reference to cut them out of"):
        read(tmp_path / "set")


def test_files_that_are_something_else(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got '.*none\.fa', which does not exist"):
        read(tmp_path / "none.fa")
    with pytest.raises(
        ValueError, match=r"got 'a\.doc', which is no kind of file that is read here; expected one of \.fa"
    ):
        read(put(tmp_path / "a.doc", "x"))
    plain = tmp_path / "plain.fa.gz"
    plain.write_text(">a\nAC\n")
    with pytest.raises(ValueError, match="which is no whole gzip file"):
        read(plain)
    whole = put(tmp_path / "cut.fa.gz", ">a\n" + "ACGT" * 100)
    whole.write_bytes(whole.read_bytes()[:-12])
    with pytest.raises(ValueError, match="which is no whole gzip file"):
        read(whole)
    binary = tmp_path / "b.fa"
    binary.write_bytes(b">a\n\xff\xfe")
    with pytest.raises(ValueError, match="which is not text"):
        read(binary)


def test_unknown_letters_follow_the_setting(tmp_path: Path) -> None:
    path = put(tmp_path / "a.fa", ">a\nAR-\n")
    assert texts(read(path, unknown="n")) == ["ANN"]
    with pytest.raises(ValueError, match="got 'R' at position 2"):
        read(path, unknown="error")
    with pytest.raises(ValueError, match="got unknown='skip'"):
        ReadSettings(unknown="skip")


def test_longer_sequences_are_cut_by_the_stated_rule(tmp_path: Path) -> None:
    data = read(put(tmp_path / "a.fa", ">a\nACGTA\n>b\nAC\n>c\nACGT\n"))
    assert texts(data.cropped(3, "center")) == ["CGT", "AC", "ACG"], "of an odd rest the end loses one more"
    assert texts(data.cropped(3, "start")) == ["ACG", "AC", "ACG"]
    assert texts(data.cropped(3, "end")) == ["GTA", "AC", "CGT"]
    assert texts(data.cropped(0, "end")) == texts(data)
    assert [data.longer_than(length) for length in (0, 2, 4, 5)] == [0, 2, 1, 0]
    assert texts(data.cropped(4, "end")) == ["CGTA", "AC", "ACGT"]


def test_some_of_them() -> None:
    tokens = tuple(np.full(length, 1, np.uint8) for length in (1, 2, 3))
    some = Sequences(("a", "b", "c"), tokens, np.array([0, 1, 1]), ("x", "y")).take([2, 0])
    assert (some.names, [len(row) for row in some.tokens]) == (("c", "a"), [3, 1])
    assert some.with_labels().tolist() == [1, 0]


def test_a_class_is_the_whole_name_of_its_file(tmp_path: Path) -> None:
    for name in ("E. coli.fa", "E. fergusonii.fa.gz", "B. subtilis.FA"):
        put(tmp_path / "folder" / name, ">a\nACGT\n")
    assert read(tmp_path / "folder").classes == ("B. subtilis", "E. coli", "E. fergusonii")


def test_lines_of_a_table_are_counted_with_empty_ones(tmp_path: Path) -> None:
    table = put(tmp_path / "t.csv", "sequence,label\nAC,x\n\n\nAC,y\nA!,x\n")
    with pytest.raises(ValueError, match="'line 6'"):
        read(table)
