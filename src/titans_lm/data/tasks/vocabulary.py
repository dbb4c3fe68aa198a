"""A tokenizer of the words that tasks are made of: one token a word, one for two digits, bytes for everything else.

    id 0 … 255    the byte itself
    id 256        <pad>, which no text has
    id 257 …      a word of the tasks' own sentences or two digits, with the space before it where there is one

Any text can be written, and what the tasks say is short: a needle of 47 bytes is 12 tokens. Digits go by two, as they
go by three in large vocabularies: a number of seven is four tokens, and the one that follows a token in it is nearly
always told by that token alone. The space between two sentences is a byte of its own, so that a sentence is the same
tokens alone and in a text. A letter that stands alone is its byte.

`encode_words` is the direct path, which takes text as it is; `word_tokenizer` is an ordinary tokenizer.json, which
reads running text as the tasks have it (white space inside is one space, or two where a line begins with a capital
letter and the one before ends no sentence), and whose chat template writes a question as they do.
"""

import math
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from titans_lm.data.tasks.stories import WORDS as STORY_WORDS

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

NOISE = (
    "The river runs past the mill.", "A cart stands in the yard.", "Bread is baked before it is light.",
    "The clock in the hall is slow.", "Nobody has come down the road.",
)  # fmt: skip
FRAME = ("The secret", "What is the secret", "number", "code", "word", "numbers", "codes", "words", "of", "are")
"""Words of needles and questions."""
INTRODUCTION = "Something secret is hidden in this text. Keep it in mind.\n"
ADJECTIVES = (
    "amber", "bitter", "brave", "calm", "clever", "cold", "crisp", "curious", "dark", "dusty", "eager", "early",
    "faint", "fierce", "frozen", "gentle", "golden", "grand", "hasty", "hollow", "humble", "icy", "jolly", "keen",
    "lazy", "little", "lonely", "loud", "lucky", "mellow", "mild", "misty", "modest", "noble", "odd", "pale", "plain",
    "polite", "proud", "quick", "quiet", "rapid", "rare", "rough", "royal", "rusty", "salty", "sharp", "shy", "silent",
    "silver", "sleepy", "slow", "smooth", "solid", "steady", "stormy", "sunny", "sweet", "tall", "tidy", "vivid",
    "warm", "wild",
)  # fmt: skip
NOUNS = (
    "acorn", "anchor", "apple", "arrow", "badger", "barrel", "basket", "beacon", "bell", "bridge", "candle", "canyon",
    "castle", "cedar", "cloud", "comet", "copper", "cradle", "crane", "desert", "drum", "eagle", "ember", "falcon",
    "feather", "fern", "forest", "fountain", "garden", "glacier", "hammer", "harbor", "hazel", "island", "ivory",
    "jacket", "kettle", "ladder", "lantern", "lemon", "lizard", "maple", "marble", "meadow", "mirror", "needle",
    "ocean", "orchard", "otter", "paper", "pebble", "pillow", "quarry", "raven", "ribbon", "saddle", "shadow",
    "shepherd", "spoon", "thistle", "tower", "tunnel", "violin", "willow",
)  # fmt: skip
WORD = re.compile(r"""(?:(?<![.!\s])(?<![.!?]["'’”)]) )?(?:[A-Za-z]+|[0-9]{2})""")
"""A word or two digits, with the space before it unless a sentence ends there, or there is another."""
NOTHING, FULL_STOP = 256, ord(".")
"""The id that no text has, and the one that ends an answer."""
FORMS = ("Where is {}?", "What is the secret number of {} {}?")
"""Questions of one word and of two: of stories, and of needles."""
QUESTION = """\
{%- for message in messages -%}
{%- set said = message["content"] | trim -%}
{%- if message["role"] == "assistant" -%}
{{ " " ~ said }}
{%- elif said.startswith("What is the secret ") -%}
{{ "\\n" ~ said ~ " The" ~ said.removeprefix("What is the").removesuffix("?") ~ " is" }}
{%- else -%}
{{ "\\n" ~ said ~ " Answer:" }}
{%- endif -%}
{%- endfor -%}
"""
"""How the tasks ask, as a chat template: up to where the answer begins."""


@cache
def word_ids() -> dict[str, int]:
    """Return the id of every word that needles and stories have and of two digits, with and without a space before."""
    texts = [INTRODUCTION, *NOISE, *ADJECTIVES, *NOUNS, *FRAME, *STORY_WORDS]
    words = sorted({word for text in texts for word in re.findall(r"[^\W\d_]+", text)})
    words += [f"{number:02}" for number in range(100)]
    forms = [form for word in words for form in (word, f" {word}")]
    return {form: 256 + i for i, form in enumerate(forms) if len(form) > 1}  # A letter alone is a byte: 256 is NOTHING


@cache
def word_count() -> int:
    """Count the ids, with that of nothing."""
    return max(word_ids().values()) + 1


@cache
def word_tokenizer() -> "PreTrainedTokenizerFast":
    """Build the tokenizer as a Hugging Face tokenizer that loads again without code of ours."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    from titans_lm.data.tokenizer import byte_level, byte_vocabulary

    words = {form.replace(" ", "Ġ"): token for form, token in word_ids().items()}  # Ġ is the letter of that byte
    vocabulary = {**byte_vocabulary(), "<pad>": NOTHING, **words}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Replace(Regex(r"""(?<=[^\s.!?"'’”)])[^\S\n]*+\n\s*+(?=[A-Z])"""), "  "),
            normalizers.Replace(Regex(r"(?<=\S)(?!  [A-Z])\s++(?=\S)"), " "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD.pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return byte_level(tokenizer, pad_token="<pad>", padding_side="left", chat_template=QUESTION)


def is_word_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Tell whether a tokenizer is that of the tasks' words."""
    return len(tokenizer) == word_count() and tokenizer.get_vocab() == word_tokenizer().get_vocab()


def split_words(text: str, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Name the words of a text that a model of these tokens was not taught; none for any other tokenizer."""
    if not is_word_tokenizer(tokenizer):
        return []
    found = dict.fromkeys(re.findall("[A-Za-z]+", text))
    return [word for word in found if len(word) > 1 and word not in word_ids()]


def as_taught(question: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Write a question as tasks ask it (capitals, spaces, a question mark), for a model of their words.

    Any other question, and one to any other model, stays as it is.
    """
    if not is_word_tokenizer(tokenizer):
        return question
    return next((taught for form in FORMS if (taught := in_form(form, question)) is not None), question)


def in_form(form: str, question: str) -> str | None:
    """Write a question in a form, and its words in letters that are known; None for one of another form."""
    pattern = r"\s+".join(form.removesuffix("?").split()).replace("{}", r"(\w+)") + r"\s*[?.!]*"
    found = re.fullmatch(pattern, question.strip(), re.IGNORECASE)
    return None if found is None else form.format(*map(_in_known_letters, found.groups()))


def _in_known_letters(word: str) -> str:
    if word in word_ids():
        return word
    return next((known for known in word_ids() if known.lower() == word.lower()), word)


def encode_words(text: str) -> "np.ndarray":
    """Turn a text into tokens."""
    import numpy as np

    known, ids, last = word_ids(), [], 0
    for found in WORD.finditer(text):
        token = known.get(found[0])
        if token is not None:
            ids += [*text[last : found.start()].encode(), token]
            last = found.end()
    return np.array([*ids, *text[last:].encode()], np.int64)


class Names:
    """Names by their numbers, made of one part for every place; the last place changes with every number."""

    def __init__(self, *places: Sequence[str], between: str = "") -> None:
        self.places, self.between = places, between

    def __len__(self) -> int:
        return math.prod(map(len, self.places))

    def __getitem__(self, which: int) -> str:
        parts = []
        for choices in reversed(self.places):
            which, at = divmod(which, len(choices))
            parts.append(choices[at])
        return self.between.join(reversed(parts))


TWO_WORDS = Names(ADJECTIVES, NOUNS, between=" ")
"""An adjective and a noun."""
