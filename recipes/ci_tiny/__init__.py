"""A two-layer model from random weights that learns to say ``a``: the whole stack in a minute, for tests and CI."""

from recipes.ci_tiny.task import CiTiny

__all__ = ["CiTiny"]
