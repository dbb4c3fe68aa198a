"""`titans compare`: learning rates by short trials, then every contender from several seeds, then a file of results."""

from statistics import mean
from typing import Any

from titans_lm.bench.hardware import hardware
from titans_lm.bench.run import FORMAT
from titans_lm.compare.jobs import Say, tune, work
from titans_lm.compare.runs import HELD_OUT, bits_at, contender_of, finals, trials
from titans_lm.compare.score import read_texts
from titans_lm.compare.settings import CompareSettings
from titans_lm.compare.spent import spent, spent_on
from titans_lm.report.spread import mean_with_spread
from titans_lm.train.files import write_json
from titans_lm.train.language import language_data
from titans_lm.train.match import count_parameters
from titans_lm.train.options import plain_settings, written_command
from titans_lm.train.sized import sized_model

FILE = "compare.json"


def run_compare(settings: CompareSettings, say: Say) -> dict[str, Any]:
    """Compare models and write OUT/compare.json; stopped, the same call goes on.

    All have as many parameters as the first (or as `train.parameters`), read the same batches, and are tried with the
    same learning rates for as many steps (where there are several rates). Raises ValueError for data, a text or a model
    that will not do, before anything is trained.
    """
    if settings.data is None or settings.test is None:
        raise ValueError("got no data or no test; expected titans compare DATA --test TEXT")
    if not settings.test.exists():
        raise ValueError(f"got the test text {str(settings.test)!r}, which does not exist; expected a file or folder")
    settings.out.mkdir(parents=True, exist_ok=True)
    parameters = _size(settings, say)
    tuning, rates = tune(settings, trials(settings, parameters), say, HELD_OUT)
    ran = work(finals(settings, parameters, rates), settings.jobs, say)
    contenders = [_contender(name, rates[name], tuning.get(name, []), ran) for name in settings.models]
    seconds, fastest = min((mean(run["seconds"] for run in one["runs"]), one["name"]) for one in contenders)
    for one in contenders:
        found = [bits_at(run["curve"], seconds) for run in one["runs"]]
        one["at_equal_time"] = None if None in found else mean_with_spread(found)
    result = {
        "format": FORMAT,
        "what": "compare",
        "command": command_line(settings),
        "hardware": hardware(),
        **spent_on(part for one in contenders for part in [*one["tuning"], *one["runs"]]),
        "settings": plain_settings(settings),
        "parameters_asked_for": parameters,
        "equal_time": {"seconds": seconds, "fastest": fastest},
        "contenders": contenders,
    }
    write_json(settings.out / FILE, result)
    return result


def command_line(settings: CompareSettings) -> str:
    """Write the command that the settings came from, as far as they are not the defaults."""
    return written_command("compare", str(settings.data), settings=settings, data=None)


def _size(settings: CompareSettings, say: Say) -> int:
    """Find how many parameters all shall have, and that every contender can have as many."""
    first = contender_of(settings, settings.models[0], 1)
    data, parameters = language_data(first), settings.train.parameters
    if parameters is None:
        parameters = count_parameters(first.model, len(data.tokenizer))
    assert settings.test is not None
    read_texts(settings.test, data.tokenizer, settings.test_bytes)  # fails now, and not after the first run
    for name in settings.models:
        sized = sized_model(contender_of(settings, name, parameters), data.tokenizer)
        say(f"{name}: {sized.describe()}")
    return parameters


def _contender(name: str, rate: float, tuning: list[dict[str, Any]], ran: list[dict[str, Any]]) -> dict[str, Any]:
    kept = ["parameters", "steps", "tokens", "seconds", "tokens_per_second", "skipped_steps"]
    kept += [HELD_OUT, "curve", "test", "reset"]
    runs = [
        {
            "seed": result["asked"]["settings"]["seed"],
            **{key: result[key] for key in kept if key in result},
            **spent(result),
        }
        for result in ran
        if result["name"] == name
    ]
    bits = [run["test"]["bits_per_byte"] for run in runs]
    return {
        "name": name,
        "parameters": runs[0]["parameters"],
        "shape": next(result["shape"] for result in ran if result["name"] == name),
        "rate": rate,
        "tuning": tuning,
        "runs": runs,
        "test_bits_per_byte": mean_with_spread(bits),
    }
