"""README and docs name only what exists."""

import re
from pathlib import Path

import pytest

from tests.pages import PAGES, ROOT
from trainer.checks import all_keys
from trainer.compose import GROUPS
from trainer.reference import FOLDER
from trainer.reference import PAGES as GENERATED

OVERRIDE = re.compile(r"(?<![\w./-])([a-z_]+(?:\.[a-z_]+)*)=(?=[\w/.\[])")
NOT_OURS = {"TESTS", "ARGS", "RECIPE", "python", "token"}


def names(page: Path) -> set[str]:
    """The keys of everything on the page that looks like an override, in code only."""
    code = "\n".join(re.findall(r"```.*?```|`[^`]+`", page.read_text(), flags=re.DOTALL))
    return {match for match in OVERRIDE.findall(code) if match not in NOT_OURS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_keys_that_exist(page):
    known = {*all_keys(), *GROUPS}
    assert not {name for name in names(page) if name not in known and not name.startswith("data.options.")}


def test_relative_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_page_is_what_the_code_says_now(name):
    assert (FOLDER / name).read_text() == GENERATED[name](), "run `python -m trainer.reference`"


def test_every_configuration_key_has_a_meaning():
    assert "|  |" not in GENERATED["configuration.md"]()


def test_the_reward_functions_of_the_docs_work():
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "your-own-task.md").read_text(), flags=re.DOTALL)
    functions: dict = {}
    exec(code[1], functions)
    columns = {"prompts": ["", ""], "completions": ["it is 7", "8"], "answer": ["3 + 4 #### 7", "#### 7"]}
    assert functions["right"](**columns) == [1.0, 0.0]
    assert functions["right"](prompts=["", ""], completions=["12", ""], answer=["#### 2", "#### 2"]) == [0.0, 0.0]
    assert functions["short"](**columns) == [1.0, 1.0]
