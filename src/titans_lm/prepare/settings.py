"""What can be set when text is prepared."""

from dataclasses import dataclass
from pathlib import Path

from titans_lm.checks import KnownSettings, check_fields
from titans_lm.config import check_between
from titans_lm.data.text import HELD_OUT


@dataclass(frozen=True, kw_only=True)
class PrepareSettings(KnownSettings):
    """Settings of `titans prepare`."""

    source: str | None = None
    """A text file, a folder, a .jsonl or .parquet file, a data set saved by Hugging Face, hf:NAME, or stdlib."""
    out: Path | None = None
    """Folder to write; the same command goes on where it was stopped."""
    tokenizer: str = "bytes"
    """The word bytes, a folder with a Hugging Face tokenizer, or its name on the hub."""
    train_bpe: int = 0
    """Ids of a byte-level BPE to train on the text, instead of --tokenizer; 0 trains none."""
    bpe_bytes: int = 200_000_000
    """Most bytes of text that the BPE is trained on."""
    column: str = "text"
    """Column or key that holds the text, in tables and JSON lines."""
    subset: str | None = None
    """Subset (configuration) of a data set on the hub."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    held_out: float = HELD_OUT
    """Share of the documents held out for validation, by a hash of their names; of a single document, its end."""
    valid: str | None = None
    """A source to validate on instead."""
    max_documents: int = 0
    """Documents to take of the source, not of --valid; 0 takes all."""
    shard_tokens: int = 2**26
    """Tokens after which a shard is closed; a document is never cut."""
    workers: int = 0
    """Threads of the tokenizer; 0 is one for each core."""

    @property
    def of_bytes(self) -> bool:
        """Whether tokens are bytes, which need no text."""
        return self.tokenizer == "bytes" and not self.train_bpe

    def __post_init__(self) -> None:
        check_fields(self, zero=["train_bpe", "max_documents", "workers"])
        check_between("held_out", self.held_out, 0.0, 1.0)
        if self.train_bpe and self.tokenizer != "bytes":
            raise ValueError(
                f"got both train_bpe={self.train_bpe} and tokenizer={self.tokenizer!r}; expected one of them"
            )
        if 0 < self.train_bpe < 256 + 3:
            raise ValueError(f"got train_bpe={self.train_bpe}; expected at least 259: 256 bytes, <bos>, <eos>, <pad>")
