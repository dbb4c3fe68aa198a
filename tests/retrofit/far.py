"""Where the tokens of one long text are, and what they cost: a base with a window, read far beyond its positions.

    python tests/retrofit/far.py MODEL TEXT [--tokens 20000] [--every 2000] [--window 256] [--sinks 4]

MODEL is a base or an adapter, whose memory is read too. Every line: tokens read, nats per token since the line before.
"""

import argparse
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import titans_lm.retrofit.file  # noqa: F401 - transformers loads adapters by it
from titans_lm.retrofit import Reach, add_memory

PIECE = 250


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    for name, default in (("tokens", 20_000), ("every", 2_000), ("window", 256), ("sinks", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.model).eval()
    if not hasattr(model, "retrofit"):
        model = add_memory(model, window=given.window, sinks=given.sinks, layers=[0])  # untrained: it adds nothing
    reach = Reach(given.window, given.sinks)
    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    ids = torch.tensor([tokenizer(given.text.read_text()).input_ids[: given.tokens + 1]])
    costs, cache = [], None
    for start in range(0, ids.shape[1] - 1, PIECE):
        piece, targets = ids[:, start : min(start + PIECE, ids.shape[1] - 1)], ids[0, start + 1 : start + PIECE + 1]
        output = model(piece, past_key_values=cache, use_cache=True, reach=reach)
        cache, costs = output.past_key_values, [*costs, F.cross_entropy(output.logits[0], targets, reduction="none")]
        read = start + piece.shape[1]
        if read % given.every == 0:
            print(f"{read:>9,}  {torch.cat(costs)[-given.every :].mean():.3f}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
