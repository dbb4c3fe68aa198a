"""Stories: every question is answered by a reader that knows nothing of how they are drawn, and published ones too."""

import gzip
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from titans_lm.data.tasks.babilong import BabiLongSettings
from titans_lm.data.tasks.stories import LABELS, OPPOSITE, Question, draw_question, read_questions

TASKS = ("qa1", "qa2", "qa3", "qa4", "qa5")
GO = r"(\w+) (?:journeyed|moved|travelled|went|went back) to the (\w+)\."
TAKE = r"(\w+) (?:got|grabbed|picked up|took) the (\w+)(?: there)?\."
DROP = r"(\w+) (?:discarded|dropped|left|put down) the (\w+)(?: there)?\."
LIE = r"The (\w+) is (\w+) of the (\w+)\."
GIVE = r"(\w+) (?:gave|handed|passed) the (\w+) to (\w+)\."


@dataclass
class Reader:
    """Follows a story, sentence by sentence."""

    at: dict[str, str] = field(default_factory=dict)
    holder: dict[str, str] = field(default_factory=dict)
    rooms: dict[str, list[str]] = field(default_factory=dict)
    gifts: list[tuple[str, str, str]] = field(default_factory=list)
    lines: list[tuple[str, str, str]] = field(default_factory=list)

    def read(self, fact: str) -> None:
        for form, do in ((GO, self.go), (GIVE, self.give), (TAKE, self.take), (DROP, self.drop), (LIE, self.lie)):
            if found := re.fullmatch(form, fact):
                do(*found.groups())
                break
        else:
            raise AssertionError(fact)
        for thing, who in self.holder.items():
            if who in self.at and (self.rooms[thing] or [None])[-1] != self.at[who]:
                self.rooms[thing].append(self.at[who])

    def go(self, who: str, where: str) -> None:
        self.at[who] = where

    def give(self, who: str, thing: str, to: str) -> None:
        self.gifts.append((who, thing, to))
        self.holder[thing] = to

    def take(self, who: str, thing: str) -> None:
        self.holder[thing] = who
        self.rooms.setdefault(thing, [])

    def drop(self, who: str, thing: str) -> None:
        assert self.holder.pop(thing) == who, "who drops a thing has it"

    def lie(self, room: str, way: str, other: str) -> None:
        self.lines += [(room, way, other), (other, OPPOSITE[way], room)]

    def before(self, thing: str, room: str) -> str:
        trail = self.rooms[thing]
        return trail[len(trail) - 2 - trail[::-1].index(room)]

    def gift(self, who: str | None, thing: str | None, to: str | None) -> tuple[str, str, str]:
        return next(
            gift for gift in reversed(self.gifts)
            if all(wanted in (None, part) for wanted, part in zip((who, thing, to), gift, strict=True))
        )  # fmt: skip

    def answer(self, question: str) -> str:
        for form, find in {
            r"Where is the (\w+)\?": lambda thing: self.rooms[thing][-1],
            r"Where is (\w+)\?": lambda who: self.at[who],
            r"Where was the (\w+) before the (\w+)\?": self.before,
            r"What is (\w+) of the (\w+)\?": lambda way, room: next(a for a, *b in self.lines if b == [way, room]),
            r"What is the (\w+) (\w+) of\?": lambda room, way: next(b for *a, b in self.lines if a == [room, way]),
            r"What did (\w+) give to (\w+)\?": lambda who, to: self.gift(who, None, to)[1],
            r"Who did (\w+) give the (\w+) to\?": lambda who, thing: self.gift(who, thing, None)[2],
            r"Who gave the (\w+)(?: to (\w+))?\?": lambda thing, to: self.gift(None, thing, to)[0],
            r"Who received the (\w+)\?": lambda thing: self.gift(None, thing, None)[2],
        }.items():
            if found := re.fullmatch(form, question):
                return find(*found.groups())
        raise AssertionError(question)


def answer(question: Question) -> str:
    """Answer a question by its story."""
    reader = Reader()
    for fact in question.facts:
        reader.read(fact)
    return reader.answer(question.question)


@pytest.mark.parametrize("task", TASKS)
def test_drawn_questions_have_the_answer_that_the_story_gives(task) -> None:
    rng = np.random.default_rng(0)
    drawn = [draw_question(rng, task) for _ in range(300)]
    assert [one.answer for one in drawn] == [answer(one) for one in drawn]
    said = {one.answer for one in drawn}
    assert said == set(LABELS[task])
    assert len({one.facts for one in drawn}) > 250


@pytest.mark.data
@pytest.mark.parametrize("task", TASKS)
def test_the_published_questions_are_of_the_same_form(task, data_dir: Path) -> None:
    """The reader above, which knows only the form of our stories, answers the published ones."""
    published = read_questions(next((data_dir / "babi" / "en").glob(f"{task}_*_test.txt")))
    assert len(published) == 1000
    assert {one.answer for one in published} <= set(LABELS[task])
    right = sum(one.answer == answer(one) for one in published)
    # Two questions of qa5 fit two gifts of the same people; the file counts the earlier one.
    assert right == {"qa5": 998}.get(task, 1000)
    drawn = [draw_question(np.random.default_rng(i), task) for i in range(500)]
    ours, theirs = (np.median([len(one.facts) for one in questions]) for questions in (drawn, published))
    assert 0.5 <= ours / theirs <= 2.0


STORY = """1 Mary moved to the garden.
2 Where is Mary? \tgarden\t1
3 John went to the office.
4 Where is John?\toffice\t3
"""


def test_files_are_read_plain_and_packed(tmp_path: Path) -> None:
    (tmp_path / "qa1.txt").write_text(STORY + "1 Mary went to the hallway.\n2 Where is Mary? \thallway\t1\n")
    for name in ("qa1.txt.gz", "QA2.TXT.GZ"):
        (tmp_path / name).write_bytes(gzip.compress((tmp_path / "qa1.txt").read_bytes()))
    first, john = "Mary moved to the garden.", "John went to the office."
    expected = [
        Question((first,), "Where is Mary?", "garden"), Question((first, john), "Where is John?", "office"),
        Question(("Mary went to the hallway.",), "Where is Mary?", "hallway"),
    ]  # fmt: skip
    assert read_questions(tmp_path / "qa1.txt") == read_questions(tmp_path / "qa1.txt.gz") == expected
    assert read_questions(tmp_path / "QA2.TXT.GZ") == expected


@pytest.mark.parametrize(("text", "said"), [("Mary moved.\n", "line 1: got 'Mary moved.'"), ("1 A.\n", "no question")])
def test_other_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.txt").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_questions(tmp_path / "x.txt")


@pytest.mark.parametrize(("name", "data"), [("x.txt", b"1 \xff.\n"), ("x.txt.gz", b"1 Plain.\n")])
def test_files_that_cannot_be_read_are_told(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name}, which cannot be read"):
        read_questions(tmp_path / name)


def test_a_damaged_archive_is_told_wherever_it_is_damaged(tmp_path: Path) -> None:
    """Any byte of it: four hold the time, two the level and the system that packed it, which change nothing."""
    (tmp_path / "x.txt").write_text(STORY)
    whole, path = gzip.compress((tmp_path / "x.txt").read_bytes()), tmp_path / "x.txt.gz"
    for place in range(len(whole)):
        path.write_bytes(bytes([*whole[:place], whole[place] ^ 0xFF, *whole[place + 1 :]]))
        if 4 <= place < 10:
            assert read_questions(path) == read_questions(tmp_path / "x.txt")
        else:
            with pytest.raises(ValueError, match=r"x\.txt\.gz, which cannot be read \(.*; expected text in"):
                read_questions(path)


def text_of(ids) -> str:
    return bytes(ids.tolist()).decode()


@pytest.mark.parametrize("length", [0, 600, 4000])
def test_facts_are_scattered_and_their_question_is_asked(tmp_path: Path, length: int) -> None:
    (tmp_path / "book.txt").write_text("Nothing is told here of anybody. Not even here! " * 200)
    task = BabiLongSettings(length=length, books=tmp_path / "book.txt")
    batch = task.draw(np.random.default_rng(0), 20)
    for ids, targets in zip(batch["input_ids"], batch["targets"], strict=True):
        text = text_of(ids).rstrip("\0")
        assert not length or len(text) == length
        told, asked = text.split("\n")
        facts = tuple(found[0] for found in re.finditer(GO, told))
        question, said = asked.split(" Answer: ")
        assert said == answer(Question(facts, question, "")) + "."
        assert text_of(targets[targets >= 0]) == f" {said}"
        assert length == 0 or "Not even here!" in told
        assert length > 0 or told.strip() == " ".join(facts)


def test_questions_come_from_a_file_and_the_most_frequent_answer_is_chance(tmp_path: Path) -> None:
    (tmp_path / "qa1.txt").write_text(STORY + "1 Mary went to the office.\n2 Where is Mary? \toffice\t1\n")
    task = BabiLongSettings(source=tmp_path / "qa1.txt", length=400)
    assert task.chance == pytest.approx(2 / 3)
    texts = [text_of(ids) for ids in task.draw(np.random.default_rng(0), 20)["input_ids"]]
    assert {text.rsplit(" ", 1)[1] for text in texts} == {"garden.", "office."}
    assert BabiLongSettings().chance == pytest.approx(1 / 6)


def test_chance_counts_the_questions_of_a_file_that_fit_the_row(tmp_path: Path) -> None:
    """Three long stories end in the office and two short ones in the garden: of short rows the garden is the answer."""
    short = "1 Mary moved to the garden.\n2 Where is Mary? \tgarden\t1\n"
    walks = "".join(f"{i} John went to the hallway.\n" for i in range(2, 20))
    long = f"1 John went to the kitchen.\n{walks}20 John went to the office.\n21 Where is John? \toffice\t20\n"
    path = tmp_path / "qa1.txt"
    path.write_text(2 * short + 3 * long)
    assert BabiLongSettings(source=path, length=4000).chance == BabiLongSettings(source=path, length=0).chance == 0.6
    for few in ({"length": 200}, {"length": 4000, "facts": 19}):
        task = BabiLongSettings(source=path, **few)
        assert task.chance == 1.0
        texts = [text_of(ids) for ids in task.draw(np.random.default_rng(0), 10)["input_ids"]]
        assert all(text.endswith(" garden.") for text in texts)
    assert BabiLongSettings(source=path, length=200, tokenizer="words").chance == 0.6, "its tokens are fewer"
    with pytest.raises(ValueError, match=r"got length=40; expected more: no question of .*qa1\.txt fits"):
        _ = BabiLongSettings(source=path, length=40).chance


@pytest.mark.parametrize("length", [0, 2000])
def test_facts_of_the_rows_that_are_drawn_are_counted(length: int) -> None:
    task = BabiLongSettings(story="qa2", length=length)
    texts = [text_of(ids) for ids in task.draw(np.random.default_rng(3), 20)["input_ids"]]
    form = rf"{GO}|{TAKE}|{DROP}"
    assert task.count_facts(np.random.default_rng(3), 20) == [len(re.findall(form, text)) for text in texts]


@pytest.mark.usefixtures("unchecked")  # some millions of calls; others have their shapes and types checked
def test_short_rows_have_short_stories_unless_facts_are_limited() -> None:
    """What the description says of qa3 in bytes: 28 % fit 1,024 and 58 % fit 2,048."""
    rng = np.random.default_rng(0)
    drawn = [draw_question(rng, "qa3") for _ in range(2000)]
    sizes = np.array([len(" ".join([*one.facts, "", f"\n{one.question} Answer: {one.answer}."])) for one in drawn])
    assert [np.mean(sizes <= 0.75 * length) for length in (1024, 2048)] == pytest.approx([0.28, 0.58], abs=0.03)
    counted = {
        (length, facts): np.mean(
            BabiLongSettings(story="qa3", length=length, facts=facts).count_facts(np.random.default_rng(1), 80)
        )
        for length in (1024, 8192)
        for facts in (0, 12)
    }
    assert counted[1024, 0] < 0.6 * counted[8192, 0]
    assert counted[1024, 12] == pytest.approx(counted[8192, 12])
    assert max(BabiLongSettings(story="qa3", length=0, facts=12).count_facts(np.random.default_rng(1), 30)) <= 12


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("task", TASKS)
def test_chance_is_the_most_frequent_answer_of_drawn_questions(task) -> None:
    rng = np.random.default_rng(0)
    answers = Counter(draw_question(rng, task).answer for _ in range(1500))
    assert max(answers.values()) / 1500 == pytest.approx(BabiLongSettings(story=task).chance, abs=0.035)


def test_background_may_leave_out_the_people_of_the_story(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Mary had a lamb. It was white. " * 50)
    kept = BabiLongSettings(books=tmp_path / "book.txt", length=500, clean=True).draw(np.random.default_rng(0), 4)
    assert all("lamb" not in text_of(ids) for ids in kept["input_ids"])
    plain = BabiLongSettings(books=tmp_path / "book.txt", length=500).draw(np.random.default_rng(0), 4)
    assert all("lamb" in text_of(ids) for ids in plain["input_ids"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"story": "qa6"}, "story='qa6'"),
        ({"length": -1}, "length=-1"),
        ({"facts": -1}, "facts=-1"),
        ({"clean": True}, "clean=True without books"),
    ],
)
def test_mistakes_are_told(change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BabiLongSettings(**change)


def test_stories_that_do_not_fit_are_told() -> None:
    with pytest.raises(ValueError, match="got length=80; expected more: 200 stories of qa1 did not fit"):
        BabiLongSettings(length=80).draw(np.random.default_rng(0), 1)
    with pytest.raises(ValueError, match="got facts=1; expected more: 200 stories of qa4 did not fit"):
        BabiLongSettings(story="qa4", length=0, facts=1).draw(np.random.default_rng(0), 1)
    with pytest.raises(ValueError, match="got length=999 and facts=1; expected more of one or both: 200 stories"):
        BabiLongSettings(story="qa4", length=999, facts=1).draw(np.random.default_rng(0), 1)


def test_of_a_file_few_questions_may_fit(tmp_path: Path) -> None:
    long = "1 Mary went to the hallway.\n2 John went to the park.\n3 Where is Mary?\thallway\t1\n"
    (tmp_path / "x.txt").write_text(long * 5000 + STORY)
    task = BabiLongSettings(source=tmp_path / "x.txt", length=0, facts=1)
    rng = np.random.default_rng(0)
    assert {task.draw_story(rng).facts for _ in range(5)} == {("Mary moved to the garden. ",)}


def test_a_story_of_a_file_fits_by_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(f"1 {'é' * 60}.\n2 Where is Mary?\tgarden\t1\n")
    task = BabiLongSettings(source=tmp_path / "x.txt", length=130)  # 94 characters, 154 bytes
    with pytest.raises(ValueError, match="got length=130; expected more: 200 stories"):
        task.draw(np.random.default_rng(0), 1)
