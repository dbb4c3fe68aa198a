"""Tokens a second that a server writes for 1, 4 and 16 clients, one answer at a time and as a batch.

python tests/serve/throughput.py [seconds] [architecture]
"""

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch

from serve.serve_cases import serving, small_engine
from titans_lm.config import BackboneConfig
from titans_lm.train.fresh import byte_model

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
ARCHITECTURE: Any = sys.argv[2] if len(sys.argv) > 2 else "mac"
TOKENS = 64


def written(url: str, clients: int) -> float:
    """Tokens a second, all clients together, each in a conversation of its own."""
    until = time.monotonic() + SECONDS

    def one(number: int) -> int:
        count = 0
        with httpx.Client(base_url=url, timeout=300.0) as client:
            while time.monotonic() < until:
                body = {"prompt": "Once more, ", "max_tokens": TOKENS, "seed": count, "conversation": f"c{number}"}
                answer = client.post("/v1/completions", json=body).json()
                count += answer["usage"]["completion_tokens"]
        return count

    began = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        total = sum(pool.map(one, range(clients)))
    return total / (time.monotonic() - began)


def main() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = byte_model(BackboneConfig(architecture=ARCHITECTURE, **sizes)).eval()
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{ARCHITECTURE}, {count / 1e6:.1f}M parameters, {SECONDS:g} s each")  # noqa: T201 - what it is for
    for batch in (1, 16):
        for clients in (1, 4, 16):
            with tempfile.TemporaryDirectory() as folder:
                engine = small_engine(Path(folder), model, max_batch=batch, workers=1)
                with serving(engine) as client:
                    rate = written(str(client.base_url), clients)
            print(f"max_batch={batch:2}  {clients:2} clients  {rate:8.1f} tokens/s", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
