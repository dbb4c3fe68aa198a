"""What the numbers say, in sentences that are computed from them: where the memory does not help, they say so."""

from titans_lm.data.tasks.stories import ROOMS
from titans_lm.demo.books import Opening
from titans_lm.demo.hidden import Kind
from titans_lm.demo.recall import RecallOutcome
from titans_lm.demo.search import Found
from titans_lm.evaluate.accuracy import Recall

LEARNED = 0.95
"""Accuracy from which recall counts as learned."""


def percent(share: float) -> str:
    """Write a share as percent; only exactly all is 100 %."""
    return "100 %" if share == 1.0 else f"{min(100 * share, 99.9):.1f} %"


def recall_findings(outcome: RecallOutcome) -> list[str]:
    """Say who remembers over the gap, and by how much it differs from guessing."""
    memory, window, task = outcome.memory_recall, outcome.window_recall, outcome.task
    config = outcome.window.config
    lines = [
        f"The memory names {percent(memory.accuracy)} of the values after a gap of {task.gap} filler tokens: "
        f"{_standing(memory)}.",
        f"The sliding window of {config.window} tokens, which in {config.num_hidden_layers} layers can look "
        f"{outcome.reach} tokens back at most, names {percent(window.accuracy)}: {_standing(window)}.",
    ]
    if memory.interval[0] <= window.interval[1]:
        lines.append("So on this run the memory is no better than the window.")
    elif memory.accuracy < LEARNED:
        lines.append("So the memory bridges the gap, but it has not learned the task in these steps.")
    else:
        lines.append("So what was read before the gap is in the memory, and nowhere within reach of the window.")
    return lines


def _standing(recall: Recall) -> str:
    chance = f"guessing gives {percent(recall.chance)}"
    if recall.at_chance:
        return f"no better than chance ({chance})"
    if recall.accuracy < recall.chance:
        return f"worse than chance ({chance})"
    return f"learned ({chance})" if recall.accuracy >= LEARNED else f"above chance, but not learned ({chance})"


def opening_findings(opening: Opening) -> list[str]:
    """Say what the book model's memory was worth on the start of the text."""
    bits = opening.bits_per_byte
    order = sorted(bits, key=bits.__getitem__)
    said = {
        "carried": "with its memory carried along",
        "frozen": "with its memory frozen",
        "reset": f"with its state thrown away every {opening.reset_every:,} tokens",
    }
    verdict = "The memory helped." if order[0] == "carried" else "So the memory did not help here."
    return [
        f"pretrained:{opening.model}, {opening.parameters:,} parameters, read the first {opening.tokens:,} tokens of "
        f"the text: {bits['carried']:.3f} bits per byte {said['carried']}, {bits['frozen']:.3f} {said['frozen']}, "
        f"{bits['reset']:.3f} {said['reset']}. {verdict}"
    ]


def search_findings(found: Found) -> list[str]:
    """Say what was answered from the memory files, and by those that stand beside them."""
    lines = [
        f"{found.tokens:,} tokens of {found.source} were read, with {_many(len(found.hidden.facts), 'sentence')} of "
        f"{'your own' if found.own else f'the draw {found.seed}'} hidden in them."
    ]
    for reading in found.readings:
        lines.append(
            f"pretrained:{reading.model}, {reading.parameters:,} parameters, read them in "
            f"{reading.seconds:.0f} s; its memory stayed at {reading.state_bytes / 1000:.0f} kB, and is a file of "
            f"{reading.file_bytes / 1000:.0f} kB."
        )
    for kind, what in (("place", "where people are"), ("number", "what a secret number is")):
        right, asked = found.score(kind, "memory")
        if asked:
            lines.append(_answers(found, kind, what, right, asked))
    if found.hidden.split:
        words = ", ".join(found.hidden.split)
        lines.append(f"The models were not taught the words {words}, and spell them: what they say may be lost.")
    return lines


def _answers(found: Found, kind: Kind, what: str, right: int, asked: int) -> str:
    furthest = max((one.tokens_ago for one in found.asked if one.kind == kind and one.right("memory")), default=0)
    others = [found.score(kind, reader)[0] for reader in ("reset", "window")]
    guessing = f"guessing gives {asked / len(ROOMS):.1f}" if kind == "place" else "guessing gives none"
    from_where = f", the furthest from {furthest:,} tokens before" if right else ""
    verdict = "" if right > max(others) else " So the memory is no better than they are here."
    return (
        f"Asked {_many(asked, 'time')} {what}, the memory file alone is right {_many(right, 'time')} "
        f"({percent(right / asked)}){from_where}; the same model with its memory reset {others[0]}, and having read "
        f"the last {found.window:,} tokens alone {others[1]} ({guessing}).{verdict}"
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
