"""A fitted forecaster on disk: its weights, its scaler, its channels and its settings, in one folder.

forecast.json         what it is, what it was fitted to, mean and standard deviation per channel
model.safetensors     its weights
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from jaxtyping import Float
from safetensors import SafetensorError
from torch import nn

from titans_lm.config import check_choice
from titans_lm.forecast.contenders import MODELS, Contender, make_model
from titans_lm.forecast.model import Shape
from titans_lm.forecast.settings import Memory, NetSettings
from titans_lm.forecast.streaming import streamed
from titans_lm.forecast.windows import Prepared, Scaler
from titans_lm.train.files import new_folder, write_json
from titans_lm.train.settings import merge_settings, plain_settings

FORMAT = "titans-lm forecaster 1"
FILE, WEIGHTS, MODEL = "forecast.json", "model.safetensors", "model"


@dataclass(frozen=True)
class FittedForecaster:
    """A model with all that it takes to forecast a table in its own units."""

    model: nn.Module
    name: str
    """Its name, as titans forecast evaluate takes it."""
    shape: Shape
    channels: tuple[str, ...]
    scaler: Scaler
    told: dict[str, Any]
    """What the file says beside that: settings, the table that it was fitted to, how far off it was."""

    def forecast(
        self, values: Float[np.ndarray, "R C"], *, memory: Memory = "fresh", device: torch.device | None = None
    ) -> Float[np.ndarray, "H C"]:
        """Forecast the H rows behind a table (R, C) of at least L rows, both in its own units.

            "fresh"     from the last L rows
            "carried"   the memory has read all windows of L rows before them too
            "still"     the memory learns nothing, in the last L rows neither

        ValueError for a word that is none of these, for a table of another shape, for numbers that are not finite, and
        for a memory where there is none.
        """
        L, _, C = self.shape
        if values.ndim != 2 or values.shape[1] != C or len(values) < L:
            raise ValueError(f"got values {values.shape}; expected (R, C) with C = {C} and at least {L} rows")
        if not np.isfinite(values).all():
            raise ValueError("got values that are not finite; expected numbers in every cell")
        device = device or torch.device("cpu")
        model = self.model.to(device).eval()
        # a table whose columns were picked lies by columns, which torch would sum up in another order
        scaled = torch.from_numpy(np.ascontiguousarray(self.scaler.scaled(values))).float()
        if memory == "fresh":
            with torch.no_grad():
                found = model(scaled[None, -L:].to(device))
        else:
            last = range(len(scaled), len(scaled) + 1)
            [(_, found)] = streamed(model, scaled, last, memory, device=device, warm_up=len(scaled) // L - 1)
        return self.scaler.undone(found[0].double().cpu().numpy())


def save_forecaster(folder: Path, model: nn.Module, who: Contender, data: Prepared, found: dict[str, Any]) -> None:
    """Save a fitted model; an interruption at any moment leaves no folder of that name, or the whole one.

    `found` is what is known of it: errors, steps.
    """
    windows = data.parts["train"]
    told = {
        "format": FORMAT,
        "name": who.name,
        "model": who.base,
        "lookback": windows.lookback,
        "horizon": windows.horizon,
        "season": data.season,
        "channels": list(data.table.channels),
        "mean": data.scaler.mean.tolist(),
        "std": data.scaler.std.tolist(),
        "net": plain_settings(who.net),
        "train": plain_settings(who.train),
        "table": data.table.name,
        **found,
    }
    with new_folder(folder) as unfinished:
        weights = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
        safetensors.torch.save_file(weights, str(unfinished / WEIGHTS))
        write_json(unfinished / FILE, told)


def load_forecaster(path: Path) -> FittedForecaster:
    """Load a fitted model from its folder, or from that of its run; ValueError where it cannot be read."""
    folder = next((found for found in (path / MODEL, path) if (found / FILE).is_file()), None)
    if folder is None:
        what = "does not exist" if not path.exists() else f"holds no {FILE}"
        raise ValueError(
            f"got the forecaster {str(path)!r}, which {what}; expected a folder that titans forecast train has made"
        )
    try:
        told = json.loads((folder / FILE).read_bytes())
        if told.get("format") != FORMAT:
            raise ValueError(f"its format is {told.get('format')!r}, not {FORMAT!r}")
        check_choice("model", told["model"], MODELS)
        shape = Shape(told["lookback"], told["horizon"], len(told["channels"]))
        model = make_model(told["model"], merge_settings(NetSettings(), told["net"]), shape, told["season"])
        model.load_state_dict(safetensors.torch.load_file(folder / WEIGHTS))
        scaler = Scaler(np.array(told["mean"], np.float64), np.array(told["std"], np.float64))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"the forecaster in {folder} cannot be loaded: {reason}") from error
    return FittedForecaster(model.eval(), told["name"], shape, tuple(told["channels"]), scaler, told)
