"""Decoding through a compiled graph: the same numbers, one graph for all places in the text, and its limits.

Run by test_compiled.py in a process without the checks of conftest.py, which torch.compile cannot trace through.
"""

import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config

from model_cases import BOUNDED, SHARED, small_backbone
from titans_lm.backbone import Backbone, reads_embeddings
from titans_lm.cli import main
from titans_lm.layers import Diagnostics

CONVOLVED = {name: {"attention_conv_size": 3} for name in ("mac", "mag", "mal")}
"""Without that convolution, mag and mal are blocks of a mixed stack here, and mac is decoded by inductor."""
DECODED = [(name, CONVOLVED.get(name, {})) for name in (*BOUNDED, *SHARED)]


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def decode(backbone: torch.nn.Module, x: torch.Tensor, first: int) -> list[torch.Tensor]:
    """Read `first` tokens at once and the others one by one."""
    with torch.no_grad():
        y, state = backbone(x[:, :first])
        outputs = [y[:, -1:]]
        for t in range(first, x.shape[1]):
            y, state = backbone(x[:, t : t + 1], state)
            outputs.append(y)
    return outputs


def kinds_of_block(backbone: Backbone) -> int:
    """How many there are in a stack, whose first block reads no embeddings."""
    c = backbone.config
    return len({(name, reads_embeddings(c, place)) for place, name in enumerate(c.blocks)})


@pytest.mark.parametrize(("architecture", "settings"), DECODED, ids=str)
def test_compiled_decoding_is_decoding(architecture: str, settings: dict[str, Any]) -> None:
    """Across the borders of chunks, segments and windows, with one graph for each kind of block.

    The backend runs the traced graph as it is: tracing is what this package can get wrong.
    """
    backbone = small_backbone(architecture, **settings).eval()
    x = torch.randn(2, 40, backbone.config.hidden_size, dtype=backbone.norm.weight.dtype)
    expected = decode(backbone, x, 3)
    backbone.compile_decoding("eager")
    for got, by_calls in zip(decode(backbone, x, 3), expected, strict=True):
        torch.testing.assert_close(got, by_calls, rtol=1e-12, atol=1e-12)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == kinds_of_block(backbone)


@pytest.mark.parametrize(("architecture", "sizes"), [("sliding", range(1, 12)), ("lmm", (1, 3))], ids=str)
def test_as_many_batch_sizes_are_compiled_as_come(architecture: str, sizes: Sequence[int]) -> None:
    """torch gives up after eight graphs of a function unless it is told otherwise; all blocks run through one.

    A graph of a memory takes a second to trace and one of a window a quarter: that one is asked about many sizes.
    """
    backbone = small_backbone(architecture, num_hidden_layers=1).eval()
    backbone.compile_decoding("eager")
    for rows in sizes:
        x = torch.randn(rows, 3, backbone.config.hidden_size, dtype=backbone.norm.weight.dtype)
        with torch.no_grad():
            expected = backbone(x)[0][:, -1:]
        torch.testing.assert_close(decode(backbone, x, 1)[-1], expected, rtol=1e-9, atol=1e-9)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(sizes)


def test_only_single_tokens_without_gradients_are_compiled() -> None:
    backbone = small_backbone("lmm").eval()
    backbone.compile_decoding("eager")
    x = torch.randn(1, 1, backbone.config.hidden_size, dtype=backbone.norm.weight.dtype)
    _, state = backbone(x)
    y, _ = backbone(x, state)
    assert y.requires_grad
    with torch.no_grad():
        backbone(x, state, diagnostics=Diagnostics(surprise=True))
        backbone(x.expand(-1, 3, -1), state)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0


def test_a_compiled_model_can_be_pickled() -> None:
    backbone = small_backbone("sliding", num_hidden_layers=1).eval()
    x = torch.randn(1, 3, backbone.config.hidden_size, dtype=backbone.norm.weight.dtype)
    backbone.compile_decoding("eager")
    expected = decode(backbone, x, 1)[-1]
    loaded = pickle.loads(pickle.dumps(backbone))
    torch.testing.assert_close(decode(loaded, x, 1)[-1], expected)
    assert loaded._compiled == "eager"


def test_full_attention_is_not_compiled() -> None:
    with pytest.raises(ValueError, match="keys and values grow with every token"):
        small_backbone("attention").compile_decoding()


def test_generate_writes_the_same_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_decoding = Backbone.compile_decoding
    monkeypatch.setattr(Backbone, "compile_decoding", lambda backbone, *_: compile_decoding(backbone, "eager"))
    (tmp_path / "text").write_text("nothing is lost\n" * 40)
    sizes = ["--model.architecture", "lmm", "--model.hidden-size", "16", "--model.num-hidden-layers", "1"]
    few = ["--steps", "1", "--warmup-steps", "0", "--seq-len", "32", "--batch-size", "2", "--quiet"]
    run = str(tmp_path / "run")
    main(["train", str(tmp_path / "text"), "--out", run, *sizes, "--model.num-attention-heads", "2", *few])
    capsys.readouterr()
    command = ["generate", run, "--prompt", "nothing", "--max-new-tokens", "12", "--temperature", "0"]
    main(command)
    plain = capsys.readouterr().out
    main([*command, "--compile"])
    assert capsys.readouterr().out == plain
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="no-such-compiler"):
        small_backbone("lmm").compile_decoding()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own, while it compiles
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@inductor_config.patch("cpp.simdlen", 1)  # which instructions there are takes many seconds to find out
def test_inductor_gives_the_same_numbers() -> None:
    backbone = small_backbone("mac").eval()
    x = torch.randn(1, 12, backbone.config.hidden_size, dtype=backbone.norm.weight.dtype)
    expected = decode(backbone, x, 3)
    backbone.compile_decoding()
    for got, by_calls in zip(decode(backbone, x, 3), expected, strict=True):
        torch.testing.assert_close(got, by_calls, rtol=1e-9, atol=1e-9)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == kinds_of_block(backbone)
