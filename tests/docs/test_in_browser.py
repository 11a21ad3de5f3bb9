"""What only a browser can tell: search, the paste page, a phone's window, dark mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from agent.cli import app
from agent.symptoms import load
from agent.symptoms.clean import clean
from agent.symptoms.entry import SAMPLES

if TYPE_CHECKING:
    from headless import Browser

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


def sample_files() -> list[Path]:
    return sorted(SAMPLES.glob("*.log"))


def raw_line(slug: str) -> str | None:
    """The first line of the entry's own samples that carries one of its signatures, as it stands in the log."""
    entry = load()[slug]
    for name in entry.samples:
        for raw in (SAMPLES / name).read_text(encoding="utf-8").splitlines():
            if any(signature.matches(clean(raw)) for signature in entry.signatures):
                return raw
    return None


def command_says(file: Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["diagnose", str(file), "--json"])
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def test_the_search_lists_the_page_of_a_raw_log_line_first(browser: Browser, address: str) -> None:
    """Every entry with a log line of its own, core ones included."""
    browser.window(1280, 900)
    browser.open(f"{address}/")
    wrong, tried = {}, 0
    for slug in load():
        line = raw_line(slug)
        if line is None:
            continue
        tried += 1
        browser.run(
            "(async () => { const field = document.querySelector('[data-md-component=search-query]');"
            "const open = document.querySelector('#__search'); if (!open.checked) open.click(); field.focus();"
            f"field.value = {json.dumps(line)}; field.dispatchEvent(new KeyboardEvent('keyup', {{bubbles: true}}));"
            "await new Promise((done) => setTimeout(done, 150)); })()"
        )
        first = (
            "(document.querySelector('.md-search-result__list .md-search-result__item a') || {getAttribute() {return"
            " ''}}).getAttribute('href')"
        )
        try:
            browser.wait(f"{first}.includes({json.dumps(f'/s/{slug}/')})", seconds=3)
        except TimeoutError:
            wrong[slug] = browser.run(first)
    assert tried > 60
    assert wrong == {}


def paste(browser: Browser, text: str) -> str:
    """Paste a text; the slug of the first cause, "" for none."""
    before = browser.run("document.getElementById('paste-result').dataset.done || ''")
    browser.run(
        f"(() => {{ const field = document.getElementById('paste-text'); field.value = {json.dumps(text)};"
        "field.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    done = "(document.getElementById('paste-result').dataset.done || '')"
    browser.wait(f"{done} && {done} !== {json.dumps(before)}")
    return str(browser.run("document.getElementById('paste-result').dataset.first"))


def test_the_paste_page_agrees_with_the_command_on_every_sample(browser: Browser, address: str) -> None:
    browser.window(1280, 900)
    browser.open(f"{address}/paste/")
    files = sample_files()
    assert len(files) > 60
    different = {}
    for file in files:
        expected = command_says(file)["first"] or ""
        shown = paste(browser, file.read_text(encoding="utf-8"))
        if shown != expected:
            different[file.name] = (shown, expected)
    assert different == {}


def test_the_browser_reads_every_line_as_the_command_does(browser: Browser, address: str, tmp_path: Path) -> None:
    """Not the first cause alone: every symptom with its role, line and count, versions, traceback, search text."""
    browser.open(f"{address}/paste/")
    extra = tmp_path / "unknown.log"
    extra.write_text(
        "2026-11-29 10:00:00 INFO vLLM API server version 0.21.0\n(Worker pid=7) Traceback (most recent call last):\n"
        '(Other pid=8) step 1\n(Worker pid=7)   File "/opt/a.py", line 3\n'
        "(Worker pid=7) OSError: [Errno 5] Input/output error: '/data/x/3f1c9a0be2aa/17.png'\n"
    )
    different = {}
    for file in [*sample_files(), extra]:
        said = command_says(file)
        expected = {
            "found": [[one["slug"], one["role"], one["line"], one["count"]] for one in said["found"]],
            "fixes": [one["fix"] for found in said["found"][:1] for one in found["fixes"]],
            **{name: said[name] for name in ("versions", "lines", "traceback", "search")},
        }
        read = (
            "(async () => { const data = await (await fetch('../assets/catalogue.json')).json();"
            "const known = new Diagnose.Catalogue(data); const scan = new Diagnose.Scan(known, '');"
            f"scan.feed({json.dumps(file.read_text(encoding='utf-8'))}); const verdict = known.verdict([scan.done()]);"
            "const fixes = verdict.found.slice(0, 1).filter((one) => one.role === 'cause')"
            ".flatMap((one) => verdict.causes(one.entry).map((cause) => cause.fix));"
            "return {found: verdict.found.map((one) => [one.entry.slug, one.role, one.line, one.count]), fixes,"
            "versions: verdict.versions, lines: scan.lines, traceback: scan.traceback,"
            "search: scan.traceback ? verdict.search(scan.traceback) : null}; })()"
        )
        shown = browser.run(read)
        if shown != expected:
            different[file.name] = (shown, expected)
    assert different == {}


def test_the_paste_page_shows_the_cause_its_fix_and_what_followed(browser: Browser, address: str) -> None:
    browser.window(1280, 900)
    browser.open(f"{address}/paste/")
    assert paste(browser, (SAMPLES / "mm-cache-desync.log").read_text()) == "mm-cache-desync"
    shown = browser.run("document.getElementById('paste-result').innerText")
    assert "mm_processor_cache_gb: 0" in shown
    cause, followed = shown.split("What followed")
    assert "vllm-engine-dead" not in cause and "EngineDeadError" in followed
    link = browser.run("document.querySelector('.verdict h2 a').href")
    assert link == f"{address}/s/mm-cache-desync/"
    browser.run("document.getElementById('paste-clear').click()")
    browser.wait("document.getElementById('paste-result').innerText === ''")


def test_nothing_is_known_and_the_traceback_is_shown(browser: Browser, address: str) -> None:
    browser.open(f"{address}/paste/")
    log = (
        'step 1\nTraceback (most recent call last):\n  File "a.py", line 3, in f\nZeroDivisionError: division by zero\n'
    )
    assert paste(browser, log) == ""
    assert browser.run("document.querySelector('.paste-traceback').innerText") == "ZeroDivisionError: division by zero"
    assert paste(browser, "step 1\nstep 2\n") == ""
    assert "No known fault in 2 lines" in browser.run("document.getElementById('paste-result').innerText")


def test_a_pasted_log_is_sent_nowhere(browser: Browser, address: str) -> None:
    browser.open(f"{address}/paste/")
    browser.wait("document.readyState === 'complete'")
    paste(browser, "warm up\n")
    browser.requests.clear()
    assert paste(browser, (SAMPLES / "mm-cache-desync.log").read_text()) == "mm-cache-desync"
    assert browser.requests == []


def test_files_large_and_wide_are_read_where_they_are(browser: Browser, address: str, tmp_path: Path) -> None:
    """Several files at once, one of 30 MB, one in UTF-16; a binary file is refused by name."""
    browser.open(f"{address}/paste/")
    big, wide, binary = tmp_path / "trainer.log", tmp_path / "controller.log", tmp_path / "core.bin"
    sample = (SAMPLES / "mm-cache-desync.log").read_text()
    big.write_text("(Worker pid=1) INFO 11-29 10:00:00 [a.py:1] all is well\n" * 500_000 + sample)
    wide.write_bytes("nothing here\n".encode("utf-16"))
    browser.choose_file("#paste-file", wide, big)
    browser.wait("document.getElementById('paste-result').dataset.first === 'mm-cache-desync'", seconds=60)
    assert "trainer.log, line 500,0" in browser.run("document.querySelector('.verdict p').innerText")
    binary.write_bytes(b"\x7fELF\0\0\0")
    browser.choose_file("#paste-file", binary)
    browser.wait("document.getElementById('paste-note').innerText === 'core.bin: not a text file'")


PAGES = ["", "paste/", "troubleshooting/", "troubleshooting/all/", "s/mm-cache-desync/", "caches/four-records/"]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_phone_and_dark_mode(browser: Browser, address: str, page: str, dark: bool) -> None:
    """Nothing sticks out of a 390 pixel window, text is readable in both schemes, and no script fails."""
    browser.errors.clear()
    browser.window(390, 844, dark=dark)
    browser.open(f"{address}/{page}")
    browser.wait("document.body.dataset.mdColorScheme")
    assert browser.run("document.body.dataset.mdColorScheme") == ("slate" if dark else "default")
    if page == "paste/":
        assert paste(browser, (SAMPLES / "mm-cache-desync.log").read_text()) == "mm-cache-desync"
    assert browser.run("document.documentElement.scrollWidth") <= 390
    light = (
        "(color => { const canvas = document.createElement('canvas').getContext('2d'); canvas.fillStyle = color;"
        "canvas.fillRect(0, 0, 1, 1); const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;"
        "const part = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };"
        "return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b); })"
    )
    style = "getComputedStyle(document.querySelector('.md-content__inner'))"
    text = browser.run(f"{light}({style}.color)")
    ground = browser.run(f"{light}(getComputedStyle(document.body).backgroundColor)")
    brighter, darker = max(text, ground), min(text, ground)
    assert (brighter + 0.05) / (darker + 0.05) > 4.5
    assert (ground < 0.1) is dark
    assert browser.errors == []


def test_the_table_of_symptoms_is_filtered(browser: Browser, address: str) -> None:
    browser.window(1280, 900)
    browser.open(f"{address}/troubleshooting/all/")
    total = len(load())
    visible = "[...document.querySelectorAll('.symptom-table tbody tr')].filter((row) => !row.hidden).length"
    assert browser.run(visible) == total
    change = "document.querySelector('.filters').dispatchEvent(new Event('input', {bubbles: true}))"
    browser.run(f"(document.querySelector('.filters input').value = 'mm_hash', {change})")
    assert browser.run(visible) == 1
    browser.run("(document.querySelector('.filters input').value = '')")
    browser.run(f"(document.querySelectorAll('.filters select')[0].value = 'Hangs', {change})")
    assert browser.run(visible) == sum(entry.group == "hang" for entry in load().values())


def test_the_search_takes_plain_words_too(browser: Browser, address: str) -> None:
    browser.window(1280, 900)
    browser.open(f"{address}/")
    browser.run(
        "(() => { const field = document.querySelector('[data-md-component=search-query]');"
        "document.querySelector('#__search').click(); field.focus(); field.value = 'resume';"
        "field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true})); })()"
    )
    links = "[...document.querySelectorAll('.md-search-result__list .md-search-result__item a')].map((a) => a.href)"
    browser.wait(f"{links}.some((href) => href.includes('/howto/resuming/'))")
