"""Word problems with a calculator: the model writes a call, the environment computes it, the model goes on."""

from recipes.calculator.task import Calculator

__all__ = ["Calculator"]
