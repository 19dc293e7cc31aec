"""What an engine takes as an update of its weights, over a stand-in for vLLM that takes everything."""

from __future__ import annotations

from typing import Any

import pytest

from generator.link import EngineError
from generator.receiver import WeightReceiver
from weight_sync.adapter_files import AdapterFiles
from weight_sync.client import InitRequest, UpdateRequest

WHOLE = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]}
FILES = AdapterFiles("{}", b"", 0)


class Anything:
    """Has every method of vLLM's engine that a receiver calls, and none of them does anything."""

    def __getattr__(self, name: str) -> Any:
        async def method(*args: Any, **kwargs: Any) -> list[bool]:
            return [True]

        return method


class Receiver(WeightReceiver):
    llm: Any = Anything()


async def updated(**init_info: Any) -> Receiver:
    """One that has taken a whole update."""
    receiver = Receiver("engine 0", adapted=True)
    await receiver.init_weight_transfer_engine(InitRequest(init_info))
    await receiver.start_weight_update()
    await receiver.update_weights(UpdateRequest(WHOLE))
    await receiver.finish_weight_update("1")
    return receiver


async def given_up(receiver: Receiver, **init_info: Any) -> None:
    """An update that ends before it is complete, and the handshake after it."""
    await receiver.start_weight_update()
    await receiver.init_weight_transfer_engine(InitRequest(init_info))


async def test_an_adapter_is_not_taken_beside_half_of_a_base():
    receiver = await updated()
    await given_up(receiver)
    with pytest.raises(EngineError, match="engine 0 holds no whole weights that the adapter of version 2"):
        await receiver.load_adapter(2, FILES)


@pytest.mark.parametrize(("init_info", "holds"), [({}, False), ({"staging": "device"}, True)])
async def test_a_delta_is_taken_after_an_update_that_was_given_up_only_where_the_model_was_left_alone(init_info, holds):
    receiver = await updated(**init_info)
    await given_up(receiver, **init_info)
    await receiver.start_weight_update()
    delta = UpdateRequest(WHOLE | {"num_updates_list": [1]})
    if holds:
        await receiver.update_weights(delta)
    else:
        with pytest.raises(EngineError, match="received a delta of weights that it does not hold"):
            await receiver.update_weights(delta)
