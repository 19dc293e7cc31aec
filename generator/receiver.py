"""The engine's side of a weight update: vLLM receives it; what was announced is remembered, to be confirmed later."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from generator.adapter import load_adapter
from generator.link import EngineError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from weight_sync.adapter_files import AdapterFiles
    from weight_sync.manifest import Manifest


STAGED_POLL_SECONDS = 0.01
"""Between two questions whether a staged update has arrived; vLLM answers between two steps of generation."""


class WeightReceiver:
    """The methods that the learner calls during a push. A base class, because the methods of an actor are one object's.

    vLLM checks neither that an update is complete nor that it is the one that was meant, so that is done here.
    """

    def __init__(self, name: str, adapted: bool = False) -> None:
        self.name = name
        self._adapted = adapted
        """Whether an adapter belongs to every version."""
        self.adapter: Any = None
        """vLLM's name for the adapter that it computes with, which every request has to carry."""
        self._staging = False
        """Whether updates arrive beside the model, while it computes. The learner's handshake says so."""
        self._open = False
        """From the start of an update until it is complete or given up."""
        self._updating = False
        """From the first change of the model until an update is complete: it may hold half of each version."""
        self._received: Manifest | None = None
        """What has arrived of the update in progress."""
        self._whole: Manifest | None = None
        """What the last complete update brought."""

    @property
    def llm(self) -> AsyncLLM:
        """The running vLLM engine."""
        raise NotImplementedError

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """vLLM's weight-transfer handshake; a new group replaces the one of an earlier handshake."""
        await self._give_up_open_update()
        self._staging = request.init_info.get("staging") is not None
        await self.llm.shutdown_weight_transfer_engine()
        await self.llm.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        """Prepare the model for new weights; with staging, prepare for weights beside the model."""
        await self._give_up_open_update()
        self._open, self._received = True, None
        self._updating = self._updating or not self._staging
        await self.llm.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        """Receive the weights that ``request`` announces: the whole update or, with ``ipc``, one bucket of it.

        With staging they are not yet in the model then.
        """
        # Not at the top: it imports torch, and an engine's core must be on its way before anything slow is imported.
        from weight_sync.manifest import Manifest

        await self.llm.update_weights(request)
        while self._staging and not all(await self.llm.collective_rpc("weight_update_staged")):  # noqa: ASYNC110
            await asyncio.sleep(STAGED_POLL_SECONDS)
        info = request.update_info
        arrived = Manifest.from_wire(info["names"], info["dtype_names"], info["shapes"])
        if "num_updates_list" in info:  # a delta over vLLM's sparse engine lists only the tensors that changed
            if self._whole is None or not set(arrived.entries) <= set(self._whole.entries):
                raise EngineError(f"{self.name} received a delta of weights that it does not hold")
            self._received = self._whole
            return
        before = self._received.entries if self._received is not None else ()
        self._received = Manifest((*before, *arrived.entries))

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Load what was received into the running model and label it."""
        self._updating = True
        await self.llm.finish_weight_update(weight_version)
        self.adapter = None  # vLLM drops it with the weights that it was for
        self._updating = self._open = False
        self._whole = self._received

    async def load_adapter(self, version: int, files: AdapterFiles) -> None:
        """Compute with this adapter beside the weights that are there, and call both together ``version``.

        Raises :class:`EngineError` without weights, or with half of an update in them, and ``ValueError`` for files
        that did not arrive as they were sent.
        """
        from weight_sync.adapter_files import manifest_of
        from weight_sync.manifest import Manifest

        if self._open or self._updating or self._whole is None:
            raise EngineError(f"{self.name} holds no whole weights that the adapter of version {version} could be for")
        arrived = await asyncio.to_thread(manifest_of, files)
        self._updating = True
        self.adapter = await load_adapter(self.llm, version, files)
        await self.llm.update_weight_version(str(version))
        self._updating = False
        self._received = Manifest((*self._whole.entries, *arrived.entries))

    async def _give_up_open_update(self) -> None:
        """Leave an update that nobody finished: another engine failed it, or a pause did that came before its swap."""
        if not self._open:
            return
        self._open = False
        if self._updating:
            self._whole = None  # a delta or an adapter is for a whole version, and the model is half of one
        from weight_sync.client import UpdateRequest

        with suppress(Exception):  # the expected answer; a dead vLLM says so again at the next call
            await self.llm.update_weights(UpdateRequest({"abandoned": "another update begins"}))

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
        if self._adapted and self.adapter is None:
            raise EngineError(f"{self.name} holds no adapter and cannot serve version {version}")
        held = await self.llm.get_weight_version()
        if held != str(version):
            raise EngineError(f"{self.name} holds weights {held!r} and cannot serve version {version}")
