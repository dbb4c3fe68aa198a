"""Plans and what came out of them, as lines to read."""

from pathlib import Path

from titans_lm.bench.repeated import NOT_MEASURED, number, rows
from titans_lm.report.table import aligned
from titans_lm.repro.cost import plan_minutes, step_minutes
from titans_lm.repro.hours import Cost, step_cost
from titans_lm.repro.published import SOURCE, Published, published
from titans_lm.repro.run import command_of
from titans_lm.repro.steps import Plan, Result, Step

ASSUMED = (
    "GPU-hours count matrix products, on a GPU that reaches 5 % of 989 TFLOP/s (assumed for all models, not measured: "
    "titans train RECIPE --dry-run has --peak-tflops and --utilisation)"
)
LIMITED = "an upper bound by the seconds after which a measurement is stopped, and not an estimate"
SMALL, IDLE = 100_000_000, "it takes longer, as small models leave a GPU idle"
"""Parameters of a model below which that is said."""
UNCOUNTED = "not counted, as what they read is not known here"


def plan_lines(plan: Plan) -> list[str]:
    """Show what a plan runs, and what it would take."""
    paper = published()[plan.table]
    lines = [heading(paper, plan.scale), ""]
    if plan.runs:
        lines += [line for step in plan.steps for line in _step(plan, step)]
        lines += ["", _taken(plan), "numbers go to " + str(plan.out)]
    else:
        lines += _by_hand(plan)
    return [*lines, "", *differences(plan.differs, paper.notes, paper.errata)] + (
        [] if plan.runs else ["", *printed(paper)]
    )


def heading(paper: Published, scale: str) -> str:
    return f"{paper.title}: {paper.where} of {SOURCE}, scale {scale}"


def _step(plan: Plan, step: Step) -> list[str]:
    takes = f"about {step_minutes(step):.0f} minutes on two cores" if plan.scale == "tiny" else ""
    return [f"{step.name}: {step.what}{takes and '; '}{takes}", f"  {command_of(step)}"]


def _taken(plan: Plan) -> str:
    if plan.scale == "tiny":
        return (
            f"about {plan_minutes(plan):.0f} minutes on two CPU cores, from the speed of single models on an AMD "
            "EPYC or an Intel Xeon; the whole was not timed"
        )
    costs = [cost for cost in map(step_cost, plan.steps) if cost is not None]
    return f"one GPU; not measured on a GPU. {_sum(costs)}"


def _by_hand(plan: Plan) -> list[str]:
    """Show commands with sizes and GPU-hours, and their sum."""
    lines = ["These commands are printed and not run. Paths and numbers of GPUs are yours to change.", ""]
    costs, uncounted = [], []
    for step in plan.steps:
        lines += [f"{step.name}: {step.what}", f"  {command_of(step)}"]
        cost = step_cost(step)
        if cost is None:
            uncounted.append(step.name)
        else:
            costs.append(cost)
            lines.append(f"  {cost_told(cost)}")
    lines += ["", _sum(costs)]
    return lines + ([f"{UNCOUNTED}: {', '.join(uncounted)}"] if uncounted else [])


def cost_told(cost: Cost) -> str:
    """Say what a step takes in a line: models, tokens, GPU-hours, and how they were counted."""
    if cost.measured:
        return f"{cost.measured} measurements, {cost.note}: at most {_readable(cost.hours)} GPU-hours"
    least, most = min(cost.parameters), max(cost.parameters)
    sizes = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    each = " for each model" if len(cost.parameters) > 1 else ""
    tested = f" to train on and {cost.tested:,.0f} to test on" if cost.tested else ""
    parts = (f"{sizes} parameters", f"{cost.trained:,.0f} {cost.unit}{tested}{each}", cost.note)
    counted = f" ({cost.basis})" if cost.basis else ""
    return "; ".join([*filter(None, parts), f"{_readable(cost.hours)} GPU-hours{counted}"])


def _sum(costs: list[Cost]) -> str:
    """Add up the GPU-hours, bounds of what is timed too, and say what they rest on."""
    told = f"{_readable(sum(cost.hours for cost in costs))} GPU-hours in all"
    if all(cost.measured for cost in costs):
        return f"at most {told}: {LIMITED}"
    small = any(0 < max(cost.parameters, default=0) < SMALL for cost in costs)
    return f"{told}; {ASSUMED}{f'; {IDLE}' if small else ''}"


def _readable(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"


def printed(paper: Published) -> list[str]:
    """Show all that the paper prints; ours is not measured at this scale."""
    if not paper.groups:
        return [f"{paper.where} prints no numbers; ours: {NOT_MEASURED}"]
    lines = []
    for group in paper.groups.values():
        body = [
            [name, "paper", *(number(value, paper.digits) for value in row.values())]
            for name, row in group.rows.items()
        ]
        lines += [f"{group.title}; ours: {NOT_MEASURED}", *aligned(["model", "", *paper.columns], body, left=2), ""]
    return lines[:-1]


def result_lines(result: Result) -> list[str]:
    """Show our numbers, the paper's below each, and how the setting differs."""
    paper = published()[result["table"]]
    lines = [heading(paper, result["scale"])]
    sizes = {step["name"]: step["parameters"] for step in result["steps"] if step["parameters"]}
    if sizes:
        lines.append("ours: " + "; ".join(f"{name}: {count:,} parameters each" for name, count in sizes.items()))
    if result["paper"]["group"]:
        lines.append(f"paper: {result['paper']['group']}")
    for table in result["tables"]:
        lines += ["", *([table["title"]] if table["title"] else []), *_table(table, paper.digits)]
    if not paper.groups:
        lines += ["", f"paper: {paper.where} prints no numbers"]
    return [*lines, "", *differences(result["differs"], result["paper"]["notes"], result["paper"]["errata"])]


def _table(table: Result, digits: int) -> list[str]:
    """Two lines for each model, ours and the paper's."""
    return aligned(*rows(table, digits), left=2)


def differences(differs: tuple[str, ...], notes: tuple[str, ...], errata: tuple[str, ...]) -> list[str]:
    """List how the setting differs, and what is known of the paper's numbers."""
    parts = (("How the setting differs from the paper's:", differs), ("The paper:", notes), ("Errata:", errata))
    return [line for title, told in parts if told for line in (title, *(f"- {one}" for one in told))]


def where(out: Path) -> str:
    """Say where the numbers are."""
    from titans_lm.repro.run import FILE

    return f"numbers in {out / FILE}"
