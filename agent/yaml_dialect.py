"""YAML as Hydra and OmegaConf read it. PyYAML speaks 1.1, where 1e-6 is a text and 2026-11-29 a day."""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """1e-6 is a number and 2026-11-29 a text, as in YAML 1.2 (section 10.3.2, the core schema)."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, shape) for tag, shape in found if tag != "tag:yaml.org,2002:timestamp"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load(text: str) -> Any:
    """The value written in ``text``. Raises ``yaml.YAMLError``, or ``ValueError`` for a value that is none."""
    return yaml.load(text, Loader=_Loader)
