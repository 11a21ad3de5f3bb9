"""Corrections of what verl does, on verl's own functions where they can be called without an engine."""

import copy

import pytest

from agent.training.upstream_fixes import as_configured

torch = pytest.importorskip("torch")
pytest.importorskip("verl")


def made(lr=6e-4, total=40, **settings):
    """Optimizer and schedule as verl's FSDP engine builds them."""
    from verl.utils.torch_functional import get_cosine_schedule_with_warmup

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=lr, **settings)
    return optimizer, get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=total)


def step(optimizer, schedule, count=1):
    for _ in range(count):
        (optimizer.param_groups[0]["params"][0] ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def resumed(saved, **settings):
    """Built anew with ``settings``, loaded as verl's checkpoint manager does, and corrected."""
    optimizer, schedule = made(**settings)
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].copy_(saved[0].param_groups[0]["params"][0])
    optimizer.load_state_dict(copy.deepcopy(saved[0].state_dict()))
    schedule.load_state_dict(copy.deepcopy(saved[1].state_dict()))
    as_configured(optimizer, schedule)
    return optimizer, schedule


def test_with_the_same_settings_nothing_changes():
    saved = made(weight_decay=0.02)
    step(*saved, 12)
    again = resumed(saved, weight_decay=0.02)
    assert again[0].param_groups[0]["lr"] == saved[0].param_groups[0]["lr"]
    for _ in range(5):
        step(*saved)
        step(*again)
        assert torch.equal(again[0].param_groups[0]["params"][0], saved[0].param_groups[0]["params"][0])
        assert again[1].get_last_lr() == saved[1].get_last_lr()


def test_another_learning_rate_and_decay_hold_from_the_next_step_on():
    saved = made()
    step(*saved, 12)
    optimizer, schedule = resumed(saved, lr=3e-5, weight_decay=0.5, betas=(0.8, 0.9))
    group = optimizer.param_groups[0]
    assert group["lr"] == pytest.approx(saved[0].param_groups[0]["lr"] / 20)
    assert (group["weight_decay"], group["betas"]) == (0.5, (0.8, 0.9))
    assert optimizer.state_dict()["state"][0]["step"] == 12, "the moments are those of the checkpoint"
    step(optimizer, schedule)
    whole = made(lr=3e-5)
    step(*whole, 13)
    assert schedule.get_last_lr() == whole[1].get_last_lr()


def test_after_more_steps_were_asked_for_the_next_one_is_on_the_new_curve():
    """verl alone makes it with the last rate of the old curve, which is zero at its end."""
    saved = made(total=40)
    step(*saved, 40)
    assert saved[0].param_groups[0]["lr"] == 0.0
    optimizer, _ = resumed(saved, total=80)
    whole = made(total=80)
    step(*whole, 40)
    assert optimizer.param_groups[0]["lr"] == whole[0].param_groups[0]["lr"] > 0
