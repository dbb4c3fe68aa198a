"""Where numbers come from: the format of a result, its command, its machine, its commits."""

import re
from typing import Any

Result = dict[str, Any]
FORMAT = "titans-lm bench 1"
"""Format of every result that is written with `hardware`."""
PATH = re.compile(r"(?<![\w.:/)\]])(?:/[\w.-]+){2,}")
"""A path from the root of the machine that a result was made on."""


def without_folders(text: str) -> str:
    """Leave the last two names of every path from the root: the rest is about a machine."""
    return PATH.sub(lambda path: "/".join(path[0].split("/")[2:][-2:]), text)


def linked(result: Result, link: str) -> str:
    """Link to the file of a result."""
    return f"[{result['file']}]({link}/{result['file']})"


def commits(result: Result, hardware: Result) -> str:
    """Name the commit that numbers were made at, or all where their runs are of several."""
    names = result.get("commits") or [hardware["commit"]]
    return f"commit{'s' * (len(names) > 1)} {', '.join(names)}"


def source(result: Result, link: str) -> list[str]:
    """Say in a line which command wrote the numbers, on which machine, with which versions, and when."""
    h = result["hardware"]
    versions = {**h["versions"], **result.get("peers", {})}
    stack = [f"{n} {versions[n]}" for n in ("torch", "transformers", "titans-pytorch") if n in versions]
    on = ", ".join(h["gpus"]) if result.get("device", "cpu") != "cpu" and h["gpus"] else h["processor"]
    machine = [on, f"{h['cores']} cores"]
    quick = ""
    if "threads" in result:
        machine = [on, f"{result['threads']} threads", result["dtype"], f"{h['memory_bytes'] / 2**30:.0f} GiB"]
        stack.append(h["system"])
        quick = " **Tiny sizes: a test of the machinery, no measurement of speed.**" if result["quick"] else ""
    return [
        f"{linked(result, link)}: `{result['command']}` on {', '.join(machine)}; {', '.join(stack)}; "
        f"{commits(result, h)}, {h['date']}.{quick}"
    ]
