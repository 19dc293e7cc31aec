"""The learner's end of pushes of an adapter alone: the model that it is for travels once, the adapter in every push."""

from __future__ import annotations

from typing import Any, cast

from weight_sync.adapter_files import files_of
from weight_sync.client import AdapterClient
from weight_sync.manifest import Manifest
from weight_sync.push_error import PushError
from weight_sync.sender import WeightSender
from weight_sync.source import DeepSpeedSource


class AdapterSender(WeightSender):
    """As :class:`WeightSender`, for engines that hold a base model and compute with an adapter beside it.

    ``base`` and ``adapter`` are sources of the two parts; ``options`` are :class:`WeightSender`'s, without deltas and
    staging. The base travels through the transfer group, whenever not every engine is known to hold it; the adapter
    follows in every push, to each engine in a call.
    """

    def __init__(self, base: DeepSpeedSource, adapter: DeepSpeedSource, **options: Any) -> None:
        super().__init__(base, **options)
        self._adapter = adapter
        self._alone = False
        """Whether the next push sends the adapter alone."""

    def prepare(self, base: int | None = None) -> Manifest:
        """As :meth:`WeightSender.prepare`. Where every engine holds version ``base``, the adapter alone is sent."""
        self._alone = base is not None
        if not self._alone:
            self._source.check_finite()
        self._adapter.check_finite()
        return Manifest((*self._source.manifest().entries, *self._adapter.manifest().entries))

    def send(self, version: int, hashed: bool = False) -> int:
        """As :meth:`WeightSender.send`. The adapter always travels with a checksum."""
        self._adapter.begin_pass()
        try:
            sent = 0 if self._alone else super().send(version, hashed)
            if self._rank == 0:
                self._send_adapter(version)
        finally:
            # Other ranks wait in the gathers of this pass, also where the base did not get as far as the engines.
            self._adapter.finish_pass()
        return sent + self._adapter.manifest().total_bytes

    def _send_adapter(self, version: int) -> None:
        if self._client is None:
            raise PushError("transfer", "there is no connection to the engines; connect before the push")
        client = cast(AdapterClient, self._client)
        try:
            client.load_adapter(version, files_of(self._adapter))
        except Exception as error:
            self.close()
            raise error if isinstance(error, PushError) else PushError("transfer", error) from error
