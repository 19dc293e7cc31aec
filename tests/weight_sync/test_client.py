"""The control plane over real Ray actors that stand in for engine actors."""

import os
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from weight_sync.client import EngineClient
from weight_sync.push import PushError
from weight_sync.sender import WeightSender
from weight_sync.source import DeepSpeedSource

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Any]]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)

    @ray.remote(num_cpus=0)
    class Recorder:
        """Has an engine actor's methods; remembers what was asked and fails or sleeps at the method it is told.

        It ``joins`` the transfer group that it is invited to, or comes never. It sleeps until there is a file ``wake``.
        """

        def __init__(self) -> None:
            self.calls: list[tuple[str, Any]] = []
            self.fail_at = self.sleep_at = self.wake = ""
            self.joins = False

        def prime(self, fail_at: str = "", sleep_at: str = "", wake: str = "", joins: bool = False) -> None:
            self.wake = wake
            self.calls, self.fail_at, self.sleep_at, self.joins = [], fail_at, sleep_at, joins
            if joins:
                import weight_sync.group  # noqa: F401 - takes seconds, which are not to count against a deadline

        def history(self) -> list[tuple[str, Any]]:
            return self.calls

        def _do(self, method: str, argument: Any = None) -> None:
            self.calls.append((method, argument))
            while method == self.sleep_at and not os.path.exists(self.wake):
                time.sleep(0.05)
            if method == self.fail_at:
                raise ValueError("wrong shape: w")

        def init_weight_transfer_engine(self, request: Any) -> None:
            self._do("init", request.init_info)
            if self.joins:
                from weight_sync.group import GlooGroup

                info = request.init_info
                where = (info["master_address"], info["master_port"])
                GlooGroup(*where, info["rank_offset"], info["world_size"], info["timeout_seconds"])

        def start_weight_update(self) -> None:
            self._do("start")

        def update_weights(self, request: Any) -> None:
            self._do("update", request.update_info)

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            self._do("finish", weight_version)

        def load_adapter(self, version: int, files: Any) -> None:
            self._do("adapter", (version, files))

    yield [Recorder.remote(), Recorder.remote()]
    ray.shutdown()


def _prime(actors: list[Any], **second: str) -> None:
    import ray

    ray.get([actors[0].prime.remote(), actors[1].prime.remote(**second)])


def _history(actors: list[Any]) -> list[list[tuple[str, Any]]]:
    import ray

    return ray.get([actor.history.remote() for actor in actors])


def test_every_engine_joins_at_its_own_rank_and_finishes_with_the_version_of_the_push(actors):
    _prime(actors)
    client = EngineClient(actors, workers_per_engine=[2, 2], timeout=60)
    client.init_weight_transfer_engine({"world_size": 5, "rank_offset": 1})
    client.version = 4
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.finish_weight_update()
    for history, offset in zip(_history(actors), [1, 3], strict=True):
        assert history == [
            ("init", {"world_size": 5, "rank_offset": offset}),
            ("start", None),
            ("update", {"names": ["w"]}),
            ("finish", "4"),
        ]


def test_every_engine_is_handed_the_adapter_itself(actors):
    _prime(actors)
    EngineClient(actors, workers_per_engine=[1, 2], timeout=60).load_adapter(5, {"weights": b"123"})
    assert _history(actors) == [[("adapter", (5, {"weights": b"123"}))]] * 2


def test_the_failure_of_one_engine_is_raised_with_its_name_the_step_and_the_cause(actors):
    _prime(actors, fail_at="update")
    client = EngineClient(actors, workers_per_engine=[1, 1], timeout=60, names=["left", "right"])
    client.start_weight_update()
    with pytest.raises(PushError, match="update_weights in right: ValueError: wrong shape: w") as caught:
        client.update_weights({})
    assert caught.value.engine == "right"
    assert isinstance(caught.value.cause, ValueError)


def test_after_a_failure_every_engine_is_led_out_of_the_update_once(actors):
    _prime(actors, fail_at="update")
    client = EngineClient(actors, workers_per_engine=[1, 1], timeout=60)
    client.start_weight_update()
    client.abandon("the sender failed")
    client.abandon("the sender failed")
    assert _history(actors) == [[("start", None), ("update", {"abandoned": "the sender failed"})]] * 2


def test_an_engine_that_does_not_answer_is_named_when_the_deadline_passes(actors, tmp_path):
    _prime(actors, sleep_at="start", wake=str(tmp_path / "wake"))
    client = EngineClient(actors, workers_per_engine=[1, 1], timeout=10.0)  # in which the other one does answer
    with pytest.raises(PushError, match="start_weight_update in engine 1: no answer within 10 s"):
        client.start_weight_update()
    (tmp_path / "wake").touch()


def test_an_engine_that_never_joins_is_blamed_and_not_the_one_that_waits_for_it(actors):
    import ray

    ray.get([actors[0].prime.remote(joins=True), actors[1].prime.remote()])
    source = DeepSpeedSource(torch.nn.Linear(2, 2), bucket_bytes=100)
    sender = WeightSender(source, backend="gloo", bucket_bytes=100, timeout=20.0)
    with pytest.raises(PushError, match=r"connect in right: .* 127\.0\.0\.1:\d+ .*: rank 2 did not come") as caught:
        sender.connect(actors, ["left", "right"], [1, 1], "127.0.0.1", 0)
    assert caught.value.engine == "right"
    port = int(re.search(r"127\.0\.0\.1:(\d+)", str(caught.value))[1])
    with socket.socket() as probe:  # nobody listens there any more
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        probe.listen()
    with pytest.raises(PushError, match="connect before the push"):
        sender.send(0)


def test_each_engine_needs_a_worker_count():
    with pytest.raises(ValueError, match="2 engines"):
        EngineClient([None, None], workers_per_engine=[1], timeout=1.0)
