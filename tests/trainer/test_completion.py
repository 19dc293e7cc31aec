import subprocess
import sys

from trainer.completion import SCRIPT


def complete(line: str) -> list[str]:
    """What bash offers when tab is pressed at the end of ``line``."""
    program = f"""{SCRIPT}
COMP_LINE="{line}"; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_midflight_completion {sys.executable}; echo "${{COMPREPLY[@]}}"
"""
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=120).stdout.split()


def test_tab_completes_groups_and_keys():
    assert complete("python -m trainer recipe=gsm8k_f") == ["recipe=gsm8k_fully_async"]
    assert complete("python -m trainer recipe=ci_tiny sampling.g") == ["sampling.group_size="]


def test_other_python_commands_are_left_alone():
    assert complete("python -m pytest recipe=c") == []
