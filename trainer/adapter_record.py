"""What a checkpoint of adapters alone belongs to, as ``lora.json`` beside it says. One of all weights has no such file.

Nothing here imports torch: settings are compared before anything heavy starts.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.config import LoRAConfig

RECORD_FILE = "lora.json"


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """Of the adapters of a learner: their ``settings``, the ``base`` model that they are for
    (:func:`trainer.lora.fingerprint`), and the ``dtype`` in which that computes."""

    settings: LoRAConfig
    base: str
    dtype: str

    def write(self, folder: str | Path, parts: int) -> None:
        """Beside the checkpoint that is written into ``folder``; nothing where there are no adapters.

        ``parts``: of how many ranks each holds a part of the optimizer; 0 where every rank holds all of it.
        """
        if self.settings.rank:
            Path(folder).mkdir(parents=True, exist_ok=True)
            record = asdict(self.settings) | {"base": self.base, "dtype": self.dtype, "parts": parts}
            Path(folder, RECORD_FILE).write_text(json.dumps(record), encoding="utf-8")

    def check(self, folder: str | Path, ranks: int) -> None:
        """Raise ``ValueError`` as :func:`check_settings` does, and for a checkpoint of another base model."""
        check_settings(folder, self.settings, ranks)
        saved = read_record(folder)
        if saved is None:
            return
        if saved["dtype"] != self.dtype:
            raise _misfit(folder, f"computes in {self.dtype}, and it was made with model.dtype={saved['dtype']}")
        if saved["base"] != self.base:
            raise _misfit(folder, "has another base model: the weights at model.path have changed")


def read_record(folder: str | Path) -> dict[str, Any] | None:
    """What is recorded of the learner checkpoint in ``folder``; ``None`` for one of all weights."""
    file = Path(folder, RECORD_FILE)
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def check_settings(folder: str | Path, settings: LoRAConfig, ranks: int) -> None:
    """Raise ``ValueError`` for a checkpoint of other adapters, for one of all weights where there are to be adapters or
    the other way round, and for one in the parts of another number of ranks.

    What the base model was is not looked at.
    """
    saved = read_record(folder)
    if saved is None and settings.rank:
        raise _misfit(folder, "trains an adapter (learner.lora.rank), and the checkpoint holds all weights")
    if saved is not None and not settings.rank:
        raise _misfit(folder, "trains all weights (learner.lora.rank), and the checkpoint holds an adapter")
    if saved is None:
        return
    different = [key for key, value in asdict(settings).items() if saved.get(key) != value]
    if different:
        made = " and ".join(f"learner.lora.{key}={saved.get(key)}" for key in different)
        raise _misfit(folder, f"cannot go on from it: it was made with {made}")
    if saved["parts"] not in (0, ranks):
        raise _misfit(
            folder,
            f"has learner.ranks={ranks}, and it was made with learner.ranks={saved['parts']}; with learner.lora the "
            "number must stay",
        )


def _misfit(folder: str | Path, what: str) -> ValueError:
    return ValueError(f"the learner checkpoint in {folder} does not fit: this run {what}")
