from benchmarks.broken_inputs import Answer, report

RIGHT = Answer("a mistyped key", 2, False, [], 1, 3.0, "Configuration error: ...")


def test_an_answer_is_right_with_exit_code_2_and_one_line_that_names_what_is_wrong():
    assert RIGHT.right
    for wrong in ({"exit_code": 1}, {"exit_code": None}, {"traceback": True}, {"missing": ["`steps`"]}, {"lines": 2}):
        assert not Answer(**{**{name: getattr(RIGHT, name) for name in Answer.__slots__}, **wrong}).right


def test_a_report_counts_by_kind_and_tells_what_was_wrong():
    late = Answer("an empty file", 1, True, [], 9, 12.0, "Traceback ...")
    figures = report({"configurations": [RIGHT, None], "data_files": [late]})
    assert (figures["configurations"], figures["data_files"], figures["left_out"]) == (1, 1, 1)
    assert (figures["exit_2"], figures["tracebacks"], figures["slowest_seconds"]) == (1, 1, 12.0)
    assert figures["wrong"] == ["an empty file: 1: Traceback ..."]
