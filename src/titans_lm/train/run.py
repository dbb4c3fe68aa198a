"""The folder of a run, and where in it a model is found.

runs/NAME/
  settings.json       the settings as they were resolved; `--config` reads it
  environment.json    machine, versions, and the commits that it began with, went on with and ended with
  contents.json       of a run of titans compare, the sums of the texts that it began with
  metrics.jsonl       a line per step
  checkpoints/
    step-000250/      a checkpoint: a saved model, and what training needs to go on
    LATEST            the name of the newest whole one
  model/              the model after the last step, without the rest
  in-use              who trains it now: a lock
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from titans_lm.checks import one_line
from titans_lm.train.checkpoint import (
    FILES,
    DamagedCheckpoint,
    quiet_transformers,
    save_checkpoint,
    save_model,
    verify_checkpoint,
    verify_weights,
    write_sums,
)
from titans_lm.train.device import choose_device, commit, environment
from titans_lm.train.files import (
    IN_USE,
    JsonLines,
    claimed,
    new_folder,
    read_json,
    remove_folder,
    remove_unfinished,
    write_atomically,
    write_json,
)
from titans_lm.train.mamba2 import use_chunk_scan
from titans_lm.train.shipped import PREFIX, shipped_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SETTINGS, ENVIRONMENT, METRICS, MODEL = "settings.json", "environment.json", "metrics.jsonl", "model"
CHECKPOINTS, LATEST, STEP, CONTENTS = "checkpoints", "LATEST", "step", "contents.json"
COMMITS, UNKNOWN = "commits", "unknown"


class RunFolder:
    """One run on disk. Make it with `create` or `open`."""

    def __init__(
        self,
        path: str | Path,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.path, self.tokenizer, self.settings = Path(path), tokenizer, settings
        self.metrics = JsonLines(self.path / METRICS)
        self.checkpoints = self.path / CHECKPOINTS

    @classmethod
    def create(
        cls, path: str | Path, settings: dict[str, Any], tokenizer: "PreTrainedTokenizerBase | None" = None
    ) -> "RunFolder":
        """Begin a run in a folder that is new or empty; ValueError where something is in the way."""
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise ValueError(f"got the run folder {path}, which is a file; expected a folder to make")
        found = {entry.name for entry in path.iterdir()} if path.exists() else set()
        if found := found - {SETTINGS, ENVIRONMENT, CONTENTS, IN_USE}:
            raise ValueError(
                f"got the run folder {path}, which holds {min(found)!r} already; "
                "choose another folder, or resume the run"
            )
        path.mkdir(parents=True, exist_ok=True)
        with claimed(path / IN_USE):  # another process may be at its first step
            write_json(path / SETTINGS, settings)
            write_json(path / ENVIRONMENT, {**environment(), COMMITS: [commit()]})
        return cls(path, tokenizer, settings)

    @classmethod
    def open(
        cls,
        path: str | Path,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        settings: dict[str, Any] | None = None,
    ) -> "RunFolder":
        """Open the folder of a run that was begun before; ValueError where it is none.

        `settings`, where they are given, are written down once training goes on with them.
        """
        path = Path(path)
        if not (path / SETTINGS).is_file():
            raise ValueError(f"got the run folder {path}, which holds no {SETTINGS}; expected the folder of a run")
        return cls(path, tokenizer, settings)

    def note_settings(self) -> None:
        """Write down the settings and the commit that a run goes on with, where they are others than before."""
        _note_commit(self.path)
        if self.settings is not None and self.settings != begun_with(self.path):
            write_json(self.path / SETTINGS, self.settings)

    def latest(self) -> Path | None:
        """Find the newest checkpoint, or None: what LATEST names, unless somebody removed it."""
        pointer, steps = self.checkpoints / LATEST, _steps(self.path)
        named = pointer.read_bytes().strip() if pointer.is_file() else b""
        return next((path for path in steps if path.name.encode() == named), (steps or [None])[-1])

    def whole(self, passed_over: Callable[[DamagedCheckpoint], None]) -> Path | None:
        """Find the newest checkpoint that is as it was written; DamagedCheckpoint where there are some and none is."""
        latest, damage = self.latest(), None
        candidates = [latest, *(path for path in reversed(_steps(self.path)) if path != latest)] if latest else []
        for checkpoint in candidates:
            try:
                verify_checkpoint(checkpoint)
                return checkpoint
            except DamagedCheckpoint as error:
                damage = damage or error
                passed_over(error)
        if damage is not None:
            raise damage
        return None

    def save(
        self,
        step: int,
        model: nn.Module,
        trainer: dict[str, Any],
        keep: int,
        *,
        optimizer: Mapping[str, Tensor] | None = None,
        weights: dict[str, Tensor] | None = None,
    ) -> Path:
        """Write the checkpoint of a step, make it the latest, and remove all but the newest `keep`.

        See `save_checkpoint`.
        """
        folder = self.checkpoint(step)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.checkpoints)
        save_checkpoint(folder, model, trainer, self.tokenizer, optimizer=optimizer, weights=weights)
        write_atomically(self.checkpoints / LATEST, folder.name + "\n")
        found = _steps(self.path)
        here = found.index(folder) + 1
        for old in (*found[here:], *found[:here][:-keep]):  # later ones were passed over: the run has gone on without
            remove_folder(old)
        return folder

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def finish(self, step: int, model: nn.Module, weights: dict[str, Tensor] | None = None) -> Path:
        """Save the finished model, and the step it was finished at."""
        with new_folder(self.path / MODEL) as unfinished:
            save_model(unfinished, model, self.tokenizer, weights)
            write_json(unfinished / f"{STEP}.json", {STEP: step})
            write_sums(unfinished)
        _note_commit(self.path)
        return self.path / MODEL


def begun_with(run: Path) -> dict[str, Any] | None:
    """Tell what a run was begun with; None where there is none."""
    path = run / SETTINGS
    return read_json(path) if path.is_file() else None


def commits_of(run: Path) -> list[str]:
    """Name the commits that a run was trained with, the first one first; none where there is no run."""
    path = run / ENVIRONMENT
    return read_json(path).get(COMMITS, [UNKNOWN]) if path.is_file() else []


def _note_commit(run: Path) -> None:
    """Add the commit of now to those of a run, where it is another than the one before."""
    known, now = commits_of(run), commit()
    if known and known[-1] != now:
        told = read_json(run / ENVIRONMENT)
        write_json(run / ENVIRONMENT, {**told, COMMITS: [*known, now]})


def seconds_of(run: Path) -> float:
    """Tell for how many seconds a run has trained, as far as it has logged; 0 where there is none."""
    return progress_of(run).get("seconds", 0.0)


def progress_of(run: Path, most: float = math.inf) -> dict[str, Any]:
    """Tell how far a run had come at step `most`: its step, seconds of training, the last bits per byte held out."""
    told: dict[str, Any] = {}
    for record in JsonLines(run / METRICS):
        if record.get("step", 0) > most:
            break
        told |= {name: record[name] for name in ("step", "seconds", "held_out_bits_per_byte") if name in record}
    return told


def resolve_model(path: str | Path) -> Path:
    """Find the saved model that a path means: a saved model or checkpoint itself, or the newest one of a run.

    pretrained:NAME is one that comes with the package. ValueError where there is none, saying what was found instead.
    """
    if str(path).startswith(PREFIX):
        return shipped_model(str(path).removeprefix(PREFIX))
    path = Path(path)
    if not path.exists():
        raise ValueError(f"got the model {str(path)!r}, which does not exist; expected a run folder or a saved model")
    if not path.is_dir():
        raise ValueError(f"got the model {str(path)!r}, which is a file; expected the folder that holds it")
    if (path / "config.json").is_file():
        return path
    finished, checkpoint = path / MODEL, RunFolder(path).latest()
    candidates = [folder for folder in (finished, checkpoint) if folder and (folder / "config.json").is_file()]
    if not candidates:
        found = "a run without a checkpoint yet" if (path / SETTINGS).is_file() else "neither a run nor a saved model"
        if (path / "adapter_config.json").is_file():
            found = "an adapter of PEFT alone: save what its merge_and_unload() gives, and the tokenizer beside it"
        raise ValueError(f"got the model {str(path)!r}, which is {found}; expected config.json and weights in it")
    # Of equal steps the finished model is taken; a run that was resumed and stopped has a newer checkpoint.
    return max(candidates, key=step_of)


def is_of_a_run(folder: Path) -> bool:
    """Tell whether a saved model was left by a run of ours, whichever model it is: a finished one, or a checkpoint."""
    return (folder / f"{STEP}.json").is_file() or (folder / FILES).is_file()


def load_model(path: str | Path, device: str = "auto") -> "PreTrainedModel":
    """Load a model from wherever `resolve_model` finds it, ready to be used; ValueError where it cannot be read."""
    from transformers import AutoModelForCausalLM

    folder = resolve_model(path)
    model = _load(AutoModelForCausalLM, folder, "model")
    broken = next((name for name, x in model.named_parameters() if not x.isfinite().all()), None)
    if broken is not None:
        raise ValueError(
            f"got the model in {folder}, whose weights are not all finite ({broken}); expected one that did not diverge"
        )
    return model.to(choose_device(device))


def load_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer that was saved beside a model; ValueError where there is none."""
    from transformers import AutoTokenizer

    folder = resolve_model(path)
    run = folder.parent.parent if folder.parent.name == CHECKPOINTS else folder.parent
    of_run = folder.name == MODEL or run != folder.parent
    if of_run and "taught" in (begun_with(run) or {}) and not any(folder.glob("tokenizer*")):
        raise ValueError(
            f"got {folder}, a model of a task's own ids, which are no text; expected one that titans train made, or "
            f"test it as it is: titans evaluate TASK --models again={run} --steps 0"
        )
    return _load(AutoTokenizer, folder, "tokenizer")


def pretrained(name: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load a model that comes with the package, and its tokenizer."""
    path = f"{PREFIX}{name}"
    return load_model(path, "cpu"), load_tokenizer(path)


def tokenizer_beside(path: str | Path) -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer that lies beside a model; None where there is none."""
    from titans_lm.data.tasks.haystack import holds_tokenizer

    folder = resolve_model(path)
    return load_tokenizer(folder) if holds_tokenizer(folder) else None


def _load(auto_class: Any, folder: Path, what: str) -> Any:
    import titans_lm.hf  # noqa: F401 - registers our classes
    from titans_lm.retrofit.file import FORMAT

    try:
        if what == "model":
            verify_weights(folder)
        with quiet_transformers():
            kind = json.loads((folder / "config.json").read_bytes()).get("model_type")
            if what != "model" or kind == FORMAT:  # an adapter, whose tensors are checked where it is loaded
                return auto_class.from_pretrained(folder, trust_remote_code=False)  # else it asks, and waits
            use_chunk_scan(kind)
            model, report = auto_class.from_pretrained(folder, output_loading_info=True, trust_remote_code=False)
        if lacking := sorted(report["missing_keys"]):
            raise ValueError(f"it lacks {', '.join(lacking[:3])}: not all of it is there, or another version saved it")
        return model
    except Exception as error:  # tokenizers, safetensors and huggingface_hub have errors of no common class
        raise ValueError(f"the {what} in {folder} cannot be loaded: {one_line(error)}") from error


def _steps(run: Path) -> list[Path]:
    """List a run's checkpoints, oldest first."""
    folders = [path for path in (run / CHECKPOINTS).glob("step-*") if path.name[5:].isdecimal() and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name[5:]))


def step_of(folder: Path) -> int:
    """Read the step that a saved model was saved at."""
    if folder.name == MODEL:
        file = folder / f"{STEP}.json"
        return int(read_json(file)[STEP]) if file.is_file() else 0
    return int(folder.name[5:])
