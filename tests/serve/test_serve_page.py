"""The page to chat on, in a real browser: Debian's Chromium, driven by Playwright."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from model_cases import small_config
from retrofit.retrofit_cases import base_of, with_memory
from serve.serve_cases import Expected, complete, plain_model, serving, small_engine, wait_until_active
from titans_lm.data.tasks.vocabulary import word_ids, word_tokenizer
from titans_lm.data.tokenizer import VOCAB_SIZE
from titans_lm.train.fresh import model_for

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
expect = sync_api.expect
expect.set_options(timeout=30_000)  # a machine that has much else to do is slow, and not wrong
pytestmark = pytest.mark.usefixtures("unchecked")
REFUSED = "the server responded with a status of"
"""How Chromium's console tells of a refusal, which the page shows itself."""
ENDLESS = 1_000_000
"""Tokens of an answer that would take an hour."""
HOSTILE = "<img src=x onerror=\"document.title='broken into'\"></script><b>bold</b>"


@pytest.fixture(scope="module")
def model() -> Any:
    return plain_model()


@pytest.fixture
def client(model: Any, tmp_path: Path) -> Iterator[httpx.Client]:
    with serving(small_engine(tmp_path, model, max_new_tokens=ENDLESS, max_body_bytes=20_000)) as client:
        yield client


@pytest.fixture
def page(browser: Any, client: httpx.Client) -> Iterator[Any]:
    """The page, which may say nothing on its console and ask nobody else."""
    page, said = browser.new_page(), []
    page.on("console", lambda message: said.append(message.text) if REFUSED not in message.text else None)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if str(client.base_url) not in request.url
            and not request.url.startswith("data:") else None)  # fmt: skip
    page.goto(str(client.base_url))
    expect(page.locator("#model")).to_have_text("small")
    yield page
    page.close()
    assert said == []


def send(page: Any, text: str) -> str:
    """Send a message and give what the model said."""
    count = page.locator(".message.assistant").count()
    page.fill("#text", text)
    page.press("#text", "Enter")
    expect(page.locator(".message.assistant")).to_have_count(count + 1)
    expect(page.locator("#stop")).to_be_hidden(timeout=30_000)
    return page.locator(".message.assistant .body").last.text_content()


def test_a_chat_goes_on_in_its_memory(page: Any, client: httpx.Client, model: Any) -> None:
    page.fill("#temperature", "0")
    page.fill("#most", "12")
    expected = Expected(model)
    assert send(page, "hello there") == expected.says("user: hello there\nassistant:", 12)
    assert send(page, "and then?") == expected.says("\nuser: and then?\nassistant:", 12)
    (conversation,) = client.get("/v1/conversations").json()["data"]
    assert conversation["tokens"] == expected.memory.tokens[0]
    assert f"{conversation['tokens']:,} tokens" in page.text_content("#size")
    assert page.locator("#conversations li.current").count() == 1
    # what the browser shows of surprise is there for every message, darker where there was more
    spans = page.locator(".message.user").first.locator(".body.heat span")
    assert spans.count() == len("hello there")
    assert "× the median" in spans.first.get_attribute("title")
    assert len({span.get_attribute("class") for span in spans.all()}) > 3


def test_what_is_sent_is_text_and_never_markup(page: Any) -> None:
    page.fill("#most", "3")
    send(page, HOSTILE)
    assert page.locator(".message.user .body").text_content() == HOSTILE
    assert page.locator(".message img, .message b").count() == 0
    assert page.title() == "titans"


def test_a_document_becomes_a_memory_to_start_from(page: Any, client: httpx.Client, tmp_path: Path) -> None:
    book = tmp_path / "book <i>.txt"
    book.write_text("The lighthouse keeper counted every ship. " * 30)
    page.set_input_files("#file", str(book))
    expect(page.locator("#memories li .name")).to_have_count(1)
    (memory,) = client.get("/v1/memories").json()["data"]
    assert (memory["id"], memory["tokens"]) == (book.name, book.stat().st_size + 1)
    expect(page.locator("#talk")).to_contain_text("begins with the memory")
    page.fill("#most", "4")
    send(page, "who counted?")
    (conversation,) = client.get("/v1/conversations").json()["data"]
    assert conversation["memory"] == book.name
    assert conversation["tokens"] > memory["tokens"]
    for answer, left in ((sync_api.Dialog.dismiss, 1), (sync_api.Dialog.accept, 0)):
        asked = []
        page.once("dialog", lambda dialog, answer=answer, asked=asked: (asked.append(dialog.message), answer(dialog)))
        page.locator("#memories button.delete").click()
        expect(page.locator("#memories li:not(.empty)")).to_have_count(left)
        assert asked == [f"Delete {book.name} and its {memory['tokens']:,} tokens? It cannot be brought back."]
    page.on("dialog", sync_api.Dialog.accept)
    expect(page.locator("#memories .empty")).to_have_count(1)
    page.locator("#conversations button.delete").click()
    expect(page.locator("#conversations .empty")).to_have_count(1)
    assert client.get("/health").json()["stored"] == 0


def test_a_conversation_begins_with_its_memory_before_the_list_knows_of_it(
    page: Any, client: httpx.Client, tmp_path: Path
) -> None:
    book, held = tmp_path / "book.txt", []
    book.write_text("The lighthouse keeper counted every ship. " * 30)
    page.set_input_files("#file", str(book))
    expect(page.locator("#memories li .name")).to_have_count(1)
    page.fill("#most", "2")
    send(page, "who counted?")
    expect(page.locator("#conversations li.current")).to_have_count(1)
    page.route("**/v1/conversations", lambda route: held.append(route))
    page.select_option("#start", book.name)
    page.click("#new button")
    send(page, "and what?")
    for route in held:
        route.continue_()
    expect(page.locator("#conversations li:not(.empty)")).to_have_count(2)
    assert [one["memory"] for one in client.get("/v1/conversations").json()["data"]] == [book.name] * 2


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "x.txt: there is no text in it"),
        (b" \n\n", "x.txt: there is no text in it"),
        (bytes(range(256)), "x.txt: this is not UTF-8 text"),
        (b"x" * 20_001, "x.txt: the body is larger than 20,000 bytes"),
    ],
)
def test_what_is_no_document_is_told(
    content: bytes, says: str, page: Any, client: httpx.Client, tmp_path: Path
) -> None:
    """Where the window is narrow too: the answer is scrolled to."""
    page.set_viewport_size({"width": 400, "height": 700})
    file = tmp_path / "x.txt"
    file.write_bytes(content)
    page.set_input_files("#file", str(file))
    expect(page.locator("#error")).to_contain_text(says)
    expect(page.locator("#error")).to_be_in_viewport(ratio=0.95)
    expect(page.locator("#drop-text")).to_contain_text("Drop a text file")
    assert client.get("/v1/memories").json()["data"] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def drop(page: Any, *names: str) -> bool:
    """Drop files beside the field; whether the browser would have opened them in place of the page."""
    return page.evaluate(
        """(names) => { const data = new DataTransfer();
        for (const name of names) data.items.add(new File(["Dropped text. ".repeat(20)], name, { type: "text/plain" }));
        const drop = new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
        return document.getElementById("talk").dispatchEvent(drop); }""",
        list(names),
    )


def test_one_document_is_read_at_a_time(page: Any) -> None:
    assert not drop(page, "a.txt", "b.txt")
    expect(page.locator("#error")).to_contain_text("one document is read at a time")
    hint = page.text_content("#drop-text")
    drop(page, "a.txt")
    drop(page, "b.txt")
    expect(page.locator("#memories li .name")).to_have_count(1)
    expect(page.locator("#drop-text")).to_have_text(hint)


def test_the_keyboard_is_enough(page: Any, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("The keeper counted every ship.")
    page.on("filechooser", lambda _: None)  # Playwright does not wait until choosers are intercepted: ask for it early
    page.focus("#start")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    expect(page.locator("#file")).to_be_focused()
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(str(book))
    expect(page.locator("#text")).to_be_focused()
    page.fill("#most", "3")
    page.focus("#text")
    page.keyboard.type("who?")
    page.keyboard.press("Enter")
    expect(page.locator("#conversations li.current")).to_have_count(1)


def test_words_that_the_model_was_not_taught_are_named(browser: Any, tmp_path: Path) -> None:
    model, the = model_for(small_config("lmm", num_hidden_layers=1), word_tokenizer()), word_ids()[" the"]
    model.lm_head.register_forward_hook(lambda _, __, logits: logits.index_fill(-1, torch.tensor(the), 1e3))
    with serving(small_engine(tmp_path, model, word_tokenizer())) as client:
        page = browser.new_page()
        page.goto(str(client.base_url))
        expect(page.locator("#temperature")).to_have_value("0")
        page.fill("#most", "1")
        assert send(page, "Where is Mary?") == "the"  # as a word and not with the space before it
        assert page.locator(".message.assistant .legend").count() == 0
        send(page, "Where is the Zyzzyva of Mary?")
        expect(page.locator(".message.assistant .legend")).to_contain_text("was not taught the words Zyzzyva")
        page.close()
        ask = {"messages": [{"role": "user", "content": "Where is Zyzzyva?"}], "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=ask).json()["split_words"] == ["Zyzzyva"]


def test_a_lost_connection_is_told_and_the_message_is_kept(browser: Any, model: Any, tmp_path: Path) -> None:
    page = browser.new_page()
    with serving(small_engine(tmp_path, model)) as client:
        page.goto(str(client.base_url))
        expect(page.locator("#model")).to_have_text("small")
    page.fill("#text", "are you there?")
    page.press("#text", "Enter")
    expect(page.locator("#error")).to_contain_text("the server cannot be reached")
    expect(page.locator(".message .legend").last).to_contain_text("not remembered")
    expect(page.locator("#text")).to_have_value("are you there?")
    page.close()


def test_dropping_a_file_and_stopping_an_answer(page: Any, client: httpx.Client) -> None:
    assert not drop(page, "dropped.txt")
    expect(page.locator("#memories li .name")).to_have_count(1)
    page.fill("#most", str(ENDLESS))
    page.fill("#temperature", "0")  # a drawn token would end the answer when it is the end mark, one time in 300
    page.fill("#text", "write for ever")
    page.press("#text", "Enter")
    expect(page.locator(".message.assistant .body")).to_have_text(re.compile(".{5}"))
    page.click("#stop")
    expect(page.locator("#stop")).to_be_hidden()
    wait_until_active(client, 0)
    assert client.get("/v1/conversations").json()["data"] == []  # a turn that was broken off is not kept
    expect(page.locator(".message.assistant .legend")).to_contain_text("not remembered")


def test_errors_are_shown(page: Any, client: httpx.Client) -> None:
    for i in range(20):
        complete(client, "x", 1, conversation=f"c{i}")
    page.uncheck("#watch")
    page.fill("#text", "one too many")
    with page.expect_response("**/completions"):
        page.press("#text", "Enter")
    expect(page.locator("#error")).to_be_visible()
    assert "takes no more" in page.text_content("#error")


def test_a_key_is_asked_for(browser: Any, model: Any, tmp_path: Path) -> None:
    with serving(small_engine(tmp_path, model), key="open sesame") as client:
        page = browser.new_page()
        page.goto(str(client.base_url))
        expect(page.locator("#key-dialog")).to_be_visible()
        page.fill("#key", "open barley")
        page.press("#key", "Enter")
        expect(page.locator("#key-says")).to_contain_text("does not take this key")
        page.fill("#key", "open sesame")
        page.press("#key", "Enter")
        expect(page.locator("#model")).to_have_text("small")
        page.close()


def test_an_adapter_s_memory_has_no_surprise_to_show(browser: Any, tmp_path: Path) -> None:
    model = with_memory(base_of(vocab_size=VOCAB_SIZE)).float()
    with serving(small_engine(tmp_path, model, max_new_tokens=4)) as client:
        assert not client.get("/v1/models").json()["data"][0]["surprise"]
        page = browser.new_page()
        page.goto(str(client.base_url))
        expect(page.locator("#model")).to_have_text("small")
        expect(page.locator("#watch")).to_be_hidden()
        send(page, "Hello")
        assert "surprise" not in page.inner_text("body")
        page.close()
