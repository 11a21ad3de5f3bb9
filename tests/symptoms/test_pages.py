"""Generated pages and data: up to date, complete, safe Markdown; and the record of texts found in released wheels."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest

from agent.symptoms import Origin, load
from agent.symptoms.clean import ANYWHERE, PREFIXES, SUFFIX
from agent.symptoms.pages import DOCS, catalogue_json, files, main, page_text
from agent.symptoms.wheels import RECORD, in_wheel, texts

ENTRIES = load()


def test_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(check=True) == 0, capsys.readouterr().out


def test_the_check_notices_a_stale_a_missing_and_a_left_over_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agent.symptoms.pages.DOCS", tmp_path / "docs")
    monkeypatch.setattr("agent.symptoms.pages.ROOT", tmp_path)
    assert main(check=True) == 1
    assert main(check=False) == 0 and main(check=True) == 0
    (tmp_path / "docs/s/mm-cache-desync.md").write_text("old")
    (tmp_path / "docs/s/gone.md").write_text("left over")
    (tmp_path / "docs/s/gateway-401.md").unlink()
    capsys.readouterr()
    assert main(check=True) == 1
    said = capsys.readouterr().out
    assert all(name in said for name in ("mm-cache-desync.md", "gone.md", "gateway-401.md"))
    assert said.count("out of date") == 3
    assert main(check=False) == 0 and main(check=True) == 0


def test_the_output_is_the_same_each_time() -> None:
    assert files() == files()
    assert set(files()) == {DOCS / "s" / f"{slug}.md" for slug in ENTRIES} | {DOCS / "assets" / "catalogue.json"}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.slug)
def test_a_page_has_everything_and_breaks_nothing(entry: object) -> None:
    from agent.symptoms import Entry

    assert isinstance(entry, Entry)
    text = page_text(entry)
    for heading in ("What you see", "Fix now", "Check that it is gone", "Why", "If that did not help", "What is lost"):
        assert text.count(f"\n## {heading}\n") == 1
    assert text.count("\n## Sources\n") == bool(entry.sources)
    for signature in entry.signatures:
        assert signature.needs.strip() in text
    outside = re.sub(r"^( *)```.*?^ *```$", "", text.split("---", 2)[2], flags=re.DOTALL | re.MULTILINE)
    outside = re.sub(r"``[^`].*?``|`[^`]*`", "", outside, flags=re.DOTALL)
    tags = re.findall(r"(?<!\\)<(?!/?small>|https://|!--)[^>]*", outside)
    assert tags == [], "unescaped HTML outside code"
    assert text.count("```") % 2 == 0


def test_the_browser_gets_what_the_command_uses() -> None:
    data = json.loads(catalogue_json())
    assert data["clean"] == {"anywhere": ANYWHERE, "prefixes": list(PREFIXES), "suffix": SUFFIX}
    assert [one["slug"] for one in data["entries"]] == list(ENTRIES)
    for one in data["entries"]:
        assert [sign["needs"] for sign in one["signatures"]] == [sign.needs for sign in ENTRIES[one["slug"]].signatures]


# -- the record of texts in released wheels ----------------------------------------------------------------------------


def test_the_record_covers_both_ends_of_every_range_and_misses_none() -> None:
    """Written by ``python -m agent.symptoms.wheels``; a new text or range needs a new run."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    wanted: dict[tuple[str, str], int] = {}
    for one in texts():
        key = (one.origin.package, one.version)
        wanted[key] = wanted.get(key, 0) + 1
    assert len(wanted) > 25
    for (package, version), count in wanted.items():
        outcome = record[package][version]
        assert outcome["missing"] == [], (package, version)
        assert outcome["found"] == count, (package, version)
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", outcome["date"])
    assert {(package, version) for package in record for version in record[package]} == set(wanted)


def test_a_text_that_is_not_in_the_wheel_is_noticed(tmp_path: Path) -> None:
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/b.py", "raise ValueError('the text')\n")
    assert in_wheel(wheel, Origin("a", "a/b.py", "==1", "the text"))
    assert not in_wheel(wheel, Origin("a", "a/b.py", "==1", "another text"))
    assert not in_wheel(wheel, Origin("a", "a/c.py", "==1", "the text"))
