from benchmarks.push import KEYS, PARTS, by_mode, commands, run, summary

REPORTS = {
    "engine smollm2": {"model": "smollm2", "transfer_ratio": 0.9, "push_ratio abort": 1.3, "push_ratio keep": 1.1,
                       "staged_stall_ratio": None, "seconds": {"stall keep": [0.3, 0.1, 0.2]}},
    "engine random": {"model": "random", "transfer_ratio": 0.7, "push_ratio abort": 1.2, "staged_stall_ratio": None},
    "zero3": {"model": "smollm2", "zero3_buckets": 2.5},
    "memory": {"error": "it did not end"},
}  # fmt: skip


def test_a_key_holds_the_worse_figure_of_two_models_and_none_where_nothing_was_measured():
    assert summary(REPORTS) == {
        "transfer_ratio": 0.7,
        "push_ratio": 1.3,
        "staged_stall_ratio": None,
        "delta_bytes_ratio": None,
        "zero3_buckets": 2.5,
        "memory_growth": None,
    }
    assert tuple(summary({})) == KEYS


def test_what_differs_from_mode_to_mode_is_listed_by_model_and_mode():
    assert by_mode(REPORTS) == {
        "smollm2": {"abort": {"push_ratio": 1.3}, "keep": {"push_ratio": 1.1, "stall_seconds": 0.2}},
        "random": {"abort": {"push_ratio": 1.2}},
    }


def test_only_the_parts_that_are_asked_for_are_run_and_those_with_an_engine_share_it():
    chosen = commands(["push", "stall", "memory"], quick=False, dtype="float32", repeat=3)
    assert list(chosen) == ["engine smollm2", "engine random", "memory"]
    assert chosen["engine random"][2:6] == ["--measure", "push", "stall", "--dtype"]
    assert list(commands(list(PARTS), quick=True, dtype="float32", repeat=3)) == [
        "engine tiny",
        "delta",
        "zero3",
        "memory",
    ]


def test_a_program_that_fails_or_hangs_is_a_report_that_says_so():
    assert run(["benchmarks.nowhere"], 60.0) == {"error": "benchmarks.nowhere exited with 1 and left no report"}
    assert "did not end within 0.1 s" in run(["tests.benchmarks.endless"], 0.1)["error"]
