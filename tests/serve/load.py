"""A server under load: 32 clients in 8 conversations, some breaking off; what is heard is what the library alone says.

python tests/serve/load.py [seconds]
"""

import sys
import tempfile
import time
from pathlib import Path

from serve.serve_cases import check_said, crowd, plain_model, serving, small_engine


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 120.0
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        engine = small_engine(Path(folder), plain_model("lmm"), in_memory=3, max_stored=10_000)
        with serving(engine) as client:
            said = crowd(str(client.base_url), seconds=seconds)
            took = time.monotonic() - began
            errors = [line for line in client.get("/metrics").text.splitlines() if 'status="5' in line]
        check_said(said, engine.model)
    turns = sum(map(len, said))
    found = f"{turns} turns of {len(said)} conversations in {took:.0f} s, all as the library alone"
    print(f"{found}; answers of 5xx: {errors or 'none'}")  # noqa: T201 - what it is for


if __name__ == "__main__":
    main()
