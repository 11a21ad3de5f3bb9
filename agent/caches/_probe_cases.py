"""What the probe tries, and how it reads what happened. Pure: no engine, no file, no vLLM."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from agent.caches.cache_safe_rollout import cache_safe_rollout, is_affected

#: vLLM's own defaults, and what the upstream multimodal example sets.
DEFAULT = {"enable_prefix_caching": True, "mm_processor_cache_gb": 4}
UPSTREAM = {"enable_prefix_caching": False, "mm_processor_cache_gb": 4}

GOOD = ("ok", "fresh")
STALE_BELOW = 1e-4  # nats; the probe's refit moves log-probabilities by 2e-3, an unchanged model by less than 1e-6


@dataclass(frozen=True)
class Hazard:
    """One way to lose a record: the steps an engine takes, and which settings it is tried with."""

    key: str
    title: str
    steps: tuple[str, ...]
    variants: tuple[str, ...]
    needs_sleep: bool | None = None  # True: only where the platform can sleep; False: only where it cannot


HAZARDS = (
    Hazard(
        "pause",
        "same image before and after pause(clear_cache) + resume",
        ("ask", "ask", "pause", "resume", "ask"),
        ("default", "upstream-example", "safe", "safe-keep-prefix", "plugin"),
    ),
    Hazard(
        "sleep1",
        "same image before and after sleep(1) + wake",
        ("ask", "ask", "sleep1", "wake", "ask"),
        ("default", "safe", "plugin"),
        needs_sleep=True,
    ),
    Hazard(
        "sleep2",
        "same image before and after sleep(2) + wake + reload + refit",
        ("ask", "ask", "sleep2", "wake_weights", "reload", "refit", "wake_kv_cache", "ask"),
        ("default", "safe", "plugin"),
        needs_sleep=True,
    ),
    Hazard(
        "sleep-caches",
        "same image before and after the cache half of sleep(1) (this platform keeps its memory)",
        ("ask", "ask", "sleep1", "wake", "ask"),
        ("default", "safe", "plugin"),
        needs_sleep=False,
    ),
    Hazard(
        "drain",
        "a new image asked about while pause(mode=wait, clear_cache) drains, and again afterwards",
        ("drain", "ask"),
        ("default", "safe", "plugin"),
    ),
    Hazard(
        "worker-clear",
        "encoder outputs cleared in the worker alone",
        ("ask", "ask", "clear_worker", "reset_prefix", "ask"),
        ("default", "safe", "safe-keep-prefix"),
    ),
    Hazard(
        "refit",
        "vision weights refitted, prefix cache reset, encoder records kept",
        ("ask", "refit", "reset_prefix", "ask"),
        ("default", "safe", "safe-keep-prefix"),
    ),
    Hazard(
        "refit-cleared",
        "vision weights refitted, both encoder records cleared",
        ("ask", "refit", "clear_both", "ask"),
        ("default", "safe"),
    ),
    Hazard(
        "refit-paused",
        "vision weights refitted between pause(clear_cache) and resume",
        ("ask", "pause", "refit", "resume", "ask"),
        ("default", "safe", "safe-keep-prefix", "plugin"),
    ),
    Hazard(
        "refit-asleep",
        "vision weights refitted between the cache half of sleep(1) and wake",
        ("ask", "sleep1", "refit", "wake", "ask"),
        ("default", "safe", "plugin"),
        needs_sleep=False,
    ),
)


@dataclass(frozen=True)
class Case:
    """One engine: a hazard under one set of engine arguments. ``same_as`` names the case that already tries them."""

    hazard: str
    variant: str
    steps: tuple[str, ...]
    settings: dict[str, Any] = field(hash=False)
    needs_sleep: bool | None = None
    same_as: str | None = None

    @property
    def key(self) -> str:
        """Name of the case in files and tables."""
        return f"{self.hazard}.{self.variant}"

    def order(self, timeout: float) -> dict[str, Any]:
        """What the host process is told (see ``_probe_host``); ``timeout`` in seconds."""
        return asdict(self) | {"key": self.key, "timeout": timeout}


def engine_args(rollout: dict[str, Any]) -> dict[str, Any]:
    """Settings under ``actor_rollout_ref.rollout`` as vLLM engine arguments, on top of vLLM's defaults."""
    flat = {name: value for name, value in rollout.items() if name != "engine_kwargs"}
    return DEFAULT | flat | rollout.get("engine_kwargs", {}).get("vllm", {})


def variants(version: str) -> dict[str, dict[str, Any]]:
    """Engine arguments by name of variant, for one vLLM version."""
    return {
        "default": DEFAULT,
        "upstream-example": UPSTREAM,
        "safe": engine_args(cache_safe_rollout(version)),
        "safe-keep-prefix": engine_args(cache_safe_rollout(version, keep_prefix_caching=True)),
        "plugin": engine_args(cache_safe_rollout(version, strategy="plugin")),
    }


def cases(version: str, only: tuple[str, ...] = ()) -> list[Case]:
    """Every case for this version, in order; where two variants come to the same arguments one engine serves both."""
    arguments = variants(version)
    found: list[Case] = []
    for hazard in HAZARDS:
        if only and hazard.key not in only:
            continue
        seen: list[Case] = []
        for variant in hazard.variants:
            settings = dict(arguments[variant])
            if hazard.needs_sleep:
                settings["enable_sleep_mode"] = True
            twin = next((case.key for case in seen if case.settings == settings), None)
            seen.append(Case(hazard.key, variant, hazard.steps, settings, hazard.needs_sleep, twin))
        found += seen
    return found


def classify(steps: tuple[str, ...], run: dict[str, Any] | None, code: int | None, log: str) -> dict[str, Any]:
    """What happened in one engine: ``outcome`` and, where it helps, ``detail`` (one line).

    Args:
        steps: the case's steps.
        run: the host's result file: ``engine`` (starting, running, done) and ``trace``.
        code: exit code of the case's process, ``None`` if it ran out of time.
        log: the engine's log.
    """
    trace = run["trace"] if run else []
    if run is None or run["engine"] == "starting":
        if code is None:
            return {"outcome": "not-started", "detail": "the engine did not come up in time"}
        return {"outcome": "not-started", "detail": killed(code) or root_cause(log) or f"exit code {code}"}
    for entry in trace:
        if "unsupported" in entry:
            return {"outcome": "unsupported", "detail": entry["unsupported"]}
        if "timeout_s" in entry:
            detail = f"no answer to '{entry['step']}' in {entry['timeout_s']:.0f} s"
            return {"outcome": "hang", "detail": "; ".join(filter(None, [detail, signature(log)]))}
        if "error" in entry:
            dead = "EngineDeadError" in entry["error"]
            return {"outcome": "engine-dead" if dead else "error", "detail": signature(log) or entry["error"]}
    if len(trace) < len(steps):
        return {"outcome": "hang" if code is None else "error", "detail": killed(code) or "stopped half-way"}
    asks = [entry for entry in trace if entry["step"] == "ask"]
    last = asks[-1]
    if last["finish"] == "error" or not last["tokens"]:
        return {"outcome": "crash", "detail": signature(log) or root_cause(log) or "empty answer"}
    if "refit" in steps:
        moved = max(abs(a - b) for a, b in zip(asks[0]["logprobs"], last["logprobs"], strict=True))
        same = asks[0]["tokens"] == last["tokens"] and moved < STALE_BELOW
        return {"outcome": "stale" if same else "fresh", "detail": f"log-probabilities moved by {moved:.1e} nats"}
    if asks[0]["tokens"] != last["tokens"]:
        return {"outcome": "differs", "detail": f"{asks[0]['tokens']} became {last['tokens']}"}
    return {"outcome": "ok"}


_SIGNATURES = ("Expected a cached item for mm_hash", "Encoder cache miss", "Multi-modal cache miss")
_PREFIX = re.compile(r"^(\([^)]*pid=\d+[^)]*\)\s*)?([A-Z]+ \d\d-\d\d [\d:]+ (\[[^\]]*\] )?)?")
_RAISED = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b(?:: .*)?$")
_CONSEQUENCE = ("Engine core initialization failed", "See root cause above", "EngineDeadError", "WorkerProc init")
_PATH = re.compile(r"(?<![\w.])/(?:[\w.+@-]+/)+([\w.+@-]*)")


def signature(log: str) -> str | None:
    """The first log line that carries a known signature, without prefix, hash or path."""
    for line in log.splitlines():
        # The quoted source line of the assertion comes before the message itself.
        if any(text in line for text in _SIGNATURES) and "{mm_hash" not in line:
            return clean(line)
    return None


def root_cause(log: str) -> str | None:
    """The first exception line that is not a mere consequence of another one."""
    for line in log.splitlines():
        text = _PREFIX.sub("", line).strip()
        if _RAISED.match(text) and not any(part in text for part in _CONSEQUENCE):
            return clean(text)
    return None


def killed(code: int | None) -> str | None:
    """What a signal as exit code most likely means."""
    return "killed (signal 9), most likely for lack of memory" if code == -9 else None


def clean(line: str) -> str:
    """A log line fit to be shown and kept: no prefix, long hashes cut, no folder of this machine."""
    text = _PREFIX.sub("", line).strip()
    text = re.sub(r"\b([0-9a-f]{8})[0-9a-f]{20,}\b", r"\1", text)
    return _PATH.sub(r"\1", text)[:300]


def short_ids(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trace with content hashes cut to eight digits (they depend on the model's folder)."""

    def cut(node: Any) -> Any:
        if isinstance(node, str):
            return node[:8] if re.fullmatch(r"[0-9a-f]{32,}", node) else node
        if isinstance(node, list):
            return [cut(item) for item in node]
        return {cut(key): cut(value) for key, value in node.items()} if isinstance(node, dict) else node

    return cut(trace)


def verdict(version: str, results: list[dict[str, Any]]) -> dict[str, bool | None]:
    """The gate held against what happened: did the defaults crash, and did the returned settings hold?"""
    outcome = {(item["hazard"], item["variant"]): item["outcome"] for item in results}
    paths = [key for key in ("pause", "sleep1", "sleep2", "sleep-caches") if (key, "default") in outcome]
    known = [key for key in paths if outcome[key, "default"] != "unsupported"]
    return {
        "gate_says_affected": is_affected(version),
        "default_crashed": any(outcome[key, "default"] in ("crash", "hang", "engine-dead") for key in known)
        if known
        else None,
        "safe_settings_passed": all(outcome[key, "safe"] in GOOD for key in known) if known else None,
    }
