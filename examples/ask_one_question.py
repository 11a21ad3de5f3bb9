"""Ask a model one question about a picture, with the loop that training uses, and no training.

    python examples/ask_one_question.py photo.jpg "How many sheep?" --url http://127.0.0.1:8000/v1 --model NAME

The endpoint is anything that speaks OpenAI's chat completions: ``vllm serve MODEL``, for example. What differs from a
bare API call: the picture is normalised as in training (upright, on white, size limit), the answer is looked for in the
wanted form first, and with ``--turns 2`` the model may look closer at a part before it answers.
"""

import argparse
import os

from agent.ask import ask
from agent.errors import InputError, RunFailed, one_line
from agent.loop import AgentSettings

parser = argparse.ArgumentParser(description="Ask one question about a picture.")
parser.add_argument("image")
parser.add_argument("question")
parser.add_argument("--url", required=True, help="base address, ending in /v1")
parser.add_argument("--model", required=True)
parser.add_argument("--turns", type=int, default=1)

if __name__ == "__main__":
    options = parser.parse_args()
    settings = AgentSettings(max_turns=options.turns)
    try:
        asked = ask(
            options.image,
            options.question,
            url=options.url,
            model=options.model,
            key=os.environ.get("OPENAI_API_KEY", ""),
            settings=settings,
        )
    except (InputError, RunFailed) as error:
        parser.exit(error.exit_code, f"error: {one_line(error)}\n")
    for turn, reply in enumerate(asked.replies, start=1):
        print(f"reply {turn}: {reply}")
    print(f"answer: {asked.answer.value!r} ({asked.answer.form})")
