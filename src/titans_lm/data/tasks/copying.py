"""Exact copying: a string whole, what follows an n-gram, and a number out of a phone book.

After "Repeat After Me" (Jelassi, Brandfonbrener, Kakade, Malach; arXiv 2402.01032), in words of our own.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from titans_lm.config import check_at_least, check_choice

if TYPE_CHECKING:
    import numpy as np

    from titans_lm.data.batches import Batch


EMPTY = 0
Asked = Literal["before", "after"]


@dataclass(frozen=True, kw_only=True)
class CopySettings:
    """Strings of random letters, each to be said again; as many in a row as fit.

    With `shortest=2, longest=3, letters=4, length=9`, letters 1 to 4, begin 5, again 6, end 7:

        input_ids     5    3    1    6    3    1    7    0    0
        targets    −100 −100 −100    3    1    7 −100 −100 −100

    Every answer is a string and its end.
    """

    shortest: int = 5
    """Fewest letters of a string."""
    longest: int = 20
    """Most letters of a string."""
    letters: int = 26
    """Different letters."""
    length: int = 220
    """Tokens of a row."""

    def __post_init__(self) -> None:
        check_at_least("shortest", self.shortest, 1)
        check_at_least("longest", self.longest, self.shortest)
        check_at_least("letters", self.letters, 2)
        check_at_least("length", self.length, 2 * self.longest + 3)

    @property
    def vocab_size(self) -> int:
        return self.letters + 4

    @property
    def chance(self) -> float:
        """Share of strings that are right, with their end, by saying any of the shortest: P(shortest) / letters^n."""
        strings = self._expected()
        return strings[self.shortest] / sum(strings.values()) / self.letters**self.shortest

    @property
    def token_chance(self) -> float:
        """Share of letters and ends that are right by saying any letter."""
        strings = self._expected()
        said = sum(size * count for size, count in strings.items())
        return said / (said + sum(strings.values())) / self.letters

    def _expected(self) -> dict[int, float]:
        """Count the strings of each size that a row has on average: short ones are more, as the last must fit."""
        sizes = range(self.shortest, self.longest + 1)
        starts = [1.0] + [0.0] * self.length  # how often a string would begin at each place, were there room for it
        found = dict.fromkeys(sizes, 0.0)
        for at, often in enumerate(starts):
            for size in sizes:
                if often and at + 2 * size + 3 <= self.length:
                    found[size] += often / len(sizes)
                    starts[at + 2 * size + 3] += often / len(sizes)
        return found

    def draw(self, rng: "np.random.Generator", rows: int) -> "Batch":
        """Draw rows; the next token is asked for from the sign "again" on, up to the end of the string."""
        from titans_lm.data.tasks.batches import as_batch

        begin, again, end = self.letters + 1, self.letters + 2, self.letters + 3
        inputs, targets, answers = _empty(rows, self.length)
        for row in range(rows):
            at = number = 0
            while True:
                size = int(rng.integers(self.shortest, self.longest + 1))
                if at + 2 * size + 3 > self.length:
                    break
                string = rng.integers(1, self.letters + 1, size)
                inputs[row, at : at + 2 * size + 3] = [begin, *string, again, *string, end]
                asked = slice(at + size + 1, at + 2 * size + 2)
                targets[row, asked], answers[row, asked] = [*string, end], number
                at, number = at + 2 * size + 3, number + 1
        return as_batch(inputs, targets, answers)


@dataclass(frozen=True, kw_only=True)
class LookupSettings:
    """A string of random letters and an n-gram that is in it once: which letter follows there?

    With `size=5, n=2, letters=4, asked="after"`, letters 1 to 4, begin 5, question 6:

        input_ids     5    1    3    3    2    4    6    3    2
        targets    −100 −100 −100 −100 −100 −100 −100 −100    4

    and with `asked="before"`, where the string must be searched while it is read:

        input_ids     5    3    2    6    1    3    3    2    4    6
        targets    −100 −100 −100 −100 −100 −100 −100 −100 −100    4
    """

    size: int = 32
    """Letters of the string."""
    n: int = 2
    """Letters of the n-gram."""
    letters: int = 26
    """Different letters."""
    asked: Asked = "after"
    """Whether the n-gram comes after the string or before it."""

    def __post_init__(self) -> None:
        check_at_least("n", self.n, 1)
        check_at_least("size", self.size, self.n + 1)
        check_at_least("letters", self.letters, 2)
        check_choice("asked", self.asked, get_args(Asked))

    @property
    def vocab_size(self) -> int:
        return self.letters + 3

    @property
    def chance(self) -> float:
        return 1.0 / self.letters

    @property
    def length(self) -> int:
        return self.size + self.n + (2 if self.asked == "after" else 3)

    def draw(self, rng: "np.random.Generator", rows: int) -> "Batch":
        """Draw rows; ValueError where strings with an n-gram that comes once are too rare to be found."""
        from titans_lm.data.tasks.batches import as_batch

        begin, question = self.letters + 1, self.letters + 2
        inputs, targets, _ = _empty(rows, self.length)
        for row in range(rows):
            string, place = self._string(rng)
            gram = string[place : place + self.n]
            if self.asked == "after":
                inputs[row] = [begin, *string, question, *gram]
            else:
                inputs[row] = [begin, *gram, question, *string, question]
            targets[row, -1] = string[place + self.n]
        return as_batch(inputs, targets)

    def _string(self, rng: "np.random.Generator") -> "tuple[np.ndarray, int]":
        """Draw a string and a place in it whose n-gram begins nowhere else."""
        import numpy as np

        for _ in range(1000):
            string = rng.integers(1, self.letters + 1, self.size)
            grams = np.lib.stride_tricks.sliding_window_view(string, self.n)
            _, first, counts = np.unique(grams, axis=0, return_index=True, return_counts=True)
            places = first[(counts == 1) & (first < self.size - self.n)]
            if len(places):
                return string, int(rng.choice(places))
        raise ValueError(
            f"got size={self.size}, n={self.n} and letters={self.letters}: no string was found in which an n-gram "
            "comes once; expected a longer n-gram, more letters or a shorter string"
        )


FIRST_NAMES = (
    "Ada", "Bela", "Cora", "Dario", "Edda", "Fynn", "Greta", "Hugo", "Ines", "Jorin", "Kaya", "Leif", "Mona", "Nils",
    "Olga", "Piet", "Quinn", "Runa", "Sven", "Tilda", "Udo", "Vera", "Wim", "Xenia", "Yara", "Zeno", "Alma", "Bruno",
    "Celia", "Dirk", "Elsa", "Fritz", "Gesa", "Henk", "Ilse", "Jana", "Kuno", "Lotte", "Malte", "Nora",
)  # fmt: skip
LAST_NAMES = (
    "Adler", "Brandt", "Cordes", "Dahl", "Ebert", "Falk", "Graf", "Harms", "Imhof", "Jansen", "Krug", "Lorenz",
    "Maurer", "Nagel", "Otten", "Petri", "Quast", "Reuter", "Sommer", "Thiel", "Ulmer", "Voss", "Weber", "Xander",
    "Yilmaz", "Zander", "Ahrens", "Berger", "Claus", "Dietz", "Engel", "Frey", "Gruber", "Huber", "Ihde", "Jung",
    "Keller", "Lang", "Meyer", "Neumann",
)  # fmt: skip
DIGITS = 10


@dataclass(frozen=True, kw_only=True)
class PhoneBookSettings:
    """A list of names and numbers, then a name: which number? Rows are bytes of text, 0 where a row has ended.

    With `entries=3, shown=1`:

        Ada Voss: 6402817395
        Piet Graf: 9718302645
        Elsa Lang: 7093514628

        Piet Graf: 9718302645

        Elsa Lang: 7093514628

    `shown` entries come again as examples of what is wanted; the last name is asked for, its ten digits are the answer.
    """

    entries: int = 20
    """Names in the list."""
    shown: int = 2
    """Entries that come again before the question; the one that is asked for is none of them."""

    def __post_init__(self) -> None:
        check_at_least("shown", self.shown, 0)
        check_at_least("entries", self.entries, self.shown + 1)
        if self.entries > len(FIRST_NAMES) * len(LAST_NAMES):
            raise ValueError(f"got entries={self.entries}; expected {len(FIRST_NAMES) * len(LAST_NAMES)} or fewer")

    @property
    def vocab_size(self) -> int:
        return 256

    @property
    def chance(self) -> float:
        """Share of numbers that are right by saying any; the first digit is 6 to 9."""
        return 0.25 * 0.1 ** (DIGITS - 1)

    @property
    def token_chance(self) -> float:
        """Share of digits that are right by saying any digit, of the first any of its four."""
        return (1 / 4 + (DIGITS - 1) / 10) / DIGITS

    @property
    def length(self) -> int:
        """Tokens of the longest row that there can be."""
        longest = max(map(len, FIRST_NAMES)) + max(map(len, LAST_NAMES)) + len(" : \n") + DIGITS
        return (self.entries + self.shown + 1) * longest + self.shown + 1

    def draw(self, rng: "np.random.Generator", rows: int) -> "Batch":
        """Draw rows; a batch is as long as its longest row."""
        import numpy as np

        from titans_lm.data.tasks.batches import as_batch

        lines = [self.text(rng) for _ in range(rows)]
        inputs, targets, answers = _empty(rows, max(map(len, lines)))
        for row, line in enumerate(lines):
            ids = np.frombuffer(line, np.uint8)
            inputs[row, : len(ids)] = ids
            asked = slice(len(ids) - DIGITS - 1, len(ids) - 1)  # each digit is asked for at the byte before it
            targets[row, asked], answers[row, asked] = ids[-DIGITS:], 0
        return as_batch(inputs, targets, answers)

    def text(self, rng: "np.random.Generator") -> bytes:
        """Draw a phone book with its question and the answer."""
        import numpy as np

        who = rng.choice(len(FIRST_NAMES) * len(LAST_NAMES), self.entries, replace=False)
        first, last = np.divmod(who, len(LAST_NAMES))
        digits = np.concatenate(
            [rng.integers(6, 10, (self.entries, 1)), rng.integers(0, 10, (self.entries, DIGITS - 1))], axis=1
        )
        entries = [
            f"{FIRST_NAMES[a]} {LAST_NAMES[b]}: {''.join(map(str, number))}"
            for a, b, number in zip(first, last, digits.tolist(), strict=True)
        ]
        again = rng.choice(self.entries, self.shown + 1, replace=False)
        return "\n".join([*entries, *(f"\n{entries[one]}" for one in again)]).encode()


def _empty(rows: int, length: int) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
    """Give rows that hold and ask nothing."""
    import numpy as np

    from titans_lm.data.batches import IGNORED

    return (
        np.full((rows, length), EMPTY, np.int64),
        np.full((rows, length), IGNORED, np.int64),
        np.full((rows, length), IGNORED, np.int64),
    )
