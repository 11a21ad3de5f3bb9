"""A stub, not a model: answers every chat completion and every event at once, so that only what is around it costs.

python examples/benchmarks/stub_server.py PORT
"""

import itertools
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

_calls = itertools.count()


async def complete(request: Request) -> JSONResponse:
    """A fixed reply with the token ids and log-probs that vLLM would send; each prompt is its own."""
    await request.body()
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": "<answer>3</answer>"},
        "token_ids": [1, 2, 3],
        "logprobs": {"content": [{"token": "x", "logprob": -0.1}] * 3},
    }
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    return JSONResponse({"choices": [choice], "prompt_token_ids": [next(_calls), 2, 3], "usage": usage})


async def event(request: Request) -> JSONResponse:
    """Takes an event and forgets it (for agents that are measured without a gateway)."""
    await request.body()
    return JSONResponse({})


app = Starlette(
    routes=[
        Route("/v1/chat/completions", complete, methods=["POST"]),
        Route("/events", event, methods=["POST"]),
    ]
)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
