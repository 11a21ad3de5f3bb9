"""Find the answer in what a model said. Pure: no server, no configuration.

The wanted form is a tag: ``<answer>5</answer>``; the last tag counts, since a model may quote the form first. Without a
tag there is one fallback: what follows the last "answer is" or "answer:", else the last number (or the last of the
allowed answers, if the task has a closed set). Taking the *first* number instead would read "1. I see 5 circles" as 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Form = Literal["tagged", "fallback", "none"]

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.IGNORECASE | re.DOTALL)
_PHRASE = re.compile(r"\banswer\s*(?:is|:|=)\s*([^\n.,;!?]+)", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*")
_NUMBER_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_WORDS = {word: str(number) for number, word in enumerate(_NUMBER_WORDS)}
_NUMBER_WORD = re.compile(r"\b(?:" + "|".join(_WORDS) + r")\b", re.IGNORECASE)


@dataclass(frozen=True)
class Answer:
    """What was found: ``value`` is normalised (see ``normalise``), empty if ``form`` is "none"."""

    value: str
    form: Form


def normalise(text: str) -> str:
    """Case, spaces, outer punctuation and number spelling do not matter: " Five." -> "5", "1,000" -> "1000"."""
    text = " ".join(text.split()).strip(" \t\"'`*.,;:!?()[]{}").casefold()
    if text in _WORDS:
        return _WORDS[text]
    if re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        text = text.replace(",", "")
    if re.fullmatch(r"[-+]?\d+(?:\.0+)?", text):
        number = int(text.split(".")[0]) if len(text) < 300 else None
        return str(number) if number is not None else text
    return text


def find(text: str, allowed: Sequence[str] = ()) -> Answer:
    """Find the answer in ``text``.

    ``allowed`` is the closed set of answers, if the task has one; it only guides the fallback. A tag that holds
    anything else is still the answer (and wrong).
    """
    if tags := _TAG.findall(text):
        return Answer(normalise(tags[-1]), "tagged")
    if phrases := _PHRASE.findall(text):
        value = _last_mention(phrases[-1], allowed) or normalise(phrases[-1])
        if value:
            return Answer(value, "fallback")
    value = _last_mention(text, allowed)
    return Answer(value, "fallback") if value else Answer("", "none")


def _last_mention(text: str, allowed: Sequence[str]) -> str:
    """The last allowed answer that ``text`` mentions; without a closed set the last number."""
    numbers = [(m.start(), normalise(m.group())) for pattern in (_NUMBER, _NUMBER_WORD) for m in pattern.finditer(text)]
    if not allowed:
        return max(numbers)[1] if numbers else ""
    wanted = {normalise(one) for one in allowed}
    mentions = [(at, value) for at, value in numbers if value in wanted]
    for value in wanted:
        if not re.fullmatch(_NUMBER, value):
            mentions += [(m.start(), value) for m in re.finditer(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.I)]
    return max(mentions)[1] if mentions else ""
