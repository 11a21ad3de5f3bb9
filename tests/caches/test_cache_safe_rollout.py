"""The gate: which vLLM gets which settings, by number for releases and by code for development builds."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from agent.caches import cache_safe_rollout as gate
from agent.caches.cache_safe_rollout import UnknownVersion, cache_safe_rollout, is_affected, source_says_affected

RELEASES = [
    line for line in Path(__file__).with_name("vllm_releases.txt").read_text().splitlines() if not line.startswith("#")
]
SAFE = {"enable_prefix_caching": False, "engine_kwargs": {"vllm": {"mm_processor_cache_gb": 0}}}
AFFECTED = {"0.17.0", "0.17.1", "0.18.0", "0.18.1", "0.19.0", "0.19.1", "0.20.0", "0.20.1", "0.20.2", "0.21.0"}


def test_release_table_is_whole() -> None:
    assert len(RELEASES) > 40 and RELEASES[0] == "0.8.0" and set(RELEASES) > AFFECTED


@pytest.mark.parametrize("version", RELEASES)
def test_gate_over_every_release(version: str) -> None:
    assert cache_safe_rollout(version) == (SAFE if version in AFFECTED else {})


@pytest.mark.parametrize("suffix", ["+cpu", "+cu130", ".post1", ".post2+cpu"])
@pytest.mark.parametrize("version", ["0.16.0", "0.17.0", "0.21.0", "0.22.0", "0.33.0"])
def test_post_and_local_parts_follow_their_release(version: str, suffix: str) -> None:
    assert is_affected(version + suffix) is (version in AFFECTED)


@pytest.mark.parametrize("version", ["0.16.1rc0.dev7+gabc1234", "0.17.0rc1", "0.21.1.dev5", "0.22.0rc1", "0.30.0a1"])
def test_prerelease_that_is_not_installed_cannot_be_told(version: str) -> None:
    assert is_affected(version)


@pytest.mark.parametrize("text", ["", "latest", "0.21.x", "v", "0.21.0 or so", ">=0.21"])
def test_unparsable_version_is_named(text: str) -> None:
    with pytest.raises(UnknownVersion, match="not a vLLM version"):
        cache_safe_rollout(text)
    with pytest.raises(UnknownVersion, match="not a vLLM version"):
        cache_safe_rollout(text, multimodal=False)


def test_text_only_or_never_paused_needs_nothing() -> None:
    assert cache_safe_rollout("0.21.0", multimodal=False) == {}
    assert cache_safe_rollout("0.21.0", pauses=False) == {}


def test_keep_prefix_caching_drops_only_that_key() -> None:
    assert cache_safe_rollout("0.20.2", keep_prefix_caching=True) == {
        "engine_kwargs": {"vllm": {"mm_processor_cache_gb": 0}}
    }


def test_result_is_fresh_each_time() -> None:
    cache_safe_rollout("0.21.0")["engine_kwargs"]["vllm"]["mm_processor_cache_gb"] = 4
    assert cache_safe_rollout("0.21.0") == SAFE


@given(
    st.tuples(st.integers(0, 1), st.integers(0, 60), st.integers(0, 12)),
    st.sampled_from(["", ".post1", "+cpu", "+cu130", ".post3+rocm721"]),
)
def test_numbered_releases_are_affected_exactly_in_the_window(number: tuple[int, int, int], suffix: str) -> None:
    text = ".".join(map(str, number)) + suffix
    assert is_affected(text) is (Version("0.17.0") <= Version(text) < Version("0.22.0"))


@given(st.text(max_size=20))
def test_any_text_is_decided_or_refused(text: str) -> None:
    try:
        result = cache_safe_rollout(text)
    except UnknownVersion:
        return
    assert result in ({}, SAFE)


# -- development builds: decided by the code --------------------------------------------------------------------------

CORE = """
class EngineCore:
    def reset_mm_cache(self): self.mm_receiver_cache.clear_cache()
    def _reset_caches(self): self.reset_prefix_cache(); self.reset_mm_cache()
    def pause_scheduler(self, mode):
        def idle(engine, future): engine._reset_caches()
        self._callbacks.append(idle)
    def sleep(self, level): self.pause_scheduler("abort"); self.model_executor.sleep(level)
"""
OLD_CORE = """
class EngineCore:
    def reset_mm_cache(self): self.mm_receiver_cache.clear_cache()
    def sleep(self, level): self.model_executor.sleep(level)
"""
FRONT = """
class Other:
    async def sleep(self): self.renderer.clear_mm_cache()
class AsyncLLM:
    async def reset_mm_cache(self): self.renderer.clear_mm_cache(); await self.engine_core.reset_mm_cache_async()
    async def sleep(self, level):
        {sleep}
        await self.engine_core.sleep_async(level)
    async def pause_generation(self):
        {pause}
        await self.engine_core.pause_scheduler_async(); await asyncio.sleep(0.02)
"""
CLEAR = "await self.renderer.clear_mm_cache_async()"


def build(folder: Path, core: str, front: str) -> Path:
    (folder / "v1/engine").mkdir(parents=True)
    (folder / "v1/engine/core.py").write_text(core)
    (folder / "v1/engine/async_llm.py").write_text(front)
    return folder


@pytest.mark.parametrize(
    ("core", "sleep", "pause", "affected"),
    [
        (CORE, "pass", "pass", True),
        (CORE, CLEAR, CLEAR, False),
        (CORE, "await self.reset_mm_cache()", "await self.reset_mm_cache()", False),
        (CORE, CLEAR, "pass", True),  # asyncio.sleep in pause_generation is not AsyncLLM.sleep
        (CORE, "pass", CLEAR, True),
        (OLD_CORE, "pass", "await self.reset_mm_cache()", False),
        ("class EngineCore: pass", CLEAR, CLEAR, None),
        ("def broken(", CLEAR, CLEAR, None),
    ],
)
def test_source_decides(tmp_path: Path, core: str, sleep: str, pause: str, affected: bool | None) -> None:
    assert source_says_affected(build(tmp_path, core, FRONT.format(sleep=sleep, pause=pause))) is affected


def test_missing_files_cannot_be_told(tmp_path: Path) -> None:
    assert source_says_affected(tmp_path) is None


@pytest.mark.parametrize(("front_clears", "affected"), [(True, False), (False, True)])
def test_installed_development_build_goes_by_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, front_clears: bool, affected: bool
) -> None:
    line = CLEAR if front_clears else "pass"
    folder = build(tmp_path, CORE, FRONT.format(sleep=line, pause=line))
    monkeypatch.setattr(gate, "installed_version", lambda: "0.22.0rc1.dev12+gabc")
    monkeypatch.setattr(gate, "package_folder", lambda: folder)
    assert is_affected() is affected
    assert is_affected("0.22.0rc1.dev12+gabc") is affected
    assert is_affected("0.22.0rc2")  # another build: not readable here
    (folder / "v1/engine/core.py").unlink()
    assert is_affected()


def test_installed_release_agrees_with_its_own_code() -> None:
    folder = gate.package_folder()
    if folder is None:
        pytest.skip("vLLM is not installed")
    assert source_says_affected(folder) is is_affected()


# -- the plugin's door, the printed form, and the file on its own ----------------------------------------------------


def test_plugin_keeps_both_caches_and_names_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert cache_safe_rollout("0.21.0", strategy="plugin") == {
        "engine_kwargs": {"vllm": {"additional_config": {"mmqa_cache_sync": True}}}
    }
    assert cache_safe_rollout("0.22.1", strategy="plugin") == {}


def test_plugin_that_vllm_would_not_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(ValueError, match="VLLM_PLUGINS"):
        cache_safe_rollout("0.21.0", strategy="plugin")
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(gate.importlib.metadata, "entry_points", lambda group: ())
    with pytest.raises(ValueError, match="install this project"):
        cache_safe_rollout("0.21.0", strategy="plugin")


def test_unknown_strategy() -> None:
    with pytest.raises(ValueError, match="unknown strategy 'magic'"):
        cache_safe_rollout("0.22.1", strategy="magic")


def test_no_vllm_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise gate.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(gate.importlib.metadata, "version", missing)
    with pytest.raises(UnknownVersion, match="not installed"):
        cache_safe_rollout()


def test_yaml_gives_the_same_settings_and_a_reason_on_every_value() -> None:
    for settings in (SAFE, cache_safe_rollout("0.21.0", strategy="plugin"), {}):
        text = gate.to_yaml(settings)
        assert yaml.safe_load(text) == settings
        values = [line for line in text.splitlines() if not line.rstrip().endswith((":", "{}"))]
        assert all(" # " in line for line in values)


def test_the_copied_file_works_alone_and_imports_nothing_heavy(tmp_path: Path) -> None:
    shutil.copy(gate.__file__, tmp_path / "cache_safe_rollout.py")
    code = textwrap.dedent("""
        import sys
        from cache_safe_rollout import cache_safe_rollout
        print(cache_safe_rollout("0.21.0"), cache_safe_rollout("0.22.0"))
        heavy = {"agent", "torch", "vllm", "verl", "ray", "transformers", "numpy", "yaml"} & set(sys.modules)
        assert not heavy, heavy
    """)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{SAFE} {{}}"


# -- what the file's text and the page show -------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs" / "caches" / "copy-safe-settings.md"


def snippets() -> dict[str, str]:
    """The lines that are shown to be copied: of the file's own text, and of the page for dicts and for OmegaConf."""
    shown = [line for line in (gate.__doc__ or "").splitlines() if line.startswith("    ")]
    plain, omegaconf, *_ = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    return {"docstring": textwrap.dedent("\n".join(shown)), "plain": plain, "omegaconf": omegaconf}


@pytest.mark.parametrize("name", ["docstring", "plain", "omegaconf"])
def test_what_is_shown_keeps_the_settings_that_are_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"n": 8, "engine_kwargs": {"vllm": {"limit_mm_per_prompt": {"image": 2}}, "sglang": {}}}
    config: Any = {"actor_rollout_ref": {"rollout": before}}
    monkeypatch.setattr(gate, "installed_version", lambda: "0.21.0")
    monkeypatch.setitem(sys.modules, "cache_safe_rollout", gate)  # as if the file were copied
    if name == "omegaconf":
        config = pytest.importorskip("omegaconf").OmegaConf.create(config)
    exec(snippets()[name], {"config": config, **vars(gate)})
    assert config["actor_rollout_ref"]["rollout"] == {
        "n": 8,
        "enable_prefix_caching": False,
        "engine_kwargs": {"vllm": {"limit_mm_per_prompt": {"image": 2}, "mm_processor_cache_gb": 0}, "sglang": {}},
    }
    assert before["engine_kwargs"] == {"vllm": {"limit_mm_per_prompt": {"image": 2}}, "sglang": {}}, (
        "not changed itself"
    )


def test_merging_nothing_changes_nothing() -> None:
    rollout = {"engine_kwargs": {"vllm": None}}
    assert gate.merged(rollout, {}) == rollout
    assert gate.merged(rollout, SAFE)["engine_kwargs"] == {"vllm": {"mm_processor_cache_gb": 0}}
