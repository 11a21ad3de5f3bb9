"""Reading a log: cleaning a line, finding signatures in streams of any shape, memory and time on large ones."""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import time
import tracemalloc
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.symptoms import load
from agent.symptoms import match as module
from agent.symptoms.clean import clean, month_to_second, writer
from agent.symptoms.match import BLOCK, Scan, scan

ENTRIES = load()
CRASH = "AssertionError: Expected a cached item for mm_hash='3f1c'"


def read(text: str | bytes) -> Scan:
    return scan(io.BytesIO(text.encode() if isinstance(text, str) else text), ENTRIES)


def slugs(result: Scan) -> list[str]:
    return [one.entry.slug for one in result.matches]


@pytest.mark.parametrize(
    "raw",
    [
        CRASH,
        f"\x1b[36m(vLLMHttpServer pid=21044)\x1b[0m {CRASH}",
        f"\x1b[36m(vLLMHttpServer pid=2, ip=10.0.0.3)\x1b[0m (EngineCore pid=3) ERROR 11-29 14:06:40 [c.py:1] {CRASH}",
        f"(EngineCore pid=3) ERROR 11-29 14:06:40.123 [core.py:11] {CRASH}",
        f"2026-11-29 14:06:40,123 ERROR {CRASH}",
        f"[2026-11-29 14:06:40,123][__main__][ERROR] - {CRASH}",
        f"2026-11-29 18:40:21 [warning  ] {CRASH}",
        f"2026-11-29T14:06:40.123Z {CRASH}",
        f"ERROR:    {CRASH}",
        f"{CRASH} [repeated 3x across cluster] (Ray deduplicates logs by default.)",
        f"\x1b[1;31m{CRASH}\x1b[0m\r",
    ],
)
def test_a_line_is_cleaned_of_what_loggers_put_around_it(raw: str) -> None:
    assert clean(raw) == CRASH
    assert slugs(read(f"before\n{raw}\nafter\n")) == ["mm-cache-desync"]


def test_what_a_line_says_itself_is_kept() -> None:
    assert clean("(optional) value: 2026") == "(optional) value: 2026"
    assert clean("  indented text") == "  indented text"
    assert writer("\x1b[36m(A pid=1)\x1b[0m (B pid=2) text (pid=3)") == "(A pid=1)(B pid=2)(pid=3)"
    assert month_to_second("(A pid=1) INFO 11-29 09:00:02 [a.py:1] x") == "11-29 09:00:02"
    assert month_to_second("2026-11-29T09:00:02.1 x") == "11-29 09:00:02"
    assert month_to_second("no time 12:00") is None


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
@settings(max_examples=200, deadline=None)
def test_cleaning_is_done_after_one_pass(raw: str) -> None:
    assert clean(clean(raw)) == clean(raw)


def test_lines_are_counted_from_one_across_blocks() -> None:
    filler = "x" * 99 + "\n"
    many = BLOCK // 100 * 3
    result = read(filler * many + CRASH + "\n" + filler * 5 + CRASH)
    (one,) = result.matches
    assert (one.line, one.count) == (many + 1, 2)
    assert result.lines == many + 7
    assert result.size == 100 * (many + 5) + 2 * len(CRASH) + 1


@pytest.mark.parametrize("size", [1, 7, 1000, BLOCK - 1, BLOCK, BLOCK + 1])
def test_the_answer_does_not_depend_on_how_the_stream_is_cut(size: int) -> None:
    class Dripping(io.BytesIO):
        def read(self, _size: int | None = -1, /) -> bytes:
            return super().read(size)

    text = ("a" * 60 + "\n") * 300 + CRASH + "\n" + "EngineDeadError\n"
    result = scan(Dripping(text.encode()), ENTRIES)
    assert [(one.entry.slug, one.line) for one in result.matches] == [
        ("mm-cache-desync", 301),
        ("vllm-engine-dead", 302),
    ]


def test_a_line_longer_than_memory_should_hold_is_read_in_pieces() -> None:
    """The literal may lie anywhere in it, also where two pieces meet."""
    for before in (10, BLOCK - 10, 2 * BLOCK + 5, 5 * BLOCK // 2):
        result = read(b"y" * before + CRASH.encode() + b"z" * (2 * BLOCK) + b"\nEngineDeadError\n")
        assert [(one.entry.slug, one.line) for one in result.matches] == [
            ("mm-cache-desync", 1),
            ("vllm-engine-dead", 2),
        ]


class Endless(io.RawIOBase):
    """``size`` bytes of one line without an end, made as they are read."""

    def __init__(self, size: int, text: bytes) -> None:
        self.left, self.text = size, text

    def read(self, size: int = -1, /) -> bytes:
        if self.left <= 0:
            last, self.text = self.text, b""
            return last
        size = min(size, self.left)
        self.left -= size
        return b"q" * size


def test_memory_stays_flat_on_a_line_of_two_gigabytes() -> None:
    size = 2 << 30 if find_spec("ahocorasick_rs") else 200 << 20  # without the library it takes minutes
    tracemalloc.start()
    try:
        result = scan(Endless(size, CRASH.encode()), ENTRIES)  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert slugs(result) == ["mm-cache-desync"]
    assert result.lines == 1
    assert peak < 40 << 20


def test_a_flood_of_one_line_is_counted_without_a_closer_look() -> None:
    line = "(A pid=1) No available shared memory broadcast block found in 60 seconds.\n"
    result = read(line * 5000)
    assert [(one.entry.slug, one.line, one.count) for one in result.matches] == [("vllm-shm-broadcast-wait", 1, 5000)]


def test_waiting_that_ended_is_no_hang() -> None:
    waiting, going = (f"AglRolloutManager: completed={done}/32 succeeded=0 failed=0\n" for done in (0, 3))
    assert read(waiting * 100).matches[0].count == 100
    assert read(waiting * 100 + going).matches == []
    (again,) = read(waiting * 100 + going + waiting * 2).matches
    assert (again.count, again.line) == (2, 102)


def test_versions_are_read_where_logs_name_them() -> None:
    text = "(E pid=1) INFO 11-29 09:00:00 [core.py:1] Initializing a V1 LLM engine (v0.21.0) with config\nverl==0.8.0\n"
    text += "agentlightning==1.0.2; more\nvLLM API server version 0.30.0\n"
    assert read(text).versions == {"vllm": "0.21.0", "verl": "0.8.0", "agentlightning": "1.0.2"}


def test_the_first_traceback_is_followed_through_other_writers() -> None:
    text = (
        "(A pid=1) Traceback (most recent call last):\n"
        '(A pid=1)   File "a.py", line 1, in f\n'
        "(B pid=2) unrelated\n"
        "(A pid=1)     raise ValueError\n"
        "(A pid=1) ValueError: the text\n"
        "(B pid=2) Traceback (most recent call last):\n(B pid=2) KeyError: 1\n"
    )
    result = read(text)
    assert (result.traceback, result.traceback_line) == ("ValueError: the text", 1)
    long = "(A pid=1) Traceback (most recent call last):\n" + "(B pid=2) noise of another process\n" * (BLOCK // 30)
    assert read(long + "(A pid=1) KeyError: 7\n").traceback == "KeyError: 7"
    assert read("Traceback (most recent call last):\n  cut off").traceback is None


def test_bytes_that_are_no_utf8_do_no_harm() -> None:
    assert slugs(read(b"\xff\xfe\x80 \xc3\x28\n" + CRASH.encode() + b" \xff\n")) == ["mm-cache-desync"]
    assert read(b"").lines == 0


def test_both_finders_give_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the library and without it."""
    noise = random.Random(3)
    parts = [one.needs for entry in ENTRIES.values() for one in entry.signatures]
    text = "\n".join(noise.choice(parts) + noise.choice(["", " 7", ": x"]) for _ in range(2000))
    shown = [(one.entry.slug, one.signature.needs, one.line, one.count) for one in read(text).matches]
    monkeypatch.setitem(__import__("sys").modules, "ahocorasick_rs", None)
    slow = [(one.entry.slug, one.signature.needs, one.line, one.count) for one in read(text).matches]
    assert slow == shown and len(shown) > 50


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """256 MB of what a run prints, one cause in the middle."""
    noise = random.Random(1)
    lines = []
    for number in range(20000):
        rid = f"{noise.getrandbits(128):032x}"
        lines += [
            f"\x1b[36m(vLLMHttpServer pid=21044)\x1b[0m INFO 11-29 14:{number % 60:02d}:11 [loggers.py:259] Engine 0: "
            f"Avg prompt throughput: {noise.random() * 1000:.1f} tokens/s, Running: {number % 7} reqs, hit rate: 75.0%",
            f'INFO:     127.0.0.1:{noise.randint(30000, 60000)} - "GET /api/rollouts/{rid} HTTP/1.1" 200 OK',
            f"(_AglTaskRunner pid=1) AglRolloutManager: completed={number % 32}/32 succeeded={number % 32} failed=0",
            f"(WorkerDict pid=2) step:{number} - actor/entropy:{noise.random()} - training/reward:{noise.random()}",
        ]
    block = ("\n".join(lines) + "\n").encode()
    path = tmp_path_factory.mktemp("large") / "trainer.log"
    times = (256 << 20) // len(block)
    with path.open("wb") as file:
        for number in range(times):
            file.write(block)
            if number == times // 2:
                file.write(CRASH.encode() + b"\n")
    yield path
    path.unlink()


@pytest.mark.skipif(shutil.which("grep") is None, reason="grep is not installed")
def test_a_large_log_takes_at_most_three_times_what_grep_takes(large: Path, tmp_path: Path) -> None:
    pytest.importorskip("ahocorasick_rs")
    literals = tmp_path / "literals"
    literals.write_text("\n".join({one.needs for entry in ENTRIES.values() for one in entry.signatures}) + "\n")
    command = ["grep", "-F", "-c", "-f", str(literals), str(large)]

    def best(work: object) -> float:
        times = []
        for _ in range(3):
            begin = time.process_time() + sum(os.times()[2:4])
            assert callable(work)
            work()
            times.append(time.process_time() + sum(os.times()[2:4]) - begin)
        return min(times)

    def ours() -> None:
        with large.open("rb") as stream:
            assert "mm-cache-desync" in slugs(scan(stream, ENTRIES))

    grep = best(lambda: subprocess.run(command, check=True, capture_output=True, env={"LC_ALL": "C", **os.environ}))
    mine = best(ours)
    print(f"grep {grep:.2f} s, scan {mine:.2f} s of CPU for {large.stat().st_size >> 20} MB")
    assert mine < 3 * grep


def test_memory_does_not_grow_with_the_log(large: Path) -> None:
    tracemalloc.start()
    try:
        with large.open("rb") as stream:
            stream.seek(192 << 20)
            scan(stream, ENTRIES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20


def test_the_block_size_is_what_the_tests_assume() -> None:
    assert module.BLOCK == 1 << 20
