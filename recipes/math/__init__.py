"""Mathematics with LaTeX answers, judged by the library math-verify: a data set of your own, MATH, or generated."""

from recipes.math.task import Math

__all__ = ["Math"]
