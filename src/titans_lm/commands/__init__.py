"""The commands: for each the settings it takes, and the function that calls the library."""

from collections.abc import Callable
from typing import Any

from titans_lm.commands import measure, memory, model

COMMANDS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "prepare": (model.Prepare, model.run_prepare),
    "train": (model.Train, model.run_train),
    "retrofit": (model.Retrofit, model.run_retrofit),
    "generate": (model.Generate, model.run_generate),
    "read": (memory.Read, memory.run_read),
    "ask": (memory.Ask, memory.run_ask),
    "memory": (memory.MemoryFiles, memory.run_memory),
    "serve": (model.Serve, model.run_serve),
    "surprise": (memory.SurpriseOf, memory.run_surprise),
    "info": (model.Info, model.run_info),
    "demo": (measure.Demo, measure.run_demo),
    "bench": (measure.Bench, measure.run_bench),
    "compare": (measure.Compare, measure.run_compare),
    "evaluate": (measure.Evaluate, measure.run_evaluate),
    "forecast": (measure.Forecast, measure.run_forecast),
    "genomics": (measure.Genomics, measure.run_genomics),
    "repro": (measure.Repro, measure.run_repro),
}
"""Every command: its settings, and what runs them."""
