"""Milliseconds and state bytes per decoded token by context length, with and without memory caching, in turn.

python tests/caching_decoding.py [context ...]

A linear memory in two blocks of width 128, beside full attention of the same shape. Caching keeps 16 memories at the
ends of segments of 256 tokens: the last ones, or with Fenwick lengths such as cover all.
"""

import statistics
import sys
import time
from typing import Any

import torch

from titans_lm.hf import TitansConfig, TitansForCausalLM
from titans_lm.ops.state import state_bytes

ROUNDS, TOKENS, PIECE = 5, 40, 512
LINEAR: dict[str, Any] = {"architecture": "lmm", "memory_depth": 1, "chunk_size": 16}
WAYS: dict[str, dict[str, Any]] = {
    "plain": LINEAR,
    "residual": {**LINEAR, "memory_caching": "residual"},
    "grm": {**LINEAR, "memory_caching": "grm"},
    "grm, Fenwick lengths": {**LINEAR, "memory_caching": "grm", "caching_lengths": "fenwick"},
    "ssc, the best 4": {**LINEAR, "memory_caching": "ssc"},
    "full attention": {"architecture": "attention"},
}


def made(settings: dict[str, Any]) -> TitansForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 259}
    return TitansForCausalLM(TitansConfig(**sizes, **settings)).eval()


@torch.no_grad()
def main() -> None:
    contexts = [int(text) for text in sys.argv[1:]] or [1024, 4096, 16_384]
    models = {name: made(settings) for name, settings in WAYS.items()}
    caches: dict[str, Any] = dict.fromkeys(models)
    read = 0
    print(f"{'':24}" + "".join(f"{name:>22}" for name in models))  # noqa: T201
    for context in contexts:
        for start in range(read, context, PIECE):
            ids = torch.randint(256, (1, min(PIECE, context - start)))
            for name, model in models.items():
                caches[name] = model(ids, past_key_values=caches[name], logits_to_keep=1).past_key_values
        read = context
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(ROUNDS):
            for name, model in models.items():
                began = time.perf_counter()
                for token in torch.randint(256, (TOKENS, 1, 1)):
                    model(token, past_key_values=caches[name])
                times[name].append((time.perf_counter() - began) / TOKENS * 1e3)
        read += ROUNDS * TOKENS
        sizes = [state_bytes(cache.state) for cache in caches.values()]
        print(f"{context:>10,}, ms a token  " + "".join(f"{statistics.median(t):>22.2f}" for t in times.values()))  # noqa: T201
        print(f"{'':>10}  state, bytes " + "".join(f"{size:>22,}" for size in sizes))  # noqa: T201


if __name__ == "__main__":
    main()
