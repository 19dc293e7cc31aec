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


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as they are made on the web."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_relative_links_lead_to_a_file_and_a_heading_in_it():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


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
