import threading

import pytest

from generator.task import DataError
from recipes.hub import HubError, read_from_hub, within


def test_a_hub_that_hangs_is_given_up():
    never = threading.Event()
    with pytest.raises(HubError, match="took longer than"):
        within(0.05, never.wait)
    never.set()


def test_what_is_wrong_with_the_data_itself_is_said_and_not_taken_for_a_hub_that_fails():
    def read():
        raise DataError("row 3 has no answer")

    with pytest.raises(DataError, match="row 3 has no answer"):
        within(10.0, read)


def test_a_data_set_that_is_not_cached_is_asked_for_only_where_the_hub_can_be_reached(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="not reachable and the data set is not cached"):
        read_from_hub("some/set", ["*"], lambda folder: folder, lambda: False)
    with pytest.raises(HubError, match="fetching it failed"):
        read_from_hub("some/set", ["*"], lambda folder: folder, lambda: True)
