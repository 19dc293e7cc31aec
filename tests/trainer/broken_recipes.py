"""Recipes outside of the package that cannot work: a YAML file under ``--config-dir``, or a module beside it."""

from __future__ import annotations

from pathlib import Path

from tests.trainer.broken import TINY, Broken

HEAD = "# @package _global_\nname: mine\ntask: recipes.ci_tiny.task.CiTiny\nsteps: 3\n"

CIRCLE = "seed: ${data.options.a}\ndata:\n  options:\n    a: ${seed}\n"


def recipe(what: str, content: str | bytes, *names: str) -> Broken:
    """A file ``recipe/mine.yaml``."""
    arguments = ("recipe=mine", "hardware=cpu", "--config-dir", "{folder}", "model.path={model}")
    return Broken(what, arguments, names, {"recipe/mine.yaml": content})


def make_folder(folder: Path) -> None:
    """Where the file of a recipe should be."""
    (folder / "recipe" / "mine.yaml").mkdir(parents=True)


FILE = "recipe/mine.yaml"

FILES = (
    recipe("a file with an unknown key", f"{HEAD}stepps: 3\n", "`stepps`", "`steps`", FILE),
    recipe("a file with a key in the wrong section", f"{HEAD}batch:\n  size: 3\n", "`batch.size`", FILE),
    recipe("a file with a word for a number", f"{HEAD}seed: many\n", "`seed`", "many", FILE),
    recipe("a file with null for a number", f"{HEAD}seed: null\n", "`seed", FILE),
    recipe("a file with a list for a text", f"{HEAD}run_dir: [a]\n", "`run_dir`"),
    recipe("a file with a value for a section", f"{HEAD}batch: 3\n", "`batch`", FILE),
    recipe("a file with a mapping for a list", f"{HEAD}checks: {{a: b}}\n", FILE),
    recipe("a file with a tab", f"{HEAD}batch:\n\tprompts: 3\n", f"{FILE}:6"),
    recipe("a file with a key twice", f"{HEAD}seed: 1\nseed: 2\n", f"{FILE}:6", "seed"),
    recipe("a file with an open quote", f'{HEAD}run_dir: "a\n', f"{FILE}:"),
    recipe("a file with an open bracket", f"{HEAD}checks: [a\n", f"{FILE}:"),
    recipe("a file with a tag of Python", f"{HEAD}seed: !!python/name:os.system\n", f"{FILE}:5"),
    recipe("a file of two documents", f"{HEAD}---\nseed: 1\n", f"{FILE}:5"),
    recipe("a file with control characters", f"{HEAD}run_dir: a\x07b\n", FILE),
    recipe("a file with a NUL in a text", f'{HEAD}run_dir: "a\\0b"\n', "`run_dir="),
    recipe("a file in another encoding", HEAD.encode() + "run_dir: müll\n".encode("latin-1"), FILE),
    recipe("a file in UTF-16", HEAD.encode("utf-16"), FILE),
    recipe("a file with a number of thousands of digits", f"{HEAD}seed: 0x{'f' * 5000}\n", "`seed="),
    recipe("an empty file", "", "# @package _global_"),
    recipe("a file with a list", f"{HEAD.splitlines()[0]}\n- steps\n", FILE),
    recipe("a file with a number", "5\n", "mine"),
    recipe("a file with a word", "hello\n", "# @package _global_"),
    recipe("a file without its first line", HEAD.partition("\n")[2], "# @package _global_"),
    recipe("a file with too long a first line", f"# @package _global_ and more\n{HEAD}", "@package"),
    recipe("a file without a task", "# @package _global_\nname: mine\nsteps: 3\n", "`task`"),
    recipe("a file that takes an unknown algorithm", f"{HEAD}defaults:\n  - override /algorithm: gpro\n", "`grpo`"),
    recipe("a file that takes a file that is not there", f"{HEAD}defaults:\n  - nothing\n", "nothing"),
    recipe("a file that takes itself", f"{HEAD}defaults:\n  - mine\n", "mine"),
    recipe("a file with a number for its defaults", f"{HEAD}defaults: 5\n", "mine", "defaults"),
    recipe("a file with an interpolation of nothing", f"{HEAD}seed: ${{nowhere}}\n", "`seed`", "nowhere"),
    recipe("a file with an interpolation in a circle", f"{HEAD}{CIRCLE}", "`seed`"),
    recipe("a file that reads a variable that is not set", f"{HEAD}run_dir: ${{oc.env:NOWHERE_SET}}\n", "`run_dir`"),
    Broken(
        "a folder in place of a file",
        ("recipe=mine", "hardware=cpu", "--config-dir", "{folder}"),
        ("recipe=mine",),
        make=make_folder,
    ),
)

NO_PATHS = (
    Broken("a model that is not there", (*TINY, "model.path=/nowhere/model"), ("/nowhere/model",)),
    Broken("a model that is a file", (*TINY, "model.path={folder}/model"), ("{folder}/model",), {"model": "x"}),
    Broken("a model folder without a model", (*TINY, "model.path={folder}"), ("{folder}", "config.json")),
    Broken("a model in a home of nobody", (*TINY, "model.path=~nobody_at_all/model"), ("model.path",)),
    Broken("a model with too long a name", (*TINY, f"model.path={'a' * 5000}"), ("model.path",)),
    Broken("a hub id that the hub refuses", (*TINY, "model.path=owner/a--b..c"), ("owner/a--b..c",)),
    Broken("a factory that is not there", (*TINY, "model.path=factory:os.path.nothing"), ("model.path", "'nothing'")),
    Broken(
        "a factory that fails",
        (*TINY, "model.path=factory:broken_factory:build", "model.cache_dir={folder}/cache"),
        ("broken_factory.py:2", "ZeroDivisionError"),
        {"broken_factory.py": "def build(folder):\n    1 / 0\n"},
    ),
    Broken(
        "a model folder whose configuration is no JSON",
        (*TINY, "model.path={folder}"),
        ("{folder}/config.json",),
        {"config.json": "{", "model.safetensors": "x", "tokenizer.json": "{}"},
    ),
    Broken("a cache that is a file", (*TINY, "model.cache_dir={folder}/x"), ("{folder}/x",), {"x": "x"}),
    Broken("a checkpoint that is not there", (*TINY, "resume={folder}/nothing"), ("resume={folder}/nothing",)),
    Broken("a checkpoint with too long a name", (*TINY, f"resume=/{'a' * 3000}"), ("aaaa",)),
    Broken("a file for a recipe without data", (*TINY, "data.path={folder}/x"), ("data.path",), {"x": "x"}),
)

RECIPES = (*FILES, *NO_PATHS)
