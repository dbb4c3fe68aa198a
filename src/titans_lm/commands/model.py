"""titans train, generate, info: make a model, let it write, and say what it is."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from titans_lm.commands.show import say, show, write, write_result
from titans_lm.recipes.find import check_data
from titans_lm.train.settings import LanguageSettings, plain_settings


@dataclass(frozen=True, kw_only=True)
class Train(LanguageSettings):
    """Train a language model on a file, a folder of text or of tokens (prepare), or the Python library's own source.

    Begin with `titans train stdlib --run runs/first`; go on with `titans train --resume runs/first`. A recipe may come
    first: `titans train tiny-mac stdlib`, or `titans train 170m-mac --dry-run` to see what it would cost.
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
    config: Path | None = None
    """A .json or .toml file of settings, which become the defaults; the settings.json of a run is one."""
    json: Path | None = None
    """Write what came out to this file."""
    quiet: bool = False
    """Show no progress."""


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Write on after a prompt, with the model of a run or any saved model."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Run folder, checkpoint, or folder of a saved model."""
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
    config: Path | None = None
    """A .json or .toml file of these settings, which become the defaults."""
    json: Path | None = None
    """Write the text and how long it took to this file."""
    quiet: bool = False
    """Show the text when it is complete and nothing else."""


@dataclass(frozen=True, kw_only=True)
class Info:
    """Show a model's parameters and state bytes, the versions of what is installed, and the devices."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = None
    """Run folder, checkpoint, or folder of a saved model; without one, versions and devices only."""
    config: Path | None = None
    """A .json or .toml file of these settings, which become the defaults."""
    json: Path | None = None
    """Write the same to this file."""


def run_train(command: Train) -> None:
    if command.data is not None or not command.dry_run:
        check_data(command.data, command.recipe, command.vocab_size)
    names = [field.name for field in dataclasses.fields(LanguageSettings)]
    settings = LanguageSettings(**{name: getattr(command, name) for name in names})
    if command.dry_run:
        say_what_it_takes(command, settings)
        return

    from titans_lm.train.language import train_language_model
    from titans_lm.train.log import ProgressReport

    if command.resume is not None:
        settings = dataclasses.replace(settings, run=command.resume)
    result = train_language_model(
        settings, resume=command.resume is not None, progress=ProgressReport(quiet=command.quiet)
    )
    if os.environ.get("RANK", "0") != "0":  # under torchrun, one process speaks
        return
    write_result(command.json, result)
    if not command.quiet:
        bits = result.get("held_out_bits_per_byte")
        say(f"held-out bits per byte {bits:.4f} after {result['steps']} steps; model in {result['model']}")


def say_what_it_takes(command: Train, settings: LanguageSettings) -> None:
    from titans_lm.recipes.estimate import estimate_lines, estimate_training

    estimate = estimate_training(settings, peak_tflops=command.peak_tflops, utilisation=command.utilisation)
    result = {"recipe": command.recipe, **estimate, "settings": plain_settings(settings)}
    write_result(command.json, result)
    if not command.quiet:
        say("\n".join(estimate_lines(estimate)))


def run_generate(command: Generate) -> None:
    folder = command.model or command.model_option
    if folder is None:
        raise ValueError("got no model; expected a run folder or a saved model: titans generate MODEL")
    if command.save_memory is not None and command.memory is None:
        raise ValueError("got --save-memory without --memory; expected both, or titans read to make a memory")
    if command.prompt and command.prompt_file is not None:
        raise ValueError("got both --prompt and --prompt-file; expected one of them")
    prompt = command.prompt if command.prompt_file is None else command.prompt_file.read_bytes()

    from titans_lm.generate import generate_text
    from titans_lm.streaming import load_memory, save_memory
    from titans_lm.train.run import load_model, load_tokenizer

    model, tokenizer = load_model(folder, command.device), load_tokenizer(folder)
    memory = None if command.memory is None else load_memory(command.memory, model)
    if command.compile:
        if not hasattr(model, "compile_decoding"):
            raise ValueError(f"got --compile for a {type(model).__name__}; expected a titans model, or no --compile")
        model.compile_decoding()
    generated = generate_text(
        model,
        tokenizer,
        prompt,
        max_new_tokens=command.max_new_tokens,
        temperature=command.temperature,
        top_k=command.top_k,
        top_p=command.top_p,
        seed=command.seed,
        write=None if command.quiet else write,
        memory=memory,
    )
    write(f"{generated.text}\n" if command.quiet else "\n")
    if command.save_memory is not None and generated.memory is not None:
        save_memory(generated.memory, command.save_memory, model)
    fields = [field.name for field in dataclasses.fields(generated) if field.name != "memory"]
    told = {name: getattr(generated, name) for name in fields}
    write_result(command.json, {"settings": plain_settings(command), **told})


def run_info(command: Info) -> None:
    from titans_lm.train.describe import describe_model
    from titans_lm.train.device import environment

    result: dict[str, Any] = {"environment": environment()}
    if command.model is not None:
        from titans_lm.train.run import load_model, resolve_model

        model = load_model(command.model, "cpu")
        result = {"path": str(resolve_model(command.model)), **describe_model(model), **result}
    write_result(command.json, result)
    show(result)
