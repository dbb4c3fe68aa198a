"""The commands: for each the settings it takes, and the function that calls the library."""

from collections.abc import Callable
from typing import Any

from titans_lm.commands.ask import Ask, run_ask
from titans_lm.commands.compare import Compare, run_compare_command
from titans_lm.commands.evaluate import Evaluate, run_evaluate
from titans_lm.commands.forecast import Forecast, run_forecast
from titans_lm.commands.genomics import Genomics, run_genomics
from titans_lm.commands.measure import Bench, Demo, run_bench, run_demo
from titans_lm.commands.memory import MemoryFiles, Read, SurpriseOf, run_memory, run_read, run_surprise
from titans_lm.commands.model import (
    Generate,
    Info,
    Prepare,
    Serve,
    Train,
    run_generate,
    run_info,
    run_prepare,
    run_serve,
    run_train,
)
from titans_lm.commands.repro import Repro, run_repro
from titans_lm.commands.retrofit import Retrofit, run_retrofit

COMMANDS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "prepare": (Prepare, run_prepare),
    "train": (Train, run_train),
    "retrofit": (Retrofit, run_retrofit),
    "generate": (Generate, run_generate),
    "read": (Read, run_read),
    "ask": (Ask, run_ask),
    "memory": (MemoryFiles, run_memory),
    "serve": (Serve, run_serve),
    "surprise": (SurpriseOf, run_surprise),
    "info": (Info, run_info),
    "demo": (Demo, run_demo),
    "bench": (Bench, run_bench),
    "compare": (Compare, run_compare_command),
    "evaluate": (Evaluate, run_evaluate),
    "forecast": (Forecast, run_forecast),
    "genomics": (Genomics, run_genomics),
    "repro": (Repro, run_repro),
}
"""Every command: its settings, and what runs them."""
