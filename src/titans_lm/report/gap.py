"""What a memory wins back of what a window costs a pretrained model."""

from titans_lm.report.section import Result, Section
from titans_lm.report.table import Column, Table, written

Row = tuple[Result, Result]
"""An adapter, and what was found with one window."""


def tables(result: Result) -> list[Table]:
    rows: list[Row] = [(model, one) for model in result["models"] for one in model["windows"]]
    names = [name for name in ("full", "windowed", "ours", "frozen") if all(name in one for _, one in rows)]
    columns = [
        Column("adapter", lambda row: row[0]["name"]),
        Column("trained numbers", lambda row: f"{row[0]['adapter_parameters']:,}"),
        Column("window", lambda row: f"{row[1]['window']}{'*' * (row[1]['window'] != row[0]['window'])}"),
        *(Column(name, lambda row, name=name: written(row[1][name], ".4f")) for name in names),
        Column("share", lambda row: written(row[1]["share"], ".3f")),
        Column("95 % interval", lambda row: f"[{row[1]['low']:+.3f}, {row[1]['high']:+.3f}]"),
    ]
    return [Table(columns=columns, rows=rows, said=said(result))]


def said(result: Result) -> str:
    settings, first = result["settings"], result["models"][0]
    return (
        f"Nats per token of {settings['rows']} rows of {settings['seq_len']:,} tokens of held-out books, each read "
        "from nothing, at positions beyond the window: the base with full attention, with its window and sinks alone, "
        "and with the adapter, where it says so with its memory frozen. **Share** of the gap between the first two "
        "that the adapter recovers, with its interval over rows (bootstrap). "
        f"The base is {'/'.join(first['base'].split('/')[-2:])}; * a window that was not "
        "trained with."
    )


SECTION = Section(
    topic=lambda _: "long-context",
    heading=lambda _: "A memory beside a pretrained model: share of the gap recovered",
    tables=tables,
)
