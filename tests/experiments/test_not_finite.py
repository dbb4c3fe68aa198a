"""Numbers that are not finite end a measurement with a sentence, before anything of it is kept."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.test_compare import book, small
from titans_lm.experiments import text as compared
from titans_lm.experiments.models import NamedModel
from titans_lm.experiments.reading import READINGS, Planned, _read_once
from titans_lm.experiments.reading_settings import ReadingSettings
from titans_lm.train.files import JsonLines
from titans_lm.train.trainer import Diverged


def test_a_reading_is_refused_and_not_kept(tmp_path: Path) -> None:
    found = {"books": [(1.0, 2.0)], "bits": [3.0, float("nan")]}
    planned, named = Planned("on", "on", {}, 7, lambda _: found), NamedModel("lmm", tmp_path / "lmm")
    settings = ReadingSettings(models=("lmm",), text=(tmp_path,), out=tmp_path / "out", quiet=True)
    with pytest.raises(ValueError, match=r"got numbers that are not finite from .*lmm in on; expected a model"):
        _read_once(planned, named, "sum", settings)
    assert not (tmp_path / "out" / READINGS).exists()
    found["bits"][1] = 4.0
    assert _read_once(planned, named, "sum", settings).found["bits"] == [3.0, 4.0]


def test_a_run_is_refused_by_its_test_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    for index in range(5):
        (tmp_path / "texts" / f"{index}.txt").write_text(book(index, 200))
    (tmp_path / "test.txt").write_text(book(9, 60))
    monkeypatch.setattr(compared, "score", lambda *_: {"bits_per_byte": float("nan")})
    settings = small(tmp_path, tmp_path / "out", data=str(tmp_path / "texts"), models=("sliding",), rates=(1e-3,))
    with pytest.raises(Diverged, match="sliding: its loss on the test text is not finite; give lower --rates"):
        compared.run_compare(settings, lambda _: None)
    assert not (tmp_path / "out" / compared.FILE).exists()


def test_an_evaluation_on_the_way_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(*_: Any, **__: Any) -> dict[str, float]:
        for step, bits in ((1, 3.0), (2, math.nan), (3, 2.0)):
            JsonLines(tmp_path / compared.METRICS).append({"step": step, "seconds": step, compared.HELD_OUT: bits})
        return {compared.HELD_OUT: 2.0}

    monkeypatch.setattr(compared, "train_language_model", trained)
    job: Any = SimpleNamespace(folder=tmp_path, settings=None, name="lmm", test=None, contents=dict)
    curve = compared.TextJob.train(job)["curve"]
    assert [one["step"] for one in curve] == [1, 3]
    assert compared.bits_at(curve, 2.0) == 2.5
