"""From a configuration to all that a run starts from: the last step before anything heavy starts.

Whatever is wrong with what a person brought (data, task, reward functions, model, checkpoint) is found here at the
latest, and is a :class:`ConfigError`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from generator.task import DataError, ModelError
from trainer.checks import ConfigError
from trainer.config import Config
from trainer.dotted import DottedPathError
from trainer.groups import KeptGroups
from trainer.inputs import Inputs, load_inputs
from trainer.state import RunState, find_checkpoint, load_state


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run starts from, and where."""

    inputs: Inputs
    checkpoint: Path | None
    """The checkpoint that the run continues from."""
    state: RunState | None
    """What it holds."""
    kept: KeptGroups
    """Its groups; none in a fresh run."""


def prepare(config: Config, found: Callable[[], None] = lambda: None) -> Prepared:
    """Load data, model folder, reward functions and checkpoint. No process is started, and nothing is written but
    models into their cache. Raises :class:`ConfigError` that names the file, the line, the row or the key.
    ``found``: see :func:`trainer.inputs.load_inputs`.
    """
    with answered():
        inputs = load_inputs(config, found)
        checkpoint = find_checkpoint(config)
        if checkpoint is None:
            return Prepared(inputs, None, None, KeptGroups())
        model = inputs.model
        return Prepared(inputs, checkpoint, *load_state(checkpoint, config, inputs.prompts, model.source, model.dtype))


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """Turns what is raised for something that a person brought into a :class:`ConfigError`."""
    try:
        yield
    except (DataError, ModelError, DottedPathError) as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        if error.filename is None:  # of nothing that was configured
            raise
        raise ConfigError(f"{str(error.filename)[:300]} cannot be read: {error.strerror or error}") from error
