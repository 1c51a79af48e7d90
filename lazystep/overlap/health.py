"""Whether training may go on after a failure.

A failed update can't be undone: some parameters may already be updated. So every later forward and step
raises, until the model and all its optimizers have been reloaded.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from torch import nn

from ..errors import OverlapError


class _State(enum.Enum):
    SOUND = "sound"
    # From SOUND when an update or a reduction failed, here or on another rank, or when the loop did something
    # whose result can't equal plain DDP. Back to SOUND when the model and every optimizer were reloaded.
    POISONED = "poisoned"


class Health:
    """The health of a model and its optimizers. `recovered` runs when all of them have been reloaded."""

    def __init__(self, model: nn.Module, recovered: Callable[[], None]) -> None:
        self._state = _State.SOUND
        self._reason = ""
        self._recovered = recovered
        self._sources: set[object] = {model}
        self._changed: set[object] = set()
        self._hook = model.register_load_state_dict_post_hook(lambda module, _: self.reloaded(module))

    def add(self, source: object) -> None:
        """Add an optimizer, which has to be reloaded too."""
        self._sources.add(source)

    def discard(self, source: object) -> None:
        """Forget an optimizer: it no longer has to be reloaded."""
        self._sources.discard(source)
        self._changed.discard(source)

    def remove(self) -> None:
        """Take the hook off the model."""
        self._hook.remove()

    def updating(self) -> None:
        """Note that an update begins: from now on only a reload of everything restores the old state."""
        self._changed = set(self._sources)

    def poison(self, error: BaseException) -> None:
        """Refuse to go on until everything is reloaded; `error` is the reason."""
        self.updating()
        if self._state is _State.SOUND:  # the first reason is the cause of the others
            self._state = _State.POISONED
            self._reason = f"{type(error).__name__}: {error}"

    def reloaded(self, source: object) -> None:
        """Note that the model or an optimizer, `source`, has loaded a state."""
        if source in self._changed:
            self._changed.discard(source)
            if not self._changed:
                self._state = _State.SOUND
                self._recovered()

    def check(self) -> None:
        """Raise if poisoned."""
        if self._state is _State.POISONED:
            raise OverlapError(
                f"an earlier step failed and may have left parameters half updated ({self._reason}). Reload "
                "the state_dict of the model and of its optimizers, or start over."
            )
