import io
import json
import re

import pytest
from rich.console import Console

from titans_lm.train import progress as progress_module
from titans_lm.train.files import JsonLines
from titans_lm.train.progress import CountReport, Outlook, ProgressReport, in_words

RECORD = {"step": 3, "loss": 1.25, "bits_per_token": 1.8, "tokens_per_second": 1234.0}


def test_lines_are_json_whatever_the_numbers(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    assert lines.read() == []
    lines.append({"step": 1, "loss": float("nan")})
    lines.append({"step": 2, "loss": 0.5})
    text = lines.path.read_text().splitlines()
    assert [json.loads(line) for line in text] == [{"step": 1, "loss": None}, {"step": 2, "loss": 0.5}]


def test_going_back_drops_what_comes_after_and_a_broken_last_line(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        lines.append({"step": step})
    with lines.path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [record["step"] for record in lines.read()] == [1, 2, 3]
    lines.rewind(2)
    assert lines.path.read_text() == '{"step": 1}\n{"step": 2}\n'


def report(**settings):
    screen = io.StringIO()
    outlook = settings.pop("outlook", None)
    return screen, ProgressReport(console=Console(file=screen, width=200, **settings), outlook=outlook)


def test_a_terminal_shows_a_bar_with_loss_and_speed():
    screen, progress = report(force_terminal=True)
    with progress.start(10, 2):
        progress.update(RECORD)
        progress.say("a line [not markup]")
    text = screen.getvalue()
    for part in ("training", "3/10", "loss 1.250", "1.800 bits/token", "1,234 tokens/s", "a line [not markup]"):
        assert part in text


@pytest.mark.parametrize("terminal", [True, False])
def test_names_are_shown_as_they_are(terminal):
    screen = io.StringIO()
    console = Console(file=screen, width=200, force_terminal=terminal)
    with CountReport(title="a[/b] 256:100:", console=console).start(10) as report:
        report.read(10)
        report.say("a[/b] 256:100:")
    assert "a[/b] 256:100:" in screen.getvalue()
    assert "\U0001f4af" not in screen.getvalue()


def test_a_file_gets_lines_and_the_last_one_surely():
    screen, progress = report()
    with progress.start(3):
        progress.update(RECORD | {"step": 1})
        progress.update(RECORD)
    assert screen.getvalue() == "training 3/3  loss 1.250  1.800 bits/token  1,234 tokens/s\n"


def test_tokens_are_counted_up_to_what_is_known(monkeypatch):
    monkeypatch.setattr("titans_lm.train.progress.QUIET_SECONDS", 0.0)
    screen = io.StringIO()
    for total in (4_000, None):
        with CountReport(title="book", console=Console(file=screen, width=200)).start(total) as progress:
            progress.read(1_500)
            progress.read(500)
    known, half, unknown, more = screen.getvalue().splitlines()
    assert known.startswith("book: 1,500 of 4,000 tokens  ")
    assert re.fullmatch(r"book: 2,000 of 4,000 tokens  [\d,]+ tokens/s  50%, 0 seconds left", half)
    assert re.fullmatch(r"book: 1,500 tokens  [\d,]+ tokens/s", unknown)
    assert more.startswith("book: 2,000 tokens  ")


def test_quiet_is_quiet(capsys):
    progress = ProgressReport(quiet=True)
    with progress.start(3):
        progress.update(RECORD)
        progress.say("nothing")
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_progress_goes_to_stderr(capsys):
    ProgressReport().say("something")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "something\n")


@pytest.mark.parametrize("line", ["{garbage", "[1]", '{"loss": 1}', '{"step": "x"}', "[" * 100_000, "\xff"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl.* line 2; remove that line"):
        JsonLines(path).rewind(5)


@pytest.fixture
def clock(monkeypatch):
    """A clock that each step puts forward by so many seconds."""
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    return now


def steps(progress, clock, seconds, total, count):
    progress.start(total)
    clock[0] += 30.0  # the first step takes long
    for step in range(1, count + 1):
        progress.update(RECORD | {"step": step})
        clock[0] += seconds


def test_a_long_run_says_once_how_long_it_takes_by_its_first_steps(clock):
    screen, progress = report(outlook=Outlook("--steps N"))
    steps(progress, clock, 2.0, 1200, 20)
    [line] = [line for line in screen.getvalue().splitlines() if "about" in line]
    assert line == "about 40 minutes of training to go here; for a look: --steps N"


def test_a_short_run_and_one_without_enough_steps_say_nothing(clock):
    screen, progress = report(outlook=Outlook("--steps N"))
    steps(progress, clock, 2.0, 40, 20)
    steps(progress, clock, 2.0, 4000, 2)
    assert "about" not in screen.getvalue()


def test_an_experiment_says_how_long_all_its_runs_take(clock):
    said = []
    outlook = Outlook("fewer --seeds", say=said.append, later=3000)
    outlook.begin([0, 100, 100])
    assert not outlook.others
    outlook.begin([100, 100])
    steps(ProgressReport(quiet=True, outlook=outlook), clock, 4.0, 100, 20)
    assert said == ["about 4 hours of training to go here; for a look: fewer --seeds"]
    side_by_side = Outlook("fewer --seeds", say=said.append)
    side_by_side.ended(600.0, [10] * 5, 2)
    assert said[1:] == ["about 20 minutes of training to go here; for a look: fewer --seeds"]


@pytest.mark.parametrize(
    ("seconds", "words"), [(30, "30 seconds"), (121, "2 minutes"), (5 * 3600, "5 hours"), (3 * 86_400, "3 days")]
)
def test_times_are_rounded_to_what_one_says(seconds, words):
    assert in_words(seconds) == words
