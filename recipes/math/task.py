"""The mathematics task: the rows of the first source there is, and the chat that a row becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from generator.task import DataError, Messages, TaskContext, TaskData
from recipes.bounded import CallFailedError
from recipes.hub import HubError
from recipes.math import reward
from recipes.math.problems import Difficulty, generate
from recipes.math.source import HUB_ID, Columns, read_file, read_hub
from recipes.options import check_options

REASONING_INSTRUCTION = (
    r"Solve the problem. Reason step by step, then write the final answer as \boxed{answer}, in LaTeX."
)
EXAMPLES = {
    "shift": (r"Solve for $x$: $x + 3 = 7$.", r"$x = 7 - 3 = \boxed{4}$"),
    "linear": (r"Solve for $x$: $4x + 2 = 5$.", r"$4x = 5 - 2 = 3$, so $x = \boxed{\frac{3}{4}}$"),
    "fractions": (
        r"Compute $\frac{1}{2} + \frac{1}{4}$.",
        r"$\frac{2}{4} + \frac{1}{4} = \boxed{\frac{3}{4}}$",
    ),
    "polynomial": (r"What is $2x^2 + 3x + 4$ at $x = 2$?", r"$8 + 6 + 4 = \boxed{18}$"),
}
"""A solved problem of each generated kind. It stands in the prompt because the small model that they are for does not
follow an instruction in words, and because it keeps responses short."""

SOURCES = ("auto", "hub", "generated")
STYLES = ("auto", "reason", "short")
OWN = ("source", "hub_id", "subset", "split", "eval_split", "problem", "answer", "prompt")
OPTIONS = (*OWN, *(field.name for field in fields(Difficulty)))


class Math:
    r"""Problems whose answers are mathematics, compared by math-verify.

    Options (``data.options``): ``source`` (auto, hub, generated); ``hub_id``, ``subset``, ``split`` and ``eval_split``
    of a hub data set; ``problem`` and ``answer``, the columns of a data set of one's own (an answer may be a solution
    with a ``\boxed{}``); ``prompt`` (auto, reason, short); and the fields of
    :class:`recipes.math.problems.Difficulty` for the generated problems.
    """

    def __init__(self) -> None:
        self._style = "reason"
        self._generated = False

    def load(self, context: TaskContext) -> TaskData:
        """The first of: ``data.path``, ``data.options.hub_id``, MATH if cached or reachable, generated problems.

        Raises :class:`DataError` for data or an option that cannot be used, and where math-verify is not installed.
        """
        _check_library()
        _check_options(context.options)
        data = self._load(context)
        style = context.options.get("prompt", "auto")
        self._style = ("short" if self._generated else "reason") if style == "auto" else style
        return data

    def prompt(self, row: Mapping[str, Any]) -> Messages:
        """The chat for ``row``: an instruction to reason, or for generated problems a solved one of the same kind."""
        question = {"role": "user", "content": str(row["problem"])}
        if self._style == "reason":
            return [{"role": "system", "content": REASONING_INSTRUCTION}, question]
        asked, answered = EXAMPLES.get(str(row.get("kind")), EXAMPLES["linear"])
        return [
            {"role": "system", "content": ""},  # keeps the chat template from adding a longer one of its own
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answered},
            question,
        ]

    def rewards(self) -> list[tuple[str, str, float]]:
        """What math-verify says; of generated problems, whose answers are numbers, only for numbers."""
        judged = "math_verify_number" if self._generated else "math_verify"
        return [("math_verify", f"recipes.math.reward.{judged}", 1.0), ("boxed", "recipes.math.reward.boxed", 0.0)]

    def _load(self, context: TaskContext) -> TaskData:
        options = context.options
        columns = Columns(options.get("problem"), options.get("answer"))
        if context.data_path is not None:
            if options.get("hub_id"):
                raise DataError("data.path and data.options.hub_id are both set; a run takes one of them")
            rows = read_file(context.data_path, columns)
            held_out = read_file(context.eval_path, columns, "data.eval_path") if context.eval_path is not None else ()
            return TaskData(rows, f"{len(rows)} rows of {context.data_path}", "data.path is set", held_out)
        if context.eval_path is not None:
            raise DataError("data.eval_path is for data of one's own; set data.path too")
        hub_id, source = options.get("hub_id"), options.get("source", "auto")
        if not hub_id and source == "generated":
            return self._generate(context, "data.options.source is generated; hub_id takes a data set of the hub")
        splits = (options.get("split", "train"), options.get("eval_split"))
        try:
            train, test, how = read_hub(hub_id or HUB_ID, options.get("subset"), splits, columns, context.hub_reachable)
        except HubError as error:
            if hub_id or source == "hub":
                raise DataError(
                    f"the hub data set {hub_id or HUB_ID} is not available: {error}; set data.path to a file"
                ) from error
            return self._generate(context, f"data.path is not set, and of the hub data set {HUB_ID}: {error}")
        reason = f"data.options.hub_id is set, it is {how}" if hub_id else f"data.path is not set, it is {how}"
        return TaskData(train, f"hub data set {hub_id or HUB_ID} ({len(train)} rows)", reason, test)

    def _generate(self, context: TaskContext, reason: str) -> TaskData:
        self._generated = True
        difficulty = Difficulty.from_options(context.options)
        train, held_out = generate(difficulty, context.seed)
        shape = f"{', '.join(difficulty.kinds)}; numbers to {difficulty.largest_number}"
        return TaskData(train, f"{len(train)} generated problems ({shape})", reason, held_out)


def _check_library() -> None:
    """Judge once: what is missing is found before anything is started, and the first reward need not wait."""
    try:
        (judged,) = reward.math_verify([""], [r"\boxed{0.5}"], answer=[r"\frac{1}{2}"])
        wrong = "" if judged == 1.0 else r"it does not take 0.5 for \frac{1}{2}"
    except CallFailedError as error:
        wrong = str(error)
    if wrong:
        raise DataError(
            f"this recipe needs the library math-verify, which cannot be used: {wrong}; "
            "`pip install 'math-verify[antlr4_9_3]==0.9.*'` (the extra `tasks` of midflight; `make setup` installs it)"
        )


def _check_options(options: Mapping[str, Any]) -> None:
    check_options(options, OPTIONS, {"source": SOURCES, "prompt": STYLES})
    for key in ("hub_id", "subset", "split", "eval_split", "problem", "answer"):
        if not isinstance(options.get(key), str | None):
            raise DataError(f"data.options.{key} is {options[key]!r}, not a text")
