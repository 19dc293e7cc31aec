"""A broken input, and what the command answers to it before anything heavy starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from recipes.ci_tiny.model import build
from trainer.checks import ConfigError
from trainer.compose import command_configs, prepared
from trainer.prepare import prepare
from trainer.wording import one_line

TINY = ("recipe=ci_tiny", "hardware=cpu")
"""What the arguments of most begin with."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Arguments of ``python -m trainer`` that cannot work, and the files that go with them.

    In arguments and names, ``{folder}`` stands for the folder of the files and ``{model}`` for that of a tiny model.
    """

    what: str
    arguments: tuple[str, ...]
    names: tuple[str, ...]
    """What the message has to name: the key, the file and its line, the nearest key."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    make: Callable[[Path], None] | None = None
    """Puts into the folder what is no plain file."""

    def lay_out(self, folder: Path, model: Path) -> tuple[list[str], list[str]]:
        """Write the files; the arguments and the names with the folders in their places."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        if self.make is not None:
            self.make(folder)

        def filled(texts: Sequence[str]) -> list[str]:
            return [text.replace("{folder}", str(folder)).replace("{model}", str(model)) for text in texts]

        return filled(self.arguments), filled(self.names)


def answer(arguments: Sequence[str]) -> str | None:
    """The message with which the command refuses ``arguments``; ``None`` where it would start Ray and engines.

    Raises what the command would end with a traceback for.
    """
    try:
        for config in command_configs(prepared(arguments)):
            prepare(config)
    except ConfigError as error:
        return one_line(str(error))
    return None


def chat_model(folder: Path) -> Path:
    """Build the tiny model in the existing ``folder``, with a chat template and room for a prompt; the folder."""
    build(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 4096}))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    return folder
