"""The page to chat on, in a real browser: Debian's Chromium, driven by Playwright."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.serve_cases import Expected, complete, plain_model, serving, small_engine, wait_until_active

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
expect = sync_api.expect
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
    with serving(small_engine(tmp_path, model, max_new_tokens=ENDLESS)) as client:
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
    page.locator("#memories button.delete").click()
    expect(page.locator("#memories .empty")).to_have_count(1)
    page.locator("#conversations button.delete").click()
    expect(page.locator("#conversations .empty")).to_have_count(1)
    assert client.get("/health").json()["stored"] == 0


def test_dropping_a_file_and_stopping_an_answer(page: Any, client: httpx.Client) -> None:
    page.evaluate(
        """() => { const data = new DataTransfer();
        data.items.add(new File(["Dropped text. ".repeat(20)], "dropped.txt", { type: "text/plain" }));
        const drop = new DragEvent("drop", { dataTransfer: data, bubbles: true });
        document.getElementById("drop").dispatchEvent(drop); }"""
    )
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
        page.fill("#key", "open sesame")
        page.press("#key", "Enter")
        expect(page.locator("#model")).to_have_text("small")
        page.close()
