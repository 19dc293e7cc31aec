"""Where the weights of a staged push wait for the pause, and what the pause then has left to do.

``device``: beside the model, in the form that it computes with; the pause exchanges them. Costs the memory of the
model once more during a push.
``host``: in host memory, as they arrived; the pause loads them. Costs the engine's device nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Protocol

import torch

from weight_sync.background import in_thread
from weight_sync.reload import LayerwiseUpdate
from weight_sync.twin import Twin

StagingDevice = Literal["device", "host"]

Pairs = Iterable[tuple[str, torch.Tensor]]
"""Tensors in checkpoint format by their names."""


class Replacement(Protocol):
    """One complete replacement of a model's weights: begin, load once a bucket, loaded, and in a pause finish.

    What is not staged needs the pause from the beginning.
    """

    def begin(self) -> None: ...
    def load(self, pairs: Pairs) -> None:
        """Take some tensors, which must not be written to until :meth:`finish`. Raises ``LoadError``."""
        ...

    def loaded(self) -> None:
        """There are no more. Raises ``IncompleteUpdateError`` if weights of the model are unfilled."""
        ...

    def finish(self) -> None:
        """From now on the model computes with the new weights. May raise what :meth:`load` and :meth:`loaded` do."""
        ...

    def abandon(self) -> None:
        """Give it up. Something staged has left the model as it was."""
        ...


class StagedOnDevice:
    """The weights are loaded into a twin of the model, and exchanged."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        self._twin: Twin | None = None
        self._update: LayerwiseUpdate | None = None

    def begin(self) -> None:
        self._twin = Twin(self._model)
        self._update = LayerwiseUpdate(self._twin.model, self._model_config)
        self._update.begin()

    def load(self, pairs: Pairs) -> None:
        assert self._update is not None, "begin comes first"
        self._update.load(pairs)

    def loaded(self) -> None:
        assert self._update is not None, "begin comes first"
        self._update.loaded()
        self._update.finish()

    def finish(self) -> None:
        assert self._twin is not None, "begin comes first"
        self._twin.exchange()
        # The old weights are with the twin now; giving their memory back takes longer than the exchange did.
        twin, self._twin, self._update = self._twin, None, None
        in_thread(twin.release, "weight-release")

    def abandon(self) -> None:
        twin, self._twin, self._update = self._twin, None, None
        if twin is not None:
            twin.release()


class StagedOnHost:
    """The weights are held as they arrive, and loaded in the pause."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._update = LayerwiseUpdate(model, model_config)
        self._held: list[tuple[str, torch.Tensor]] = []

    def begin(self) -> None:
        self._held = []

    def load(self, pairs: Pairs) -> None:
        self._held += [(name, tensor.to("cpu")) for name, tensor in pairs]

    def loaded(self) -> None:
        """Whether the model is filled shows only when it is loaded."""

    def finish(self) -> None:
        held, self._held = self._held, []
        try:
            self._update.begin()
            self._update.load(held)
            self._update.loaded()
            self._update.finish()
        except BaseException:
            self._update.abandon()
            raise

    def abandon(self) -> None:
        self._held = []


def replacement(model: torch.nn.Module, model_config: Any, staging: StagingDevice | None) -> Replacement:
    """The way in which the next update replaces the weights of ``model``."""
    ways: dict[StagingDevice | None, type[Any]] = {
        None: LayerwiseUpdate,
        "device": StagedOnDevice,
        "host": StagedOnHost,
    }
    chosen: Replacement = ways[staging](model, model_config)
    return chosen
