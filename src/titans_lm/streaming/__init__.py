"""Reading without end: a text of any length becomes a memory of constant size, which can be kept, copied and saved."""

from titans_lm.streaming.file import load_memory, save_memory
from titans_lm.streaming.memory import Memory, Source
from titans_lm.streaming.reader import Reader
from titans_lm.streaming.tokens import TokenStream

__all__ = ["Memory", "Reader", "Source", "TokenStream", "load_memory", "save_memory"]
