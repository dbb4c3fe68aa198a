"""Memories of documents, conversations that start from them, and the store that keeps both."""

import os
from pathlib import Path

import httpx
import pytest

from serve.serve_cases import Expected, complete, plain_model, serving, small_engine, text_of
from streaming.stream_cases import reading_model
from titans_lm.data.tokenizer import byte_tokenizer
from titans_lm.serve.schema import ClientError
from titans_lm.serve.store import Entry, Store
from titans_lm.streaming import Memory, Reader
from titans_lm.streaming.file import open_memory
from titans_lm.surprise import measure_surprise

BOOK = "It was the best of memories, it was the worst of memories. " * 5
TRICKS = (
    "../../etc/passwd",
    "..%2F..%2Fx",
    "a/b",
    "/",
    ".",
    "..",
    "nul\x00l",
    "%00",
    "C:\\x",
    "\u202e",
    "~",
    "a" * 200,
)


def book_memory(model: object) -> Memory:
    reader = Reader(model, byte_tokenizer())
    reader.read(BOOK)
    return reader.memory


def test_a_document_becomes_a_memory_that_conversations_start_from(tmp_path: Path) -> None:
    engine = small_engine(tmp_path)
    with serving(engine) as client:
        made = client.post("/v1/memories", json={"text": BOOK, "name": "book", "source": "two.txt"}).json()
        assert made["id"] == "book"
        assert made["tokens"] == len(BOOK) + 1
        assert made["sources"] == [{"name": "two.txt", "tokens": len(BOOK)}]
        for name in ("one", "two"):
            answer = complete(client, " Then", 8, conversation=name, memory="book")
            assert text_of(answer) == Expected(engine.model, book_memory(engine.model)).says(" Then", 8)
        alone = complete(client, " Then", 8, memory="book")
        assert text_of(alone) == text_of(answer)
        assert client.get("/v1/conversations/one").json()["memory"] == "book"
        more = client.post("/v1/memories", json={"text": "More.", "onto": "book"}).json()
        assert more["tokens"] == made["tokens"] + 1 + 1 + 5  # <eos>, <bos>
        assert more["id"].startswith("mem-")
        assert {entry["id"] for entry in client.get("/v1/memories").json()["data"]} == {"book", more["id"]}
        again = client.post("/v1/memories", json={"text": "x", "name": "book"})
        assert again.status_code == 409
        other = client.post("/v1/completions", json={"prompt": "x", "conversation": "one", "memory": more["id"]})
        assert other.status_code == 400
        assert "begun from 'book'" in other.json()["error"]["message"]
        assert client.delete("/v1/memories/book").json()["deleted"] is True
        assert client.get("/v1/memories/book").status_code == client.delete("/v1/memories/book").status_code == 404
        assert client.post("/v1/completions", json={"prompt": "x", "memory": "book"}).status_code == 404
        assert text_of(complete(client, "on", 4, conversation="one"))  # what began from it goes on without it
        for address, said in (("completions", {"prompt": "on"}), ("surprise", {"text": "on"})):  # and may name it still
            asked = {**said, "conversation": "two", "memory": "book"}
            assert client.post(f"/v1/{address}", json=asked).status_code == 200, address


def test_a_look_at_surprise_changes_nothing(tmp_path: Path) -> None:
    engine = small_engine(tmp_path)
    with serving(engine) as client:
        client.post("/v1/memories", json={"text": BOOK, "name": "book"})
        text = "worst of é\x00"
        found = client.post("/v1/surprise", json={"text": text, "memory": "book"}).json()["pieces"]
        assert [piece["text"] for piece in found] == [*"worst of é", "\\x00"]
        direct = measure_surprise(engine.model, list(text.encode()), memory=book_memory(engine.model))
        assert found[0]["surprise"] == pytest.approx(direct.summary()[0], abs=1e-3)
        assert found[1]["bits"] == pytest.approx(direct.bits[1], abs=1e-3)
        complete(client, BOOK, 2, conversation="c")
        before = client.get("/v1/conversations/c").json()
        client.post("/v1/surprise", json={"text": "hello", "conversation": "c"})
        assert client.get("/v1/conversations/c").json() == before
        other = client.post("/v1/surprise", json={"text": "hello", "conversation": "c", "memory": "nope"})
        assert (other.status_code, "begun from nothing" in other.json()["error"]["message"]) == (400, True)
        alone = client.post("/v1/surprise", json={"text": "xy"}).json()["pieces"]
        marked = measure_surprise(engine.model, [byte_tokenizer().bos_token_id, *b"xy"])
        assert [piece["bits"] for piece in alone] == pytest.approx(marked.bits[1:], abs=1e-3), (
            "as a completion reads it"
        )
        complete(client, "so", 2, conversation="open")
        going_on = client.post("/v1/surprise", json={"text": "xy", "conversation": "open"}).json()["pieces"]
        entry = engine.store.get("conversation", "open")
        assert entry is not None
        unmarked = measure_surprise(engine.model, list(b"xy"), memory=entry.memory)
        assert [piece["bits"] for piece in going_on] == pytest.approx(unmarked.bits, abs=1e-3), "it is in a document"
        assert client.post("/v1/surprise", json={"text": "x", "conversation": "open"}).status_code == 400


def test_all_tokens_that_are_read_are_counted(tmp_path: Path) -> None:
    with serving(small_engine(tmp_path)) as client:
        client.post("/v1/memories", json={"text": "12345", "name": "book"})
        client.post("/v1/surprise", json={"text": "6789"})
        complete(client, "0", 2, memory="book")
        assert 'titans_tokens_total{kind="prompt"} 12' in client.get("/metrics").text  # two of them <bos>


def test_everything_is_there_after_a_restart_and_little_of_it_in_memory(tmp_path: Path) -> None:
    model = plain_model()
    engine, expected = small_engine(tmp_path, model, in_memory=2), {}
    with serving(engine) as client:
        for name in "abcde":
            expected[name] = Expected(model)
            assert text_of(complete(client, name, 5, conversation=name)) == expected[name].says(name, 5)
            assert client.get("/health").json()["in_memory"] <= 2
    engine = small_engine(tmp_path, model, in_memory=2)
    with serving(engine) as client:
        assert client.get("/health").json() == {"status": "ok", "active": 0, "stored": 5, "in_memory": 0}
        for name in "abcdeab":
            assert text_of(complete(client, "+", 5, conversation=name)) == expected[name].says("+", 5)
        assert client.get("/health").json()["in_memory"] == 2


@pytest.mark.parametrize("name", TRICKS)
def test_no_name_reaches_the_file_system(tmp_path: Path, name: str) -> None:
    model = reading_model("lmm")
    store = Store(tmp_path / "store", model, in_memory=1, most=5)
    reader = Reader(model, byte_tokenizer())
    reader.read("x")
    for kind in ("conversation", "memory"):
        path = store.path(kind, name)
        assert path.parent == store.folder
        assert path.name.removesuffix(".memory").isalnum()
        store.put(Entry(kind, name, reader.memory))
        assert store.describe(kind, name)["id"] == name
    assert {path.parent for path in tmp_path.rglob("*.memory")} == {store.folder}
    assert store.delete("memory", name)
    assert store.get("memory", name) is None
    assert store.get("conversation", name) is not None
    store.close()


def test_tricks_in_addresses_are_names_like_others(tmp_path: Path) -> None:
    (tmp_path / "secret.memory").write_text("x")
    with serving(small_engine(tmp_path / "store")) as client:
        for path in ("../../secret", "..%2f..%2fsecret", "%2e%2e/secret.memory", "/etc/passwd", "%00"):
            for method in ("GET", "DELETE"):
                response = client.request(method, httpx.URL(f"{client.base_url}/v1/memories/{path}"))
                assert response.status_code == 404, (method, path, response.text)
        assert client.get("/page/../app.py").status_code == client.get("/app.py").status_code == 404
        assert client.get("/health").json()["status"] == "ok"
    assert (tmp_path / "secret.memory").exists()


def test_the_store_is_not_shared_and_not_overfilled(tmp_path: Path) -> None:
    model = reading_model("lmm")
    store = Store(tmp_path, model, in_memory=1, most=2)
    with pytest.raises(ValueError, match="another server has open"):
        Store(tmp_path, model, in_memory=1, most=2)
    reader = Reader(model, byte_tokenizer())
    reader.read("x")
    for name in ("a", "b", "b"):
        store.put(Entry("memory", name, reader.memory))
    with pytest.raises(ClientError, match="takes no more"):
        store.put(Entry("memory", "c", reader.memory))
    store.put(Entry("conversation", "c", reader.memory))
    assert store.counts() == {"stored": 3, "in_memory": 1}
    store.close()


def test_a_place_in_the_store_is_kept_until_the_memory_is_written(tmp_path: Path) -> None:
    model = reading_model("lmm")
    store, memory = Store(tmp_path, model, in_memory=1, most=1), Reader(model, byte_tokenizer()).memory
    store.check_room("memory", "a", reserve=True)
    with pytest.raises(ClientError, match="takes no more"):
        store.check_room("memory", "b")
    store.check_room("memory", "a")
    store.check_room("conversation", "b")
    store.put(Entry("memory", "a", memory))
    store.delete("memory", "a")
    store.put(Entry("memory", "b", memory))
    store.close()


def test_the_memory_that_was_used_longest_ago_leaves_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = reading_model("lmm")
    store, memory = Store(tmp_path, model, in_memory=2, most=3), Reader(model, byte_tokenizer()).memory
    for name in "ab":
        store.put(Entry("memory", name, memory))
    store.get("memory", "a")
    store.put(Entry("memory", "c", memory))
    read: list[Path] = []

    def noted(path: Path, model: object) -> object:
        read.append(path)
        return open_memory(path, model)

    monkeypatch.setattr("titans_lm.serve.store.open_memory", noted)
    for name in "acb":
        store.get("memory", name)
    assert read == [store.path("memory", "b")]
    store.close()


def test_what_was_written_last_is_listed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, now = plain_model("lmm"), [0.0]
    monkeypatch.setattr("titans_lm.serve.store.time.time", lambda: now[0])
    store, memory = Store(tmp_path, model, in_memory=1, most=9), Reader(model, byte_tokenizer()).memory
    for now[0], name in ((1.0, "a"), (2.0, "c"), (2.0, "b"), (3.0, "a"), (2.0, "d")):
        store.put(Entry("memory", name, memory))
    assert [entry["id"] for entry in store.entries("memory")] == ["a", "b", "c", "d"]
    store.close()


def test_what_was_read_from_disk_is_not_kept_over_what_was_written_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at a conversation waits for nobody; while it reads the file, a turn may write a new one, or delete it."""
    model = plain_model("lmm")
    store = Store(tmp_path, model, in_memory=1, most=9)
    reader, opened = Reader(model, byte_tokenizer()), open_memory

    def put(name: str) -> int:
        reader.read("more", new_document=False)
        store.put(Entry("conversation", name, reader.memory))
        return reader.tokens

    put("c"), put("other")

    def slowly(path: Path, model: object) -> object:
        found = opened(path, model)
        monkeypatch.setattr("titans_lm.serve.store.open_memory", opened)
        put("c"), put("other")
        return found

    monkeypatch.setattr("titans_lm.serve.store.open_memory", slowly)
    entry = store.get("conversation", "c")
    assert entry is not None
    assert entry.memory.tokens[0] == store.describe("conversation", "c")["tokens"] == reader.tokens - 4

    def gone(path: Path, model: object) -> object:
        store.delete("conversation", "other")
        return opened(path, model)

    put("c")
    monkeypatch.setattr("titans_lm.serve.store.open_memory", gone)
    assert store.get("conversation", "other") is None
    store.close()


def test_a_file_that_is_damaged_is_refused_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = reading_model("lmm")
    store = Store(tmp_path, model, in_memory=1, most=9)
    reader = Reader(model, byte_tokenizer())
    reader.read("x")
    for name in ("whole", "cut", "changed"):
        store.put(Entry("memory", name, reader.memory))
    paths = {name: store.path("memory", name) for name in ("whole", "cut", "changed")}
    os.truncate(paths["cut"], 100)
    data = bytearray(paths["changed"].read_bytes())
    data[-5] ^= 1
    paths["changed"].write_bytes(data)
    (store.folder / ".unfinished-x").write_text("left by a kill")
    store.close()
    kept = {name: paths[name].read_bytes() for name in ("cut", "changed")}
    store = Store(tmp_path, model, in_memory=1, most=9)
    assert {entry["id"] for entry in store.entries("memory")} == {"whole", "changed"}
    assert "cannot be used" in caplog.text
    assert not (store.folder / ".unfinished-x").exists()
    for name in ("cut", "changed"):
        for _ in range(2):
            with pytest.raises(ClientError, match=f"'{name}' is kept in a file that cannot be read") as refused:
                store.get("memory", name)
            assert refused.value.status == 409
        with pytest.raises(ClientError, match="cannot be read"):
            store.put(Entry("memory", name, reader.memory))
        assert paths[name].read_bytes() == kept[name], "it is never written over"
        assert store.delete("memory", name)
        assert not paths[name].exists()
        assert store.get("memory", name) is None
        store.put(Entry("memory", name, reader.memory))
    assert store.get("memory", "whole") is not None
    store.close()


def test_a_damaged_conversation_does_not_begin_anew(tmp_path: Path) -> None:
    model = plain_model()
    with serving(small_engine(tmp_path, model)) as client:
        complete(client, "remember", 4, conversation="ann")
    (path,) = tmp_path.rglob("*.memory")
    os.truncate(path, 100)
    with serving(small_engine(tmp_path, model)) as client:
        refused = client.post("/v1/completions", json={"prompt": "x", "conversation": "ann"})
        assert refused.status_code == client.get("/v1/conversations/ann").status_code == 409
        assert "'ann'" in refused.json()["error"]["message"]
        assert path.stat().st_size == 100
        assert client.delete("/v1/conversations/ann").status_code == 200
        complete(client, "anew", 4, conversation="ann")


def test_a_file_that_cannot_be_opened_just_now_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reading_model("lmm")
    store = Store(tmp_path, model, in_memory=1, most=9)
    reader = Reader(model, byte_tokenizer())
    reader.read("x")
    for name in "ab":
        store.put(Entry("memory", name, reader.memory))

    def full(*_: object) -> bytes:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as now:
        now.setattr(Path, "read_bytes", full)
        with pytest.raises(OSError, match="Too many open files"):
            store.get("memory", "a")
    assert store.get("memory", "a") is not None
    store.close()


def test_what_was_deleted_stays_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is on the disk before anybody is told: after a power cut the file would be back."""
    model = reading_model("lmm")
    store = Store(tmp_path, model, in_memory=1, most=9)
    reader = Reader(model, byte_tokenizer())
    reader.read("x")
    store.put(Entry("memory", "a", reader.memory))
    synced = []
    monkeypatch.setattr("titans_lm.train.files.sync", synced.append)
    assert store.delete("memory", "a")
    assert synced == [store.folder]
    store.close()


def test_only_who_runs_the_server_can_read_its_memories(tmp_path: Path) -> None:
    model = reading_model("lmm")
    store = Store(tmp_path, model, in_memory=1, most=9)
    reader = Reader(model, byte_tokenizer())
    reader.read("x")
    store.put(Entry("memory", "a", reader.memory))
    assert store.path("memory", "a").stat().st_mode & 0o077 == 0
    store.close()


def test_memories_of_another_model_stay_where_they_are(tmp_path: Path) -> None:
    for seed, count in ((0, 1), (1, 1), (0, 1)):
        model = reading_model("lmm")
        with_bias = next(model.parameters())
        with_bias.data += seed
        store = Store(tmp_path, model, in_memory=1, most=9)
        reader = Reader(model, byte_tokenizer())
        reader.read("x")
        store.put(Entry("memory", "same name", reader.memory))
        assert store.counts()["stored"] == count
        store.close()
    assert len(list(tmp_path.rglob("*.memory"))) == 2
