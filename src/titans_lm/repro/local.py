"""The tables at the scales that `titans repro` runs: the paper's protocols with small models and texts at hand."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titans_lm.bench.settings import ModelSettings, OpsSettings, ScalingSettings
from titans_lm.compare.question_settings import QuestionSettings
from titans_lm.compare.settings import CompareSettings
from titans_lm.compare.task_settings import BabiLongTask, NeedleTask, RecallTask, TaskFit
from titans_lm.data.tasks.babilong import BabiLongSettings
from titans_lm.data.tasks.needle import NeedleSettings
from titans_lm.repro import reads
from titans_lm.repro.effort import Effort
from titans_lm.repro.steps import Column, Plan, Row, Step, Table

ROWS = {
    "attention": Row("Transformer++, short convolution", "Transformer++", "attention"),
    "llama": Row("Transformer++ (Llama)", "Transformer++", "llama"),
    "sliding": Row("sliding window, short convolution", None, "sliding"),
    "mamba2": Row("Mamba2", "Mamba2", "mamba2"),
    "lmm": Row("LMM", "Titans (LMM)", "lmm"),
    "mac": Row("MAC", "Titans (MAC)", "mac"),
    "mag": Row("MAG", "Titans (MAG)", "mag"),
    "mal": Row("MAL", "Titans (MAL)", "mal"),
}
ABLATIONS = (
    Row("LMM", "LMM", "lmm"),
    Row("+ attention, MAC", "+ Attn (MAC)", "mac"),
    Row("+ attention, MAG", "+ Attn (MAG)", "mag"),
    Row("+ attention, MAL", "+ Attn (MAL)", "mal"),
    Row("linear memory", "Linear memory", "lmm:memory_depth=1"),
    Row("w/o convolution", "w/o convolution", "lmm:conv_size=1"),
    Row("w/o momentum", "w/o momentum", "lmm:momentum=false"),
    Row("w/o weight decay", "w/o weight decay", "lmm:decay=false"),
    Row("w/o persistent memory", "w/o persistent memory", "lmm:num_persistent=0"),
)
"""Table 5 in the paper's order."""
QUESTIONS = {
    "LMB ppl": ("lambada_openai", "perplexity"), "LMB acc": ("lambada_openai", "acc"), "PIQA": ("piqa", "acc"),
    "Wino": ("winogrande", "acc"), "ARC-e": ("arc_easy", "acc"), "ARC-c (n)": ("arc_challenge", "acc_norm"),
    "BoolQ": ("boolq", "acc"),
}  # fmt: skip
"""Columns of table 1 that files of questions have, with the paper's metric."""
LARGEST_FIRST = ("mac", "attention", "sliding", "lmm", "mag", "mal")
"""Models on needles and stories. The first sets the size of all."""
FIGURE6 = ("2K", "4K", "8K", "16K", "32K", "64K", "128K", "512K", "1M", "10M")
TABLE1 = ("Wiki ppl", "LMB ppl", "LMB acc", "PIQA", "Hella (n)", "Wino", "ARC-e", "ARC-c (n)", "SIQA", "BoolQ", "Avg")


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a user gives: texts and folders, all of which are there."""

    data: str
    """What to train on."""
    test: Path
    """Text that decides, or that facts are hidden in to decide; nothing of it is taught."""
    hay: Path
    """Text to hide facts in while they are taught."""
    local: Path | None
    """Folder of questions."""
    out: Path


def table1(e: Effort, given: Given) -> Plan:
    """Models of equal size on the same text, then the questions of a folder, where one is given."""
    models = ("attention", "llama", "mamba2", "lmm", "mac", "mag", "mal")
    steps = [_compared(e, given, "table1", models, e.rates, "bits per byte of the test text, and by position")]
    if given.local is not None:
        folder = given.out / "text" / "runs"
        asked = QuestionSettings(
            models=tuple(str(folder / f"{name}-seed{seed}") for seed in e.seeds[:1] for name in models),
            tasks=tuple(dict.fromkeys(task for task, _ in QUESTIONS.values())),
            local=given.local, limit=e.limit, device=e.device, json=given.out / "questions.json",
        )  # fmt: skip
        what = "accuracy on files of questions, scored as lm-eval does"
        steps.append(Step(name="questions", what=what, settings=asked))
    columns = [Column(title="bits per byte, not in the paper", step="text", read=reads.bits_per_byte(), digits=3)]
    for title in TABLE1:
        task, metric = QUESTIONS.get(title, ("", ""))
        read = reads.answered(task, metric, metric != "perplexity") if task and given.local else None
        columns.append(Column(title=title, paper=title, step="questions" if read else None, read=read))
    few = "all items" if e.limit is None else f"the first {e.limit} items"
    asked_of = (
        f"questions: {few} of each file, one seed; HellaSwag and SIQA are not among the files"
        if given.local
        else "no questions were asked: --local FOLDER has them asked (docs/guides/evaluate.md)"
    )
    return Plan(
        table="table1", scale=e.name, steps=tuple(steps), out=given.out,
        tables=(Table(columns=tuple(columns), rows=tuple(_starred(ROWS[name]) for name in models)),),
        differs=(
            *_text_differs(e, given, "table1", "340M parameters and 15B tokens"),
            "bits per byte of a local text stand in for Wiki ppl, which they cannot be turned into",
            asked_of,
            "RetNet, GLA, HGRN2, Mamba, DeltaNet, TTT, Gated DeltaNet, its hybrid and Samba are not run",
            "the paper's numbers are those of its models of 400M parameters",
        ),
    )  # fmt: skip


def table2(e: Effort, given: Given) -> Plan:
    """Needles at once, twice and four times the length that was taught."""
    n, models = e.needles, ("attention", "sliding", "lmm", "mac", "mag", "mal")
    steps, columns = [], []
    for kind in ("PK", "N", "W"):
        value = n.values.get(kind)
        if value is not None:
            taught, tested = (None, None) if kind == "PK" else (given.hay, given.test)
            settings = NeedleTask(
                task=NeedleSettings(value=value, books=taught, tokenizer="words"), test_books=tested, sizes=n.taught,
                test_sizes=n.tested, depths=(0.0, 0.5, 1.0), examples=n.examples, out=given.out / f"needle-{kind}",
                models=LARGEST_FIRST, seeds=e.needle_seeds, rates=(e.task_rate,), jobs=e.jobs, train=_fit(e, n.steps),
            )  # fmt: skip
            where = "dull sentences" if kind == "PK" else "text"
            what = f"{kind}: {value} hidden in {where}"
            steps.append(Step(name=f"needle-{kind}", what=what, settings=settings))
        columns.append(Column(title=f"{kind} 2K", paper=f"{kind} 2K"))
        for size, length in zip(n.tested, ("4K", "8K", "16K"), strict=True):
            found = {} if value is None else {"step": f"needle-{kind}", "read": reads.right(size)}
            title = f"{kind} {length}" if value is None else f"{kind} {length}, ours {size}"
            columns.append(Column(title=title, paper=f"{kind} {length}", **found))
    left = [kind for kind in ("PK", "N", "W") if kind not in n.values]
    return Plan(
        table="table2", scale=e.name, steps=tuple(steps), out=given.out,
        tables=(Table(columns=tuple(columns), rows=tuple(ROWS[name] for name in models)),),
        differs=(
            *_task_differs(e, given, n.steps, e.needle_seeds),
            f"trained on the task itself, in rows of {', '.join(n.taught)} tokens (NxK: K needles, 0: no hay), which "
            "join one after the other, where the paper asks language models trained on rows of 4,096",
            f"our lengths {', '.join(n.tested)} stand beside the paper's 4K, 8K and 16K: once, twice and four times "
            "what was taught; half of it (2K) is not measured",
            f"hidden are {', '.join(f'{value} ({kind})' for kind, value in n.values.items())}, where the paper hides "
            "numbers (PK, N) and most likely uuids (W)",
            *([f"{', '.join(left)}: not run, as a uuid is not learned in so few steps"] if left else []),
            f"N{'' if left else ' and W'}: {_hidden(given)}, not in essays",
            "PK: taught and tested in the same five sentences, over and over",
            f"{n.examples} rows at each of three depths, all characters right; the sentences are ours, not RULER's",
        ),
    )  # fmt: skip


def table5(e: Effort, given: Given) -> Plan:
    """The switches of the memory, on text and on recall."""
    models = tuple(row.contender for row in ABLATIONS)
    recall = RecallTask(
        sizes=e.recall, test_sizes=e.recall_tested, out=given.out / "recall", models=models, seeds=e.seeds,
        rates=(e.task_rate,), jobs=e.jobs, examples=256, train=_fit(e, e.recall_steps),
    )  # fmt: skip
    columns = [
        Column(title="ppl", paper="ppl"),
        Column(title="bits per byte, not in the paper", step="text", read=reads.bits_per_byte(), digits=3),
        Column(title="reasoning", paper="reasoning"),
        Column(title="long context", paper="long context"),
    ]
    for size in e.recall_tested:
        columns.append(Column(title=f"MQAR {size} %, not in the paper", step="recall", read=reads.right(size)))
    what = "bits per byte of the test text, in the place of perplexity"
    return Plan(
        table="table5", scale=e.name, out=given.out,
        steps=(
            _compared(e, given, "table5", models, e.rates[:1], what),
            Step(name="recall", what="right answers (MQAR), in the place of long context", settings=recall),
        ),
        tables=(Table(columns=tuple(columns), rows=ABLATIONS),),
        differs=(
            *_text_differs(e, given, "table5", "400M parameters and 15B tokens"),
            "bits per byte of a local text stand in for ppl, the mean of the perplexities of Wiki and LAMBADA",
            f"MQAR (LENGTH:PAIRS, taught {', '.join(e.recall)}, {e.recall_steps:,} steps of {e.fit.batch_size} rows, "
            f"width {e.fit.model.hidden_size}) stands in for long context, the mean of S-NIAH",
            "no reasoning: models of this size are at chance",
            "w/o momentum, θ may be larger: its bound depends on η (D10)",
            f"one learning rate for all ({e.rates[0]:g} on text, {e.task_rate:g} on recall), tuned for none; all have "
            "as many parameters as LMM, by their width (D43)",
        ),
    )  # fmt: skip


def figure6(e: Effort, given: Given) -> Plan:
    """One fact among the sentences of a text, learned by a curriculum of lengths."""
    f, models = e.facts, ("attention", "sliding", "lmm", "mac", "mag", "mal")
    fit = _fit(e, f.steps)
    fit = replace(fit, model=replace(fit.model, conv_size=8))  # a place is named up to five tokens behind its person
    settings = BabiLongTask(
        task=BabiLongSettings(story="qa1", books=given.hay, tokenizer="words"), sizes=f.taught, test_sizes=f.tested,
        test_books=given.test, out=given.out / "babilong", models=LARGEST_FIRST, seeds=e.facts_seeds,
        rates=(e.task_rate,), jobs=e.jobs, examples=f.examples, train=fit,
    )  # fmt: skip
    paper = Table(
        title="What the paper's group prints, of other models than ours",
        columns=tuple(Column(title=length, paper=length) for length in FIGURE6),
        rows=(Row("ARMT", "ARMT", ""), Row("GPT-2 with MAC and MAL", "GPT-2 with MAC and MAL*", "")),
    )
    ours = Table(
        title="Right answers to qa1 in %, by tokens of a row",
        columns=tuple(Column(title=size, step="babilong", read=reads.right(size)) for size in f.tested),
        rows=tuple(ROWS[name] for name in models),
    )
    return Plan(
        table="figure6", scale=e.name, out=given.out, tables=(ours, paper),
        steps=(Step(name="babilong", what="qa1: where is a person? by tokens of a row", settings=settings),),
        differs=(
            *_task_differs(e, given, f.steps, e.facts_seeds),
            "trained from fresh weights on the task, where the paper fine-tunes a pretrained model",
            f"taught in rows of {', '.join(f.taught)} tokens, which join one after the other; BABILong's "
            "curriculum ends at 16K",
            "a short convolution of 8 tokens; the paper does not give its own",
            "lengths are in words of the task, and bytes for the rest; the paper's are in tokens of GPT-2",
            "qa1 alone, with stories that are drawn; the paper's are qa1 to qa5 of bAbI",
            f"{_hidden(given)}, not in PG-19",
            f"{f.examples} questions of each length; guessing a room gives 16.7 %",
        ),
    )  # fmt: skip


def figure7(e: Effort, given: Given) -> Plan:
    """Memories of one to four layers on the same text."""
    rows = [Row(f"LMM, {d} layer{'s' * (d > 1)}", None, f"lmm:memory_depth={d}") for d in (1, 2, 3, 4)]
    rows.append(ROWS["mamba2"])
    starts = [start for start in (0, 128, 512, 1024, 2048, 4096, 8192, 16_384) if start < e.positions]
    columns = [
        Column(title=f"{a:,}–{b:,}", step="text", read=reads.bits_at(a), digits=3)
        for a, b in zip(starts, [*starts[1:], e.positions], strict=True)
    ]
    columns.insert(0, Column(title="all", step="text", read=reads.bits_per_byte(), digits=3))
    models = tuple(row.contender for row in rows)
    return Plan(
        table="figure7", scale=e.name, out=given.out,
        steps=(_compared(e, given, "figure7", models, e.rates[:1], "bits per byte of the test text by position"),),
        tables=(Table(title="Bits per byte by position", columns=tuple(columns), rows=tuple(rows)),),
        differs=(
            *_text_differs(e, given, "figure7", "170M, 360M and 760M parameters"),
            "bits per byte by position in stretches of one text stand in for perplexity by length on the Pile",
            "all have as many parameters as the LMM of one layer, by their width (D43)",
            f"one learning rate for all ({e.rates[0]:g}), tuned for none",
            "Mamba2 stands in for Mamba, which takes a token at a time without a GPU's kernels",
        ),
    )  # fmt: skip


def figure8(e: Effort, given: Given) -> Plan:
    """The op forward and backward, by the layers of the memory and by length."""
    s = e.speed
    heads = max(1, s.width // 64)
    steps = tuple(
        Step(
            name=f"op-{tokens}", what=f"tokens per second of the op at {tokens:,} tokens", minutes=1.5 + tokens / 2000,
            settings=OpsSettings(
                tokens=tokens, lengths=(tokens,), rows=1, chunks=(16,), widths=(64,), heads=(heads,), depths=s.depths,
                modes=("forward+backward",), repeats=s.repeats, dtype=s.dtype, device=e.device, quick=s.quick,
                out=given.out / f"op-{tokens}", json=given.out / f"op-{tokens}.json",
            ),
        )
        for tokens in s.lengths
    )  # fmt: skip
    columns = tuple(
        Column(title=f"{t:,}", step=f"op-{t}", read=reads.op_speed(24 if s.quick else t), digits=0) for t in s.lengths
    )
    rows = tuple(Row(f"memory of {d} layer{'s' * (d > 1)}", None, str(d)) for d in s.depths)
    return Plan(
        table="figure8", scale=e.name, out=given.out, steps=steps,
        tables=(Table(title="Tokens per second, forward and backward, by length", columns=columns, rows=rows),),
        differs=(
            f"the op alone, with {heads} heads of 64 channels, chunks of 16 and a hidden layer four times as wide; the "
            "paper's are training steps of whole models",
            "the same number of tokens in one row, whatever the depth; the paper's sizes are not stated",
            f"on this machine, in {s.dtype}; the paper's hardware is not stated",
        ),
    )  # fmt: skip


def figure9(e: Effort, given: Given) -> Plan:
    """Training steps and prompts of whole models, and the op by length."""
    s, models = e.speed, ("llama", "attention", "mamba2", "lmm", "mac", "mag", "mal")
    shared: dict[str, Any] = {"repeats": s.repeats, "dtype": s.dtype, "device": e.device, "quick": s.quick}
    whole = ModelSettings(
        models=models, width=s.width, layers=s.layers, contexts=(100,), prefill=s.prefill, out=given.out / "model",
        json=given.out / "model.json", **shared,
    )  # fmt: skip
    scaling = ScalingSettings(
        lengths=s.lengths, stream_tokens=0, out=given.out / "scaling", json=given.out / "scaling.json", **shared
    )
    lengths = (32, 64) if s.quick else s.lengths
    return Plan(
        table="figure9", scale=e.name, out=given.out,
        steps=(
            Step(name="model", what="tokens per second of whole models", settings=whole, minutes=9.0),
            Step(name="scaling", what="tokens per second of the op by length", settings=scaling, minutes=4.0),
        ),
        tables=(
            Table(
                title="Tokens per second of whole models",
                columns=(
                    Column(title="training", step="model", read=reads.model_speed("train"), digits=0),
                    Column(title=f"prompt of {s.prefill:,}", step="model", read=reads.model_speed("prefill"), digits=0),
                ),
                rows=tuple(ROWS[name] for name in models),
            ),
            Table(
                title="Tokens per second of the memory alone, forward and backward, by length",
                columns=tuple(
                    Column(title=f"{t:,}", step="scaling", read=reads.row_speed(t), digits=0) for t in lengths
                ),
                rows=(Row("the op", None, "op"),),
            ),
        ),
        differs=(
            f"width {s.width}, {s.layers} blocks, a byte's vocabulary; the paper's sizes are not stated",
            "training steps have 4 rows of 1,024 tokens whatever the model, and the op alone goes by length; the paper "
            "goes by length with whole models",
            f"on this machine, in {s.dtype}; the paper's hardware is not stated",
            "Gated DeltaNet, DeltaNet, TTT and others of the figure are not run",
        ),
    )  # fmt: skip


def _fit(e: Effort, steps: int) -> TaskFit:
    return replace(e.fit, steps=steps, warmup_steps=min(e.fit.warmup_steps, steps // 4))


def _compared(
    e: Effort, given: Given, table: str, models: tuple[str, ...], rates: tuple[float, ...], what: str
) -> Step:
    steps = e.text_steps[table]
    settings = CompareSettings(
        data=given.data, test=given.test, out=given.out / "text", models=models, seeds=e.seeds, rates=rates,
        tune_steps=e.tune_steps, positions=e.positions, test_bytes=e.test_bytes, jobs=e.jobs,
        train=replace(e.text, steps=steps, warmup_steps=min(e.text.warmup_steps, max(1, steps // 4))),
    )  # fmt: skip
    return Step(name="text", what=what, settings=settings)


def _starred(row: Row) -> Row:
    """Table 1 marks hybrids with attention."""
    hybrid = row.contender in ("mac", "mag", "mal")
    return replace(row, paper=f"{row.paper}*") if hybrid else row


def _text_differs(e: Effort, given: Given, table: str, paper: str) -> tuple[str, ...]:
    model, train = e.text.model, e.text
    tokens = e.text_steps[table] * train.batch_size * train.seq_len
    return (
        f"width {model.hidden_size} and {model.num_hidden_layers} blocks, trained on {tokens:,} tokens in rows of "
        f"{train.seq_len:,}; the paper's {paper}, in rows of 4,096",
        f"{seeds_told(e.seeds)} on {given.data}, tested on {given.test} (its first {e.test_bytes:,} bytes at most); "
        "the paper trains on FineWeb-Edu in 32,000 ids",
        f"segments of {model.segment_len}, a window of {model.window}, {model.num_persistent} persistent tokens",
    )


def _task_differs(e: Effort, given: Given, steps: int, seeds: tuple[int, ...]) -> tuple[str, ...]:
    model = e.fit.model
    return (
        f"width {model.hidden_size} and {model.num_hidden_layers} blocks, {steps:,} steps of {e.fit.batch_size} rows, "
        f"{seeds_told(seeds)}, one learning rate ({e.task_rate:g}); window and segments of {model.window}; all have as "
        "many parameters as MAC, by their width (D43)",
    )


def _hidden(given: Given) -> str:
    """Say in which texts facts are hidden: what is tested in is held out."""
    return f"taught in {given.hay} and tested in {given.test}, which is not taught"


def seeds_told(seeds: tuple[int, ...]) -> str:
    """Write how many seeds there are."""
    return f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"


PLANS: dict[str, Callable[[Effort, Given], Plan]] = {
    "table1": table1, "table2": table2, "table5": table5,
    "figure6": figure6, "figure7": figure7, "figure8": figure8, "figure9": figure9,
}  # fmt: skip
"""Every table and figure, as it is run."""
