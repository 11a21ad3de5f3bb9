"""The order of the data after a resume between two epochs, where verl begins the first epoch's order again.

verl 0.8.0 leaves ``data.pt`` unread if the step is a multiple of the steps per epoch: the loader's state says that its
epoch is used up, so the next pass gives nothing, and verl's own loop would end there
(https://github.com/verl-project/verl/pull/5725). That state also holds the sampler's generator, which shuffles the
epochs to come. So it is loaded here all the same, and the empty pass is taken at once.
"""

from __future__ import annotations

from typing import Any


def ends_epoch(step: int, steps_per_epoch: int) -> bool:
    """Whether verl takes ``step`` for the last of an epoch and leaves the loader's state unread."""
    return step > 0 and steps_per_epoch > 0 and step % steps_per_epoch == 0


def go_on(loader: Any, state: dict[str, Any]) -> None:
    """Load ``state`` into a ``StatefulDataLoader`` so that its next pass goes on where the state was taken.

    If the state's epoch is used up, the next pass is the epoch after it, in the order of a run that never stopped.
    """
    loader.load_state_dict(state)
    if next(iter(loader), None) is not None:  # something is left of the epoch: the look at it is undone
        loader.load_state_dict(state)
