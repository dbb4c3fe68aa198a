"""transformers' own tests of models: where they lie, and their mixins. They come with its sdist (`make conformance`).

The sdist holds tests/*.py and no folder below: not the tests of `generate()`, nor those of export. A checkout of
transformers, named by TRANSFORMERS_TESTS, holds all of them.
"""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import transformers

BUILD = Path(__file__).resolve().parents[2] / "build" / "conformance"
FOLDER = Path(os.environ.get("TRANSFORMERS_TESTS", BUILD / f"transformers-{transformers.__version__}")) / "tests"
ABSENT = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}


def load_mixins() -> tuple[type, type]:
    """ModelTesterMixin and GenerationTesterMixin; the latter without a test where the folder has none of them."""
    if not (FOLDER / "test_modeling_common.py").is_file():
        pytest.skip(f"transformers' tests are not at {FOLDER} (make conformance)", allow_module_level=True)
    sys.path.append(str(BUILD / "lib"))
    ours, sys.modules["tests"] = sys.modules.get("tests"), _package("tests", [str(FOLDER)])
    try:
        for module, name in ABSENT.items():
            if not (FOLDER / f"{module.replace('.', '/')}.py").is_file():
                parent = f"tests.{module.split('.')[0]}"
                sys.modules.setdefault(parent, _package(parent, []))
                stand_in = sys.modules[f"tests.{module}"] = ModuleType(f"tests.{module}")
                setattr(stand_in, name, type(name, (), {}))
        common = importlib.import_module("tests.test_modeling_common")
    finally:
        del sys.modules["tests"]
        if ours is not None:
            sys.modules["tests"] = ours
    return common.ModelTesterMixin, common.GenerationTesterMixin


def _package(name: str, path: list[str]) -> ModuleType:
    package = ModuleType(name)
    package.__path__ = path
    return package
