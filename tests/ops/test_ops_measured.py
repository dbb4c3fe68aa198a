"""`auto` takes the kernels where a table of measurements has them as the faster ones, and nowhere else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.memory_cases import Case, make_call
from ops.triton_cases import moved
from titans_lm import ops
from titans_lm.ops import measured, neural_memory
from titans_lm.ops.measured import FORMAT, Measurement, read_table, table_text

GPU = "A GPU of the tests"
ROW = Measurement(
    device=GPU, dtype="float32", width=4, hidden=8, chunk_size=4, mode="forward", memories=4, tokens=8,
    chunked_seconds=2e-3, triton_seconds=1e-3,
)  # fmt: skip


def backend_of(monkeypatch: pytest.MonkeyPatch, table: tuple[Measurement, ...], case: Case, **more: Any) -> str:
    """Which backend `auto` runs on a GPU of this name; neither computes anything here."""
    monkeypatch.setattr(measured, "device_name", lambda x: GPU)
    monkeypatch.setattr(measured, "shipped", lambda: table)
    chosen = []
    for name in ("auto", "triton"):

        def note(q: Tensor, *others: Any, name: str = name, **_: Any) -> tuple[Any, ...]:
            chosen.append(name)
            return q, others[5], q

        monkeypatch.setitem(ops._BACKENDS, name, note)
    call = moved(make_call(case), torch.float32, torch.device("cpu"))
    neural_memory(*call.arguments, **call.settings, **more)
    return chosen[0]


CASE = Case(tokens=8)


@pytest.fixture
def no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.usefixtures("no_grad")
def test_a_measured_shape_takes_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_of(monkeypatch, (ROW,), CASE) == "triton"
    assert backend_of(monkeypatch, (replace(ROW, triton_seconds=3e-3),), CASE) == "auto"
    assert backend_of(monkeypatch, (), CASE) == "auto"


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize(
    "other",
    [
        {"device": "Another GPU"}, {"dtype": "bfloat16"}, {"width": 8}, {"hidden": 16}, {"chunk_size": 16},
        {"mode": "forward+backward"}, {"mode": "decode"}, {"memories": 5}, {"tokens": 9},
    ],
    ids=str,
)  # fmt: skip
def test_another_shape_was_not_measured(monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]) -> None:
    assert backend_of(monkeypatch, (replace(ROW, **other),), CASE) == "auto"


@pytest.mark.usefixtures("no_grad")
def test_the_nearest_smaller_measurement_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = replace(ROW, memories=2, triton_seconds=9.0)
    assert backend_of(monkeypatch, (slower, ROW), CASE) == "triton"
    assert backend_of(monkeypatch, (replace(slower, memories=3), replace(ROW, memories=2)), CASE) == "auto"
    assert backend_of(monkeypatch, (replace(slower, memories=4, tokens=7), ROW), CASE) == "triton"


def test_the_mode_of_a_call_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    train, decode = replace(ROW, mode="forward+backward"), replace(ROW, mode="decode", tokens=1)
    assert backend_of(monkeypatch, (train,), CASE) == "triton"
    assert backend_of(monkeypatch, (ROW,), CASE) == "auto"
    with torch.no_grad():
        assert backend_of(monkeypatch, (decode,), Case(tokens=1)) == "triton"


@pytest.mark.usefixtures("no_grad")
def test_a_linear_memory_has_no_hidden_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_of(monkeypatch, (replace(ROW, hidden=0),), Case(tokens=8, depth=1)) == "triton"


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize(
    ("case", "more"),
    [
        (Case(tokens=8, gates=("channel", "head", "head")), {}),
        (Case(tokens=8, depth=3), {}),
        (CASE, {"return_surprise": "parts"}),
        (CASE, {"backend": "auto", "return_surprise": "parts"}),
    ],
    ids=str,
)
def test_what_no_kernel_does_stays_with_the_chunked_backend(
    monkeypatch: pytest.MonkeyPatch, case: Case, more: dict[str, Any]
) -> None:
    assert backend_of(monkeypatch, (ROW, replace(ROW, hidden=0)), case, **more) == "auto"


def test_a_cpu_never_takes_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured.device_name(torch.zeros(1)) is None
    monkeypatch.setattr(measured, "shipped", lambda: (replace(ROW, mode="forward+backward"),))
    call = make_call(CASE)
    for x, y in zip(call("auto")[:1], call("chunked")[:1], strict=True):
        assert torch.equal(x, y)


def test_the_shipped_table_can_be_read() -> None:
    """Nothing was measured on a GPU so far, and nothing is claimed."""
    assert read_table() == ()


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [ROW, replace(ROW, device="B"), replace(ROW, mode="decode", tokens=1)]
    path = tmp_path / "table.json"
    path.write_text(table_text(rows))
    assert set(read_table(path)) == set(rows)
    assert table_text(rows) == table_text(rows[::-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", f"expected a table of kernels with the format '{FORMAT}'"),
        ('{"format": "other", "measurements": []}', "expected a table of kernels"),
        (f'{{"format": "{FORMAT}", "measurements": [{{"device": "x"}}]}}', "got a measurement with"),
    ],
)
def test_another_file_is_no_table(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_table(path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "training"}, "mode"), ({"width": 0}, "width"), ({"hidden": -1}, "hidden"),
        ({"triton_seconds": 0.0}, "triton_seconds"),
    ],
    ids=str,
)  # fmt: skip
def test_a_measurement_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"got {message}="):
        replace(ROW, **wrong)
