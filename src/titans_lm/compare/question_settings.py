"""Settings of `titans evaluate lm-eval`: which models answer which questions."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from titans_lm.config import check_at_least


@dataclass(frozen=True, kw_only=True)
class QuestionSettings:
    """Ask trained models lm-eval's tasks (--tasks piqa), or files of questions scored as lm-eval does (--local DIR).

    Begin with `titans evaluate lm-eval runs/first --tasks piqa arc_easy --limit 100`.
    """

    command: ClassVar[str] = "lm-eval"
    """Word behind `titans evaluate`."""
    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="MODEL [MODEL ...]")] = ()
    """Run folders, checkpoints, or folders of saved models: ours, or any causal language model of Hugging Face."""
    tasks: tuple[str, ...] = ()
    """Tasks by their names; with --local all that are there, if none is named."""
    local: Path | None = None
    """Folder of JSON lines (piqa.jsonl and the like) to score here, without lm-eval and without a network."""
    limit: int | None = None
    """Items of each task, the first ones; all if not set."""
    batch_size: int = 8
    """Texts read at once; changes speed and nothing else."""
    max_length: int | None = None
    """Most tokens that are read: longer prompts lose their beginning, pages are cut into windows.

    Without it, a model of ours has no limit and reads a page as a whole; others have the limit of their config."""
    num_fewshot: int | None = None
    """Examples before each question; if not set, as many as the task says. Not with --local."""
    include_path: Path | None = None
    """Folder of more tasks for lm-eval, in YAML. Not with --local."""
    metadata: tuple[str, ...] = ()
    """What tasks are told, as NAME=VALUE with VALUE in JSON: max_seq_lengths=[1024,2048] for RULER, max_seq_lengths=4k
    for BABILong. Not with --local."""
    bos: Literal["auto", "yes", "no", "tokenizer"] = "auto"
    """Whether texts begin with <bos>; auto is yes for what was trained here, and elsewhere as the tokenizer does."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""
    seed: int = 1234
    """Seed of the examples before questions, and of what tasks draw."""
    samples: Path | None = None
    """Write a line of JSON for every item to this file: what the model made of each choice."""
    json: Path | None = None
    """Write the numbers to this file; titans bench render makes a table of it."""
    quiet: bool = False
    """Show nothing."""

    def __post_init__(self) -> None:
        check_at_least("batch_size", self.batch_size, 1)
        for name, least in (("limit", 1), ("max_length", 2), ("num_fewshot", 0)):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), least)
        if self.local is not None:
            for name, unset in (("num_fewshot", None), ("include_path", None), ("metadata", ())):
                if getattr(self, name) != unset:
                    raise ValueError(
                        f"got {name}={getattr(self, name)!r} with --local; expected it for lm-eval's tasks"
                    )
        self.told()

    def told(self) -> dict[str, Any]:
        """Return the metadata by name; ValueError for a part that is no NAME=VALUE."""
        found = {}
        for part in self.metadata:
            name, equals, value = part.partition("=")
            if not name or not equals:
                raise ValueError(f"got the metadata {part!r}; expected NAME=VALUE")
            try:
                found[name] = json.loads(value)
            except json.JSONDecodeError:
                found[name] = value
        return found
