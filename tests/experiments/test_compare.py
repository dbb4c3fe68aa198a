"""A comparison is fair, goes on where it was stopped, and says what came out."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cli_cases import titans
from experiments.experiment_cases import finals, trials
from model_cases import small_config
from titans_lm.data.tokenizer import BOS, byte_tokenizer, encode_document
from titans_lm.evaluate.bits_per_byte import token_bits
from titans_lm.experiments.models import folder_name
from titans_lm.experiments.runner import run_job
from titans_lm.experiments.settings import CompareSettings
from titans_lm.experiments.text import (
    FILE,
    bits_at,
    command_line,
    language_settings,
    read_texts,
    run_compare,
    score,
    stretches,
)
from titans_lm.report.page import render_results, without_folders
from titans_lm.report.text import verdict
from titans_lm.train.baselines import fit_baseline, make_baseline
from titans_lm.train.fresh import byte_model
from titans_lm.train.options import as_settings, plain_settings
from titans_lm.train.run import RunFolder
from titans_lm.train.settings import LanguageSettings

WORDS = ["the", "memory", "learns", "while", "it", "reads", "and", "forgets", "what", "does", "not", "come", "again"]


def book(seed: int, words: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "train.txt").write_text(book(0, 600))
    (folder / "test.txt").write_text(book(1, 60))
    return folder


def small(texts: Path, out: Path, **changes) -> CompareSettings:
    train = LanguageSettings(
        model=small_config("mac", hidden_size=16, num_hidden_layers=1), steps=6, warmup_steps=1, seq_len=32,
        batch_size=2, eval_every=2, save_every=3, eval_bytes=200,
    )  # fmt: skip
    return CompareSettings(
        **{
            "data": str(texts / "train.txt"), "test": texts / "test.txt", "out": out,
            "models": ("mac", "llama"), "seeds": (0, 1), "rates": (1e-3, 1e-2), "tune_steps": 3,
            "positions": 100, "train": train, **changes,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[CompareSettings, dict]:
    settings = small(texts, tmp_path_factory.mktemp("compare") / "out")
    return settings, run_compare(settings, lambda _: None)


def test_all_is_equal_that_should_be(done) -> None:
    settings, result = done
    sizes = [one["parameters"] for one in result["contenders"]]
    assert max(sizes) / min(sizes) < 1.02
    for one in result["contenders"]:
        shape = one["shape"]
        assert (shape["blocks"], shape["heads"]) == (1, 2)
        assert shape["hidden_size"] == 2 * shape["head_dim"]
        assert 2.0 <= shape["mlp_ratio"] == shape["mlp_width"] / shape["hidden_size"]
    assert {run["tokens"] for one in result["contenders"] for run in one["runs"]} == {6 * 2 * 32}
    assert [[run["seed"] for run in one["runs"]] for one in result["contenders"]] == [[0, 1]] * 2
    assert all([trial["rate"] for trial in one["tuning"]] == [1e-3, 1e-2] for one in result["contenders"])
    for one in result["contenders"]:
        best = min(one["tuning"], key=lambda trial: trial["held_out_bits_per_byte"])
        assert one["rate"] == best["rate"]
    jobs = finals(settings, 1, dict.fromkeys(settings.models, 1e-3))
    kernels = [language_settings(settings, name, 1).model.attention_conv_size for name in ("mac", "attention", "lmm")]
    assert kernels == [4, 4, 1], "attention gets the convolution"
    assert not {job.settings.seed for job in jobs} & {job.settings.seed for job in trials(settings, 1)}


def test_what_is_said_is_what_the_models_do(done, texts: Path) -> None:
    """The models that are left behind score as the file says."""
    settings, result = done
    from titans_lm.train.run import load_model, load_tokenizer

    for one in result["contenders"]:
        folder = settings.out / "runs" / f"{one['name']}-seed1"
        found = score(load_model(folder), *read_texts(texts / "test.txt", load_tokenizer(folder), 2**20), 100)
        assert found == one["runs"][1]["test"]
        if one["name"] == "llama":
            assert "reset" not in one["runs"][1]
        else:
            reset = bits_of_pieces(load_model(folder), texts / "test.txt", positions=100, every=32)
            assert one["runs"][1]["reset"] == {"every": 32, "bits_per_byte": pytest.approx(reset, rel=1e-5)}
        values = [run["test"]["bits_per_byte"] for run in one["runs"]]
        assert one["test_bits_per_byte"]["mean"] == pytest.approx(sum(values) / 2)
        assert one["test_bits_per_byte"]["sd"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)


def bits_of_pieces(model: torch.nn.Module, source: Path, positions: int, every: int) -> float:
    """Bits per byte of a text, each piece of a stretch read alone, after the token that comes before it."""
    data, total = source.read_bytes(), 0.0
    for stretch in stretches(encode_document(data, eos=False), positions):
        for start in range(0, len(stretch) - 1, every):
            ids = torch.from_numpy(stretch[start : start + every + 1].astype(np.int64))[None]
            with torch.no_grad():
                logits = model(input_ids=ids[:, :-1]).logits
            total += float(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum")) / np.log(2)
    return total / len(data)


def test_what_was_reached_in_the_time_of_the_fastest(done) -> None:
    """Every run keeps what its evaluations found, and the file what that says of one moment."""
    settings, result = done
    time = result["equal_time"]
    fastest = min(result["contenders"], key=lambda one: np.mean([run["seconds"] for run in one["runs"]]))
    assert time == {"seconds": max(run["seconds"] for run in fastest["runs"]), "fastest": fastest["name"]}
    ends = [run["held_out_bits_per_byte"] for run in fastest["runs"]]
    assert fastest["at_equal_time"]["mean"] == pytest.approx(np.mean(ends)), "all its runs were done then"
    for one in result["contenders"]:
        for run in one["runs"]:
            assert [point["step"] for point in run["curve"]] == [2, 4, 6]
            assert run["curve"][-1]["held_out_bits_per_byte"] == run["held_out_bits_per_byte"]
            assert run["curve"][-1]["seconds"] == run["seconds"]
        found = [bits_at(run["curve"], time["seconds"]) for run in one["runs"]]
        said = one["at_equal_time"]
        assert said is None if None in found else said["mean"] == pytest.approx(np.mean(found))
    assert not (settings.out / "trials" / "mac-0.001" / "metrics.jsonl").read_text().count('"step": 2, "seconds"')


def test_a_learning_curve_between_its_points() -> None:
    curve = [
        {"step": step, "seconds": seconds, "held_out_bits_per_byte": bits}
        for step, seconds, bits in ((1, 10.0, 4.0), (2, 20.0, 3.0), (3, 40.0, 2.0))
    ]
    assert [bits_at(curve, at) for at in (9.9, 10.0, 15.0, 20.0, 35.0, 40.0, 99.0)] == [
        None, 4.0, 3.5, 3.0, 2.25, 2.0, 2.0,
    ]  # fmt: skip
    assert bits_at([], 1.0) is None


def test_it_trains_nothing_twice(done, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, result = done

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("nothing is left to train")

    monkeypatch.setattr("titans_lm.experiments.text.train_language_model", fail)
    again = run_compare(settings, lambda _: None)
    assert again["contenders"] == result["contenders"]
    parts = [part for one in result["contenders"] for part in [*one["tuning"], *one["runs"]]]
    assert again["wall_seconds"] == result["wall_seconds"] == pytest.approx(sum(part["wall_seconds"] for part in parts))
    assert all(part["commits"] == [result["hardware"]["commit"]] for part in parts)
    with pytest.raises(ValueError, match="holds a run of other settings"):
        run_compare(dataclasses.replace(settings, train=dataclasses.replace(settings.train, steps=7)), lambda _: None)


def test_a_run_that_was_stopped_goes_on(done, texts: Path, tmp_path: Path) -> None:
    """Stopped in the middle of one of its runs, a comparison ends with the same numbers."""
    import titans_lm.train.language as language

    settings = small(texts, tmp_path / "out", models=("mac",), seeds=(0,))
    fit, calls = language.fit, []

    def stopping(model: object, batches: object, loss: object, given: object, **more: object) -> object:
        calls.append(given)
        if len(calls) == 3:
            more["on_step"] = lambda record: record["step"] == 4
            fit(model, batches, loss, given, **more)
            raise KeyboardInterrupt
        return fit(model, batches, loss, given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language, "fit", stopping)
        with pytest.raises(KeyboardInterrupt):
            run_compare(settings, lambda _: None)
    result = run_compare(settings, lambda _: None)
    mac = done[1]["contenders"][0]
    assert [run["test"] for run in result["contenders"][0]["runs"]] == [mac["runs"][0]["test"]]


def test_stretches_begin_as_a_text_does_and_lose_nothing() -> None:
    text = encode_document(bytes(range(65, 90)), eos=False)
    pieces = stretches(text, 10)
    assert [len(piece) for piece in pieces] == [11, 11, 6]
    assert {int(piece[0]) for piece in pieces} == {int(text[0])}
    assert np.concatenate([piece[1:] for piece in pieces]).tolist() == text[1:].tolist()


def test_one_stretch_scores_as_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(book(3, 30))
    torch.manual_seed(0)
    data = (tmp_path / "a.txt").read_bytes()
    document = encode_document(data, eos=False)
    ours = byte_model(small_config("mac", hidden_size=16))
    llama = make_baseline(fit_baseline("llama", small_config("mac", hidden_size=16), 259, 20_000))
    for model in (ours, llama):
        whole = {} if model is ours else {"reset_every": len(document)}
        [bits] = token_bits(model, [document], **whole)
        expected = bits.sum() / len(data)
        found = score(model, *read_texts(tmp_path / "a.txt", byte_tokenizer(), 10**6), 4096)
        assert found["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
        parts = [(b["tokens"], b["bits_per_byte"]) for b in found["by_position"]]
        assert sum(n * bits for n, bits in parts) / found["tokens"] == pytest.approx(expected, rel=1e-5)


def test_the_page_says_it(done, tmp_path: Path) -> None:
    settings, result = done
    results = tmp_path / "results"
    results.mkdir()
    (results / FILE).write_text(json.dumps(result))
    written = render_results(results, tmp_path / "results.md")
    assert results / "compare.png" in written
    page = (tmp_path / "results" / "language.md").read_text()
    assert "![Bits per byte by position" in page
    assert "| reset − carried | held out at equal time | tokens/s | minutes |" in page
    assert "the cost of a state that is thrown away every 32 tokens" in page
    assert "Status: current, " in page
    for one in result["contenders"]:
        bits, shape = one["test_bits_per_byte"], one["shape"]
        assert f"{bits['mean']:.4f} ± {bits['sd']:.4f}" in page
        assert f"| {one['parameters']:,} | 1 | {shape['hidden_size']} | 2 | {shape['head_dim']} |" in page
        assert f"| {one['rate']:g}, the {'smallest' if one['rate'] == 1e-3 else 'largest'} tried |" in page
    old = {key: value for key, value in result.items() if key != "equal_time"}
    old["contenders"] = [{k: v for k, v in one.items() if k != "shape"} for one in result["contenders"]]
    (results / FILE).write_text(json.dumps(old))
    render_results(results, tmp_path / "old.md")
    before = (tmp_path / "old" / "earlier.md").read_text()
    assert not (tmp_path / "old" / "language.md").exists(), "what is of before D43 stands on its own page alone"
    assert "Status: earlier defaults, " in before
    assert "equal time" not in before
    assert without_folders(command_line(settings)) in page
    order = [page.index(f"{one['test_bits_per_byte']['mean']:.4f} ±") for one in result["contenders"]]
    ranked = sorted(result["contenders"], key=lambda one: one["test_bits_per_byte"]["mean"])
    assert [result["contenders"][i]["name"] for i in np.argsort(order)] == [one["name"] for one in ranked]


def test_the_page_says_who_is_ahead() -> None:
    def scored(**bits: float) -> list[dict]:
        return [{"name": name, "test_bits_per_byte": {"mean": value}} for name, value in bits.items()]

    assert verdict(scored(mac=2.0, llama=2.5, lmm=2.6)) == (
        "**MAC has the lowest mean**, 0.500 bits per byte before the best without a memory, Transformer++ (Llama)."
    )
    lost = verdict(scored(mamba2=1.9, llama=2.0, mag=2.25, lmm=2.6))
    assert lost == (
        "**No model with a memory is best here**: Mamba2, Transformer++ (Llama) come before the first of them, MAG, "
        "which is 0.350 bits per byte behind Mamba2."
    )
    assert verdict(scored(mac=2.0, lmm=2.5)) == verdict(scored(llama=2.0)) == ""


def test_the_command_line_gives_the_same_settings(done, texts: Path) -> None:
    import shlex

    from titans_lm.cli import parse

    settings, _ = done
    command = parse(shlex.split(command_line(settings))[1:])
    found = {f.name: getattr(command, f.name) for f in dataclasses.fields(CompareSettings)}
    assert {**found, "train": as_settings(LanguageSettings, command.train)} == vars(settings)


@pytest.mark.slow
def test_as_a_command_with_two_at_once(done, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, result = done
    mac = result["contenders"][0]
    import shlex

    alone = dataclasses.replace(settings, models=("mac",), rates=(mac["rate"],), out=tmp_path / "out", jobs=2)
    code, out, err = titans(capsys, *shlex.split(command_line(alone))[1:])
    assert (code, err) == (0, "")
    [again] = json.loads((tmp_path / "out" / FILE).read_text())["contenders"]
    assert again["test_bits_per_byte"]["mean"] == pytest.approx(mac["test_bits_per_byte"]["mean"], rel=1e-4)
    assert f"{again['test_bits_per_byte']['mean']:.4f}" in out


MISTAKES = [
    ({"seeds": (0, 1000)}, r"got seeds=\(0, 1000\); expected others than 1000, that of trials"),
    ({"test": Path("nowhere.txt")}, "'nowhere.txt', which does not exist"),
    ({"data": None}, "titans compare DATA --test TEXT"),
    ({"models": ("mac", "mambo2")}, "did you mean 'mamba2'"),
    ({"models": ("mac", "mac")}, "expected one or more, each once"),
    ({"rates": ()}, "expected one or more"),
    ({"models": ("mac:chunk=4",)}, "'chunk', which a variant of 'mac' cannot change; did you mean 'chunk_size'"),
    ({"models": ("mac:hidden_size=8",)}, "got hidden_size for a variant of 'mac'"),
    ({"models": ("gated-delta-net:hidden_size=8",)}, "got hidden_size for a variant of 'gated-delta-net'"),
    ({"models": ("deltanet",)}, "did you mean 'delta-net'"),
    ({"models": ("mac:architecture=lmm",)}, "'architecture', which a variant of 'mac' cannot change"),
    ({"models": ("mac:chunk_size=many",)}, "got chunk_size='many'; expected int"),
    ({"models": ("mac:momentum=1",)}, "got momentum=1; expected bool"),
    ({"models": ("mac:forget_to=nothing",)}, "forget_to='nothing'"),
    ({"models": ("mac:chunk_size=4,chunk_size=8",)}, "every setting once"),
    ({"models": ("mac:chunk_size",)}, "expected mac:SETTING=VALUE"),
    ({"models": ("llama:chunk_size=4",)}, "'llama:chunk_size=4', which has no settings to vary"),
    ({"models": ("macc:chunk_size=4",)}, "did you mean 'mac'"),
    ({"models": ("mac:layer_types=[lmm,mac]",)}, r"layer_types for a variant of 'mac'; expected hybrid:layer_types=\["),
    ({"models": ("hybrid:layer_types=[lmm,slidng]",)}, "layer_types='slidng'; did you mean 'sliding'"),
    ({"models": ("hybrid:layer_types=[lmm,]",)}, "got layer_types=''"),
    ({"models": ("hybrid:layer_types=[lmm,mac",)}, "expected hybrid:SETTING=VALUE"),
    ({"models": ("hybrid:layer_types=[]",)}, "layer_types of 0 blocks and num_hidden_layers=1"),
    ({"models": ("hybrid",)}, "architecture='hybrid' and num_hidden_layers=1"),
]


@pytest.mark.parametrize(("change", "said"), MISTAKES)
def test_mistakes_are_told_before_anything_is_trained(texts: Path, tmp_path: Path, change: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_compare(small(texts, tmp_path / "out", **change), lambda _: None)
    assert not (tmp_path / "out").exists()


def test_variants_of_one_model(texts: Path, tmp_path: Path) -> None:
    """A variant differs in what its name says and in nothing else; a single learning rate is not tried first."""
    names = ("mac", "mac:forget_to=zero,chunk_size=4,theta_bound=0.5", "mac:stateful=true", "attention:conv_size=2")
    settings = small(texts, tmp_path / "out", models=names, seeds=(3,), rates=(2e-3,))
    plain, changed, stateful, attention = (language_settings(settings, name, 9_000) for name in names)
    model = dataclasses.replace(plain.model, forget_to="zero", chunk_size=4, theta_bound=0.5)
    assert changed == dataclasses.replace(plain, model=model)
    assert stateful == dataclasses.replace(plain, stateful=True)
    assert (attention.model.attention_conv_size, attention.model.conv_size) == (4, 2), "it is told to change no other"
    result = run_compare(settings, lambda _: None)
    assert not (tmp_path / "out" / "trials").exists()
    assert {one["rate"] for one in result["contenders"]} == {2e-3}
    scores = [one["test_bits_per_byte"]["mean"] for one in result["contenders"]]
    assert len(set(scores)) == 4
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "compare-settings.json").write_text(json.dumps(result))
    render_results(tmp_path / "results", tmp_path / "results.md")
    page = (tmp_path / "results" / "language.md").read_text()
    assert "## Settings of models of equal size on the same text" in page
    assert "**A pilot of one seed**" in page
    ranked = sorted(result["contenders"], key=lambda one: one["test_bits_per_byte"]["mean"])
    places = [page.index(f"| {one['test_bits_per_byte']['mean']:.4f} |") for one in ranked]
    assert places == sorted(places)
    assert "| **MAC, forget to zero, chunk size 4, theta bound 0.5** |" in page
    assert "; learning rate 0.002, 1 seed." in page


def test_a_stack_of_blocks_is_a_contender(texts: Path, tmp_path: Path) -> None:
    """By its list; attention gets the convolution that the memory has (D21, D42)."""
    deep = "num_hidden_layers=3"
    listed, quoted = f"hybrid:layer_types=[mac, attention],{deep}", f"hybrid:{deep},layer_types=['mac',\"attention\"]"
    kinds = {
        f"hybrid:{deep}": (("sliding", "lmm", "sliding"), 4),
        f"hybrid:{deep},attention_conv_size=2": (("sliding", "lmm", "sliding"), 2),
        listed: (("mac", "attention", "mac"), 4),
        quoted: (("mac", "attention", "mac"), 4),
        f"hybrid:layer_types=[mag,lmm],{deep}": (("mag", "lmm", "mag"), 4),
    }
    base = small(texts, tmp_path / "out")
    for name, (blocks, kernel) in kinds.items():
        found = language_settings(base, name, 20_000)
        assert (found.model.blocks, found.model.attention_conv_size) == (blocks, kernel)
    shared = dataclasses.replace(base.train.model, layer_types=("lmm", "segment"), num_hidden_layers=2)
    shared = dataclasses.replace(base, train=dataclasses.replace(base.train, model=shared))
    assert language_settings(shared, "hybrid", 20_000).model.blocks == ("lmm", "segment")
    assert language_settings(shared, "mal", 20_000).model.blocks == ("mal", "mal")
    settings = small(texts, tmp_path / "out", models=(listed,), seeds=(0,), rates=(1e-3,))
    result = run_compare(settings, lambda _: None)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "compare-settings.json").write_text(json.dumps(result))
    render_results(tmp_path / "results", tmp_path / "results.md")
    page = (tmp_path / "results" / "language.md").read_text()
    assert "| **hybrid, layer types [mac,  attention], num hidden layers 3** |" in page


def test_a_size_can_be_asked_for(texts: Path, tmp_path: Path) -> None:
    base = small(texts, tmp_path)
    settings = dataclasses.replace(base, train=dataclasses.replace(base.train, parameters=30_000))
    assert language_settings(settings, "llama", 30_000).parameters == 30_000
    assert language_settings(settings, "llama", 30_000).baseline == "llama"
    assert language_settings(settings, "mal", 30_000).model.architecture == "mal"


def test_a_run_that_was_begun_otherwise_is_not_gone_on_with(texts: Path, tmp_path: Path) -> None:
    """A folder with a run that is not done says how it was begun, and that counts."""
    settings = small(texts, tmp_path / "out", models=("mac",), seeds=(0,))
    job = finals(settings, 20_000, {"mac": 1e-3})[0]
    RunFolder.create(job.folder, plain_settings(job.settings))
    other = finals(settings, 20_000, {"mac": 1e-2})[0]
    with pytest.raises(ValueError, match="mac-seed0 holds a run of other settings"):
        run_job(other)
    assert run_job(job)["steps"] == 6


def test_a_learning_rate_that_diverges_is_not_chosen(texts: Path, tmp_path: Path) -> None:
    said: list[str] = []
    settings = small(texts, tmp_path / "out", models=("llama",), seeds=(0,), rates=(1e-3, 1e30))
    settings = dataclasses.replace(
        settings, tune_steps=8, train=dataclasses.replace(settings.train, max_skipped=2, clip=0.0)
    )
    for _ in range(2):  # and what is read from its file again is the same
        result = run_compare(settings, said.append)
        assert result["contenders"][0]["rate"] == 1e-3
        assert result["contenders"][0]["tuning"][1]["held_out_bits_per_byte"] is None
    assert any("1e+30: 2 steps in a row" in line for line in said)
    with pytest.raises(ValueError, match="llama diverged with every learning rate"):
        run_compare(dataclasses.replace(settings, rates=(1e30, 1e31), out=tmp_path / "other"), said.append)


def test_models_of_ones_own_do_not_share_a_folder(tmp_path: Path) -> None:
    names = [str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "a" / "config.json"), f"{tmp_path / 'a'}/"]
    folders = [folder_name(name) for name in names]
    assert folders[0] == folders[3]
    assert len(set(folders)) == 3
    assert all(folder.startswith(("a-", "b-")) for folder in folders)
    assert folder_name(str(tmp_path / "llama-3.2")).startswith("llama-3.2-")
    assert folder_name("mac") == "mac"
    assert folder_name("mac:chunk_size=4,forget_to=zero") == "mac-chunk_size=4,forget_to=zero"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lr": 1e-2}, "got lr=0.01, which every run has its own of; expected --rates 0.01"),
        ({"seed": 5}, "got seed=5, which every run has its own of; expected --seeds 5"),
        ({"baseline": "llama"}, "expected --models llama"),
        ({"out": Path("a")}, "expected --out a"),
        ({"data": "a"}, "expected DATA: a"),
    ],
)
def test_settings_of_training_that_runs_have_of_their_own_are_refused(
    texts: Path, tmp_path: Path, change: dict, said: str
) -> None:
    base = small(texts, tmp_path)
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(base, train=dataclasses.replace(base.train, **change))


@pytest.mark.parametrize("most", range(1, 12))
def test_a_text_is_cut_between_characters(tmp_path: Path, most: int) -> None:
    (tmp_path / "a.txt").write_text("aéb記c")
    whole = "aéb記c".encode()
    (found,), count = read_texts(tmp_path / "a.txt", byte_tokenizer(), most)
    assert count <= most
    assert (found[0], bytes(found[1:].tolist())) == (BOS, whole[:count])
    whole[:count].decode()
