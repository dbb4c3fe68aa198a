"""Where numbers come from: the format of a result, its command, its machine, its commits."""

from typing import Any

Result = dict[str, Any]
FORMAT = "titans-lm bench 1"
"""Format of every result that is written with `hardware`."""


def linked(result: Result, link: str) -> str:
    """Link to the file of a result."""
    return f"[{result['file']}]({link}/{result['file']})"


def commits(result: Result, hardware: Result) -> str:
    """Name the commit that numbers were made at, or all where their runs are of several."""
    names = result.get("commits") or [hardware["commit"]]
    return f"commit{'s' * (len(names) > 1)} {', '.join(names)}"


def source_of_models(result: Result, link: str) -> list[str]:
    """Say in a line where numbers of what models have learned come from."""
    h = result["hardware"]
    return [
        f"{linked(result, link)}: `{result['command']}` on {h['processor']}, {h['cores']} cores; "
        f"torch {h['versions']['torch']}, transformers {h['versions']['transformers']}; {commits(result, h)}, "
        f"{h['date']}."
    ]


def source_of_speed(result: Result, link: str) -> list[str]:
    """Say where numbers of speed come from, a line for each of the files that stand together."""
    return [_measured(one, link) for one in (result, *result.get("others", []))]


def _measured(result: Result, link: str) -> str:
    h = result["hardware"]
    where = ", ".join(h["gpus"]) if result["device"] != "cpu" and h["gpus"] else h["processor"]
    versions = {**h["versions"], **result.get("peers", {})}
    stack = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
    stack += f", titans-pytorch {versions['titans-pytorch']}" if "titans-pytorch" in versions else ""
    quick = " **Tiny sizes: a test of the machinery, no measurement of speed.**" if result["quick"] else ""
    return (
        f"{linked(result, link)}: `{result['command']}` on {where}, {result['threads']} threads, "
        f"{result['dtype']}, {h['memory_bytes'] / 2**30:.0f} GiB; {stack}; {h['system']}; commit {h['commit']}, "
        f"{h['date']}, {result['wall_seconds'] / 60:.1f} minutes.{quick}"
    )
