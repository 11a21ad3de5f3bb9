"""The catalogue itself: schema, slugs, samples, and that its texts and keys exist in the released packages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.symptoms import Entry, EntryError, load
from agent.symptoms.clean import clean
from agent.symptoms.diagnose import diagnose
from agent.symptoms.entry import CATALOGUE, GROUPS, SAMPLES, parse
from agent.symptoms.wheels import Text, in_installed, in_system, installed, texts
from agent.training.config import MMQA_DEFAULTS

ENTRIES = load()
SLUGS = Path(__file__).parent / "slugs.txt"


def test_no_slug_is_ever_lost() -> None:
    """An address that was given out stays: slugs.txt only grows."""
    kept = SLUGS.read_text().split()
    assert len(kept) == len(set(kept)) > 60
    assert sorted(ENTRIES) == sorted(kept), "add new slugs to tests/symptoms/slugs.txt; never remove one"


def test_the_families_that_started_the_catalogue() -> None:
    needs = {slug: {one.needs for one in ENTRIES[slug].signatures} for slug in ENTRIES}
    assert "Expected a cached item for mm_hash" in needs["mm-cache-desync"]
    assert "Multi-modal cache miss for request" in needs["mm-cache-desync"]
    assert "Encoder cache miss for" in needs["encoder-cache-miss"]
    assert not needs["stale-encoder-output"] and ENTRIES["stale-encoder-output"].severity == "silent"
    assert {entry.group for entry in ENTRIES.values()} == set(GROUPS)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.slug)
def test_an_entry_helps(entry: Entry) -> None:
    """Links lead somewhere, every section says something, every cause has a change or says that none is needed."""
    assert set(entry.tell_apart) <= set(ENTRIES)
    for linked in re.findall(r"\]\(([a-z0-9-]+)\.md\)", entry.body):
        assert linked in ENTRIES
    assert all(len(text) > 15 for text in entry.sections().values())
    assert len(entry.body.splitlines()) < 60, "the body fits one screen"
    assert entry.aliases and entry.lost
    assert entry.sources or entry.component == "this package"
    assert all(source.startswith("https://") for source in entry.sources)
    assert not re.search(r"restart from the (?:latest|last) checkpoint", entry.body, re.IGNORECASE)
    if re.search(r"(?:from|takes) the newest (?:whole|complete)", text := " ".join(entry.body.split())):
        assert "if there is none" in text, "what the command does without a checkpoint"


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.slug)
def test_samples_are_named_by_their_entry_and_by_no_other(entry: Entry) -> None:
    assert bool(entry.samples) == bool(entry.signatures)
    for name in entry.samples:
        assert name.startswith(entry.slug)
        result = diagnose(str(SAMPLES / name))
        named = {one.entry.slug for one in result.found}
        assert entry.slug in named, name
        followed = {one.entry.slug for one in result.found if one.role == "consequence"}
        assert named - followed <= {entry.slug}, name
        mine = next(one for one in result.found if one.entry.slug == entry.slug)
        if mine.role == "cause":
            assert result.first is mine, name
        else:
            assert result.first is None and (entry.consequence or mine.role == "note"), name


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.slug)
def test_cleaning_a_line_leaves_every_literal_whole(entry: Entry) -> None:
    """A literal that begins like a log level, or ends in a space, would never be found."""
    for signature in entry.signatures:
        assert clean(f"(A pid=1) {signature.needs}") == signature.needs


def test_every_signature_has_a_sample_that_shows_it_or_a_sibling() -> None:
    """Each entry's samples together show at least one of its signatures as the first match; none is an orphan."""
    named = {name for entry in ENTRIES.values() for name in entry.samples}
    clean = {file.name for file in SAMPLES.glob("clean-*.log")}
    assert {file.name for file in SAMPLES.iterdir()} == named | clean


def test_it_is_said_of_every_sample_how_it_was_made() -> None:
    """And those that are said to be captured are written by the program that captures."""
    made = yaml.safe_load((CATALOGUE.parent / "evidence/samples.yaml").read_text(encoding="utf-8"))
    listed = [name for names in made.values() for name in names]
    assert sorted(listed) == sorted(file.name for file in SAMPLES.iterdir())
    program = (Path(__file__).parent / "capture.py").read_text(encoding="utf-8")
    written = re.findall(r'^@sample\("\w+", "([a-z0-9-]+)"', program, flags=re.MULTILINE)
    assert sorted(made["captured"]) == sorted(f"{name}.log" for name in written)
    assert len(written) > len(made["written"]) and all(made["written"].values())


@pytest.mark.engine
@pytest.mark.skipif(installed("vllm") is None, reason="needs the cpu extra")
def test_captured_samples_come_out_the_same_again() -> None:
    """The packages still say what the samples hold; about a minute of imports."""
    program = Path(__file__).parent / "capture.py"
    done = subprocess.run([sys.executable, str(program), "--check"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("file", sorted(SAMPLES.glob("clean-*.log")), ids=lambda file: file.name)
def test_clean_logs_are_named_by_none(file: Path) -> None:
    result = diagnose(str(file))
    assert result.lines >= 10 or file.name == "clean-controller.log"
    assert result.first is None
    noted = {one.entry.slug for one in result.found}
    assert noted <= ({"nothing-to-resume"} if file.name == "clean-first-start.log" else set())
    assert all(one.role == "note" for one in result.found)


@pytest.mark.parametrize("slug", ["images-not-in-training", "logprob-mismatch-unwatched"])
def test_what_this_package_says_itself_is_known(slug: str) -> None:
    source = (CATALOGUE.parents[1] / "training/image_proof.py").read_text(encoding="utf-8")
    for signature in ENTRIES[slug].signatures:
        assert signature.needs in source


# -- against the released packages -----------------------------------------------------------------------------------


def _here(one: Text) -> bool:
    if one.origin.package in ("libc", "python"):
        return True
    distribution = installed(one.origin.package)
    return distribution is not None and one.version == distribution.version.split("+")[0]


def _in_range() -> list[Text]:
    """Texts whose range covers the installed release, which need not be one of its ends."""
    found: dict[Any, Text] = {}
    for one in texts():
        distribution = installed(one.origin.package)
        from packaging.specifiers import SpecifierSet

        covered = distribution and SpecifierSet(one.origin.versions).contains(distribution.version.split("+")[0])
        if covered or one.origin.package in ("libc", "python"):
            found[(one.slug, one.origin)] = one
    return list(found.values())


@pytest.mark.parametrize("one", _in_range(), ids=lambda one: f"{one.slug}-{one.origin.package}")
def test_the_text_is_in_the_installed_file_it_is_said_to_come_from(one: Text) -> None:
    known = in_system(one.origin)
    assert in_installed(one.origin) if known is None else known, f"{one.origin.text!r} in {one.origin.file}"


def test_enough_texts_are_checked_here() -> None:
    """With the cpu extra the check above is no formality; without it there is nothing to read."""
    if installed("vllm") is None:
        pytest.skip("the engine is not installed")
    assert len(_in_range()) > 80


def _flat(tree: Any, path: str = "") -> set[str]:
    keys = {path} if path else set()
    if isinstance(tree, dict):
        for key, value in tree.items():
            keys |= _flat(value, f"{path}.{key}" if path else str(key))
    return keys


def test_every_setting_that_an_entry_names_exists() -> None:
    """verl's and Agent Lightning's composed config, gateway and controller config, and the engine's own arguments."""
    verl, agl, engine = installed("verl"), installed("agentlightning"), installed("vllm")
    if not (verl and agl and engine):
        pytest.skip("the stack is not installed")

    def read(distribution: Any, file: str) -> str:
        return Path(str(distribution.locate_file(file))).read_text(encoding="utf-8")

    known = _flat(yaml.safe_load(read(verl, "verl/trainer/config/_generated_ppo_trainer.yaml")))
    for file in ("verl/config.yaml", "config/controller.yaml", "config/server.yaml"):
        known |= _flat(yaml.safe_load(read(agl, f"agentlightning/{file}")))
    rollout = re.findall(r"^    (\w+): ", read(verl, "verl/workers/config/rollout.py"), flags=re.MULTILINE)
    known |= {f"actor_rollout_ref.rollout.{name}" for name in rollout} | _flat({"mmqa": MMQA_DEFAULTS})
    free = ("actor_rollout_ref.model.override_config.",)  # handed on to transformers as it is
    arguments = set(re.findall(r"^    (\w+): ", read(engine, "vllm/engine/arg_utils.py"), flags=re.MULTILINE))
    arguments |= set(re.findall(r'"--([\w-]+)"', read(engine, "vllm/entrypoints/openai/cli_args.py")))
    arguments |= set(
        re.findall(r"^    (\w+): ", read(engine, "vllm/entrypoints/openai/cli_args.py"), flags=re.MULTILINE)
    )
    prefix = "actor_rollout_ref.rollout.engine_kwargs.vllm."
    nemo = {"grpo", "policy"}
    unknown = {}
    for entry in ENTRIES.values():
        configs = [cause.config for cause in entry.causes if cause.config]
        leaves = [key for text in configs for key in _flat(yaml.safe_load(text)) if key.split(".")[0] not in nemo]
        for key in {*entry.config_keys, *leaves}:
            if key.startswith(prefix):
                ok = key.removeprefix(prefix).split(".")[0] in arguments
            else:
                ok = key in known or key.startswith(free)
            if not ok:
                unknown.setdefault(entry.slug, set()).add(key)
    assert unknown == {}


# -- the schema ------------------------------------------------------------------------------------------------------


def _broken(change: tuple[str, str]) -> str:
    text = (CATALOGUE / "mm-cache-desync.md").read_text(encoding="utf-8")
    assert change[0] in text
    return text.replace(*change, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("severity: crash", "severity: fatal"), "severity"),
        (("group: crash", "group: nowhere"), "group"),
        (("phase: rollout", "phase: lunch"), "phase"),
        (("slug: mm-cache-desync", "slug: other"), "file's name"),
        (("lost: ", "losst: "), "unknown field losst"),
        (("## Why", "## Because"), "sections"),
        (('versions: ">=0.17.0,<0.22.0"', 'versions: "about 0.17"'), "about 0.17"),
        (('  - literal: "Expected', "  - regex: '(?<=a)b'\n    needs: b\n    #"), "JavaScript"),
        (('  - literal: "Expected', "  - regex: '[a-z'\n    needs: b\n    #"), "unterminated"),
        (('evidence: "measured', 'evidence: "heard'), "evidence"),
    ],
)
def test_a_file_that_breaks_the_schema_is_refused_by_name(change: tuple[str, str], said: str) -> None:
    with pytest.raises(EntryError, match="mm-cache-desync") as raised:
        parse(_broken(change), "mm-cache-desync")
    assert said in str(raised.value)
