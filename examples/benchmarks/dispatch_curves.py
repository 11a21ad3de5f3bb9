"""How the cost of dispatch grows with the rollouts of a step and with the size of the pictures; draws the docs' plots.

    python examples/benchmarks/dispatch_curves.py [--out docs/assets/speed]        (plots: needs the extra "bench")

Against an instant model server (a stub), with Agent Lightning's real gateway:

* seconds from enqueueing a step's rollouts until all have ended, for 8 to 2,048 rollouts, under this project's
  controller and under agl-controller with its defaults (up to 512: beyond that it takes a quarter of an hour);
* bytes through the gateway for each rollout, for pictures of 0.1 to 8 megapixels, as references into the image store
  (this project's way) and inside the messages (the upstream example's way).
"""

import argparse
import datetime
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from dispatch import Counter, controller, enqueue, wait_ended
from PIL import Image
from rigs import gateway, stub_model

from agent.images import ImageStore, InlineImages
from agent.training.services import HOST

ROLLOUTS = (8, 32, 128, 512, 2048)
THEIRS_UP_TO = 512
MEGAPIXELS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def seconds_of(kind: str, count: int, folder: Path, model: str, picture: str) -> float:
    """From enqueueing to the last end, seconds."""
    with gateway(folder, model) as (client, _), controller(kind, str(client.base_url).rstrip("/"), folder):
        started = time.monotonic()
        enqueue(client, picture, count)
        wait_ended(client, count)
        return time.monotonic() - started


def bytes_of(reference: str, folder: Path, model: str, count: int) -> float:
    """Bytes through the gateway per rollout, both directions, without the controller's looking for work."""
    with gateway(folder, model) as (client, _):
        counter = Counter(client.base_url.port or 0)
        time.sleep(0.5)
        with controller("ours", f"http://{HOST}:{counter.port}", folder):
            idle, since = counter.bytes, time.monotonic()
            time.sleep(2.0)
            rate = (counter.bytes - idle) / (time.monotonic() - since)
            before, started = counter.bytes, time.monotonic()
            enqueue(client, reference, count)
            wait_ended(client, count)
            return (counter.bytes - before - rate * (time.monotonic() - started)) / count


def measure_seconds(folder: Path, model: str) -> dict[str, Any]:
    """Seconds until all have ended, by controller and number of rollouts."""
    picture = ImageStore(folder / "images").put(Image.new("RGB", (84, 84), "white"))
    found: dict[str, Any] = {"ours": {}, "theirs": {}}
    for count in ROLLOUTS:
        for kind in ("ours", "theirs") if count <= THEIRS_UP_TO else ("ours",):
            found[kind][str(count)] = round(seconds_of(kind, count, folder, model, picture), 2)
            print(f"{count:>5} rollouts, {kind:<6} {found[kind][str(count)]:>7.2f} s", flush=True)
    return found


def measure_bytes(folder: Path, model: str) -> dict[str, Any]:
    """Bytes through the gateway per rollout, by way and size of the picture."""
    store = ImageStore(folder / "images", max_pixels=20_000_000)
    found: dict[str, Any] = {"reference": {}, "inline": {}}
    for size in MEGAPIXELS:
        side = int((size * 1e6) ** 0.5)
        photo = Image.effect_noise((side, side), 40)
        ways = {"reference": store.put(photo), "inline": InlineImages(20_000_000).put(photo)}
        for way, reference in ways.items():
            found[way][str(size)] = round(bytes_of(reference, folder, model, 4))
            print(f"{size:>5} megapixels, {way:<9} {found[way][str(size)]:>12,} bytes a rollout", flush=True)
    return found


PARTS = {"seconds": measure_seconds, "bytes": measure_bytes}


def draw(found: dict[str, Any], out: Path) -> None:
    """Two SVG files beside the figures."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("svg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    pyplot.rcParams |= {"svg.hashsalt": "dispatch", "font.size": 11, "axes.grid": True, "grid.alpha": 0.3}
    labels = {
        "ours": "in-process controller",
        "theirs": "agl-controller, defaults",
        "reference": "references into the image store",
        "inline": "pictures inside the messages",
    }
    for name, x, y in (
        ("seconds", "rollouts in a step", "seconds until all have ended"),
        ("bytes", "megapixels of the picture", "bytes through the gateway per rollout"),
    ):
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for kind, points in found[name].items():
            axes.plot([float(one) for one in points], list(points.values()), marker="o", label=labels[kind])
        axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
        axes.legend()
        figure.tight_layout()
        figure.savefig(out / f"{name}.svg", metadata={"Date": None}, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[2] / "docs/assets/speed")
    parser.add_argument("--only", choices=[*PARTS, "none"], help="measure this part alone; none: draw again")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "dispatch.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for part, measure in PARTS.items():
        if options.only in (None, part):
            with tempfile.TemporaryDirectory() as name, stub_model(Path(name)) as model:
                found[part] = measure(Path(name), model)
            found[f"{part}_measured"] = f"{datetime.date.today()}, {os.cpu_count()} cores"
            file.write_text(json.dumps(found, indent=1) + "\n")
    draw(found, options.out)


if __name__ == "__main__":
    main()
