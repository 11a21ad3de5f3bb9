"""``report.html`` of a run: one file, no script, no other host. What a model or a data set said is escaped."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from io import BytesIO
from typing import Any

from PIL import Image

from agent.errors import page
from agent.images import ImageError, ImageStore
from agent.training import summary
from agent.training.rundir import RunDir, read_json, read_jsonl

SHOWN_SAMPLES = 24
THUMBNAIL = 128  # px
WIDTH, HEIGHT = 640, 180
CURVES = (
    ("Reward", "training/reward", "mean reward of a step's rollouts"),
    ("Held-out accuracy", "val/accuracy_any_form", "right in any form: the seeing"),
    ("Held-out accuracy in the wanted form", "val/accuracy_wanted_form", "right and in the wanted form"),
    ("Log-prob gap", "training/logprob_gap_mean", "engine against actor, nats a token"),
    ("Seconds a step", "timing_s/step", "without validation and saving"),
)
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #8884;padding:.3rem .5rem;text-align:left;"
    "vertical-align:top;overflow-wrap:anywhere}svg{width:100%;height:auto;background:#8881}img{image-rendering:pixelated;"
    "max-width:128px}code{white-space:pre-wrap}.bad{color:#c33}"
)


def curve(points: Sequence[tuple[float, float]], label: str) -> str:
    """An SVG line through (step, value) points; "" for fewer than two."""
    if len(points) < 2:
        return ""
    xs, ys = [one[0] for one in points], [one[1] for one in points]
    low, high = min(ys), max(ys)
    span_x, span_y = (max(xs) - min(xs)) or 1.0, (high - low) or 1.0
    place = [(40 + (x - min(xs)) / span_x * (WIDTH - 50), 15 + (high - y) / span_y * (HEIGHT - 40)) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in place)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f'<polyline points="{line}" fill="none" stroke="#0a8f7f" stroke-width="2"/>'
        f'<text x="2" y="20" font-size="11" fill="currentColor">{high:.3g}</text>'
        f'<text x="2" y="{HEIGHT - 22}" font-size="11" fill="currentColor">{low:.3g}</text>'
        f'<text x="40" y="{HEIGHT - 4}" font-size="11" fill="currentColor">step {min(xs):g}</text>'
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 4}" font-size="11" text-anchor="end" fill="currentColor">'
        f"step {max(xs):g}</text></svg>"
    )


def picture(store: ImageStore, reference: str) -> str:
    """A stored picture as a small inline image; its reference as text if it cannot be shown."""
    try:
        # by its name in the store as it lies now: a run directory may have been moved since
        image = store.open(f"file://{store.root / reference.rpartition('/')[2]}")
    except (ImageError, OSError):
        return f"<code>{escape(reference[:120])}</code>"
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.NEAREST)
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def _list(value: Any) -> list[Any]:
    """``value`` if it is a list: the file of samples may have been written to by something else."""
    return value if isinstance(value, list) else []


def sample_row(store: ImageStore, one: dict[str, Any]) -> str:
    """One rollout as a table row."""
    images = "".join(picture(store, str(reference)) for reference in _list(one.get("images"))[:3])
    replies = "<br>".join(f"<code>{escape(str(reply)[:2000])}</code>" for reply in _list(one.get("replies")))
    error = f'<div class="bad">{escape(str(one["error"])[:500])}</div>' if one.get("error") else ""
    cells = (
        escape(str(one.get("step"))),
        images,
        escape(str(one.get("question", ""))[:500]),
        replies + error,
        escape(str(one.get("truth", ""))[:200]),
        escape(str(one.get("reward"))),
    )
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def chosen_samples(samples: Sequence[dict[str, Any]], count: int = SHOWN_SAMPLES) -> list[dict[str, Any]]:
    """Failed rollouts first, then the newest held-out ones, then the newest trained ones."""
    failed = [one for one in samples if one.get("state") not in (None, "succeeded")]
    held_out = [one for one in samples if one.get("split") == "val" and one not in failed]
    rest = [one for one in samples if one.get("split") != "val" and one not in failed]
    return [*failed[-count // 4 :], *held_out[::-1][: count // 2], *rest[::-1]][:count]


def render(run: RunDir) -> str:
    """The whole page as text."""
    metrics = summary.latest_per_step(read_jsonl(run.metrics))
    status = read_json(run.status)
    state = f"{status.get('state', 'unknown')}, step {status.get('step', 0)} of {status.get('total_steps', '?')}"
    parts = [
        f"<h1>{escape(run.root.name)}</h1>",
        f"<p>{escape(state)}, attempt {escape(str(status.get('attempt')))}</p>",
    ]
    if status.get("reason"):
        parts.append(f'<p class="bad">{escape(str(status["reason"]))}</p>')
    if status.get("symptom"):
        parts.append(f"<p>{escape(page(str(status['symptom'])))}</p>")
    parts += [f"<p>{escape(line)}</p>" for line in summary.lines(run)]
    for title, key, what in CURVES:
        points = [(one["step"], value) for one in metrics if (value := summary.figure(one, key)) is not None]
        if drawn := curve(points, title):
            parts.append(f"<h2>{escape(title)}</h2><p>{escape(what)}</p>{drawn}")
    samples = chosen_samples(read_jsonl(run.samples))
    if samples:
        store = ImageStore(run.images)
        head = "".join(f"<th>{name}</th>" for name in ("step", "picture", "question", "replies", "truth", "reward"))
        rows = "".join(sample_row(store, one) for one in samples)
        parts.append(f"<h2>Rollouts</h2><table><tr>{head}</tr>{rows}</table>")
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.root.name)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
