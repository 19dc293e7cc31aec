import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recipes.bounded import BoundedCalls, CallCutError, CallFailedError


@pytest.fixture(scope="module")
def python():
    """Evaluates Python in another process; what is to be answered may take long enough for a busy machine."""
    calls = BoundedCalls("builtins", seconds=60.0, memory_mib=256)
    return lambda expression, seconds=None: calls("eval", expression, seconds=seconds)


def test_a_call_returns_what_was_called_returns(python):
    assert python("[1 + 1, {'a': None}]") == [2, {"a": None}]
    assert BoundedCalls("operator")("add", "some \ud800 text, ", "more") == "some \ud800 text, more"


def test_what_is_raised_there_is_said_here_and_the_next_call_is_answered(python):
    with pytest.raises(CallFailedError, match="ZeroDivisionError: division by zero"):
        python("1 / 0")
    with pytest.raises(CallFailedError, match="TypeError: Object of type set is not JSON serializable"):
        python("{1, 2}")
    assert python("2 * 3") == 6


@pytest.mark.parametrize(
    ("expression", "seconds", "cause"),
    [
        # One instruction of the interpreter. Of the wall time it has ten times as much, however busy the machine is.
        ("9 ** 9 ** 9 % 7", 3.0, "took more processor time than it may"),
        ("[None for _ in iter(int, 1)]", 60.0, "took more"),
        ("len(bytearray(1 << 34))", 60.0, "took more memory than it may"),
        ("__import__('time').sleep(3600)", 0.1, "took more time than it may"),
        ("__import__('os').abort()", 60.0, "exit code -6"),
        ("__import__('os')._exit(3)", 60.0, "exit code 3"),
    ],
)
def test_a_call_that_takes_too_much_or_ends_its_process_is_cut_and_the_next_one_is_answered(
    python, expression, seconds, cause
):
    with pytest.raises(CallCutError, match=cause):
        python(expression, seconds)
    assert python("'still here'") == "still here"


def test_what_is_called_neither_reads_nor_writes_what_the_two_processes_tell_each_other(python):
    assert python("print('{}') or 1") == 1
    with pytest.raises(CallFailedError, match="EOFError"):
        python("input()")
    assert python("2") == 2


def test_what_is_called_writes_no_file(python, tmp_path):
    with pytest.raises(CallFailedError, match="File too large"):
        python(f"__import__('pathlib').Path({str(tmp_path / 'f')!r}).write_text('x')")


def test_a_process_that_has_ended_is_replaced(python):
    assert python("__import__('os').kill(__import__('os').getppid(), 9)") is None
    assert python("5") == 5


def test_several_threads_call_at_a_time_and_each_gets_its_own_answer(python):
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(python, map(str, range(40)))) == list(range(40))


def test_what_cannot_be_imported_or_called_is_named():
    with pytest.raises(CallFailedError, match="No module named 'no_such_module'"):
        BoundedCalls("no_such_module")("f")
    with pytest.raises(CallFailedError, match="no attribute 'sinus'"):
        BoundedCalls("math")("sinus", 0)


def test_a_call_may_have_a_bound_of_its_own():
    calls = BoundedCalls("time", seconds=60.0)
    with pytest.raises(CallCutError, match="took more time than it may"):
        calls("sleep", 3600, seconds=0.1)


def test_strings_hash_the_same_in_every_process():
    hashes = {BoundedCalls("builtins")("hash", "a text") for _ in range(2)}
    assert len(hashes) == 1


def test_the_processes_end_with_the_one_that_started_them():
    program = (
        "import os; from recipes.bounded import BoundedCalls; calls = BoundedCalls('os'); "
        "print(calls('getppid'), flush=True); os._exit(0)"
    )
    root = Path(__file__).resolve().parents[2]
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    deadline = time.monotonic() + 120
    while _is_running(int(ran.stdout)):
        assert time.monotonic() < deadline, "the process outlived the one that started it"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" and os.getpgid(pid) >= 0
    except (FileNotFoundError, ProcessLookupError):
        return False
