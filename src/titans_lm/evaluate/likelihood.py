"""Summed log-probabilities of continuations, by the rules of lm-eval: how texts become tokens, and what is added up.

    context, continuation    are tokenised together and cut where the context alone would end; spaces at the end of a
                             context belong to the continuation
    log P                    is the sum over the tokens of the continuation, greedy whether each was the likeliest

Every pair is read from a fresh start: rows of a batch share nothing, and padding stands on the right, where a causal
model's answers do not depend on it. Pairs whose inputs are the same are read once.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from titans_lm.config import check_at_least, check_choice
from titans_lm.data.tokenizer import is_byte_tokenizer
from titans_lm.train.run import is_of_a_run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BOS: dict[str, bool | None] = {"yes": True, "no": False, "tokenizer": None}
"""How a text may begin: with <bos>, without it, or as the tokenizer begins it by itself."""
LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx")
"""Where configs say how much a model can read, in the order that lm-eval looks."""
USUAL_LENGTH = 2048
"""What lm-eval takes where nothing says how much a model can read."""
NO_LENGTH = 10**18
"""Tokenizers that know no length name one beyond this."""


class Likelihood(NamedTuple):
    """What a model makes of a continuation."""

    log_probability: float
    """Sum over the tokens, in nats."""
    greedy: bool
    """Whether every token was the likeliest."""


class Pair(NamedTuple):
    """A context and its continuation, as tokens."""

    context: list[int]
    continuation: list[int]


def starts_with_bos(model: nn.Module, tokenizer: "PreTrainedTokenizerBase", bos: str = "auto") -> bool | None:
    """Say whether texts begin with <bos>: True, False, or None where the tokenizer decides.

    "auto" is True for what was trained here, and None elsewhere: documents of `titans train` begin with <bos>, which
    tokenizers seldom add by themselves. A model is known to be from here by its type, by the folder that a run left, or
    by the byte tokenizer.
    """
    check_choice("bos", bos, ("auto", *BOS))
    if bos != "auto":
        return BOS[bos]
    if tokenizer.bos_token_id is None:
        return None
    kind, folder = getattr(getattr(model, "config", None), "model_type", None), getattr(model, "name_or_path", "")
    here = kind == "titans" or (folder and is_of_a_run(Path(folder))) or is_byte_tokenizer(tokenizer)
    return True if here else None


def longest_input(model: nn.Module, tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Tokens that a model can read, as lm-eval finds it; None for a model that has a state and no limit."""
    if hasattr(model, "init_state"):
        return None
    config: Any = model.config
    for part in (config.get_text_config(decoder=True), config):
        for name in LENGTHS:
            if isinstance(found := getattr(part, name, None), int):
                return found
    known = tokenizer.model_max_length
    return int(known) if known and known < NO_LENGTH else USUAL_LENGTH


def encode(tokenizer: "PreTrainedTokenizerBase", text: str, bos: bool | None = None) -> list[int]:
    """Turn a text into tokens: with <bos> before them (True), without (False), or as the tokenizer does (None)."""
    if bos is None:
        return tokenizer.encode(text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [_begin(tokenizer), *ids] if bos else ids


def encode_pair(tokenizer: "PreTrainedTokenizerBase", context: str, continuation: str, bos: bool | None = None) -> Pair:
    """Turn a context and its continuation into tokens; a context of nothing is <bos>, or <eos> without one.

    ValueError for a continuation that adds no token.
    """
    if not context:
        ids, first = encode(tokenizer, continuation, False), _begin(tokenizer)
        pair = Pair(ids[:1], ids[1:]) if ids[:1] == [first] else Pair([first], ids)
    else:
        kept = context.rstrip()
        whole, start = encode(tokenizer, context + continuation, bos), encode(tokenizer, kept, bos)
        pair = Pair(start, whole[len(start) :])
    if not pair.context or not pair.continuation:
        raise ValueError(f"got the continuation {continuation!r}, which adds no token to {context[-40:]!r}")
    return pair


@torch.no_grad()
def log_likelihoods(
    model: nn.Module,
    pairs: Sequence[Pair],
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    done: Callable[[int], None] = lambda _: None,
) -> list[Likelihood]:
    """Score every pair, in the order given; of more than `max_length` tokens the first ones are left out.

    Batches are made as lm-eval makes them, the longest first, so that the sums agree with its own bit by bit. `done` is
    told how many pairs are scored. Raises ValueError for a continuation that alone is longer than `max_length`.
    """
    check_at_least("batch_size", batch_size, 1)
    if max_length is not None:
        check_at_least("max_length", max_length, 1)
        longest = max((len(pair.continuation) for pair in pairs), default=0)
        if longest > max_length:
            raise ValueError(f"got a continuation of {longest} tokens with max_length={max_length}; expected no longer")
    asked: dict[tuple[int, ...], list[int]] = {}
    for index, pair in enumerate(pairs):
        asked.setdefault((*pair.context, *pair.continuation[:-1]), []).append(index)
    order = sorted(asked, key=lambda ids: (-len(ids), ids))
    found: list[Likelihood | None] = [None] * len(pairs)
    was_training, count = model.training, 0
    model.eval()
    try:
        for first in range(0, len(order), batch_size):
            group = order[first : first + batch_size]
            inputs = [ids if max_length is None else ids[-max_length:] for ids in group]
            for ids, read, logits in zip(group, inputs, _logits(model, inputs), strict=True):
                for index in asked[ids]:
                    targets = pairs[index].continuation
                    found[index] = _add_up(logits[len(read) - len(targets) : len(read)], targets)
                count += len(asked[ids])
            done(count)
    finally:
        model.train(was_training)
    return [each for each in found if each is not None]


def _logits(model: nn.Module, inputs: Sequence[tuple[int, ...]]) -> Tensor:
    """Read a batch of inputs, each from a fresh start."""
    ids = torch.zeros(len(inputs), max(map(len, inputs)), dtype=torch.int64)
    for row, read in enumerate(inputs):
        ids[row, : len(read)] = torch.tensor(read)
    return model(input_ids=ids.to(next(model.parameters()).device), use_cache=False).logits


def _add_up(logits: Tensor, targets: Sequence[int]) -> Likelihood:
    """Sum the log-probabilities of targets (T) by their logits (T, V), in float32 at least."""
    chances = torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    wanted = torch.tensor(targets, device=logits.device)
    total = chances.gather(1, wanted[:, None]).squeeze(1).sum()
    return Likelihood(float(total), bool((chances.argmax(dim=-1) == wanted).all()))


def _begin(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The token that stands before a text."""
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if first is None:
        raise ValueError("got a tokenizer without <bos> and <eos>; expected one of them to begin a text with")
    return int(first)
