"""vLLM plugin (see cache_safe_rollout)."""


def register() -> None:
    """Called by vLLM in each of its processes."""
