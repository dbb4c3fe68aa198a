"""Plans and what came out of them, as lines to read."""

from pathlib import Path

from titans_lm.bench.repeated import NOT_MEASURED, number, rows
from titans_lm.report.table import aligned
from titans_lm.repro.cost import plan_minutes, step_hours, step_minutes, training
from titans_lm.repro.published import SOURCE, Published, published
from titans_lm.repro.run import command_of
from titans_lm.repro.steps import Plan, Result, Step
from titans_lm.train.settings import LanguageSettings

ASSUMED = (
    "GPU-hours count matrix products, on a GPU that reaches 5 % of 989 TFLOP/s (assumed, not measured: "
    "titans train RECIPE --dry-run has --peak-tflops and --utilisation)"
)


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
    hours = [found for found in map(step_hours, plan.steps) if found is not None]
    if not hours:
        return "one GPU; not measured on a GPU, and not estimated"
    return (
        f"one GPU; not measured on a GPU. At least {sum(hours):.2g} GPU-hours without tests and trials, and more, as "
        f"small models leave a GPU idle. {ASSUMED}"
    )


def _by_hand(plan: Plan) -> list[str]:
    """Show commands with sizes and GPU-hours, and their sum."""
    lines, total, uncounted = (
        ["These commands are printed and not run. Paths and numbers of GPUs are yours to change.", ""],
        0.0,
        [],
    )
    for step in plan.steps:
        lines += [f"{step.name}: {step.what}", f"  {command_of(step)}"]
        found = training(step.settings) if isinstance(step.settings, LanguageSettings) else None
        hours = step_hours(step) if found is None else found["gpu_hours"]
        if found is not None:
            of = "" if step.settings.baseline is None else ", counted as full attention of ours"
            lines.append(
                f"  {found['parameters']:,} parameters{of}; {found['tokens']:,} tokens, {found['steps']:,} steps of "
                f"{found['tokens_per_step']:,}; {found['memory_bytes']['total'] / 1e9:.0f} GB on one GPU; "
                f"{hours:,.0f} GPU-hours"
            )
        elif hours is not None:
            lines.append(f"  {hours:,.0f} GPU-hours to train, without tests")
        else:
            uncounted.append(step.name)
        total += hours or 0.0
    lines += ["", f"{total:,.0f} GPU-hours in all; {ASSUMED}"] if total else [""]
    if uncounted:
        lines.append(f"not estimated: {', '.join(uncounted)}")
    return lines


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
