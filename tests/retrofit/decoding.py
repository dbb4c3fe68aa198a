"""Milliseconds and cache bytes of a token at long contexts: a model with an adapter beside its base, in turn.

python tests/retrofit/decoding.py ADAPTER [context ...]

The base's cache is filled with random keys and values, as many as the context has tokens: what a token costs does not
depend on them. Ours reads the context, random tokens.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from titans_lm.retrofit import load
from titans_lm.retrofit.file import load_base

TOKENS, PIECE = 24, 2048


def filled_cache(config: Any, length: int) -> DynamicCache:
    """Keys and values of so many tokens that nobody has read."""
    cache, heads, width = DynamicCache(), config.num_key_value_heads, config.head_dim
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(1, heads, length, width), torch.randn(1, heads, length, width), layer)
    return cache


def seconds_of(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


@torch.no_grad()
def main() -> None:
    model: Any = load(sys.argv[1])
    base: Any = load_base(model.config._name_or_path)
    token = torch.tensor([[5]])
    for length in [int(one) for one in sys.argv[2:]] or [8192, 32_768]:
        ids = torch.randint(0, base.config.vocab_size, (1, length))
        cache: Any = None
        for piece in ids.split(PIECE, 1):
            cache = model.base_model(piece, past_key_values=cache, use_cache=True).past_key_values
        grown = filled_cache(base.config, length)
        ours, full = (
            lambda cache=cache: model(token, past_key_values=cache),
            lambda grown=grown: base(
                token, past_key_values=grown, position_ids=torch.tensor([[grown.get_seq_length()]])
            ),
        )
        times = [(seconds_of(full), seconds_of(ours)) for _ in range(TOKENS)][4:]
        held = sum(x.numel() * x.element_size() for layer in grown.layers for x in (layer.keys, layer.values))
        for name, ms, size in zip(
            ("full attention", "with memory"),
            (1e3 * statistics.median(column) for column in zip(*times, strict=True)),
            (held, cache.state_bytes()),
            strict=True,
        ):
            print(f"{length:7,} tokens  {name:15} {ms:7.1f} ms a token  {size / 2**20:7.1f} MiB", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
