"""Losses that layers add while they are called (`add_loss`, activity regularisers), kept apart for each replica.

Keras 3.15 keeps them in a list of the layer (`Layer._losses`), which all replicas share: where one replica waits for the
others in the middle of a step, the call of the next clears what it added, and it then reads the loss of another replica.
"""

from __future__ import annotations

import functools
from typing import Any

from gpudist_core import share as shares


@functools.cache
def install() -> None:
    """Teach Keras's layers about replicas; outside a step of ours they do what they did."""
    from keras.src import tree
    from keras.src.layers.layer import Layer

    add, own, clear = Layer.add_loss, Layer._get_own_losses, Layer._clear_losses

    @functools.wraps(add)
    def add_loss(self: Any, loss: Any) -> Any:
        kept = _kept()
        if kept is None:
            return add(self, loss)
        kept.setdefault(id(self), []).extend(tree.flatten(loss))
        return None

    @functools.wraps(own)
    def get_own_losses(self: Any) -> Any:
        kept = _kept()
        return own(self) if kept is None else list(kept.get(id(self), []))

    @functools.wraps(clear)
    def clear_losses(self: Any) -> None:
        kept = _kept()
        if kept is None:
            clear(self)
        else:
            kept.pop(id(self), None)
            for layer in self._layers:
                layer._clear_losses()

    Layer.add_loss, Layer._get_own_losses, Layer._clear_losses = add_loss, get_own_losses, clear_losses


def _kept() -> dict[int, list[Any]] | None:
    """What this replica's layers added in the step that is traced; None outside one, and where Keras keeps it apart itself."""
    from keras.src import backend

    share = shares.current()
    return None if share is None or backend.in_stateless_scope() else share.added_losses
