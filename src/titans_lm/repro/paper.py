"""The tables at the paper's sizes: commands to run on GPUs, which `titans repro` prints and does not run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titans_lm.bench.settings import ModelSettings, OpsSettings, ScalingSettings
from titans_lm.compare.question_settings import QuestionSettings
from titans_lm.compare.task_settings import BabiLongTask, TaskFit
from titans_lm.data.tasks.babilong import BabiLongSettings
from titans_lm.prepare.settings import PrepareSettings
from titans_lm.repro.steps import Plan, Step, from_recipe

SOURCE, SUBSET, TOKENIZER = "hf:HuggingFaceFW/fineweb-edu", "sample-100BT", "meta-llama/Llama-2-7b-hf"
TASKS = (
    "wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "social_iqa", "boolq",
)  # fmt: skip
NEEDLES = ("niah_single_1", "niah_single_2", "niah_single_3")
MODELS = {
    "340m": ("lmm", "mac", "mag", "mal", "llama", "mamba"),
    "400m": ("lmm", "mac", "mag", "mal", "llama", "mamba", "mamba2"),
    "760m": ("lmm", "mac", "mag", "mal", "llama", "mamba", "mamba2"),
    "1.3b": ("lmm", "mac", "mal", "llama", "mamba2"),
}
"""Rows of table 1 at each size, as far as they can be run here."""
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"memory_depth": 1}, "no-convolution": {"conv_size": 1}, "no-momentum": {"momentum": False},
    "no-decay": {"decay": False}, "no-persistent": {"num_persistent": 0},
}  # fmt: skip
"""Switches of table 5."""
OURS = (
    "width of the MLP, warm-up and weight decay are ours where the paper is silent; chunks of 16 (D17)",
    "lr is that of the paper's table of sizes, not of its text",
)


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the commands read and write."""

    data: str | None
    """Folder of tokens that is there; None has one prepared."""
    books: str
    """Folder of books for BABILong."""
    out: Path

    @property
    def tokens(self) -> str:
        return self.data or "data/fineweb-edu"


def table1(at: Places) -> Plan:
    """Every size and model, then lm-eval's tasks."""
    runs = [_train(at, f"{size}-{name}", size, name) for size, names in MODELS.items() for name in names]
    asked = [
        _asked(at, f"questions-{size}", [at.out / f"{size}-{name}" for name in names], TASKS)
        for size, names in MODELS.items()
    ]
    differs = (
        *OURS,
        "Llama, Mamba and Mamba2 are those of transformers with the parameters of LMM; RetNet, HGRN2, GLA, DeltaNet, "
        "TTT, Gated DeltaNet, its hybrid and Samba are not there",
        "wikitext is read page by page with the memory carried along; others read windows of their own length",
    )
    return _plan(at, "table1", [*_prepared(at), *runs, *asked], differs)


def table2(at: Places) -> Plan:
    """Models of table 1 on RULER's needles; the size is not stated, 400M by table 5."""
    names = ("lmm", "mac", "mag", "mal", "mamba2")
    runs = [_train(at, f"400m-{name}", "400m", name) for name in names]
    asked = _asked(at, "needles", [at.out / f"400m-{name}" for name in names], NEEDLES)
    return _plan(
        at, "table2", [*_prepared(at), *runs, asked],
        (
            *OURS, "the size is not stated; 400M, because the long context of table 5 is the mean of these cells",
            "TTT, DeltaNet, Samba and Gated DeltaNet's hybrid are not there", "PK, N, W are taken for S-NIAH 1, 2, 3",
        ),
    )  # fmt: skip


def table5(at: Places) -> Plan:
    """LMM without each of its parts, and with attention."""
    runs = [_train(at, f"400m-{name}", "400m", name) for name in ("lmm", "mac", "mag", "mal")]
    runs += [_train(at, f"400m-{name}", "400m", "lmm", **changes) for name, changes in VARIANTS.items()]
    folders = [run.settings.run for run in runs]
    asked = [_asked(at, "questions", folders, TASKS), _asked(at, "needles", folders, NEEDLES)]
    differs = (
        *OURS,
        "ppl is the mean of the perplexities of wikitext (word_perplexity) and LAMBADA, reasoning the mean of the "
        "eight accuracies, long context that of the twelve needle scores: it fits what is printed, and is not stated",
        "variants keep LMM's width; whether the paper gave them other parameters back is not stated",
    )
    return _plan(at, "table5", [*_prepared(at), *runs, *asked], differs)


def figure6(at: Places) -> Plan:
    """MAC of 170M on qa1 to qa5 with a curriculum, tested to ten million tokens."""
    recipe = from_recipe("170m-mac")
    model = replace(recipe.model, conv_size=8)  # a place is named up to five tokens behind its person
    steps = [
        Step(
            name=story, what=f"{story} by tokens of a row",
            settings=BabiLongTask(
                task=BabiLongSettings(story=story, books=Path(at.books), tokenizer=TOKENS),
                sizes=("512", "1K", "2K", "4K", "8K", "16K"),
                test_sizes=("2K", "4K", "8K", "16K", "32K", "64K", "128K", "512K", "1M", "10M"), models=("mac",),
                seeds=(0,), rates=(3e-4,), examples=100, out=at.out / story, test_books=Path(f"{at.books}-test"),
                train=TaskFit(
                    model=model, steps=20_000, batch_size=32, warmup_steps=500, precision="bfloat16",
                    text_weight=0.3,
                ),
            ),
        )
        for story in STORIES
    ]  # fmt: skip
    few = _asked(
        at, "few-shot", [at.out / "170m-mac"], tuple(f"babilong_{story}" for story in STORIES), ("max_seq_lengths=16k",)
    )
    return _plan(
        at, "figure6", [*_prepared(at), _train(at, "170m-mac", "170m", "mac"), few, *steps],
        (
            *OURS, "the size of the models is not stated; 170M, the smallest",
            "pg19 and pg19-test are folders with the books of PG-19's train and test splits, which are yours to fetch",
            "a short convolution of 8 tokens in qa1 to qa5, the recipe's 4 before; the paper does not give its own",
            "lengths are in words of the task and bytes; the paper's are in tokens of GPT-2",
            "the steps of fine-tuning are not stated, and ours begin with fresh weights instead of pretrained ones",
            "models of others are not asked",
        ),
    )  # fmt: skip


def figure7(at: Places) -> Plan:
    """LMM with memories of one to four layers, at three sizes, and Mamba."""
    runs = [
        _train(at, f"{size}-depth-{depth}", size, "lmm", memory_depth=depth)
        for size in ("170m", "340m", "760m")
        for depth in (1, 2, 3, 4)
    ]
    runs += [_train(at, f"{size}-mamba", size, "mamba") for size in ("170m", "340m", "760m")]
    asked = _asked(at, "pages", [run.settings.run for run in runs], ("wikitext",))
    differs = (
        *OURS,
        "FineWeb-Edu instead of a part of the Pile, whose choice is not stated; 340M instead of 360M",
        "by length: metrics.jsonl of every run has held-out bits by position; wikitext's pages are one number",
        "deeper memories have more parameters here: the MLPs are those of the recipe",
    )
    return _plan(at, "figure7", [*_prepared(at), *runs, asked], differs)


def figure8(at: Places) -> Plan:
    """The op on a GPU, by depth and length."""
    steps = [
        Step(
            name=f"op-{tokens}", what=f"tokens per second of the op at {tokens:,} tokens",
            settings=OpsSettings(
                tokens=tokens, lengths=(tokens,), rows=1, chunks=(16,), widths=(64,), heads=(12,), depths=(1, 2, 3, 4),
                modes=("forward+backward",), dtype="bf16", device="cuda", out=at.out / f"op-{tokens}",
                json=at.out / f"op-{tokens}.json",
            ),
        )
        for tokens in LENGTHS
    ]  # fmt: skip
    return _plan(at, "figure8", steps, ("the op alone; the paper's are training steps of whole models",))


def figure9(at: Places) -> Plan:
    """Whole models and the op on a GPU."""
    models = ("llama", "attention", "mamba2", "lmm", "mac", "mag", "mal")
    shared: dict[str, Any] = {"dtype": "bf16", "device": "cuda"}
    whole = ModelSettings(
        models=models, width=1024, layers=24, contexts=(100,), prefill=32_768, out=at.out / "model",
        json=at.out / "model.json", **shared,
    )  # fmt: skip
    scaling = ScalingSettings(
        lengths=LENGTHS, stream_tokens=0, out=at.out / "scaling", json=at.out / "scaling.json", **shared
    )
    steps = [
        Step(name="model", what="tokens per second of whole models", settings=whole),
        Step(name="scaling", what="tokens per second of the op by length", settings=scaling),
    ]
    return _plan(
        at, "figure9", steps,
        ("training steps have 4 rows of 1,024 tokens; the paper goes by length with whole models",),
    )  # fmt: skip


STORIES = ("qa1", "qa2", "qa3", "qa4", "qa5")
LENGTHS = (2048, 4096, 8192, 16_384, 32_768)
TOKENS = "words"
"""Tokens of BABILong: those of the task, so that no tokenizer need be fetched first."""


def _plan(at: Places, table: str, steps: list[Step], differs: tuple[str, ...]) -> Plan:
    return Plan(table=table, scale="paper", steps=tuple(steps), differs=differs, out=at.out)


def _prepared(at: Places) -> list[Step]:
    if at.data is not None:
        return []
    settings = PrepareSettings(source=SOURCE, subset=SUBSET, tokenizer=TOKENIZER, out=Path(at.tokens), held_out=0.0005)
    what = "FineWeb-Edu in the 32,000 ids of Llama 2's tokenizer (any other with as many will do)"
    return [Step(name="tokens", what=what, settings=settings)]


def _train(at: Places, run: str, size: str, model: str, **changes: Any) -> Step:
    """Train one of ours from its recipe, or a baseline as large as LMM's."""
    ours = model in ("lmm", "mac", "mag", "mal")
    recipe = f"{size}-{model if ours else 'lmm'}"
    settings = from_recipe(recipe)
    settings = replace(
        settings, data=at.tokens, run=at.out / run, baseline=None if ours else model,
        model=replace(settings.model, **changes),
    )  # fmt: skip
    return Step(name=run, what=f"train {run}", settings=settings, recipe=recipe)


def _asked(
    at: Places, name: str, runs: list[Path], tasks: tuple[str, ...], told: tuple[str, ...] | None = None
) -> Step:
    if told is None:
        told = ("max_seq_lengths=[2048,4096,8192,16384]",) if tasks == NEEDLES else ()
    settings = QuestionSettings(
        models=tuple(map(str, runs)), tasks=tasks, metadata=told, json=at.out / f"{name}.json", device="cuda"
    )
    return Step(name=name, what=f"lm-eval: {', '.join(tasks)}", settings=settings)


PLANS: dict[str, Callable[[Places], Plan]] = {
    "table1": table1, "table2": table2, "table5": table5,
    "figure6": figure6, "figure7": figure7, "figure8": figure8, "figure9": figure9,
}  # fmt: skip
"""Every table and figure, at the paper's size."""
