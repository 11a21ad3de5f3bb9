"""Shared by all tests: nothing reaches a hub, and the caller's caches are used for the tiny model alone."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
