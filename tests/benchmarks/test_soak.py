import pytest

from benchmarks.soak import FAULTS, faults

CLEAN = dict.fromkeys(FAULTS, 0) | {"engine_kills": 3, "kills_survived": 3}


def test_a_clean_report_has_no_fault():
    assert faults(CLEAN) == 0


@pytest.mark.parametrize("figure", [*FAULTS, "engine_kills"])
def test_every_figure_of_something_lost_or_wrong_is_a_fault(figure):
    assert faults(CLEAN | {figure: CLEAN[figure] + 1}) == 1
