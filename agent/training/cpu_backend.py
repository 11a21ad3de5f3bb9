"""Filled in by the cpu backend."""


def vllm_plugin() -> None:
    """vLLM plugin hook; does nothing unless the cpu preset is running."""
