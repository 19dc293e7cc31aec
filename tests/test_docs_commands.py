"""Every command in README and docs is run by a test, composed as a run would compose it, or marked as needing more.

The scheme stands in CONTRIBUTING.md, under "Docs".
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT, TUTORIAL, Command, all_commands, blocks
from trainer.checks import all_keys
from trainer.compose import check_flags, compose_config, jobs, prepared, split
from trainer.conditions import read_conditions
from trainer.control import CHANGEABLE

RUN_BY = {
    "trainer.check": "tests/trainer/test_check.py::test_the_conditions_of_the_recipe_are_taken_when_none_is_given",
    "trainer.control": "tests/trainer/test_control.py::test_a_folder_in_which_no_run_listens_is_told_in_one_line",
    "trainer.dashboard": "tests/trainer/test_dashboard.py::"
    "test_the_command_writes_what_would_be_sent_without_an_account",
    "trainer.doctor": "tests/trainer/test_doctor.py::test_this_machine_has_python_packages_and_loopback",
    "trainer.evaluate": "tests/trainer/test_command.py::"
    "test_its_checkpoint_is_evaluated_as_the_run_evaluated_it_with_nothing_but_the_run_folder",
    "trainer.reference": "tests/test_docs.py::test_a_generated_page_is_what_the_code_says_now",
    "trainer.report": "tests/trainer/report/test_page.py::test_the_command_writes_where_it_is_told_and_says_where",
}
"""Programs beside ``python -m trainer``, and a test that runs each."""

BY_CI = ("setup", "lint", "docs", "test")
"""Targets that ``.ci/run`` calls."""

NOT_RUN = {
    "format": "repairs files in place",
    "lock": "asks a package index for every package",
}
"""Targets that no test can run, and why."""

NEEDS_MORE = re.compile(r"^needs (\d+ GPUs|a GPU|a cluster|a model hub)\b")
PLACEHOLDER = re.compile(r"[A-Z_]+(=[A-Z_]+)?|\.\.\.|…|recipe=(NAME|…)")
"""What stands for a word of the reader's."""

SHELL = {
    ("source", ".venv/bin/activate"),
    (".ci/run",),
    ("scripts/setup",),
    ("scripts/lock",),
    ("tensorboard", "--logdir", "outputs"),  # its files are read in tests/trainer/watch/test_tensorboard_log.py
}

COMMANDS = [command for page in PAGES for command in all_commands(page)]


def composed(words: list[str], hardware: str) -> None:
    """Compose and check the command line of a run, flags included, as the command does before it starts anything."""
    words = [word for word in words if not PLACEHOLDER.fullmatch(word)]
    if not any(word.startswith("recipe=") for word in words):
        words.append("recipe=gsm8k_fully_async")
    if not any(word.startswith("hardware=") for word in words):
        words.append(f"hardware={hardware}")
    overrides, flags = split(prepared(words))
    check_flags(flags)
    for job in jobs(overrides):
        compose_config(job)


def makes(target: str, variables: dict[str, str], hardware: str) -> None:
    """A target of the Makefile, with variables that it reads."""
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert phony
    assert target in phony[1].split(), f"make has no target {target}"
    if target == "train":
        recipe = variables.pop("RECIPE", "gsm8k_fully_async")
        words = shlex.split(variables.pop("ARGS", ""))
        composed([f"recipe={recipe}", *words], hardware)
    elif target == "test":
        for word in shlex.split(variables.pop("TESTS", "")):
            assert not word.startswith("tests") or (ROOT / word).exists(), word
    elif target in BY_CI:
        assert f"make {target}" in (ROOT / ".ci" / "run").read_text()
    else:
        assert target in NOT_RUN
        variables.pop("LOCK", None)
    assert not variables, f"make {target} reads no {variables}"


def options_exist(module: str, words: list[str]) -> None:
    """Every option of the command stands in the module's source."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no module {module}"
    path = Path(str(spec.origin))
    source = "".join(part.read_text() for part in ([path] if path.name != "__init__.py" else path.parent.glob("*.py")))
    for word in words:
        option = word.partition("=")[0]
        assert not option.startswith("--") or option == "--help" or f'"{option}"' in source, f"{module} has no {option}"


def names_a_test(node: str) -> bool:
    """Whether a test of that name stands in its file."""
    file, _, name = node.partition("::")
    return f"def {name}(" in (ROOT / file).read_text()


def hold(command: Command) -> None:
    """Fail unless something holds the command."""
    words = list(command.words)
    hardware = "gpu" if "GPU" in command.note or "cluster" in command.note else "cpu"
    if command.note.startswith("needs"):
        assert NEEDS_MORE.match(command.note), f"say it as in `# needs 8 GPUs`: {command.note}"
    if tuple(words) in SHELL or (command.page, command.section) == TUTORIAL:
        return
    if words[0] == "make":
        variables = dict(word.split("=", 1) for word in words[2:])
        makes(words[1], variables, hardware)
        return
    assert words[0] in ("python", ".venv/bin/python"), "no rule holds this command: see CONTRIBUTING.md, Docs"
    assert words[1] == "-m", "python runs a module"
    module, arguments = words[2], words[3:]
    if module == "trainer":
        if arguments != ["--help"]:  # run by tests/trainer/test_help.py
            composed(arguments, hardware)
        return
    if module == "benchmarks.NAME":
        return
    if module.startswith("benchmarks."):
        options_exist(module, arguments)
        assert f"| `{module}` |" in (ROOT / "docs" / "hardware.md").read_text(), "it has no line in docs/hardware.md"
        return
    options_exist(module, arguments)
    assert module in RUN_BY, "no test runs it"
    assert names_a_test(RUN_BY[module]), RUN_BY[module]
    values = [word for word in arguments[1:] if not PLACEHOLDER.fullmatch(word) and not word.startswith("--")]
    if module == "trainer.check":
        read_conditions(values)
    elif module == "trainer.control":
        assert {value.partition("=")[0] for value in values} <= set(CHANGEABLE)
    elif module == "trainer.evaluate":
        composed(values, hardware)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_of_the_docs_is_held(command: Command) -> None:
    hold(command)


def test_the_docs_have_commands_of_every_kind() -> None:
    first = {command.words[:3] for command in COMMANDS}
    for words in (("make", "train"), ("make", "test"), ("python", "-m", "trainer"), ("python", "-m", "trainer.check")):
        assert any(words == found[: len(words)] for found in first), words


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('make train ARGS="stepss=3"', "stepss"),
        ("make train STEPS=3", "reads no"),
        ("make trian", "no target"),
        ("python -m trainer recipe=gsm8k", "no such recipe"),
        ("python -m trainer recipe=ci_tiny weight_sync.backend=nccl", "needs GPUs"),
        ("python -m trainer.check RUN_DIR 'last(\"policy/entropyy\") > 1'", "no metric"),
        ("python -m trainer.control RUN_DIR steps=3", "steps"),
        ("python -m trainer.report RUN_DIR --outptu FILE", "no --outptu"),
        ("python -m benchmarks.nothing", "no module"),
        ("python -m benchmarks.soak --pushs 3", "no --pushs"),
        ("curl example.org", "no rule"),
    ],
)
def test_a_command_that_rotted_is_found(text: str, says: str) -> None:
    command = Command(PAGES[0], 1, tuple(shlex.split(text)), "", "")
    with pytest.raises((AssertionError, ValueError, ModuleNotFoundError), match=re.escape(says)):
        hold(command)


def test_a_block_in_a_shell_s_language_is_written_bash() -> None:
    for page in PAGES:
        for block in blocks(page):
            assert block.language not in ("sh", "shell", "console"), f"{page.name}:{block.line}"


def test_every_recipe_of_a_page_names_only_keys_that_exist() -> None:
    known = {*all_keys(), "defaults"}
    for page in PAGES:
        for block in blocks(page):
            if block.language == "yaml" and "@package _global_" in block.text:
                top = re.findall(r"^(\w+):", block.text, flags=re.MULTILINE)
                assert set(top) <= known, f"{page.name}:{block.line}"
