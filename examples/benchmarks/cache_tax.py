"""What each cache setting costs: generated tokens per second on a group-of-8 image workload, one engine at a time.

    python examples/benchmarks/cache_tax.py --out tax.json

Each step asks about 4 pictures 8 times (the group of a GRPO step), with different samples, and ends as a trainer's
does: pause, caches cleared, resume. All variants run in one go, round after round in changing order. The machine is
rarely idle, so beside the clock it reads the processor time of the engine's processes, which other work disturbs less.

The model is random: a 6-layer vision tower on 448 px pictures (256 image tokens), a 2-layer language model. The ratios
belong to that proportion of vision to language work and to the platform; the order of the variants carries over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from agent.caches import _probe_cases as rules
from agent.caches import _probe_host as host
from agent.caches import _probe_model
from agent.caches.cache_safe_rollout import installed_version, is_affected
from agent.caches.probe import ENVIRONMENT

PICTURES, GROUP, STEPS, TOKENS, SIDE = 4, 8, 3, 16, 448

#: name -> engine arguments; "safe" and "keep" are what affected versions get, wherever they are measured
VARIANTS: dict[str, dict[str, Any]] = {
    "all caches on": rules.DEFAULT,
    "upstream example: prefix caching off": rules.UPSTREAM,
    "cache_safe_rollout(): both off": {"enable_prefix_caching": False, "mm_processor_cache_gb": 0},
    "keep_prefix_caching=True": {"enable_prefix_caching": True, "mm_processor_cache_gb": 0},
    "strategy='plugin'": rules.DEFAULT | {"additional_config": {"mmqa_cache_sync": True}},
}


async def measure(model: str, settings: dict[str, Any], safe_pause: bool, result: Path) -> None:
    """Start one engine, warm it up with a picture of its own, time ``STEPS`` steps; write tokens per second."""
    engine = host.start_engine(model, settings, max_model_len=1024)
    await _step(engine, "warm", [9])
    started, busy, made = time.monotonic(), cpu_seconds(), 0
    for step in range(STEPS):
        made += await _step(engine, f"s{step}", list(range(1, PICTURES + 1)))
        if safe_pause:
            await host._pause(engine)
            await engine.resume_generation()
        else:  # the pause itself would desynchronise this variant: the same clears, on both sides
            await engine.reset_mm_cache()
            await engine.reset_prefix_cache()
            await engine.reset_encoder_cache()
    wall = time.monotonic() - started
    result.write_text(json.dumps({"wall": made / wall, "cpu": made / (cpu_seconds() - busy)}))


def cpu_seconds() -> float:
    """User and system time so far of this case's session: front end, engine core, worker (Linux)."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()  # from the state on
            if int(fields[3]) == os.getsid(0):
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def _step(engine: Any, name: str, pictures: list[int]) -> int:
    from vllm import SamplingParams

    async def one(picture: int, sample: int) -> int:
        last = None
        wanted = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True)
        image = host.picture(picture).resize((SIDE, SIDE))
        prompt = {"prompt": _probe_model.PROMPT, "multi_modal_data": {"image": image}}
        async for output in engine.generate(prompt, wanted, f"{name}-{picture}-{sample}"):
            last = output
        count = len(last.outputs[0].token_ids) if last else 0
        if count != TOKENS:
            raise RuntimeError(f"request {name}-{picture}-{sample} came back with {count} tokens")
        return count

    return sum(await asyncio.gather(*(one(picture, sample) for picture in pictures for sample in range(GROUP))))


def survives(settings: dict[str, Any]) -> bool:
    """Whether this variant can be paused on the installed version."""
    off = settings["mm_processor_cache_gb"] == 0
    return off or "additional_config" in settings or not is_affected()


def middle(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Median over the rounds, per unit."""
    return {unit: statistics.median(speed[unit] for speed in rounds) for unit in ("wall", "cpu")}


def show(speed: dict[str, float]) -> str:
    """Tokens per second of the clock and of processor time."""
    return f"{speed['wall']:.1f} tokens/s, {speed['cpu']:.1f} tokens per CPU second"


def main() -> int:
    """Measure every variant ``--rounds`` times and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    names = [name for name in VARIANTS if "plugin" not in name or is_affected()]
    print(f"vLLM {installed_version()}: {len(names)} variants x {wanted.rounds} rounds, about 40 s each", flush=True)
    speeds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="mmqa-tax-") as scratch:
        folder = Path(scratch)
        model = folder / "model"
        size = {"depth": 6, "width": 256, "side": SIDE}
        if host._forked(lambda: _probe_model.build(model, **size), folder / "model.log", 300) != 0:
            sys.exit((folder / "model.log").read_text()[-2000:])
        import vllm.v1.engine.async_llm  # noqa: F401  once, before the forks

        for round_number in range(wanted.rounds):
            for name in names[round_number % len(names) :] + names[: round_number % len(names)]:
                result, log = folder / "speed.json", folder / "engine.log"
                result.unlink(missing_ok=True)
                settings = VARIANTS[name]
                work = partial(measure, str(model), settings, survives(settings), result)
                host._forked(lambda work=work: asyncio.run(work()), log, 400)
                if not result.exists():
                    cause = rules.signature(log.read_text()) or rules.root_cause(log.read_text())
                    sys.exit(f"error: {name}: {cause}")
                speed = {unit: round(value, 2) for unit, value in json.loads(result.read_text()).items()}
                speeds[name].append(speed)
                print(f"  round {round_number + 1}  {name}: {show(speed)}", flush=True)
    base = middle(speeds[names[0]])
    table = {}
    for name, rounds in speeds.items():
        ratio = {unit: round(value / base[unit], 2) for unit, value in middle(rounds).items()}
        table[name] = {"rounds": rounds, "median": middle(rounds), "ratio": ratio, "paused": survives(VARIANTS[name])}
        print(f"{name:40} {show(middle(rounds))}  x {ratio['wall']:.2f} wall, x {ratio['cpu']:.2f} CPU")
    if wanted.out:
        report = {"version": installed_version(), "date": datetime.date.today().isoformat(), "device": "cpu"}
        wanted.out.write_text(json.dumps(report | {"variants": table}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
