"""Fill the generated parts of the documentation, between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``.

python docs/generate.py            write them
python docs/generate.py --check    exit 1 if a page is out of date
"""

from __future__ import annotations

import html
import inspect
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import typer
from typer.models import ArgumentInfo, OptionInfo

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

SHOWN_PRESETS = ("cpu", "qwen3_vl_2b", "qwen3_vl_2b_8gpu")
SEVERITY = {
    "crash": "stops the run",
    "hang": "waits for ever",
    "silent": "goes on, with wrong results",
    "slow": "costs time",
    "noise": "harmless",
}


def _cell(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).replace("|", "&#124;")


def symptom_groups() -> str:
    """The symptoms by what a person sees; consequences last in each group."""
    from agent.symptoms.entry import GROUPS, load

    parts = []
    for group, heading in GROUPS.items():
        entries = [entry for entry in load().values() if entry.group == group]
        parts.append(f"## {heading} {{ #{group} }}\n")
        for entry in sorted(entries, key=lambda one: (one.consequence, one.slug)):
            note = " (a consequence: look for what came before it)" if entry.consequence else ""
            parts.append(f"- [{_cell(entry.title)}](../s/{entry.slug}.md){note}")
        parts.append("")
    return "\n".join(parts)


def symptom_table() -> str:
    """Every symptom in one table; the page's script adds the filters."""
    from agent.symptoms.entry import GROUPS, load

    lines = ["| symptom | what you see | effect | where | phase | aliases |", "|---|---|---|---|---|---|"]
    for entry in load().values():
        cells = [
            f"[{_cell(entry.title)}](../s/{entry.slug}.md)<br><code>{entry.slug}</code>",
            GROUPS[entry.group],
            f"{entry.severity}: {SEVERITY[entry.severity]}",
            _cell(entry.component),
            entry.phase,
            _cell("; ".join(entry.aliases)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return '<div class="symptom-table" markdown>\n\n' + "\n".join(lines) + "\n\n</div>\n"


def command_line() -> str:
    """Every command of ``mmqa``, from the signatures and docstrings of the functions behind them."""
    from agent.cli import app

    parts = []
    for name, function in sorted(commands(app).items()):
        arguments, options = parameters(function)
        usage = " ".join(["mmqa", name, *(["[OPTIONS]"] if options else []), *arguments])
        help_text = inspect.cleandoc(function.__doc__ or "").replace("``", "`")
        parts += [f"## mmqa {name} {{ #{name} }}\n", f"```text\n{usage}\n```\n", f"{help_text}\n"]
        if options:
            parts += ["| option | meaning | default |", "|---|---|---|", *options, ""]
    return "\n".join(parts)


def commands(app: typer.Typer) -> dict[str, Callable[..., Any]]:
    """The functions behind the commands that are not hidden, by name."""
    found = {}
    for one in app.registered_commands:
        if one.callback and not one.hidden:
            found[one.name or one.callback.__name__.replace("_", "-")] = one.callback
    return found


def parameters(function: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """Metavars of the arguments, and one table row for each option."""
    arguments, options = [], []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind, *extra = get_args(parameter.annotation) or (parameter.annotation,)
        info = next((one for one in extra if isinstance(one, OptionInfo | ArgumentInfo)), None)
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        if isinstance(info, ArgumentInfo):
            shown = info.metavar or name.upper()
            optional = parameter.default is not inspect.Parameter.empty and not shown.startswith("[")
            arguments.append(f"[{shown}]" if optional else shown)
        elif not getattr(info, "hidden", False):
            flags = [str(one) for one in getattr(info, "param_decls", None) or []]
            first = getattr(info, "default", None)  # typer keeps the first flag of an Annotated option here
            flags = ([first] if isinstance(first, str) and first.startswith("-") else []) + flags
            flags = flags or [f"--{name.replace('_', '-')}"]
            shown = ", ".join(f"`{flag}`" for flag in flags) + ("" if kind is bool else f" {_kind(kind)}")
            value = "" if default in (None, False, "") else f"`{default}`"
            options.append(f"| {shown} | {_cell(getattr(info, 'help', None) or '')} | {value} |")
    return arguments, options


def _kind(annotation: Any) -> str:
    """ "int | None" -> INTEGER, as the program's own help shows it."""
    names = [one.__name__ for one in (get_args(annotation) or (annotation,)) if one is not type(None)]
    shown = {"int": "INTEGER", "float": "FLOAT", "str": "TEXT", "Path": "PATH"}
    return shown.get(names[0]) or str(names[0]).upper()


def project_keys() -> str:
    """The project's own section of a preset, with the comments of its definition."""
    from agent.training.config import MMQA_DEFAULTS

    source = (ROOT / "agent/training/config.py").read_text(encoding="utf-8")
    settings = (ROOT / "agent/loop.py").read_text(encoding="utf-8")
    comments = dict(re.findall(r'^    +"?(\w+)"?\s*:.*?#\s*(.+)$', source + "\n" + settings, flags=re.MULTILINE))
    lines = ["| key | default | meaning |", "|---|---|---|"]

    def walk(tree: dict[str, Any], path: str) -> None:
        for key, value in tree.items():
            if isinstance(value, dict):
                walk(value, f"{path}.{key}")
            else:
                lines.append(f"| `{path}.{key}` | {_value(value)} | {_cell(comments.get(key, ''))} |")

    walk(MMQA_DEFAULTS, "mmqa")
    return "\n".join(lines)


def _value(value: Any) -> str:
    return "" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def upstream_keys() -> str:
    """Keys of verl and Agent Lightning that the presets set, with their values."""
    import yaml

    files = {file.stem: file for file in sorted((ROOT / "examples/configs").glob("*.yaml"))}
    presets = {name: _flat(yaml.safe_load(files[name].read_text(encoding="utf-8"))) for name in SHOWN_PRESETS}
    keys = sorted({key for preset in presets.values() for key in preset if not key.startswith("mmqa.")})
    lines = [
        f"Presets: {', '.join(f'`{name}`' for name in files)}. Shown are {len(presets)} of them.\n",
        "| key | " + " | ".join(presets) + " |",
        "|---|" + "---|" * len(presets),
    ]
    for key in keys:
        shown = [_value(preset.get(key)) for preset in presets.values()]
        lines.append(f"| `{key}` | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _flat(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        full = f"{path}.{key}" if path else str(key)
        flat |= _flat(value, full) if isinstance(value, dict) else {full: value}
    return flat


def pinned_versions() -> str:
    """The pins of ``pyproject.toml``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = ["| package | version | extra |", "|---|---|---|", f"| Python | {project['requires-python']} | all |"]
    for extra, names in (("cpu", extras["cpu"]), ("gpu", extras["gpu"]), ("cpu, gpu", extras["stack"])):
        for requirement in names:
            if requirement.startswith(project["name"]):
                continue
            name, _, version = requirement.partition("==")
            lines.append(f"| {name} | {version} | {extra} |" if version else f"| {requirement} | | {extra} |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "symptom groups": symptom_groups,
    "symptom table": symptom_table,
    "command line": command_line,
    "project keys": project_keys,
    "upstream keys": upstream_keys,
    "pinned versions": pinned_versions,
}
_MARK = re.compile(r"(<!-- begin: ([a-z ]+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


def filled(text: str) -> str:
    """``text`` with every marked part made anew."""
    return _MARK.sub(lambda mark: f"{mark[1]}\n{PARTS[mark[2]]().strip()}\n\n{mark[3]}", text)


def main(check: bool) -> int:
    """Write or check every page that has marks; the exit code."""
    stale = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if "<!-- begin: " not in text or (new := filled(text)) == text:
            continue
        stale.append(page.relative_to(ROOT))
        if not check:
            page.write_text(new, encoding="utf-8")
    for page in stale:
        print(f"{'out of date' if check else 'written'}: {page}")
    if check and stale:
        print("run: python docs/generate.py")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main("--check" in sys.argv[1:]))
