"""Resident memory and tokens per second while a model with an adapter reads a long text.

python tests/retrofit/streaming.py ADAPTER TEXT [tokens]
"""

import resource
import sys
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from titans_lm.retrofit import load
from titans_lm.streaming.reader import Reader

STEP, PIECE = 20_000, 1024


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    adapter, text = sys.argv[1:3]
    wanted = int(sys.argv[3]) if len(sys.argv) > 3 else 200_000
    model: Any = load(adapter)
    ids = AutoTokenizer.from_pretrained(adapter)(Path(text).read_text("utf-8"), add_special_tokens=False).input_ids
    if len(ids) < wanted:
        raise SystemExit(f"got {len(ids)} tokens; expected a text of at least {wanted}")
    reader, began, found = Reader(model, piece_len=PIECE), time.perf_counter(), []
    for start in range(0, wanted, STEP):
        reader.feed([ids[start : min(start + STEP, wanted)]])
        found.append(resident())
        read, speed = reader.tokens, reader.tokens / (time.perf_counter() - began)
        size, memory = f"{found[-1] / 2**20:7.1f} MiB", reader.memory.bytes
        print(f"{read:7} tokens  resident {size}  memory {memory:,} bytes  {speed:.0f} tokens/s")  # noqa: T201
    print(f"resident memory at the end beside that after {STEP} tokens: {found[-1] / found[0]:.4f}")  # noqa: T201


if __name__ == "__main__":
    main()
