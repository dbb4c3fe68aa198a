"""titans prepare, train, retrofit, generate, serve, info: tokens, models from them, and what they can be used for."""

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from titans_lm.checks import load_library
from titans_lm.commands.show import Chosen, Configured, Written, lines_of, say, write
from titans_lm.distill.settings import RetrofitSettings
from titans_lm.prepare.settings import PrepareSettings
from titans_lm.recipes.find import check_data
from titans_lm.serve.settings import ServeSettings
from titans_lm.train.options import as_settings, plain_settings
from titans_lm.train.settings import LanguageSettings


@dataclass(frozen=True, kw_only=True)
class Prepare(Configured, PrepareSettings):
    """Turn text into a folder of tokens that titans train reads: files, folders, JSON lines, parquet, data sets.

    Begin with `titans prepare books/ --out data/books --train-bpe 8192`, then `titans train data/books`.
    """

    source: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")] = None


@dataclass(frozen=True, kw_only=True)
class Train(Configured, LanguageSettings):
    """Train a language model on a file, a folder of text or of tokens (prepare), or the Python library's own source.

    Begin with `titans train stdlib --out runs/first`; go on with `titans train --resume runs/first`. A recipe may come
    first: `titans train tiny-mac stdlib`, or `titans train 170m-mac --dry-run` to see what it would cost.
    `titans train stdlib --init runs/first --model.chunk-size 4` goes on with a trained model at another chunk size.
    """

    data: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RECIPE] [DATA]")] = None
    recipe: str | None = None
    """Recipe whose settings are the defaults, such as tiny-mac; the same as its name in the first place."""
    dry_run: bool = False
    """Say what training would take (parameters, memory, FLOPs, GPU-hours), and do nothing."""
    peak_tflops: float = 989.0
    """TFLOP/s that the GPU of --dry-run can do; an H100 does 989 in bfloat16 without sparsity."""
    utilisation: float = 0.05
    """Share of them that training reaches in the estimate of --dry-run; 0.05 is what others report for small chunks."""
    resume: Path | None = None
    """Run folder to go on with; its settings are the defaults."""


@dataclass(frozen=True, kw_only=True)
class Retrofit(Configured, RetrofitSettings):
    """Give a pretrained model a memory: its attention keeps a window, and an adapter is trained to recall the rest."""

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    data: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = None
    resume: Path | None = None
    """Run folder to go on with; its settings are the defaults."""


@dataclass(frozen=True, kw_only=True)
class OfModel:
    """A model that was saved."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Run folder, checkpoint, folder of a saved model, or pretrained:NAME."""


@dataclass(frozen=True, kw_only=True)
class Generate(Configured, OfModel):
    """Write on after a prompt, with the model of a run or any saved model."""

    model_option: Annotated[Path | None, tyro.conf.arg(name="model")] = None
    """The same, as an option."""
    prompt: str = ""
    """Text to go on from; it starts a document, or follows what a memory has read."""
    prompt_file: Path | None = None
    """File to go on from, instead of --prompt."""
    max_new_tokens: int = 300
    """Most tokens to write."""
    temperature: float = 0.8
    """Sharpness of sampling; 0 takes the likeliest token every time."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that add up to this probability."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that have been written become less likely, by so much; those of the prompt do not."""
    seed: int | None = None
    """Seed of the sampling, for the same text every time."""
    compile: bool = False
    """Compile what reads single tokens: some seconds at first, then faster; needs a C++ compiler on a CPU."""
    memory: Path | None = None
    """Memory file to go on from (titans read makes one)."""
    save_memory: Path | None = None
    """Write the memory after prompt and text to this file; with --memory."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""


@dataclass(frozen=True, kw_only=True)
class Serve(ServeSettings):
    """Serve a model over HTTP: OpenAI's completions and chat, one memory per conversation, and a page to chat on.

    `titans serve` alone serves pretrained:facts: drop a document on its page, and ask where people are.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = Path("pretrained:facts")
    """Run folder, checkpoint, folder of a saved model, or pretrained:NAME."""

    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU where there is one."""
    config: Path | None = None
    """A .json or .toml file of these settings, which become the defaults."""
    quiet: bool = False
    """Say nothing but what goes wrong."""


@dataclass(frozen=True, kw_only=True)
class Info(Chosen, Written, OfModel):
    """Show a model's sizes, parameters, state bytes and training, the versions of what is installed, and devices."""


def run_prepare(command: Prepare) -> None:
    from titans_lm.prepare.run import prepare
    from titans_lm.train.progress import CountReport

    settings = as_settings(PrepareSettings, command)
    with CountReport(quiet=command.quiet, title="preparing") as progress:
        result = prepare(settings, progress=progress)
    command.write({"settings": plain_settings(settings), **result})
    command.say(
        f"{result['train_tokens']:,} tokens of {result['train_documents']:,} documents to train on, "
        f"{result['held_out_tokens']:,} of {result['held_out_documents']:,} held out; {result['tokenizer']}"
    )
    if settings.valid is None:
        share = result["held_out_tokens"] / max(1, result["held_out_tokens"] + result["train_tokens"])
        if not settings.held_out / 2 <= share <= settings.held_out * 2:
            command.say(
                f"{share:.1%} of the tokens are held out, and not the {settings.held_out:.1%} asked for: whole "
                "documents are, and these are few or of very different lengths; --valid SOURCE names others to test on"
            )
    if "was_there" in result:
        command.say(f"{result['folder']} was there already and is whole: nothing was done")
    else:
        command.say(
            f"{result['seconds']:.1f} s, {result['megabytes_per_second']:.1f} MB/s, "
            f"{result['peak_resident_bytes'] / 2**20:,.0f} MiB at most; {result['skipped']} skipped; {result['folder']}"
        )
    command.say(f"go on with: titans train {result['folder']}")


def run_train(command: Train) -> None:
    if command.data is not None or not command.dry_run:
        check_data(command.data, command.recipe, command.vocab_size)
    settings = as_settings(LanguageSettings, command)
    if command.dry_run:
        say_what_it_takes(command, settings)
        return

    from titans_lm.train.language import train_language_model
    from titans_lm.train.progress import Outlook, ProgressReport
    from titans_lm.train.trainer import Diverged

    if command.resume is not None:
        settings = dataclasses.replace(settings, out=command.resume)
    progress = ProgressReport(quiet=command.quiet, outlook=Outlook("--steps N"))
    result = train_language_model(settings, resume=command.resume is not None, progress=progress)
    if os.environ.get("RANK", "0") != "0":  # under torchrun, one process speaks
        return
    command.write(result)
    bits = result.get("held_out_bits_per_byte")
    if not math.isfinite(bits):
        raise Diverged(f"held-out bits per byte are {bits} after {result['steps']} steps; give a lower --lr")
    command.say(f"held-out bits per byte {bits:.4f} after {result['steps']} steps; model in {result['model']}")
    command.say(
        f"go on with: titans generate {result['run']}, titans info {result['run']}, titans serve {result['run']}"
    )


def say_what_it_takes(command: Train, settings: LanguageSettings) -> None:
    from titans_lm.data.prepared import TokenFolder, is_token_folder
    from titans_lm.recipes.estimate import estimate_lines, estimate_training

    if settings.data is not None and settings.vocab_size is None and is_token_folder(settings.data):
        settings = dataclasses.replace(settings, vocab_size=TokenFolder(settings.data, verify=False).vocab_size)
    estimate = estimate_training(settings, peak_tflops=command.peak_tflops, utilisation=command.utilisation)
    command.write({"recipe": command.recipe, **estimate, "settings": plain_settings(settings)})
    command.say("\n".join(estimate_lines(estimate)))


def run_retrofit(command: Retrofit) -> None:
    from titans_lm.distill.train import retrofit
    from titans_lm.train.progress import Outlook, ProgressReport

    settings = as_settings(RetrofitSettings, command)
    if command.resume is not None:
        settings = dataclasses.replace(settings, out=command.resume)
    progress = ProgressReport(quiet=command.quiet, outlook=Outlook("--steps N"))
    result = retrofit(settings, resume=command.resume is not None, progress=progress)
    command.write(result)
    shares = ", ".join(
        f"{result[f'{kind}_share']:.1%} on {kind}" for kind in ("text", "returns") if f"{kind}_share" in result
    )
    command.say(f"share of the gap recovered: {shares}; model in {result['model']}")


def run_generate(command: Generate) -> None:
    folder = command.model or command.model_option
    if folder is None:
        raise ValueError("got no model; expected a run folder or a saved model: titans generate MODEL")
    if command.model is not None and command.model_option is not None:
        raise ValueError(f"got the model {command.model} and --model {command.model_option}; expected one of them")
    if command.save_memory is not None and command.memory is None:
        raise ValueError("got --save-memory without --memory; expected both, or titans read to make a memory")
    if command.save_memory is not None and command.save_memory != command.memory and command.save_memory.exists():
        raise ValueError(
            f"got --save-memory {command.save_memory}, which exists; expected a new name, or that of --memory itself"
        )
    if command.prompt and command.prompt_file is not None:
        raise ValueError("got both --prompt and --prompt-file; expected one of them")
    prompt = command.prompt if command.prompt_file is None else command.prompt_file.read_bytes()

    from titans_lm.generate import generate_text
    from titans_lm.streaming import load_memory, save_memory
    from titans_lm.streaming.file import check_memory_file
    from titans_lm.train.run import load_model, load_tokenizer

    check_memory_file(command.memory)
    model: Any = load_model(folder, command.device)
    memory = None if command.memory is None else load_memory(command.memory, model)
    if command.compile:
        if not hasattr(model, "compile_decoding"):
            raise ValueError(f"got --compile for a {type(model).__name__}; expected a titans model, or no --compile")
        model.compile_decoding()
    dials = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
    sampling = {name: getattr(command, name) for name in dials}
    tell = None if command.quiet else write
    generated = generate_text(model, load_tokenizer(folder), prompt, write=tell, memory=memory, **sampling)
    write(f"{generated.text}\n" if command.quiet else "\n")
    if command.save_memory is not None and generated.memory is not None:
        save_memory(generated.memory, command.save_memory, model)
    told = {name: value for name, value in vars(generated).items() if name != "memory"}
    command.write({"settings": plain_settings(command), **told})


def run_serve(command: Serve) -> None:
    server = load_library("titans_lm.serve.app", "serving needs", "pip install 'titans-lm[serve]'")
    server.serve_model(command.model, command, device=command.device, say=None if command.quiet else say)


def run_info(command: Info) -> None:
    from titans_lm.train.device import environment

    result: dict[str, Any] = {"environment": environment()}
    if command.model is not None:
        from titans_lm.train.fresh import describe_model
        from titans_lm.train.run import load_model, progress_of, resolve_model, step_of

        model, folder = load_model(command.model, "cpu"), resolve_model(command.model)
        told = {"path": str(folder), **describe_model(model)}
        trained = progress_of(command.model, step_of(folder)) if Path(command.model) in folder.parents else {}
        result = {**told, **({"training": trained} if trained else {}), **result}
    command.write(result)
    say("\n".join(lines_of(result)))
