"""What the numbers say, in sentences that are computed from them: where the memory does not help, they say so."""

from titans_lm.demo.language import LanguageOutcome
from titans_lm.demo.reading import Reading
from titans_lm.demo.recall import RecallOutcome
from titans_lm.evaluate.accuracy import Recall
from titans_lm.evaluate.intervals import Difference

LEARNED = 0.95
"""Accuracy from which recall counts as learned."""


def percent(share: float) -> str:
    """Write a share as percent; only exactly all is 100 %."""
    return "100 %" if share == 1.0 else f"{min(100 * share, 99.9):.1f} %"


def signed(number: float, digits: int = 3) -> str:
    """Write a difference with its sign, a true minus."""
    return f"{number:+.{digits}f}".replace("-", "−")


def interval(difference: Difference) -> str:
    return f"{signed(difference.low)} to {signed(difference.high)}"


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


def language_findings(outcome: LanguageOutcome) -> list[str]:
    """Say what the memory is worth on held-out text, against being reset and against not being there."""
    segment = outcome.segment_len
    bits = [m.bits_per_byte for m in (outcome.with_memory, outcome.reset, outcome.without)]
    lines = [
        f"Held-out text costs {bits[0]:.3f} bits per byte with the memory, {bits[1]:.3f} with the memory reset every "
        f"{segment} bytes, and {bits[2]:.3f} without a memory at all.",
        _verdict(outcome.against_reset, "Carrying the memory from segment to segment", "what it kept of earlier ones"),
        _verdict(
            outcome.against_none,
            "Against the same stack without a memory, of equal size and trained on the same batches, the memory",
            "the memory",
        ),
    ]
    share = outcome.reset_against_none
    if share.clear and share.bits_per_byte < 0.0:
        lines.append(
            f"Of the difference to the stack without a memory, {signed(share.bits_per_byte)} is there even when the "
            "memory is reset: that part comes from what the memory does inside a segment."
        )
    return [*lines, *_by_position(outcome), *_cut_short(outcome)]


def _verdict(difference: Difference, subject: str, what: str) -> str:
    documents = "one document" if difference.documents == 1 else f"{difference.documents} documents"
    number = f"{signed(difference.bits_per_byte)} bits per byte, 95 % interval {interval(difference)}"
    if not difference.clear:
        return f"{subject} makes no difference that {documents} can show ({number})."
    if difference.bits_per_byte < 0.0:
        return f"{subject} saves bits ({number}, over {documents}): {what} helps here."
    return f"{subject} costs bits ({number}, over {documents}): {what} does not help here, it hurts."


def _by_position(outcome: LanguageOutcome) -> list[str]:
    pairs = list(zip(outcome.with_memory.by_position, outcome.reset.by_position, strict=True))
    gains = [(f"{a.start}–{a.stop - 1}", a.bits_per_token - b.bits_per_token) for a, b in pairs]
    if len(gains) < 2:
        return []
    (first, start), (last, end) = gains[0], gains[-1]
    lines = [f"Carried against reset, by position: {signed(start)} in bytes {first}, {signed(end)} in bytes {last}."]
    worse = [place for place, gain in gains if gain > 0.0005]
    if worse:
        lines.append(f"The carried memory is worse than a fresh one in bytes {', '.join(worse)}.")
    return lines


def _cut_short(outcome: LanguageOutcome) -> list[str]:
    steps, planned = outcome.memory.steps, outcome.memory.planned_steps
    if steps >= planned:
        return []
    return [
        f"This machine was slow: the byte models were trained for {steps} of {planned} steps, "
        "so their numbers are worse than those of a full run."
    ]


def reading_findings(reading: Reading) -> list[str]:
    """Say how the memory's surprise relates to what the model found hard to predict."""
    agreement = reading.agreement()
    if agreement > 0.3:
        relation = "so bytes that the model finds hard to predict tend to surprise its memory too"
    elif agreement > -0.3:
        relation = "so what surprises the memory is mostly not what the model finds hard to predict"
    else:
        relation = "so bytes that the model finds easy to predict are the ones that surprise its memory"
    return [
        f"Byte by byte, the rank correlation of the memory's surprise with the bits that the model needed is "
        f"{signed(agreement, 2)}, {relation}."
    ]
