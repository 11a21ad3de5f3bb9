"""What a run is doing, as events: the trainer's process appends, the supervisor reads and shows.

One JSON object a line in ``attempts/<n>/progress.jsonl``: ``{"time": s, "phase": str, "step": int, ...}``. Phases are
"starting", "rollout", "validating", "training", "saving", "step" (one finished, with its figures) and "failed".
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.training.rundir import json_lines


class Progress:
    """Appends events to one file; every line is written whole."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def emit(self, phase: str, **details: Any) -> None:
        """Append one event."""
        line = json.dumps({"time": round(time.time(), 3), "phase": phase, **details}) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)


class Follower:
    """Yields the events that were appended since the last call.

    A line not yet finished waits for the next; one that a full disk cut short is left out.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Events since the last call (none while the file does not exist)."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        end = data.rfind(b"\n") + 1
        self._offset += end
        yield from json_lines(data[:end])
