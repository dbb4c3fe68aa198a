"""Training in which passages return: as many tokens in both phases, taken up again as if never stopped."""

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.experiment_cases import trials
from prepare.prepare_cases import prepared, write_texts
from titans_lm.cli import parse
from titans_lm.config import BackboneConfig
from titans_lm.data.batches import PackedRows, RandomCrops, RereadRows
from titans_lm.data.curriculum import RereadCurriculum
from titans_lm.experiments.settings import CompareSettings
from titans_lm.train.language import language_data, train_language_model
from titans_lm.train.loop import Interrupted
from titans_lm.train.options import merge_settings, plain_settings
from titans_lm.train.parallel import Distributed
from titans_lm.train.settings import LanguageSettings

SMALL = BackboneConfig(
    architecture="lmm", hidden_size=16, num_attention_heads=2, num_hidden_layers=1, memory_expansion=1,
    intermediate_size=32,
)  # fmt: skip
REREAD = RereadCurriculum(
    first_steps=3, first_len=8, first_passages=(2, 3), first_gaps=(0, 1), share=0.5, passages=(4, 12)
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reread")
    write_texts(path / "texts")
    prepared(path / "texts", path / "tokens")
    return path


def settings(data: Path | None, run: Path | None = None, **more: Any) -> LanguageSettings:
    base = LanguageSettings(
        data=data and str(data), out=run, steps=6, warmup_steps=1, seq_len=24, batch_size=2, eval_bytes=500,
        eval_every=0, save_every=2, model=SMALL, reread=REREAD,
    )  # fmt: skip
    return dataclasses.replace(base, **more)


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("folder", ["texts", "tokens"])
def test_a_run_counts_its_tokens_and_goes_on_in_either_phase(
    folder: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two batches a step: stopped within the first phase and within the second."""
    whole = train_language_model(settings(texts / folder, tmp_path / "whole", accumulate=2))
    assert whole["tokens"] == 6 * 2 * 2 * 24
    assert whole["settings"]["reread"]["first_steps"] == 3
    draw = RereadRows.__call__
    for stop in (2, 5):

        def stopping(self: RereadRows, step: int, at: int = 2 * stop - 1) -> Any:
            if step == at:
                os.kill(os.getpid(), signal.SIGINT)
            return draw(self, step)

        part = settings(texts / folder, tmp_path / f"part-{stop}", accumulate=2)
        monkeypatch.setattr(RereadRows, "__call__", stopping)
        with pytest.raises(Interrupted, match=f"stopped after step {stop}"):
            train_language_model(part)
        monkeypatch.setattr(RereadRows, "__call__", draw)
        assert train_language_model(part, resume=True)["tokens"] == whole["tokens"]
        assert losses(tmp_path / f"part-{stop}") == losses(tmp_path / "whole")


def test_another_curriculum_is_another_run(texts: Path, tmp_path: Path) -> None:
    train_language_model(settings(texts / "texts", tmp_path / "run", steps=3))
    other = settings(texts / "texts", tmp_path / "run", reread=dataclasses.replace(REREAD, share=0.4))
    with pytest.raises(ValueError, match="was trained on other data"):
        train_language_model(other, resume=True)


def test_without_one_the_batches_are_as_they_were(texts: Path) -> None:
    for folder, kind in (("texts", RandomCrops), ("tokens", PackedRows)):
        assert isinstance(language_data(settings(texts / folder, reread=RereadCurriculum())).batches, kind)


def test_every_process_takes_its_rows_in_both_phases(texts: Path) -> None:
    batches = language_data(settings(texts / "tokens")).batches
    for step, rows in ((0, 6), (3, 2)):
        parts = [Distributed(rank, 2, torch.device("cpu")).rows(batches(step)) for rank in (0, 1)]
        for name, whole in batches(step).items():
            assert len(whole) == rows
            assert torch.equal(torch.cat([part[name] for part in parts]), whole)


def test_a_trial_has_its_share_of_the_first_phase(tmp_path: Path) -> None:
    shared = settings(None, steps=600, reread=dataclasses.replace(REREAD, first_steps=300))
    contest = CompareSettings(data="text", test=tmp_path, train=shared, rates=(1e-3, 2e-3), tune_steps=200)
    assert {job.settings.reread.first_steps for job in trials(contest, 10_000)} == {100}
    short = settings(None, steps=100, reread=dataclasses.replace(REREAD, first_steps=60))
    longer = dataclasses.replace(contest, train=short)
    assert {job.settings.reread.first_steps for job in trials(longer, 10_000)} == {120}


def test_settings_are_said_and_read_again(texts: Path) -> None:
    words = "--reread.first-steps 3 --reread.share 0.5 --reread.first-passages 2 3 --reread.max-gap 9 --steps 6"
    said = parse(["train", "text", *words.split()])
    assert said.reread == RereadCurriculum(first_steps=3, share=0.5, first_passages=(2, 3), max_gap=9)
    read = merge_settings(LanguageSettings(), json.loads(json.dumps(plain_settings(settings(texts)))))
    assert read.reread == REREAD
    compared = parse(["compare", "text", "--reread.share", "0.25"])
    assert compared.train.reread.share == 0.25
    falls = parse(["train", "text", "--reread.share", "0.5", "0.1"])
    assert falls.reread.share == (0.5, 0.1)
    kept = settings(texts, reread=dataclasses.replace(REREAD, share=(0.5, 0.1)))
    assert merge_settings(LanguageSettings(), json.loads(json.dumps(plain_settings(kept)))).reread == kept.reread


def test_what_does_not_go_together(texts: Path) -> None:
    with pytest.raises(ValueError, match=r"got reread.first_steps=3 in a run of 2 steps"):
        settings(texts / "texts", steps=2)
    with pytest.raises(ValueError, match="got reread with stateful=True"):
        settings(texts / "texts", stateful=True)
    few = dataclasses.replace(REREAD, passages=(2000, 2010))
    with pytest.raises(ValueError, match=r"the longest document has .*; expected a document that holds a"):
        language_data(settings(texts / "tokens", boundaries="reset", seq_len=4800, reread=few))
