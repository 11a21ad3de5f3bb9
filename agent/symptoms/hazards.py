"""Known hazards of a set-up: a config, the installed versions and the machine, checked before anything starts.

``check`` is pure. ``mmqa doctor`` prints what it returns; the trainer's preflight calls it with the composed config and
stops on a finding of severity ``crash``. It imports neither torch, verl, vllm, ray nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agent.symptoms.hazards_facts import Facts, Finding, Gpu, Machine, ModelFacts, NotANumber, Settings

__all__ = ["SEVERITIES", "Finding", "Gpu", "Machine", "ModelFacts", "check"]

#: Worst first. ``crash``: the run will stop. ``noise``: worth knowing, nothing breaks.
SEVERITIES = ("crash", "hang", "silent", "slow", "noise")


def check(config: Mapping[str, Any], versions: Mapping[str, str], machine: Machine | None = None) -> list[Finding]:
    """Every known hazard of this set-up, worst first; an empty list is a healthy one.

    Args:
        config: nested config in verl's layout (Agent Lightning's keys and this project's ``mmqa`` section included) or
            in NeMo-RL's; complete or partial. ``{}`` checks the versions and the machine alone.
        versions: distribution name -> version, as ``importlib.metadata`` gives them; absent means not installed.
        machine: what is known about the machine and the model folder; ``None`` skips the checks that need it.

    A check that itself fails is reported as a finding of severity ``noise``; the others still run.
    """
    from agent.symptoms import hazards_machine, hazards_nemo, hazards_verl, hazards_versions

    facts = Facts(Settings(config), dict(versions), machine)
    checks = [*hazards_versions.CHECKS, *hazards_machine.CHECKS]
    checks += hazards_nemo.CHECKS if facts.settings.dialect == "nemo" else hazards_verl.CHECKS
    findings = list(dict.fromkeys(finding for one in checks for finding in _guarded(one, facts)))
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _guarded(one: Callable[[Facts], Iterable[Finding]], facts: Facts) -> list[Finding]:
    try:
        return list(one(facts))
    except NotANumber as error:  # several checks may want it
        change = f"{error.path}=1, or the number you mean"
        return [Finding(str(error), "the run stops when it reads it", change, "", "crash")]
    except Exception as error:
        return [
            Finding(
                what=f"the check {one.__name__} could not be done: {type(error).__name__}: {error}",
                why="its hazard is neither found nor excluded; every other check ran",
                change="look at the value it names; the check expects what verl's or NeMo-RL's own config holds there",
                slug="",
                severity="noise",
            )
        ]
