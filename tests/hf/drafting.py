"""Tokens per second of plain greedy decoding, prompt lookup and assisted decoding, in turn, as medians.

python tests/hf/drafting.py [steps [width]]

A small model is trained on a text that repeats itself, so that what is looked up in the prompt is mostly right. Drafts
are written by a model of one block and a quarter of the width, trained on the same text, and by the model itself, whose
passes are then those of its drafts too.
"""

import statistics
import sys
import time
import warnings
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from titans_lm.hf import TitansConfig, TitansForCausalLM

NEW, ROUNDS, DRAFTED, LENGTH = 200, 5, 8, 64
TEXT = b"The lamp was lit at six. The boat came in at nine. Nobody saw the cat that sat on the stone by the water. "


def trained(steps: int, width: int, blocks: int) -> TitansForCausalLM:
    """A byte model of the text."""
    torch.manual_seed(0)
    config = TitansConfig(
        architecture="mac", vocab_size=259, hidden_size=width, num_attention_heads=4, num_hidden_layers=blocks,
        segment_len=64, eos_token_id=None,
    )  # fmt: skip
    model, text = TitansForCausalLM(config), torch.tensor(list(TEXT * 8))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (8,))
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        loss = cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.generation_config.num_assistant_tokens = DRAFTED
    model.generation_config.assistant_confidence_threshold = 0.0
    return model.eval()


def main() -> None:
    warnings.filterwarnings("ignore")
    steps, width = (int(sys.argv[i]) if len(sys.argv) > i else n for i, n in ((1, 150), (2, 128)))
    model, small = trained(steps, width, 2), trained(steps, width // 4, 1)
    prompt = torch.tensor([list(TEXT * 2)])
    ways: dict[str, dict[str, Any]] = {
        "plain greedy": {},
        "prompt lookup": {"prompt_lookup_num_tokens": DRAFTED},
        "a small draft": {"assistant_model": small},
        "itself as draft": {"assistant_model": model},
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    texts, passes, count = {}, {}, [0]
    model.model.register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    for _ in range(ROUNDS):
        for name, way in ways.items():
            count[0], began = 0, time.perf_counter()
            texts[name] = model.generate(prompt, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **way)
            rates[name].append(NEW / (time.perf_counter() - began))
            passes[name] = count[0]
    for name, found in rates.items():
        same = torch.equal(texts[name], texts["plain greedy"])
        median = statistics.median(found)
        print(f"{name:16} {median:8.1f} tokens/s  {passes[name]:4} passes  the same text: {same}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
