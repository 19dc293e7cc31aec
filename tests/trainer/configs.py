"""The configuration of the tiny recipe on CPU with some keys changed, without composing it anew for every test."""

from __future__ import annotations

import copy
import functools
from typing import Any

from trainer.compose import compose_config
from trainer.config import Config


@functools.cache
def _composed(hardware: str) -> Config:
    return compose_config(["recipe=ci_tiny", f"hardware={hardware}"])


def tiny_config(changes: dict[str, Any] | None = None, hardware: str = "cpu") -> Config:
    """``changes`` are values by dotted key. They are not checked."""
    config = copy.deepcopy(_composed(hardware))
    for key, value in (changes or {}).items():
        *sections, name = key.split(".")
        section = functools.reduce(getattr, sections, config)
        assert hasattr(section, name), key
        setattr(section, name, value)
    return config
