"""An agent written as the upstream multimodal example writes it: openai's client, the picture in the environment.

For comparison only (docs/explain/speed.md): each rollout imports openai, and a picture over 128 kB cannot be
passed to it.
"""

import os
import re

import httpx


class UpstreamAgent:
    """Reads IMAGE (a data: address), QUESTION and ANSWER; the reward is whether the first integer is right."""

    def run(self) -> None:
        from openai import OpenAI

        client = OpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key=os.environ["AGL_KEY"], max_retries=2)
        content = [
            {"type": "image_url", "image_url": {"url": os.environ["IMAGE"]}},
            {"type": "text", "text": os.environ["QUESTION"]},
        ]
        reply = client.chat.completions.create(
            model="auto",
            messages=[{"role": "user", "content": content}],  # type: ignore[list-item]
            max_tokens=int(os.environ.get("MAX_TOKENS", "6")),
        )
        number = re.search(r"\d+", reply.choices[0].message.content or "")
        reward = float(number is not None and number.group() == os.environ["ANSWER"])
        httpx.post(
            os.environ["AGL_EVENT_URL"],
            json={"event_type": "reward", "data": {"value": reward}},
            headers={"Authorization": f"Bearer {os.environ['AGL_KEY']}"},
        ).raise_for_status()
