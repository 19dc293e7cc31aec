"""The reference page of the algorithm's parts and presets, from the code that runs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

from omegaconf import OmegaConf

from trainer.algorithm.advantages import ADVANTAGES
from trainer.algorithm.aggregation import AGGREGATIONS
from trainer.algorithm.choices import Choice
from trainer.algorithm.objectives import OBJECTIVES
from trainer.algorithm.proximal import PROXIMAL_POLICIES
from trainer.algorithm.ratios import LEVELS
from trainer.algorithm.regularisers import KL_ESTIMATORS
from trainer.allowed import EXTENSIBLE
from trainer.checks import get
from trainer.config import Config

INTRODUCTION = """\
# Algorithms

What the learner minimises, part by part, in the order in which the parts act (`trainer/algorithm/loss.py`):

```
loss = aggregation( correction * (objective + kl.coefficient * KL) - entropy_bonus * entropy )
```

`algorithm=NAME` takes a preset; every part can be changed on top of it, for example
`algorithm=grpo algorithm.aggregation=prompt_mean`. Generated from the code by `python -m trainer.reference`.

In the formulas, `A` is the advantage, `pi` the current policy, `r` the ratio of the current to the proximal policy,
`rho` the ratio of the proximal to the behaviour policy, `|y|` the response tokens that the loss sees, and `sg` stops
the gradient. Log-ratios are clamped to +-20 before they are exponentiated. What is masked before the update (staleness,
rollouts without a reward, `algorithm.filter`, M2PO) leaves the denominators; a token that correction or objective leave
out during the update counts in them, as in the papers' formulas.

With one update a batch, as by default, and `algorithm.proximal=current` the ratio `r` is 1: the bounds of `ppo_clip`
never act, `policy/clip_fraction_*` stay 0, and the correction does the whole work. Bounds act with several updates
(`learner.epochs`, `learner.minibatches`) and `algorithm.proximal=recomputed`, with `algorithm.proximal=behaviour
algorithm.correction.weight=none`, or with `algorithm.proximal=log_linear`.
"""


PARTS: tuple[tuple[str, str, str, Mapping[str, Choice]], ...] = (
    ("Advantages", "advantage", "Groups of one and of equal rewards get exactly 0 from every group-relative one.",
     ADVANTAGES),
    ("Objectives", "objective", "The loss of a token.", OBJECTIVES),
    ("Proximal policies", "proximal", "What `r` is measured against.", PROXIMAL_POLICIES),
    ("Corrections", "correction.weight",
     "Two choices of the same ratios. `correction.weight` multiplies the token's loss, truncated to `[weight_low, "
     "weight_high]`; `correction.mask` leaves out tokens whose ratio lies outside `[mask_low, mask_high]`. Truncated "
     "importance sampling is weight `token`; IcePop (arXiv:2510.18855) adds mask `token` with two bounds, masked "
     "importance sampling with `mask_high` alone. `correction.second_moment` is the mask of M2PO (arXiv:2510.01161), "
     "over the whole batch.", LEVELS),
    ("Aggregations", "aggregation", "From token losses to one number, with the denominators of the whole batch.",
     AGGREGATIONS),
    ("KL estimators", "kl.estimator",
     "Of KL(current, reference), with `x = log pi - log pi_reference`. Which one is right depends on where it enters: "
     "`algorithm.kl.place=reward` asks for k1, `algorithm.kl.place=loss` for k2 (arXiv:2510.01555).",
     KL_ESTIMATORS),
)  # fmt: skip


def algorithms_page() -> str:
    """The page ``docs/reference/algorithms.md``."""
    lines = [INTRODUCTION, "## Presets", "", *_presets(), ""]
    for title, key, text, choices in PARTS:
        lines += [f"## {title}", "", f"`algorithm.{key}`. {text}", "", *_table(key, choices), ""]
    lines += ["## Your own", "", *_own()]
    return "\n".join(lines) + "\n"


def _table(key: str, choices: Mapping[str, Choice]) -> list[str]:
    rows = []
    for name, choice in choices.items():
        cells = (f"`{name}`", f"`{_cell(choice.formula)}`", choice.source, _defaults(choice), choice.off_policy)
        rows.append(f"| {' | '.join(cell or '-' for cell in cells)} |")
    return ["| name | formula | source | keys and defaults | off-policy |", "|---|---|---|---|---|", *rows]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")  # a bar would end the cell, in code too


def _defaults(choice: Choice) -> str:
    return ", ".join(f"`{key}` {_shown(get(Config().algorithm, key))}" for key in choice.keys)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _presets() -> list[str]:
    rows = ["| preset | what it is | sets |", "|---|---|---|"]
    for path in sorted((resources.files("configs") / "algorithm").iterdir(), key=lambda item: item.name):
        text = path.read_text()
        about = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        keys = ", ".join(
            f"`{key}` {_shown(value)}" for key, value in _leaves(OmegaConf.to_container(OmegaConf.create(text)))
        )
        rows.append(f"| `{path.name.removesuffix('.yaml')}` | {about} | {keys} |")
    return rows


def _leaves(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return found


def _own() -> list[str]:
    rows = [f"| `{key}` | `({', '.join(arguments)})` |" for key, arguments in EXTENSIBLE.items()]
    return [
        "These keys also take the dotted path of a function, which is called as the built-in ones are; their types and",
        "shapes stand in the docstrings of the module. It must be importable where the learner runs, and is looked up",
        "before anything starts.",
        "",
        "| key | called with |",
        "|---|---|",
        *rows,
    ]
