"""Runs in every Ray process of a run, before its work (``runtime_env.worker_process_setup_hook``).

The hook replaces the one Agent Lightning would set, so it calls that one too.
"""

from __future__ import annotations


def setup() -> None:
    """Register the patches that this process may need; each is applied when its module is imported."""
    from agent.training import cpu_backend, upstream_fixes

    if cpu_backend.requested():
        cpu_backend.install()
    upstream_fixes.install()
    from agentlightning.verl.per_rollout_loss import register_in_worker

    register_in_worker()
