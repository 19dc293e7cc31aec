import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.weight_sync.punctual import LEFT, always_come
from weight_sync.buckets import pack
from weight_sync.group import GlooGroup, TransferGroupError, free_port, receive_buckets, send_buckets


def _groups(world_size: int, timeout: float) -> list[GlooGroup]:
    port = free_port("127.0.0.1")
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: GlooGroup("127.0.0.1", port, rank, world_size, timeout), range(world_size)))


def test_every_receiver_gets_every_bucket_and_later_ones_do_not_overwrite_earlier_ones():
    groups = _groups(3, timeout=30)
    buckets = [pack([torch.full((1000 + n,), n, dtype=torch.uint8)]) for n in range(5)]
    sizes = [bucket.numel() for bucket in buckets]
    with ThreadPoolExecutor(2) as pool:
        receiving = [pool.submit(lambda group: list(receive_buckets(group, sizes)), group) for group in groups[1:]]
        assert send_buckets(groups[0], buckets) == 5
        for future in receiving:
            for sent, received in zip(buckets, future.result(), strict=True):
                assert torch.equal(sent, received)
    for group in groups:
        group.close()


def test_a_receiver_that_leaves_fails_the_sender_instead_of_hanging_it():
    sender, receiver = _groups(2, timeout=30)
    receiver.close()
    with pytest.raises(TransferGroupError, match=LEFT):
        send_buckets(sender, [torch.zeros(8 << 20, dtype=torch.uint8)] * 2)
    sender.close()


def test_a_sender_that_fails_between_buckets_fails_the_receiver_at_once_even_while_its_error_is_looked_at():
    sender, receiver = _groups(2, timeout=60)

    def buckets():
        yield torch.zeros(1000, dtype=torch.uint8)
        raise LookupError("a weight is gone")

    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(lambda: list(receive_buckets(receiver, [1000, 1000])))
        with pytest.raises(LookupError) as held:
            send_buckets(sender, buckets())
        sender.close()
        with pytest.raises(TransferGroupError, match=LEFT):
            receiving.result()
    assert held.value is not None
    receiver.close()


def test_a_silent_sender_fails_the_receiver_after_the_deadline():
    sender, receiver = _groups(2, timeout=30)
    receiver.timeout = 1.0
    with pytest.raises(TransferGroupError):
        list(receive_buckets(receiver, [8]))
    receiver.close()
    sender.close()


def test_an_error_on_the_control_plane_ends_the_wait_for_a_silent_receiver():
    sender, receiver = _groups(2, timeout=30)

    def check() -> None:
        raise LookupError("the engine refused the announcement")

    with pytest.raises(LookupError, match="refused"):
        send_buckets(sender, [torch.zeros(8 << 20, dtype=torch.uint8)], check)
    receiver.close()
    sender.close()


def assert_free(port: int) -> None:
    """Nobody listens there any more."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that were closed may linger
        probe.bind(("127.0.0.1", port))
        probe.listen()


def test_members_that_never_come_are_named_with_the_address_and_the_port_is_free_while_the_error_is_looked_at(
    monkeypatch,
):
    always_come(monkeypatch, 2)
    port = free_port("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        punctual = pool.submit(lambda: GlooGroup("127.0.0.1", port, 2, 4, timeout=60))
        with pytest.raises(TransferGroupError, match=f"of 4 at 127.0.0.1:{port} within 2 s: rank 1, 3 did not") as held:
            GlooGroup("127.0.0.1", port, 0, 4, timeout=2)
        assert held.value.absent == (1, 3)
        assert_free(port)
        with pytest.raises(TransferGroupError, match="rank 2 could not join"):
            punctual.result()


def test_a_sender_that_never_listens_is_an_error_of_the_receiver_that_names_the_address():
    port = free_port("127.0.0.1")
    with pytest.raises(TransferGroupError, match=f"rank 1 could not join .* at 127.0.0.1:{port} within 1 s"):
        GlooGroup("127.0.0.1", port, 1, 2, timeout=1)


def test_a_name_that_does_not_resolve_is_an_error_of_the_receiver_that_names_it():
    with pytest.raises(TransferGroupError, match=r"rank 1 could not join .* at no-such-host\.invalid:29500"):
        GlooGroup("no-such-host.invalid", 29500, 1, 2, timeout=1)


def test_a_port_that_is_taken_is_an_error_that_names_it():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TransferGroupError, match=f"rank 0 could not join .* at 127.0.0.1:{port} .*in use"):
            GlooGroup("127.0.0.1", port, 0, 2, timeout=1)


@pytest.mark.parametrize("address", ["no-such-host.invalid", "203.0.113.7"], ids=["unresolved", "another machine's"])
def test_an_address_that_is_not_this_machine_s_is_an_error_that_names_it(address):
    with pytest.raises(TransferGroupError, match=f"cannot listen at '{address}'"):
        free_port(address)


def test_a_closed_group_says_what_to_do():
    sender, receiver = _groups(2, timeout=30)
    sender.close()
    sender.close()
    with pytest.raises(TransferGroupError, match="connect again"):
        sender.broadcast(torch.zeros(1))
    receiver.close()
