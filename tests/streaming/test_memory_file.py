"""A memory file is the memory, to the bit, and nothing else is taken for one."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import disk_offload
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError

from streaming.stream_cases import CONSTANT, assert_same_memory, reading_model, text
from titans_lm.former import LATER
from titans_lm.streaming import Memory, Reader, file, load_memory, save_memory
from titans_lm.streaming.compare import compare_memories, describe_memory, verify_memory
from titans_lm.streaming.file import named_state, read_memory_file
from titans_lm.streaming.memory import with_caching


def read(model: torch.nn.Module, data: bytes) -> Memory:
    reader = Reader(model, piece_len=16)
    reader.read(data, name="a text")
    return reader.memory


@pytest.mark.parametrize("length", [21, 24])
@pytest.mark.parametrize("architecture", CONSTANT)
def test_a_file_is_the_memory(architecture: str, length: int, tmp_path: Path) -> None:
    """Also at the border of a chunk, where M and the anchor are one."""
    model = reading_model(architecture)
    memory = read(model, text(length))
    header = save_memory(memory, tmp_path / "x.memory", model)
    loaded = load_memory(tmp_path / "x.memory", model)
    assert_same_memory(loaded, memory, 0.0)
    assert loaded.sources == memory.sources == header.sources
    a, b = Reader(model, memory=memory), Reader(model, memory=loaded)
    for reader in (a, b):
        reader.read(b"and more", new_document=False)
    assert_same_memory(a.memory, b.memory, 0.0)


def test_what_is_one_tensor_is_written_once(tmp_path: Path) -> None:
    model = reading_model("lmm", num_persistent=0)
    memory = read(model, text(8))  # <bos> and 7 bytes are written: two chunks of 4
    assert memory.state.layers[0].memory.anchor[0] is memory.state.layers[0].memory.M[0]
    header = save_memory(memory, tmp_path / "x.memory", model)
    assert header.shared["state.layers.0.memory.anchor.0"] == "state.layers.0.memory.M.0"
    _, tensors = read_memory_file(tmp_path / "x.memory")
    assert "state.layers.0.memory.anchor.0" not in tensors
    loaded = load_memory(tmp_path / "x.memory", model)
    assert loaded.state.layers[0].memory.anchor[0] is loaded.state.layers[0].memory.M[0]


def test_numbers_that_are_not_finite_are_not_kept(tmp_path: Path) -> None:
    model = reading_model("lmm")
    memory = read(model, text(8))
    memory.state.layers[0].memory.S[0][0, 0, 0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=r"not finite, in state\.layers\.0\.memory\.S\.0; expected that of a model that has"
    ):
        save_memory(memory, tmp_path / "x.memory", model)
    assert not list(tmp_path.iterdir())


def test_sources_and_tensors_are_all_shown(tmp_path: Path) -> None:
    """Whatever the sources are called, and where two tensors are one."""
    model = reading_model("lmm", num_persistent=0)
    reader = Reader(model)
    for name, length in (("a", 3), ("a (2)", 2), ("a", 4), ("a", 5)):
        reader.read(text(length), name=name)
    save_memory(reader.memory, tmp_path / "x.memory", model)
    sources = describe_memory(tmp_path / "x.memory")["sources"]
    assert {name: told["tokens"] for name, told in sources.items()} == {"a": 3, "a (2)": 2, "a (3)": 4, "a (4)": 5}
    save_memory(read(model, text(8)), tmp_path / "y.memory", model)  # at the border of a chunk
    norms = describe_memory(tmp_path / "y.memory")["norms"]
    assert norms["state.layers.0.memory.anchor.0"] == norms["state.layers.0.memory.M.0"] > 0


def test_rows_are_kept_apart(tmp_path: Path) -> None:
    model = reading_model("mac")
    reader = Reader(model, batch_size=2)
    reader.read([text(9), text(30, 1)])
    save_memory(reader.memory, tmp_path / "x.memory", model)
    assert_same_memory(load_memory(tmp_path / "x.memory", model), reader.memory, 0.0)


def test_half_the_size_and_how_much_that_changed(tmp_path: Path) -> None:
    model = reading_model("mac").float()
    memory = read(model, text(21))
    save_memory(memory, tmp_path / "exact.memory", model)
    header = save_memory(memory, tmp_path / "half.memory", model, precision="bfloat16")
    assert 0.0 < max(header.loss.values()) < 2.0**-8
    loaded = load_memory(tmp_path / "half.memory", model)
    expected = dict(named_state(memory.state, "state"))
    for name, x in named_state(loaded.state, "state"):
        assert x.dtype == expected[name].dtype
        rounded = expected[name].bfloat16().to(x.dtype) if x.is_floating_point() else expected[name]
        assert torch.equal(x, rounded), name
    sizes = [
        sum(x.nbytes for x in read_memory_file(tmp_path / name)[1].values()) for name in ("exact.memory", "half.memory")
    ]
    assert sizes[1] < 0.52 * sizes[0]
    loss = describe_memory(tmp_path / "half.memory")["rounding"]
    assert loss == max(header.loss.values())


def test_another_model_is_refused(tmp_path: Path) -> None:
    model = reading_model("mag")
    save_memory(read(model, text(9)), tmp_path / "x.memory", model)
    others = {
        "its settings are others": reading_model("mal"),  # a state of the same shape
        "its weights were in float64, and are in float32 now": reading_model("mag").float(),
        "its weights are others": reading_model("mag"),
    }
    with torch.no_grad():
        others["its weights are others"].lm_head.weight[3, 2] += 1e-6
    for message, other in others.items():
        with pytest.raises(ValueError, match=message):
            load_memory(tmp_path / "x.memory", other)
    load_memory(tmp_path / "x.memory", reading_model("mag", memory_backend="reference"))


def test_a_model_that_learns_is_another_model(tmp_path: Path) -> None:
    """Also where its parameters stay the same tensors."""
    model = reading_model("lmm")
    save_memory(read(model, text(9)), tmp_path / "x.memory", model)
    load_memory(tmp_path / "x.memory", model)
    optimiser = torch.optim.SGD(model.parameters(), 1e-3)
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimiser.step()
    with pytest.raises(ValueError, match="its weights are others"):
        load_memory(tmp_path / "x.memory", model)


def test_weights_that_were_changed_through_data_are_others(tmp_path: Path) -> None:
    """As averaged weights are swapped in, and adapters merged: torch counts no version then."""
    model = reading_model("lmm")
    save_memory(read(model, text(9)), tmp_path / "x.memory", model)
    before = [p.data.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.mul_(1.01)
    with pytest.raises(ValueError, match="its weights are others"):
        load_memory(tmp_path / "x.memory", model)
    for p, old in zip(model.parameters(), before, strict=True):
        p.data.copy_(old)
    load_memory(tmp_path / "x.memory", model)


def test_a_memory_belongs_to_the_caching_that_it_was_made_with(tmp_path: Path) -> None:
    model = reading_model("lmm")
    made = Reader(model, caching={"caching_segment": 4})
    made.read(text(20))
    save_memory(made.memory, tmp_path / "x.memory", made.model)
    load_memory(tmp_path / "x.memory", with_caching(model, caching_segment=4))
    for other in (model, with_caching(model, caching_segment=8), with_caching(model, caching_segment=4, caching_top=2)):
        with pytest.raises(ValueError, match="its settings are others"):
            load_memory(tmp_path / "x.memory", other)


def test_a_memory_is_written_for_the_model_that_has_read_it(tmp_path: Path) -> None:
    """With caching that is the reader's: a file of the other could never be read again."""
    model = reading_model("lmm")
    reader = Reader(model, caching={"caching_segment": 5})
    reader.read(text(12))
    with pytest.raises(ValueError, match=r"not those of this model's state; expected .* such as reader.model"):
        save_memory(reader.memory, tmp_path / "a.memory", model)
    assert not list(tmp_path.iterdir())
    save_memory(reader.memory, tmp_path / "a.memory", reader.model)
    assert_same_memory(load_memory(tmp_path / "a.memory", reader.model), reader.memory)


def test_a_model_of_inference_mode_has_a_fingerprint(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = reading_model("lmm")
        reader = Reader(model)
        reader.read(text(12))
        save_memory(reader.memory, tmp_path / "a.memory", model)
        assert_same_memory(load_memory(tmp_path / "a.memory", model), reader.memory)


@pytest.mark.parametrize("rows", [[], [-1], [2], [0, 2]], ids=str)
def test_rows_that_a_memory_has_not_are_named(rows: list[int]) -> None:
    reader = Reader(reading_model("lmm"), batch_size=2)
    reader.read([text(5), text(6)])
    with pytest.raises(ValueError, match=re.escape(f"got rows {rows} of a memory of 2; expected some of 0 to 1")):
        reader.memory.take(rows)
    other = Reader(reading_model("lmm", hidden_size=16))
    for several in ([], [reader.memory, other.memory]):
        with pytest.raises(ValueError, match="kinds of states; expected one or more, all of one model"):
            Memory.join(several)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_memory_belongs_to_the_adapters_that_it_was_made_with(tmp_path: Path) -> None:
    model = get_peft_model(reading_model("lmm"), LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False))
    base = model.get_base_model()
    memory = read(base, text(9))
    save_memory(memory, tmp_path / "x.memory", base)
    with model.disable_adapter(), pytest.raises(ValueError, match="its settings are others"):
        load_memory(tmp_path / "x.memory", base)
    assert_same_memory(load_memory(tmp_path / "x.memory", base), memory)
    for layer in base.modules():
        if hasattr(layer, "scaling"):
            layer.scaling["default"] *= 2
    with pytest.raises(ValueError, match="its settings are others"):
        load_memory(tmp_path / "x.memory", base)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["down_proj"], lora_alpha=2, init_lora_weights=False))
    save_memory(read(base, text(9)), tmp_path / "y.memory", base)
    model.set_adapter("other")
    with pytest.raises(ValueError, match="its settings are others"):
        load_memory(tmp_path / "y.memory", base)


def test_weights_may_stay_on_disk(tmp_path: Path) -> None:
    model = reading_model("mac")
    memory = read(model, text(9))
    save_memory(memory, tmp_path / "x.memory", model)
    disk_offload(model, tmp_path / "weights", execution_device=torch.device("cpu"))
    assert_same_memory(load_memory(tmp_path / "x.memory", model), memory)
    assert_same_memory(read(model, text(9)), memory)


def test_what_is_damaged_is_refused(tmp_path: Path) -> None:
    model, path, bad = reading_model("lmm"), tmp_path / "x.memory", tmp_path / "bad.memory"
    save_memory(read(model, text(30)), path, model)
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header_end = 8 + length
    for at in (header_end, (header_end + len(whole)) // 2, len(whole) - 1):
        bad.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            load_memory(bad, model)
    for cut in (0, 5, 8, header_end - 3, header_end, len(whole) - 1):
        bad.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="damaged or not whole"):
            load_memory(bad, model)
    for old, new in ((b"a text", b"b text"), (b'\\"tokens\\": [31]', b'\\"tokens\\": [32]')):
        assert old in whole
        bad.write_bytes(whole.replace(old, new))
        with pytest.raises(ValueError, match="damaged"):
            verify_memory(bad)


def test_a_file_that_is_replaced_while_it_is_read_is_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process saves to the path after it has been opened."""
    model, path = reading_model("lmm"), tmp_path / "x.memory"
    old, new = read(model, text(30)), read(model, text(12))
    save_memory(old, path, model, notes={"long": "x" * 10_000})

    def replacing(function: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            save_memory(new, path, model)
            return function(*given, **more)

        return call

    monkeypatch.setattr("torch.UntypedStorage.from_file", replacing(torch.UntypedStorage.from_file))
    monkeypatch.setattr("titans_lm.streaming.file._metadata", replacing(file._metadata))
    assert_same_memory(load_memory(path, model), old, 0.0)
    assert_same_memory(load_memory(path, model), new, 0.0)


def test_other_files_and_newer_formats_are_refused(tmp_path: Path) -> None:
    model, path = reading_model("lmm"), tmp_path / "x.memory"
    save_memory(read(model, text(9)), path, model)
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])

    def rewritten(**changes: str) -> Path:
        changed = {**header, "__metadata__": {**header["__metadata__"], **changes}}
        data = json.dumps(changed).encode()
        (tmp_path / "other").write_bytes(struct.pack("<Q", len(data)) + data + whole[8 + length :])
        return tmp_path / "other"

    with pytest.raises(ValueError, match="in format 2; this version of titans-lm reads format 1"):
        load_memory(rewritten(version="2"), model)
    with pytest.raises(ValueError, match="is no memory file"):
        load_memory(rewritten(format="pt"), model)
    (tmp_path / "book.txt").write_text("Call me Ishmael. Some years ago")
    with pytest.raises(ValueError, match=r"book.txt', which is no memory file; expected one that `titans read`"):
        load_memory(tmp_path / "book.txt", model)
    with pytest.raises(ValueError, match="does not exist"):
        load_memory(tmp_path / "none", model)
    with pytest.raises(ValueError, match="is a folder"):
        load_memory(tmp_path, model)


FORGED: list[tuple[str, Any]] = [
    ("not finite", lambda t, h: t["state.layers.0.memory.M.0"].view(-1)[3].fill_(float("nan"))),
    ("are not those", lambda t, h: t.update({"state.position": t["state.position"].float()})),
    ("are not those", lambda t, h: t.update({"state.layers.0.memory.M.0": t["state.layers.0.memory.M.0"].int()})),
    ("are not those", lambda t, h: t.update({"state.position": t["state.position"].repeat(2)})),
    ("are not those", lambda t, h: t.update({"pending": t["pending"].repeat(2)})),
    ("are not those", lambda t, h: t["pending"].fill_(99_999)),
    ("are not those", lambda t, h: h.update(tokens=[1, 2])),
    ("are not those", lambda t, h: h.update(tokens=["many"])),
    ("are not those", lambda t, h: h.update(sources=[])),
    ("are not those", lambda t, h: h.update(shared={"state.position": "nowhere"})),
    ("are not those", lambda t, h: h.update(shared={"extra": "pending"})),
    ("damaged", lambda t, h: h.update(shared=5)),
    ("damaged", lambda t, h: h.update(sources=[[{}]])),
    ("damaged", lambda t, h: h.pop("tokens")),
]


@pytest.mark.parametrize(("message", "change"), FORGED)
def test_a_file_whose_sums_are_right_and_whose_contents_are_not(tmp_path: Path, message: str, change: Any) -> None:
    model, path = reading_model("lmm"), tmp_path / "x.memory"
    save_memory(read(model, text(30)), path, model)
    _, tensors = read_memory_file(path)
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    metadata = json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"]
    header = json.loads(metadata["header"])
    change(tensors, header)
    metadata["header"] = json.dumps(header)
    metadata["digest"] = file._digest(metadata["header"], tensors)
    path.write_bytes(safetensors.torch.save(tensors, metadata))
    with pytest.raises(ValueError, match=message):
        load_memory(path, model)


def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = reading_model("lmm"), tmp_path / "x.memory"
    memory = read(model, text(9))
    save_memory(memory, path, model)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="No space left"):
        save_memory(read(model, text(12)), path, model)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.memory"]


def test_memories_are_described_and_compared(tmp_path: Path) -> None:
    model = reading_model("lmm")
    for name, data in (("a", text(20)), ("b", text(20, 1)), ("c", text(20))):
        save_memory(read(model, data), tmp_path / name, model)
    found = describe_memory(tmp_path / "a")
    assert (found["tokens"], found["rows"]) == ([21], 1)
    assert (found["sources"]["a text"]["tokens"], found["sources"]["a text"]["complete"]) == (20, True)
    state = dict(named_state(load_memory(tmp_path / "a", model).state, "state"))
    assert found["norms"]["state.layers.0.memory.M.0"] == pytest.approx(
        state["state.layers.0.memory.M.0"].norm().item(), abs=1e-6
    )
    assert compare_memories(tmp_path / "a", tmp_path / "c")["equal"]
    apart = compare_memories(tmp_path / "a", tmp_path / "b")
    assert not apart["equal"]
    assert apart["apart"]["state.layers.0.memory.M.0"] > 0
    fresh = read(model, text(20))
    for _, x in named_state(fresh.state, "state"):
        x.zero_()
    save_memory(fresh, tmp_path / "zero", model)
    ratios = [compare_memories(tmp_path / "zero", tmp_path / name)["apart"] for name in ("a", "zero")]
    assert [one["state.layers.0.memory.M.0"] for one in ratios] == [None, 0.0], "zeros have no share"
    assert verify_memory(tmp_path / "a", model)["checked_with_model"]
    other = reading_model("mac")
    save_memory(read(other, text(9)), tmp_path / "d", other)
    with pytest.raises(ValueError, match="memories of two models"):
        compare_memories(tmp_path / "a", tmp_path / "d")
    with pytest.raises(ValueError, match="of another model"):
        verify_memory(tmp_path / "d", model)


def test_numbers_that_are_not_finite_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file of a version that wrote them."""
    model = reading_model("lmm")
    memory = read(model, text(9))
    memory.state.layers[0].memory.M[0].view(-1)[3] = float("nan")
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "isfinite", lambda x: torch.ones_like(x, dtype=torch.bool))
        save_memory(memory, tmp_path / "x", model)
    with pytest.raises(ValueError, match="not finite"):
        verify_memory(tmp_path / "x")


def test_settings_that_came_later_change_no_fingerprint_at_their_defaults() -> None:
    """Files from before they were there are still of the same model."""
    assert not set(LATER) & file._settings(reading_model("lmm")).keys()
    other = reading_model("lmm", memory_objective="huber", threshold_init=0.4)
    assert file._settings(other)["threshold_init"] == 0.4


@pytest.mark.parametrize("length", [1, 21, 24])
def test_a_file_holds_what_a_window_reaches_back_to(length: int, tmp_path: Path) -> None:
    model = reading_model("mac", omega_window=4)
    memory = read(model, text(length))
    save_memory(memory, tmp_path / "x.memory", model)
    loaded = load_memory(tmp_path / "x.memory", model)
    assert_same_memory(loaded, memory, 0.0)
    assert [name for name, _ in named_state(loaded.state, "state") if ".tail." in name]
    a, b = Reader(model, memory=memory), Reader(model, memory=loaded)
    for reader in (a, b):
        reader.read(b"and more", new_document=False)
    assert_same_memory(a.memory, b.memory, 0.0)


def test_a_memory_of_too_many_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors takes a header of 100 MB."""

    def save(*_: Any) -> bytes:
        raise SafetensorError("Error while serializing: header too large")

    model = reading_model("lmm")
    reader = Reader(model)
    reader.read(text(9))
    monkeypatch.setattr("safetensors.torch.save", save)
    with pytest.raises(ValueError, match="got a memory of 1 sources, too many for a file"):
        save_memory(reader.memory, tmp_path / "memory", model)
    assert not list(tmp_path.iterdir())
