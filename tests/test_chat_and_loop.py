"""agent.chat and agent.loop against a fake model server and gateway (httpx's mock transport, no network)."""

import asyncio
import json
import math

import httpx
import pytest
from PIL import Image

from agent import chat as chat_module
from agent.chat import Chat, ChatError, usable
from agent.images import ImageError, ImageStore
from agent.loop import AgentSettings, MultimodalQAAgent, check_references

BASE = "http://gateway/v1"


def completion(text, reason="stop", tokens=3):
    return {
        "choices": [{"message": {"content": text}, "finish_reason": reason}],
        "usage": {"completion_tokens": tokens},
    }


class Gateway:
    """Answers model calls from a list (a dict is a body, an int a status, an exception is raised) and keeps events."""

    def __init__(self, *replies):
        self.replies, self.requests, self.events = list(replies), [], []

    def __call__(self, request):
        body = json.loads(request.content)
        if request.url.path.endswith("/events"):
            self.events.append((body["event_type"], body["data"]))
            return httpx.Response(200, json={})
        self.requests.append(body)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, int):
            return httpx.Response(reply, json={"error": {"message": f"status {reply}"}})
        return httpx.Response(200, json=reply)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(chat_module, "_wait", lambda attempt, retry_after: 0.0)


def run_chat(gateway, **options):
    async def main():
        async with httpx.AsyncClient(transport=httpx.MockTransport(gateway)) as client:
            return await Chat(BASE, "key", client=client, **options).complete([{"role": "user", "content": "?"}])

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (completion("hi"), ("hi", "stop")),
        (completion("", tokens=1), ("", "stop")),  # the model ended at once: a reply, not an error
        (completion("h", "length"), ("h", "length")),
        (completion("", "error", 0), None),
        (completion("half", "abort"), None),
        (completion("", "stop", 0), None),
        (completion([{"type": "text", "text": "hi"}]), None),  # parts instead of a text
        ({"choices": []}, None),
        ({"choices": [{"message": None, "finish_reason": "stop"}]}, None),
        ({}, None),
        (None, None),
        ([1], None),
    ],
)
def test_usable(payload, expected):
    assert usable(payload) == expected


@pytest.mark.parametrize(
    "trouble", [500, 503, 429, completion("", "error", 0), {"choices": []}, httpx.ConnectError("refused")]
)
def test_trouble_is_retried_until_a_reply_comes(trouble):
    reply = run_chat(Gateway(trouble, trouble, completion("fine")))
    assert (reply.text, reply.attempts) == ("fine", 3)


def test_a_refusal_is_final_and_quotes_the_server():
    gateway = Gateway(400, completion("never"))
    with pytest.raises(ChatError, match="HTTP 400: status 400"):
        run_chat(gateway)
    assert len(gateway.requests) == 1


def test_endless_trouble_ends_with_the_last_problem():
    with pytest.raises(ChatError, match="no reply after 3 attempts; last: HTTP 503"):
        run_chat(Gateway(500, 502, 503), retries=2)


@pytest.fixture
def rollout(tmp_path, monkeypatch):
    """Runs one rollout: ``rollout(gateway, settings, **row)`` returns the events by kind."""
    store = ImageStore(tmp_path / "images")
    image = Image.new("RGB", (64, 64), "white")
    image.paste((255, 0, 0), (32, 32, 64, 64))
    picture = store.put(image)

    def run(gateway, settings=None, agent=MultimodalQAAgent, **changes):
        row = {"id": "1", "task": "t", "question": "How many?", "images": [picture], "answer": "3", **changes}
        environ = {
            "AGL_OPENAI_BASE_URL": BASE,
            "AGL_EVENT_URL": "http://gateway/api/events",
            "AGL_KEY": "secret",
            "MMQA_ROW": json.dumps(row),
            "MMQA_IMAGE_ROOT": str(store.root),
            "MMQA_AGENT": json.dumps({"instruction": "", **(settings or {})}),
        }

        async def main():
            async with httpx.AsyncClient(transport=httpx.MockTransport(gateway)) as client:
                monkeypatch.setattr(chat_module, "_shared", client)
                await agent(environ).run()

        error = None
        try:
            asyncio.run(main())
        except Exception as problem:
            error = problem
        return dict(gateway.events), error

    run.store, run.picture = store, picture
    return run


def test_a_right_tagged_answer_earns_one(rollout):
    gateway = Gateway(completion("<answer>3</answer>"))
    events, error = rollout(gateway)
    assert error is None and [kind for kind, _ in gateway.events] == ["sample", "reward"]
    assert events["reward"] == {"value": 1.0}
    assert events["sample"]["correct"] and events["sample"]["form"] == "tagged"
    assert gateway.requests[0]["messages"][0]["content"] == [
        {"type": "image_url", "image_url": {"url": rollout.picture}},
        {"type": "text", "text": "How many?"},
    ]
    assert "secret" not in json.dumps(gateway.events)


def test_an_engine_error_is_retried_and_the_rollout_goes_on(rollout):
    events, error = rollout(Gateway(completion("", "error", 0), 500, completion("3")))
    assert error is None and events["reward"] == {"value": 0.5} and events["sample"]["calls"] == 3


def test_a_failed_call_posts_a_finite_reward_and_fails_the_rollout(rollout):
    events, error = rollout(Gateway(400))
    assert isinstance(error, ChatError)
    assert events["reward"] == {"value": 0.0} and "HTTP 400" in events["sample"]["error"]


@pytest.mark.parametrize("value", [math.nan, "great", None])
def test_a_bad_reward_fails_the_rollout_and_is_never_posted(rollout, value):
    class Broken(MultimodalQAAgent):
        def score(self, row, reply, settings):
            good = super().score(row, reply, settings)
            return type(good)(value, good.correct, good.form, good.answer)

    events, error = rollout(Gateway(completion("3")), agent=Broken)
    assert type(error).__name__ == "RewardError" and events["reward"] == {"value": 0.0}


def test_a_scoring_bug_fails_the_rollout_but_keeps_the_sample(rollout):
    class Buggy(MultimodalQAAgent):
        def score(self, row, reply, settings):
            return 1 / 0

    events, error = rollout(Gateway(completion("3")), agent=Buggy)
    assert isinstance(error, ZeroDivisionError)
    assert events["sample"]["replies"] == ["3"] and events["sample"]["correct"] is None


def test_zoom_sends_the_part_and_asks_again(rollout):
    gateway = Gateway(completion("<zoom>0.5,0.5,1,1</zoom>"), completion("<answer>3</answer>"))
    events, error = rollout(gateway, {"max_turns": 2})
    assert error is None and events["reward"] == {"value": 1.0}
    roles = [message["role"] for message in gateway.requests[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    closer = gateway.requests[1]["messages"][2]["content"][0]["image_url"]["url"]
    assert rollout.store.open(closer).getpixel((30, 30)) == (255, 0, 0)


def test_the_last_turn_is_scored_even_if_it_zooms(rollout):
    zoom = completion("<zoom>0,0,1,1</zoom>")
    events, error = rollout(Gateway(zoom, zoom), {"max_turns": 2})
    assert error is None and events["reward"] == {"value": 0.0} and len(events["sample"]["replies"]) == 2


def test_images_outside_the_store_are_never_sent(rollout):
    gateway = Gateway(completion("3"))
    events, error = rollout(gateway, images=["file:///etc/hostname"])
    assert isinstance(error, ImageError) and gateway.requests == [] and events["reward"] == {"value": 0.0}


def test_remote_references_need_permission(tmp_path):
    store = ImageStore(tmp_path)
    with pytest.raises(ImageError):
        check_references(["http://127.0.0.1/a.png"], store, allow_remote=False)
    assert check_references(["http://127.0.0.1/a.png"], store, allow_remote=True)


def test_unknown_agent_settings_are_named():
    with pytest.raises(ValueError, match="max_token"):
        AgentSettings.from_json('{"max_token": 3}')
