"""Marks that transformers' own tests bear."""

import pytest

MARKS = (
    "accelerate_tests",
    "all_flash_attn_test",
    "executorch_export_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "flash_attn_test",
    "generate",
    "onnx_export_test",
    "timeout",
    "torch_compile_test",
    "torch_export_test",
)


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: of transformers' own tests")
