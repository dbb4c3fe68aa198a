"""What the extra `genomics` brings: scikit-learn, with scipy; the only place that says how to get it."""

import importlib
from typing import Any


def needed(module: str) -> Any:
    """Import a module of the extra; ValueError, saying how to install it, where it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"got no {error.name}, which words of nucleotides and paired tests need; install it with: "
            "pip install 'titans-lm[genomics]'"
        ) from error
