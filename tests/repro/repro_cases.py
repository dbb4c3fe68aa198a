"""A tiny text, and an amount of work that takes seconds."""

from dataclasses import replace
from pathlib import Path

from titans_lm.repro.effort import Effort, Facts, Needles, Speed, tiny

WORDS = ("the", "memory", "learns", "while", "it", "reads", "and", "forgets", "what", "does", "not", "come", "again")


def text(words: int, start: int = 0) -> str:
    return " ".join(WORDS[(start + i * i) % len(WORDS)] for i in range(words))


def texts(folder: Path) -> tuple[str, Path]:
    """Write a text to train on and one to test on."""
    (folder / "train.txt").write_text(text(900))
    (folder / "test.txt").write_text(text(60, 3))
    return str(folder / "train.txt"), folder / "test.txt"


def micro() -> Effort:
    """The work of the scale tiny with sizes that take seconds."""
    e = tiny()
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "memory_expansion": 1,
             "segment_len": 16, "window": 16, "num_persistent": 2}  # fmt: skip
    return replace(
        e,
        text=replace(
            e.text, model=replace(e.text.model, **small), seq_len=32, batch_size=2, eval_bytes=200, save_every=1
        ),
        text_steps=dict.fromkeys(e.text_steps, 2), rates=(3e-3,), tune_steps=1, seeds=(0, 1), positions=64,
        test_bytes=200, limit=2, fit=replace(e.fit, model=replace(e.fit.model, **small), batch_size=64),
        recall_steps=1, recall=("32:2",), recall_tested=("32:2",),
        needles=Needles(values={"PK": "words"}, taught=("128",), tested=("128", "160", "192"), steps=1, examples=2),
        facts=Facts(taught=("0", "128"), tested=("0", "256"), steps=2, examples=2), facts_seeds=(0,),
        speed=Speed(lengths=(24,), depths=(2,), repeats=1, quick=True), jobs=1, device="cpu",
    )  # fmt: skip
