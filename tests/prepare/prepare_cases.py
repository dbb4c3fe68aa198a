"""Text to prepare, and token folders to look into."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from titans_lm.data.prepared import TokenFolder
from titans_lm.prepare.run import prepare
from titans_lm.prepare.settings import PrepareSettings

WORDS = [
    "the",
    "memory",
    "learns",
    "while",
    "it",
    "reads",
    "and",
    "forgets",
    "what",
    "does",
    "not",
    "come",
    "again",
    "é",
    "ü",
    "記憶",
    "<eos>",
    "<bos>",
    "🙂\n",
]


def text(number: int, words: int = 40) -> str:
    """A text unlike the others, with characters of one to four bytes and words that look like special tokens."""
    order = np.random.default_rng(number).integers(0, len(WORDS), words)
    return f"{number}: " + " ".join(WORDS[i] for i in order)


def write_texts(folder: Path, count: int = 40, words: int = 40) -> dict[str, bytes]:
    """Files of text by name."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {f"{number:03d}.txt": text(number, words).encode() for number in range(count)}
    for name, data in texts.items():
        (folder / name).write_bytes(data)
    return texts


def write_rows(folder: Path, count: int = 10) -> dict[str, list[str]]:
    """The same kind of text as rows of JSON lines, plain and packed, and of parquet."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    rows = {name: [text(100 * place + i) for i in range(count)] for place, name in enumerate(("a", "b", "c"), 1)}
    lines = {
        name: "".join(json.dumps({"text": row, "id": i}) + "\n" for i, row in enumerate(rows[name])) for name in "ab"
    }
    (folder / "a.jsonl").write_text(lines["a"], encoding="utf-8")
    (folder / "b.JSONL.GZ").write_bytes(gzip.compress(lines["b"].encode()))
    parquet.write_table(pyarrow.table({"id": list(range(count)), "text": rows["c"]}), folder / "c.parquet")
    return {"a.jsonl": rows["a"], "b.JSONL.GZ": rows["b"], "c.parquet": rows["c"]}


def settings(source: Any, out: Any, **more: Any) -> PrepareSettings:
    return PrepareSettings(source=str(source), out=Path(out), **({"held_out": 0.3} | more))


def prepared(source: Any, out: Any, **more: Any) -> TokenFolder:
    prepare(settings(source, out, **more))
    return TokenFolder(out)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
