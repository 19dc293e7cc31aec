"""Reward functions and tasks that cannot work: paths to nothing, modules that fail, functions of another shape."""

from __future__ import annotations

from tests.trainer.broken import TINY, Broken

MODEL = ("model.path={model}",)
TASK = """\
from generator.task import TaskData


class Mine:
    def load(self, context):
        return TaskData([{"start": "ab"}, {"start": "cd"}], "two rows", "a test")

    def prompt(self, row):
        return row["start"]

    def rewards(self):
        return [("share", "recipes.ci_tiny.reward.share_of_a", 1.0)]
"""
"""A task that works; each broken one has a part of it replaced."""


def reward(what: str, value: str, *names: str, **modules: str) -> Broken:
    """A value of ``reward``, and the modules that it names."""
    files = {f"{name}.py": text for name, text in modules.items()}
    return Broken(what, (*TINY, *MODEL, f"reward={value}"), names, files)


def task(what: str, module: str, old: str, new: str, *names: str) -> Broken:
    """The task above with ``old`` replaced, as a module of its own: a process imports a name once."""
    assert old in TASK
    return Broken(what, (*TINY, *MODEL, f"task={module}.Mine"), names, {f"{module}.py": TASK.replace(old, new)})


SHARE = "recipes.ci_tiny.reward.share_of_a"

REWARDS = (
    reward("a reward in no package", "nowhere_at_all.f", "nowhere_at_all"),
    reward("a reward without a package", "share_of_a", "share_of_a"),
    reward("a reward that a module lacks", "recipes.ci_tiny.reward.share_of_b", "'share_of_b'", "'share_of_a'"),
    reward("a module for a reward", "recipes.ci_tiny.reward", "recipes.ci_tiny.reward", "share_of_a"),
    reward("a number for a reward", "5", "reward: 5"),
    reward("no reward at all", "[]", "reward"),
    reward("a reward whose path is a number", "{function: 5}", "reward", "function"),
    reward("a reward with an unknown key", f"{{function: {SHARE}, wieght: 1}}", "'wieght'", "weight"),
    reward("a reward with a word for its weight", f"[{{function: {SHARE}, weight: much}}]", "weight", "'much'"),
    reward("a reward with a weight past counting", f"[{{function: {SHARE}, weight: {'9' * 400}}}]", "weight"),
    reward("a reward with a list for its name", f"[{{function: {SHARE}, name: [1]}}]", "name", "[1]"),
    reward("two rewards of one name", f"[{SHARE},{SHARE}]", "'share_of_a'"),
    reward("only rewards that do not count", f"[{{function: {SHARE}, weight: 0}}]", "weight"),
    reward("a reward that is no function", "broken_r1.f", "broken_r1.f", "int", broken_r1="f = 5\n"),
    reward("a reward whose file is no Python", "broken_r2.f", "broken_r2.py", "line 2", broken_r2="x = 1\ndef f(:\n"),
    reward("a reward whose file raises", "broken_r3.f", "ZeroDivisionError", "broken_r3.py:2", broken_r3="\n1 / 0\n"),
    reward("a reward whose file ends the process", "broken_r4.f", "broken_r4", broken_r4="import sys\nsys.exit(0)\n"),
    reward("a reward whose file imports nothing", "broken_r5.f", "nowhere_at_all", broken_r5="import nowhere_at_all\n"),
    reward("a reward whose module answers with an error", "broken_r6.f", "broken_r6",
           broken_r6="def __getattr__(name):\n    raise RuntimeError('not\\ntoday')\n"),
    reward("a reward that takes no columns", "broken_r7.f", "reward function f", "start", "**columns",
           broken_r7="def f(prompts, completions):\n    return [0.0] * len(prompts)\n"),
    reward("a reward that wants a column that is not there", "broken_r8.f", "'answer'",
           broken_r8="def f(prompts, completions, answer, **columns):\n    return [0.0] * len(prompts)\n"),
    reward("a reward that takes numbers", "math.exp", "exp", "prompts"),
)  # fmt: skip

TASKS = (
    Broken("a task in no package", (*TINY, "task=nowhere_at_all.Mine"), ("task", "nowhere_at_all")),
    Broken("a task that is no task", (*TINY, "task=os.getcwd"), ("task", "`load`")),
    task("a task that cannot be made", "broken_t1", "class Mine:\n",
         "class Mine:\n    def __init__(self, x):\n        pass\n\n", "task", "broken_t1.Mine"),
    task("a task whose load raises", "broken_t2", "return TaskData", 'context.options["x"]\n        return TaskData',
         "`Mine.load`", "broken_t2.py:6"),
    task("a task that loads nothing", "broken_t3", "return TaskData(", "TaskData(", "`Mine.load`", "None"),
    task("a task that loads no list", "broken_t4", '[{"start": "ab"}, {"start": "cd"}]', "None", "`Mine.load`", "rows"),
    task("a task without a row", "broken_t5", '[{"start": "ab"}, {"start": "cd"}]', "[]", "no rows"),
    task("a task with a text for a row", "broken_t6", '{"start": "cd"}', '"cd"', "row 2", "'cd'"),
    task("a task whose row lacks a column", "broken_t7", '{"start": "cd"}', '{"strat": "cd"}', "row 2", "'start'",
         "broken_t7.py:9", "strat"),
    task("a task with an unknown field in its template", "broken_t8", 'row["start"]', '"{strat}".format(**row)',
         "row 1", "'strat'", "broken_t8.py:9"),
    task("a task whose prompt is nothing", "broken_t9", 'return row["start"]', 'row["start"]', "row 1", "None"),
    task("a task whose prompt is a list of texts", "broken_t10", 'row["start"]', '[row["start"]]', "row 1", "'role'"),
    task("a task with an empty prompt", "broken_t11", '"cd"', '""', "row 2", "empty"),
    task("a task with half a character", "broken_t12", '"cd"', '"\\ud800"', "row 2", "surrogate"),
    task("a task with a column that hides the texts", "broken_t13", '{"start": "ab"}',
         '{"start": "ab", "completions": 1}', "'completions'"),
    task("a task whose rewards raise", "broken_t14", 'return [("share"', 'return [(undefined, "share"',
         "`Mine.rewards`", "broken_t14.py:12"),
    task("a task whose rewards have no weight", "broken_t15", ", 1.0)", ")", "`Mine.rewards`", "weight"),
    task("a task whose environment cannot run", "broken_t16", "    def rewards",
         "    def environment(self):\n        return 5\n\n    def rewards", "environment", "async def run"),
    task("a task whose environment fails", "broken_t17", "    def rewards",
         "    def environment(self):\n        return 1 / 0\n\n    def rewards", "`Mine.environment`",
         "broken_t17.py:12"),
)  # fmt: skip

CODE = (*REWARDS, *TASKS)
