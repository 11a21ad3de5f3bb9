"""The site as built: complete, up to date, nothing from another host, and its examples are real."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from agent.symptoms import load

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
_BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def blocks(*languages: str) -> list[tuple[str, str]]:
    """(page and number, text) of every fenced block in one of these languages."""
    found = []
    for page in PAGES:
        for number, match in enumerate(_BLOCK.finditer(page.read_text(encoding="utf-8"))):
            if match[2] in languages:
                text = "\n".join(line.removeprefix(match[1]) for line in match[3].splitlines())
                found.append((f"{page.relative_to(DOCS)}:{number}", text))
    return found


class Resources(HTMLParser):
    """What a page loads, and its links."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("canonical", "next", "prev", "alternate"):
            return
        names = {"link": "href", "use": "href"}.get(tag, "src")
        for value in (given.get(names), given.get("srcset"), given.get("poster")):
            if value and tag != "a":
                self.loaded.append(value)


def test_every_symptom_has_its_address(site: Path) -> None:
    entries = load()
    assert len(entries) > 60
    for slug in entries:
        assert (site / "s" / slug / "index.html").is_file(), slug


def test_every_address_in_the_program_leads_to_a_page(site: Path) -> None:
    """Slugs given to errors, outcomes and findings anywhere in the package."""
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "agent").rglob("*.py"))
    named = set(re.findall(r"""\b(?:slug|symptom)=["']([a-z0-9-]+)["']""", source))
    assert len(named) >= 3
    for slug in named:
        assert (site / "s" / slug / "index.html").is_file(), slug


def test_addresses_that_were_ever_given_out_still_work(site: Path) -> None:
    for slug in (ROOT / "tests/symptoms/slugs.txt").read_text().split():
        assert (site / "s" / slug / "index.html").is_file(), slug
    for address in ("s", "resuming", "howto/copy-config"):
        assert (site / address / "index.html").is_file(), address


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    for page in pages:
        text = page.read_text(encoding="utf-8")
        parser = Resources()
        parser.feed(text)
        assert parser.loaded or 'http-equiv="refresh"' in text, page
        foreign = [one for one in parser.loaded if re.match(r"(?:[a-z]+:)?//", one)]
        assert foreign == [], page
    for style in site.rglob("*.css"):
        text = re.sub(r"/\*.*?\*/", "", style.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", text), style


def test_generated_parts_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_page_is_noticed(tmp_path: Path) -> None:
    """The check can fail: the same generator on a page whose mark holds something else."""
    sys.path.insert(0, str(DOCS))
    try:
        import generate
    finally:
        sys.path.remove(str(DOCS))
    page = (DOCS / "reference/versions.md").read_text(encoding="utf-8")
    assert generate.filled(page) == page
    assert generate.filled(page.replace("| verl |", "| verl-old |")) == page


@pytest.mark.parametrize(("place", "text"), blocks("yaml"))
def test_yaml_blocks_load(place: str, text: str) -> None:
    assert yaml.safe_load(text), place


@pytest.mark.parametrize(("place", "text"), blocks("json"))
def test_json_blocks_load(place: str, text: str) -> None:
    assert yaml.safe_load(text), place


@pytest.mark.parametrize(("place", "text"), blocks("python"))
def test_python_blocks_compile_and_those_of_the_how_tos_run(place: str, text: str) -> None:
    """Others are lines for the reader's own program: they need its engine."""
    code = compile(text, place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if place.startswith("howto/"):
        exec(code, {"__name__": "example"})


@pytest.mark.parametrize(("place", "text"), blocks("sh", "bash"))
def test_shell_blocks_parse(place: str, text: str) -> None:
    done = subprocess.run(["bash", "-n", "-c", text], capture_output=True, text=True, timeout=10)
    assert done.returncode == 0, done.stderr


def mmqa_lines() -> list[tuple[str, str]]:
    """Every command line of the package in the documentation: blocks, and ``inline`` ones with an argument."""
    found = []
    for place, text in blocks("sh", "bash"):
        joined = text.replace("\\\n", " ")
        found += [(place, line.split("#")[0]) for line in joined.splitlines() if re.match(r"(?:\w+=\S+ )*mmqa ", line)]
    for page in PAGES:
        for inline in re.findall(r"`(mmqa [a-z][^`]*)`", page.read_text(encoding="utf-8")):
            found.append((str(page.relative_to(DOCS)), inline))
    return sorted(set(found))


@pytest.mark.parametrize(("place", "line"), mmqa_lines())
def test_commands_of_the_documentation_exist(place: str, line: str) -> None:
    """The command is there and takes every option that is shown."""
    from agent.cli import app

    words = [word for word in shlex.split(line) if "=" not in word.split("mmqa")[0]]
    name = words[1]
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})
    assert result.exit_code == 0, f"{place}: no command {name}"
    for option in (word.split("=")[0] for word in words[2:] if word.startswith("--")):
        assert re.search(rf"{option}\b", result.output), f"{place}: mmqa {name} has no {option}"


def test_presets_and_files_of_the_documentation_exist() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES if "/s/" not in str(page))
    presets = {file.stem for file in (ROOT / "examples/configs").glob("*.yaml")}
    named = set(re.findall(r"--preset (\w+)", text))
    assert named and named <= presets
    for path in set(re.findall(r"\b((?:agent|examples|docs)/[\w/]+\.(?:py|yaml|md))\b", text)):
        assert (ROOT / path).exists(), path


def test_no_path_of_one_machine_and_no_index_host() -> None:
    for page in [*PAGES, *DOCS.rglob("*.js"), *DOCS.rglob("*.py"), ROOT / "mkdocs.yml"]:
        text = page.read_text(encoding="utf-8")
        found = re.search(r"/(?:root|work)/|pypi\.org|files\.pythonhosted", text)
        assert not found, f"{page}: {found}"


def test_the_site_needs_no_more_than_agreed() -> None:
    """Three plugins, no font of another host, every page in the navigation or named as left out."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    assert {next(iter(one)) if isinstance(one, dict) else one for one in config["plugins"]} <= {
        "search",
        "tags",
        "redirects",
    }
    assert config["theme"]["font"] is False and config["use_directory_urls"] is True
    listed = set(re.findall(r"([\w/-]+\.md)\b", text.split("nav:")[1]))
    pages = {str(page.relative_to(DOCS)) for page in PAGES}
    assert {page for page in pages - listed if not page.startswith(("s/", "caches/"))} == set()
