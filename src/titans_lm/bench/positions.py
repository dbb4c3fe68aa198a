"""Books read with and without memory, for the page of results: bits per byte by position."""

from typing import Any


def lines(result):
    return []
