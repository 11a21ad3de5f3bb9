"""An agent with a scoring bug that strikes once in a run (the first training rollout that gets there)."""

import os
from pathlib import Path

from agent.loop import MultimodalQAAgent


class FlakyAgent(MultimodalQAAgent):
    def score(self, row, reply, settings):
        if "/mode/train/" in self.environ["AGL_OPENAI_BASE_URL"]:
            try:
                os.close(os.open(Path(os.environ["MMQA_RUN_DIR"]) / "bug-struck", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                raise ZeroDivisionError("the scoring bug")
        return super().score(row, reply, settings)
