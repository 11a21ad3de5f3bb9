"""What a log line says, without what the loggers put around it.

The expressions are data: the page that reads a pasted log in the browser applies the same ones in the same order.
"""

from __future__ import annotations

import re

# Removed anywhere: colours and other terminal control sequences.
ANYWHERE = r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\r"

# Removed at the start, again and again: Ray's "(Actor pid=1, ip=10.0.0.1)", vLLM's "(EngineCore_DP0 pid=2)", times,
# level and place as vLLM, Python's logging, hydra and uvicorn write them, this package's "[rollout 7c1d]", torch's
# "[rank0]:" and Kubernetes' "stdout F".
PREFIXES = (
    r"^[ ]*\([^()]*pid=[0-9]+[^()]*\)[ ]?",
    r"^\[?[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:.,]+Z?(?:[+-][0-9:]+)?\]?[ :]*",
    r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)(?::[ ]*| +)(?:[0-9]{2}-[0-9]{2} [0-9:.]+ )?"
    r"(?:\[[A-Za-z0-9_./-]+:[0-9]+\][ ]?)?",
    r"^\[[A-Za-z0-9_.]+\]\[(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\] - ",
    r"^\[(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|debug|info|warning|error|critical) *\][ :-]*",
    r"^\[rollout [0-9A-Za-z_-]+\][ ]?",
    r"^\[rank[0-9]+\]:[ ]?",
    r"^(?:stdout|stderr) [FP][ ]?",
)
# Removed at the end: Ray says once that a line came again.
SUFFIX = r" ?\[repeated [0-9]+x across cluster\].*$"

_ANYWHERE = re.compile(ANYWHERE)
_PREFIXES = tuple(re.compile(prefix) for prefix in PREFIXES)
_SUFFIX = re.compile(SUFFIX)
_WRITER = re.compile(r"\([^()]*pid=[0-9]+[^()]*\)|\[rollout [0-9A-Za-z_-]+\]")
_TIME = re.compile(r"(?:([0-9]{4})-)?([0-9]{2})-([0-9]{2})[T ]([0-9]{2}):([0-9]{2}):([0-9]{2})")


def clean(raw: str) -> str:
    """The line without colours, process prefixes, times, levels and Ray's repetition note."""
    line = _ANYWHERE.sub("", raw)
    changed = True
    while changed:
        before = line
        for prefix in _PREFIXES:
            line = prefix.sub("", line, count=1)
        changed = line != before
    return _SUFFIX.sub("", line).rstrip()


def writer(raw: str) -> str:
    """Who wrote a line ("(Worker pid=7)", "[rollout 7c1d]"); lines of one traceback share it."""
    return "".join(_WRITER.findall(raw[:300]))


def month_to_second(raw: str) -> str | None:
    """The line's time as ``MM-DD HH:MM:SS`` (vLLM writes no year), or None."""
    match = _TIME.search(raw[:300])
    return f"{match[2]}-{match[3]} {match[4]}:{match[5]}:{match[6]}" if match else None
