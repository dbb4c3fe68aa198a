"""Where in the results of the commands the numbers of a table stand."""

from collections.abc import Sequence
from functools import partial

from titans_lm.report.spread import in_percent, mean_with_spread
from titans_lm.repro.steps import Found, Read, Result


def bits_per_byte() -> Read:
    """Bits per byte of the whole test text, of `titans compare`."""
    return _bits


def bits_at(start: int) -> Read:
    """Bits per byte at the positions that begin there, of `titans compare`."""
    return partial(_bits_at, start)


def right(size: str) -> Read:
    """Right answers in %, of `titans evaluate mqar` and its sisters."""
    return partial(_right, size)


def answered(task: str, metric: str, percent: bool = True) -> Read:
    """Score of questions, of `titans evaluate lm-eval` on the runs of a comparison: over seeds where there are some."""
    return partial(_answered, task, metric, percent)


def model_speed(mode: str) -> Read:
    """Tokens per second of a model, of `titans bench model`."""
    return partial(_model_speed, mode)


def op_speed(tokens: int) -> Read:
    """Tokens per second of the op with a memory of so many layers, of `titans bench ops`."""
    return partial(_op_speed, tokens)


def row_speed(tokens: int) -> Read:
    """Tokens per second of the op on one row, of `titans bench scaling`."""
    return partial(_row_speed, tokens)


def forecast_error(measure: str) -> Read:
    """Error of a table by its measure (mse, mae), the mean over horizons, of `titans forecast evaluate`."""
    return partial(_forecast_error, measure)


def classified() -> Read:
    """Right classes in %, every sequence once a seed, of `titans genomics evaluate`."""
    return _classified


def over_seeds(values: Sequence[float]) -> Found | None:
    """Give the mean and, of several, the standard deviation."""
    return Found(**mean_with_spread(values)) if values else None


def _contender(result: Result, name: str) -> Result | None:
    return next((one for one in result["contenders"] if one["name"] == name), None)


def _bits(result: Result, name: str) -> Found | None:
    one = _contender(result, name)
    return None if one is None else Found(**one["test_bits_per_byte"])


def _bits_at(start: int, result: Result, name: str) -> Found | None:
    one = _contender(result, name)
    runs = [] if one is None else one["runs"]
    places = [place for run in runs for place in run["test"]["by_position"] if place["start"] == start]
    return over_seeds([place["bits_per_byte"] for place in places])


def _right(size: str, result: Result, name: str) -> Found | None:
    one = _contender(result, name)
    found = None if one is None else one["exact"].get(size)
    return None if found is None else _percent(found)


def _answered(task: str, metric: str, percent: bool, result: Result, name: str) -> Found | None:
    values = [
        one["tasks"][task]["metrics"][metric]["value"]
        for one in result["models"]
        if one["name"].rpartition("-seed")[0] == name and metric in one["tasks"].get(task, {"metrics": {}})["metrics"]
    ]
    return over_seeds([value * (100 if percent else 1) for value in values if value is not None])


def _forecast_error(measure: str, result: Result, name: str) -> Found | None:
    """A step has one table."""
    (table,) = result["tables"]
    one = _contender(table, name)
    return None if one is None else Found(**one["test"][measure]["mean"])


def _classified(result: Result, name: str) -> Found | None:
    one = _contender(result, name)
    return None if one is None else _percent(one["accuracy"])


def _percent(found: Result) -> Found:
    return Found(**in_percent(found))


def _speed(rows: list[Result]) -> Found | None:
    return next((Found(row["tokens_per_second"]) for row in rows if row.get("tokens_per_second")), None)


def _model_speed(mode: str, result: Result, name: str) -> Found | None:
    return _speed([row for row in result["rows"] if (row["label"], row["mode"]) == (name, mode)])


def _op_speed(tokens: int, result: Result, name: str) -> Found | None:
    """The base case has two allocators, and others beside it other chunks or gates: told apart by all their sizes."""
    heads = max(row["case"]["heads"] for row in result["rows"])
    return _speed(
        [
            row
            for row in result["rows"]
            for case in [row["case"]]
            if (str(case["depth"]), case["tokens"], case["heads"]) == (name, tokens, heads)
            and (case["forget_to"], row["mode"], row["allocator"]) == ("zero", "forward+backward", "default")
        ]
    )


def _row_speed(tokens: int, result: Result, name: str) -> Found | None:
    """The op alone has no models: the name of the row is of no use."""
    del name
    return _speed([row for row in result["rows"] if row["case"].get("tokens") == tokens and row["case"]["rows"] == 1])
