"""The engine's side of a weight update: vLLM receives it; what was announced is remembered, to be confirmed later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from generator.link import EngineError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from weight_sync.manifest import Manifest


class WeightReceiver:
    """The methods that the learner calls during a push. A base class, because the methods of an actor are one object's.

    vLLM checks neither that an update is complete nor that it is the one that was meant, so that is done here.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._updating = False
        """From the start of an update until it is complete: the model may hold half of each version."""
        self._received: Manifest | None = None

    @property
    def llm(self) -> AsyncLLM:
        """The running vLLM engine."""
        raise NotImplementedError

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """vLLM's weight-transfer handshake; a new group replaces the one of an earlier handshake."""
        await self.llm.shutdown_weight_transfer_engine()
        await self.llm.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        """Prepare the model for new weights."""
        self._updating, self._received = True, None
        await self.llm.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        """Receive the weights that ``request`` announces: the whole update or, with ``ipc``, one bucket of it."""
        # Not at the top: it imports torch, and an engine's core must be on its way before anything slow is imported.
        from weight_sync.manifest import Manifest

        await self.llm.update_weights(request)
        info = request.update_info
        arrived = Manifest.from_wire(info["names"], info["dtype_names"], info["shapes"])
        before = self._received.entries if self._received is not None else ()
        self._received = Manifest((*before, *arrived.entries))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Load what was received into the running model and label it."""
        await self.llm.finish_weight_update(weight_version)
        self._updating = False

    async def confirm(self, version: int, manifest: Manifest) -> None:
        """Confirm that ``version`` arrived completely: the names, dtypes and shapes that ``manifest`` lists.

        Raises :class:`EngineError` with what is missing, unexpected or of the wrong kind.
        """
        from weight_sync.manifest import abridged

        if self._received is None:
            raise EngineError(f"{self.name} received no weights for version {version}")
        if lines := manifest.difference(self._received):
            raise EngineError(f"{self.name} did not receive version {version} as it was sent: {abridged(lines)}")
        await self._check_held(version)

    async def _check_held(self, version: int) -> None:
        """Raise :class:`EngineError` unless the weights are those of ``version``, all of them."""
        if self._updating:
            raise EngineError(f"{self.name} is in the middle of a weight update and cannot serve version {version}")
        held = await self.llm.get_weight_version()
        if held != str(version):
            raise EngineError(f"{self.name} holds weights {held!r} and cannot serve version {version}")
