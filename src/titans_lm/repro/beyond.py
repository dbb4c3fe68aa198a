"""Tables 3 and 4, beyond language: forecasting and DNA, as they are run on a user's files and at the paper's sizes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from titans_lm.data.text import STDLIB
from titans_lm.forecast.settings import EvaluateForecasters, TableSettings
from titans_lm.genomics import settings as dna
from titans_lm.repro import reads
from titans_lm.repro.effort import Dna, Effort, Forecasts, small
from titans_lm.repro.local import Given, seeds_told
from titans_lm.repro.paper import Places
from titans_lm.repro.sets import DNA, SERIES, Classes, DataSet, find_sets, told
from titans_lm.repro.steps import Column, Plan, Row, Step, Table

FORECASTERS = (
    Row("LMM", "Neural Memory", "lmm"),
    Row("Mamba in the memory's place", "Simba", "mamba"),
    Row("attention in the memory's place", None, "attention"),
    Row("PatchTST", "PatchTST", "patchtst"),
    Row("DLinear", "DLinear", "dlinear"),
    Row("NLinear, closed form", "RLinear", "nlinear"),
    Row("repeat the last value", None, "repeat"),
)
CLASSIFIED = (
    Row("LMM", "Neural memory", "lmm"),
    Row("Transformer++, short convolution", "Transformer++", "attention"),
    Row("the same words, their mean", None, "words"),
    Row("CNN", "CNN", "cnn"),
    Row("5-mers, naive Bayes", None, "kmer-nb"),
    Row("6-mers, logistic regression", None, "kmer-lr:k=6"),
    Row("8-mers, logistic regression", None, "kmer-lr:k=8"),
    Row("length alone", None, "length:max_length=0"),
)
MEASURES = {"MSE": "mse", "MAE": "mae"}
SENTINELS: dict[str, TableSettings] = {"Weather": TableSettings(sentinel="keep")}
"""Tables that are read otherwise than by default: published results take −9999 as measured."""
FRAME = (
    "the paper says no more than that Simba's backbone has its Mamba replaced, and Simba's public code has no time "
    "series: patches of each channel, the norm of each window, the MLP and the linear map beside the stack are ours",
    "Simba's row stands beside that stack with Mamba in it, RLinear's beside NLinear: one linear map of a window in "
    "both, trained and normalised by mean and deviation there, in closed form and less the last value here",
    "PatchTST is that of transformers in our width, DLinear is trained by our loop; the paper's cells are taken for "
    "others' runs",
)
OTHERS = "iTransformer, Crossformer, TiDE and TimesNet are not run"


def table3(e: Effort, given: Given) -> Plan:
    """One evaluation for each table that is there; averages over horizons."""
    f, found = e.forecasts, _found("table3", given.data, SERIES)
    run = {column: path for column, path in found.items() if column in f.epochs}
    if not run:
        raise ValueError(f"got {', '.join(found)}, which the scale {e.name} leaves out; expected {', '.join(f.epochs)}")
    steps = tuple(_forecast(f, column, path, given.out / column, e.jobs) for column, path in run.items())
    return Plan(
        table="table3", scale=e.name, steps=steps, out=given.out,
        tables=tuple(_errors(measure, run) for measure in MEASURES), differs=_forecast_differs(f, e, found, given),
    )  # fmt: skip


def table4(e: Effort, given: Given) -> Plan:
    """One cross-validation for each file that is there."""
    d, found = e.dna, _found("table4", given.data, DNA)
    steps, columns = [], []
    for one in DNA:
        if one.column not in found:
            columns.append(Column(title=one.column, paper=one.column))
            continue
        settings = dna.EvaluateSettings(
            data=found[one.column], out=given.out / one.short, models=d.models, folds=d.folds, seeds=d.seeds,
            rates=d.rates, tune_steps=d.tune_steps, jobs=e.jobs, train=d.train,
        )  # fmt: skip
        what = f"accuracy in {d.folds} folds of {found[one.column]}"
        steps.append(Step(name=one.short, what=what, settings=settings))
        title = f"{one.column}, ours {d.folds} folds"
        columns.append(Column(title=title, paper=one.column, step=one.short, read=reads.classified()))
    return Plan(
        table="table4", scale=e.name, steps=tuple(steps), out=given.out,
        tables=(Table(columns=tuple(columns), rows=CLASSIFIED),), differs=_dna_differs(d, found, given),
    )  # fmt: skip


def paper_table3(at: Places) -> Plan:
    """Every table at four horizons, by the stack with a memory, with Mamba, and by others."""
    f = replace(small().forecasts, rates=(1e-4, 5e-4, 1e-3))
    paths, left = _paths(at, SERIES, "data/series")
    return Plan(
        table="table3", scale="paper", out=at.out,
        steps=tuple(_forecast(f, column, path, at.out / column, 1) for column, path in paths.items()),
        differs=(
            *FRAME, OTHERS,
            "width, blocks, patches, seeds and the three learning rates are ours; 10 epochs, batches of 32 and three "
            "epochs of patience are those of Time-Series-Library's scripts, where the paper is silent",
            *_untold(at, SERIES, left), *(_unlike(paths) if at.data is not None else ()),
        ),
    )  # fmt: skip


def paper_table4(at: Places) -> Plan:
    """Each set trained on its official training part, and told apart on its official test part."""
    paths, left = _paths(at, DNA, "data/dna", "train")
    if at.data is not None:
        whole = {column: path for column, path in paths.items() if _is_whole(path)}
        if not whole:
            raise ValueError(f"got --data {at.data}, where no set has folders train and test; expected {told(DNA)}")
        paths, left = whole, tuple(one.column for one in DNA if one.column not in whole)
    steps = [
        step for one in DNA if one.column in paths for name in ("lmm", "attention", "cnn")
        for step in _trained(at, one, paths[one.column], name)
    ]  # fmt: skip
    return Plan(
        table="table4", scale="paper", steps=tuple(steps), out=at.out,
        differs=(
            "width 128, two blocks, 100 epochs in batches of 128, lr 6e-4 and a dropout of 0.1 are HyenaDNA's recipe, "
            "epochs of the nine tenths that are trained on here; the size of the paper's models, and what they were "
            "trained with, are not verified",
            "sizes are not matched: attention has the widths of the LMM and no memory, so fewer parameters, and the "
            "CNN is smaller still (result.json of each run has their numbers)",
            "one seed, from fresh weights: HyenaDNA's are pre-trained on the human genome (titans genomics pretrain "
            "GENOME.fa.gz, then --pretrained RUN); whether the paper's were is not verified",
            "the step is chosen on a tenth of the training set, where HyenaDNA's recipe looks at the test set; padding "
            "is on the right and not pooled",
            "DNABERT, GPT, HyenaDNA, Mamba and Based are not run",
            *_untold(at, DNA, left),
        ),
    )  # fmt: skip


def _forecast(f: Forecasts, column: str, path: Path, out: Path, jobs: int) -> Step:
    settings = EvaluateForecasters(
        data=(path,), models=f.models, horizons=f.horizons, lookback=f.lookback, seeds=f.seeds[column], rates=f.rates,
        table=SENTINELS.get(column, TableSettings()), net=f.net, train=replace(f.train, epochs=f.epochs[column]),
        out=out, jobs=jobs,
    )  # fmt: skip
    what = f"MSE and MAE at horizons {', '.join(map(str, f.horizons))}"
    return Step(name=column, what=what, settings=settings)


def _is_whole(path: Path) -> bool:
    """Tell whether a path is the official training set, with the test set beside it."""
    return path.name == "train" and path.with_name("test").is_dir()


def _errors(measure: str, run: dict[str, Path]) -> Table:
    """Lay out one of the two errors of table 3, which are too wide side by side."""
    read = reads.forecast_error(MEASURES[measure])
    columns = [
        Column(
            title=one.column, paper=f"{one.column} {measure}", digits=3,
            step=one.column if one.column in run else None, read=read if one.column in run else None,
        )
        for one in SERIES
    ]  # fmt: skip
    return Table(title=f"{measure} on scaled values, the mean over horizons", columns=tuple(columns), rows=FORECASTERS)


def _trained(at: Places, one: Classes, path: Path, name: str) -> tuple[Step, Step]:
    """Train a classifier on the training part, and have it told the test part beside that."""
    trained_on = round((1.0 - dna.TrainSettings().held_out) * one.sequences)
    epoch = -(-trained_on // 128)
    model = replace(dna.small_model(), hidden_size=128, num_attention_heads=4, intermediate_size=512)
    if name == "attention":
        model = replace(model, architecture="attention", attention_conv_size=model.conv_size)
    run = at.out / f"{one.short}-{name}"
    settings = dna.TrainSettings(
        data=path, run=run, model=model, baseline="cnn" if name == "cnn" else None, steps=100 * epoch,
        warmup_steps=epoch, eval_every=epoch, save_every=epoch, batch_size=128, lr=6e-4, max_length=one.longest,
        device="cuda",
    )  # fmt: skip
    tested = dna.PredictSettings(
        model=run, data=path.with_name("test"), out=run / "test.tsv", json=run / "test.json", device="cuda"
    )
    return (
        Step(name=run.name, what=f"train {name} on {one.column}", settings=settings),
        Step(name=f"{run.name}-test", what=f"accuracy of {name} on {one.column}", settings=tested),
    )


def _found(table: str, data: str, sets: Sequence[DataSet]) -> dict[str, Path]:
    """Find a user's files; ValueError without a folder, saying what to give and where it is to be had."""
    if data == STDLIB:
        raise ValueError(
            f"got no folder of data for {table}; expected --data FOLDER that holds, itself or in folders, as many as "
            f"there are of {told(sets)}"
        )
    return find_sets(Path(data), sets)


def _paths(at: Places, sets: Sequence[DataSet], usual: str, part: str = "") -> tuple[dict[str, Path], tuple[str, ...]]:
    """Give the files of a user's folder, or those of a usual one; and which sets are left out."""
    if at.data is None:
        return {one.column: Path(usual) / one.file / part for one in sets}, ()
    found = find_sets(Path(at.data), sets)
    return found, tuple(one.column for one in sets if one.column not in found)


def _untold(at: Places, sets: Sequence[DataSet], left: tuple[str, ...]) -> tuple[str, ...]:
    """Say where files come from, or that some are missing."""
    if at.data is None:
        return (f"files are yours to fetch: {told(sets)}; or give their folder: --data FOLDER",)
    return _missing(left, at.data)


def _unlike(paths: dict[str, Path]) -> tuple[str, ...]:
    """Say which tables are of another size than the paper's."""
    unlike = (one.unlike(paths[one.column]) for one in SERIES if one.column in paths)
    return tuple(line for line in unlike if line is not None)


def _missing(left: Sequence[str], data: str) -> tuple[str, ...]:
    return (f"{', '.join(left)}: not measured, no file in {data}",) if left else ()


def _forecast_differs(f: Forecasts, e: Effort, found: dict[str, Path], given: Given) -> tuple[str, ...]:
    stack, run = f.net.backbone, [column for column in found if column in f.epochs]
    rate = f"lr {f.train.lr:g}" if not f.rates else f"the best of lr {', '.join(f'{one:g}' for one in f.rates)}"
    trained = [f"{column} {f.epochs[column]} ({seeds_told(f.seeds[column])})" for column in run]
    missing = [one.column for one in SERIES if one.column not in found]
    out_of_scale = [column for column in found if column not in f.epochs]
    not_run = [row for row in FORECASTERS if row.contender not in f.models]
    return (
        *FRAME,
        f"width {stack.hidden_size}, blocks: {stack.num_hidden_layers}, patches of {f.net.patch_len} every "
        f"{f.net.stride} steps, a memory of depth {stack.memory_depth} in chunks of {stack.chunk_size}; the paper's "
        "sizes are not stated",
        f"most epochs: {', '.join(trained)}; batches of {f.train.batch_size}, {rate}; the paper's training is not "
        "stated",
        f"means over horizons {', '.join(map(str, f.horizons))} with {f.lookback} rows to forecast from; ± is the "
        "deviation over seeds of that mean, where there are several",
        *(["Weather: −9999 is taken as measured, as published results do"] if "Weather" in run else []),
        f"{''.join(f'{row.title} ({row.paper}) is not run at this scale; ' for row in not_run)}{OTHERS}",
        *_missing(missing, given.data),
        *_unlike({column: found[column] for column in run}),
        *([f"{', '.join(out_of_scale)}: not run at the scale {e.name}"] if out_of_scale else []),
    )


def _dna_differs(d: Dna, found: dict[str, Path], given: Given) -> tuple[str, ...]:
    fit, model = d.train, d.train.model
    files = ", ".join(f"{column} {path}" for column, path in found.items())
    rates = " or ".join(f"{rate:g}" for rate in d.rates)
    if len(d.rates) > 1:
        rates += " (chosen for each fold by trials on its training part)"
    missing = [one.column for one in DNA if one.column not in found]
    return (
        f"NOT COMPARABLE with the paper's table: accuracy by {d.folds}-fold cross-validation on the files given "
        f"({files}), where the paper trains on all of the official training sets and tests on the official test sets; "
        "parts of these sets give other numbers than the whole",
        f"width {model.hidden_size}, blocks: {model.num_hidden_layers}, embedded words of up to {fit.word_size} "
        f"nucleotides, a memory of depth {model.memory_depth}, fresh weights; sizes and pre-training of the paper's "
        "models are not verified",
        f"{fit.steps:,} steps of {fit.batch_size} sequences, {seeds_told(d.seeds)}, lr {rates}; at most "
        f"{fit.max_length:,} nucleotides, of longer ones the center; the best step is chosen on a tenth of what is "
        "trained on",
        "± is the deviation over seeds of the accuracy on all sequences; results.json of each step has the folds and "
        "paired tests",
        "counted words of nucleotides (k-mers), the mean of embedded ones and the length are not in the paper; "
        "DNABERT, GPT, HyenaDNA, Mamba and Based are not run",
        *_missing(missing, given.data),
    )


PLANS: dict[str, Callable[[Effort, Given], Plan]] = {"table3": table3, "table4": table4}
"""As they are run."""
PAPER: dict[str, Callable[[Places], Plan]] = {"table3": paper_table3, "table4": paper_table4}
"""As they are printed, at the paper's size."""
