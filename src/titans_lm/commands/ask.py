"""titans ask: questions about what files say."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from titans_lm.commands.show import Configured, say
from titans_lm.train.options import plain_settings


@dataclass(frozen=True, kw_only=True)
class Ask(Configured):
    """Read files of any length at constant memory, and answer a question from what the memory keeps.

    Begin with `titans ask notes.txt "Where is Mary?" --out notes.memory`; go on without the text:
    `titans ask "Where is John?" --memory notes.memory`. What a model knows to answer, its card says.
    """

    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILES QUESTION")] = ()
    """Files in the order they are read (- is standard input), then the question."""
    model: Path | None = None
    """Run folder, checkpoint, folder of a saved model, or pretrained:NAME; by default the one that comes with the
    package and was taught such a question."""
    memory: Path | None = None
    """Memory file to go on from, or to ask."""
    out: Path | None = None
    """Memory file to write, so that more can be asked without the text."""
    max_new_tokens: int = 32
    """Most tokens of the answer."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""


def run_ask(command: Ask) -> None:
    if not command.words:
        raise ValueError('got no question; expected titans ask FILE "Where is Mary?"')
    from titans_lm.ask import ask_files, check_asked
    from titans_lm.train.run import load_model, load_tokenizer
    from titans_lm.train.shipped import model_asked, taught_instead

    *files, question = command.words
    check_asked(files, question, command.memory, command.out)
    asked = model_asked(question) if command.model is None else command.model
    model, tokenizer = load_model(asked, command.device), load_tokenizer(asked)
    names = ("memory", "out", "max_new_tokens", "quiet")
    result = ask_files(model, tokenizer, files, question, **{name: getattr(command, name) for name in names})
    if (example := taught_instead(asked, question)) is not None:
        command.say(f'warning: {asked} was taught questions such as "{example}"; its answer to others means nothing')
    if result["read_in_part"]:
        command.say(f"warning: {', '.join(result['read_in_part'])} was read only in part: titans read --resume goes on")
    if result["split_words"]:
        words = ", ".join(result["split_words"])
        command.say(f"warning: the model was not taught the words {words}, and spells them; its answer may be wrong")
    if command.out is not None:
        command.say(f"{result['tokens_read']:,} tokens read; memory of {result['memory_bytes']:,} bytes: {command.out}")
    say(result["answer"])
    command.write({"settings": plain_settings(command), "model": str(asked), **result})
