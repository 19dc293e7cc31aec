"""``python -m trainer.evaluate WHAT [overrides]``: evaluate a checkpoint of a run, or any model, on held-out prompts.

WHAT is a run folder (its newest checkpoint), a checkpoint (RUN/checkpoints/step_20), a run's export, or a model as
``model.path`` names one. Of a run, its own configuration is taken; a model needs ``recipe=NAME``. Prompts are sampled
and scored as in a run (``evaluation.*``). Exit codes: 0 done, 1 failed, 2 configuration error, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from generator.link import root_cause
from generator.task import DataError, ModelError
from trainer.checkpoint_folder import LEARNER_FOLDER
from trainer.checks import ConfigError
from trainer.config import Config, LoRAConfig
from trainer.dotted import DottedPathError
from trainer.evaluation_target import Target, find_target
from trainer.leave import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, leave
from trainer.ray_session import RaySession
from trainer.signals import interrupts
from trainer.temporary_folder import temporary_folder
from trainer.wording import one_line

if TYPE_CHECKING:
    from trainer.inputs import Inputs

RESULT_FILE = "evaluated.jsonl"
"""In the run folder, beside the ``evaluations.jsonl`` that belongs to the run itself."""


class NoTrace:
    """Records nothing."""

    def span(self, track: str, name: str, **args: Any) -> AbstractContextManager[None]:
        """Do nothing around the body."""
        return contextlib.nullcontext()


def main() -> int:
    """Run the command line in ``sys.argv`` and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", help="a run folder, a checkpoint, or a model")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration, as for a run")
    parser.add_argument(
        "--output", type=Path, help=f"file to append the result to, a line of JSON; of a run: RUN/{RESULT_FILE}"
    )
    arguments = parser.parse_intermixed_args()
    if wrong := [word for word in arguments.overrides if "=" not in word]:
        parser.error(f"{wrong[0]!r} is no override: write key=value")
    # Until the event loop has its own handlers, SIGTERM is the same as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        target = find_target(arguments.what, arguments.overrides)
        return evaluate(evaluating(target), arguments.output)
    except (ConfigError, DataError, ModelError, DottedPathError) as error:
        sys.stderr.write(f"Configuration error: {one_line(str(error))}\n")
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        cause = root_cause(error)
        sys.stderr.write(f"failed: {type(cause).__name__}: {cause}\n")
        return EXIT_FAILED


def evaluating(target: Target) -> Target:
    """The target with a configuration in which nothing but an evaluation is wanted: held-out rows are loaded, and no
    learner, reference model or weight push asks for anything. Engines load whole weights, adapters merged."""
    config = target.config
    config = replace(
        config,
        evaluation=replace(config.evaluation, every=config.evaluation.every or 1, engine="shared"),
        learner=replace(config.learner, ranks=0, lora=LoRAConfig()),
        weight_sync=replace(config.weight_sync, lora="merged"),
        algorithm=replace(config.algorithm, kl=replace(config.algorithm.kl, model=None)),
    )
    return replace(target, config=config)


def evaluate(target: Target, output: Path | None) -> int:
    """Evaluate, print the table, append the result; the exit code."""
    with RaySession(target.config) as ray_session, model_folder(target) as config:
        from trainer.cluster import check_resources
        from trainer.inputs import load_inputs  # takes seconds: while Ray starts
        from trainer.prepare import answered

        with answered():
            inputs = load_inputs(config, ray_session.begin)
        say("evaluating", target.name)
        if target.checkpoint is None:
            say("model", f"{inputs.model.source}  ({inputs.model.reason})")
        say("data", f"{inputs.data.source}; {len(inputs.held_out)} held-out prompts")
        check_resources(config, ray_session.wait())
        metrics = asyncio.run(supervise(config, inputs, target.version))
    if metrics is None:
        return EXIT_INTERRUPTED
    sys.stdout.write(table(metrics, config.evaluation.rollouts))
    if (path := output or (target.run_dir / RESULT_FILE if target.run_dir else None)) is not None:
        append_result(path, result(target, inputs.data.source, metrics))
        say("result", str(path))
    return EXIT_DONE


@contextlib.contextmanager
def model_folder(target: Target) -> Iterator[Config]:
    """The configuration with ``model.path`` a folder that engines load: of a checkpoint, one that is made for it.

    It is made in the run folder, which nodes of a cluster share, and removed afterwards; what a killed
    evaluation left there is removed before.
    """
    if target.checkpoint is None:
        yield target.config
        return
    from trainer.checkpoint_model import write_checkpoint_model
    from trainer.inputs import find_model

    config, where = target.config, target.run_dir
    base = find_model(config, config.model.path)
    writable = where is not None and os.access(where, os.W_OK)
    with temporary_folder(".evaluate-", where if writable else None) as folder:
        try:
            learner = target.checkpoint / LEARNER_FOLDER
            write_checkpoint_model(learner, base, config.model.trust_remote_code, folder)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the weights of {target.name} cannot be read: {error}") from error
        except (RuntimeError, KeyError, EOFError, pickle.UnpicklingError) as error:  # torch's, of a damaged file
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"the weights of {target.name} cannot be read, the file is damaged: {what}") from error
        yield replace(config, model=replace(config.model, path=str(folder)))


async def supervise(config: Config, inputs: Inputs, version: int) -> dict[str, float] | None:
    """The metrics, or ``None`` when interrupted; engines are ended either way."""
    task = asyncio.current_task()
    assert task is not None
    with interrupts(task):
        try:
            return await run_evaluation(config, inputs, version)
        except asyncio.CancelledError:
            return None


async def run_evaluation(config: Config, inputs: Inputs, version: int) -> dict[str, float]:
    """Start engines that load the weights as ``version``, and evaluate it on them. An engine that is lost is replaced
    by another that loads the same."""
    from generator.pool import EnginePool
    from trainer.assembly import make_engine, make_evaluator
    from trainer.placement import engine_settings, pool_settings

    engines = EnginePool(
        lambda number: make_engine(config, inputs, version, number, loaded_version=version), pool_settings(config)
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engines.shutdown)
        say("waiting", f"starting {config.engine.count} engine(s)")
        await engines.start()
        sampling = engine_settings(config, inputs.model, inputs.longest_prompt).sampling
        evaluator = make_evaluator(config, inputs, NoTrace(), engines, sampling)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve_all(engines, version))
            metrics = await evaluator.run(version)
            serving.cancel()
    return metrics


async def serve_all(engines: Any, version: int) -> None:
    """Let every engine that joins serve what it has loaded."""
    while True:
        await engines.joined.wait()
        await engines.serve_loaded(version)


def result(target: Target, data: str, metrics: Mapping[str, float]) -> dict[str, Any]:
    """What is written of an evaluation: of which weights, on what, how, and the outcome."""
    return {
        "evaluated": target.name,
        "step": target.version,
        "recipe": target.config.name,
        "data": data,
        "evaluation": {
            key: value for key, value in asdict(target.config.evaluation).items() if key not in ("every", "engine")
        },
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **metrics,
    }


def append_result(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line of JSON."""
    from trainer.watch.run_folder import finite

    path.parent.mkdir(parents=True, exist_ok=True)
    begin = "\n" if path.is_file() and _last_line_is_cut(path) else ""  # not to become a part of what a kill cut in two
    with path.open("a", encoding="utf-8") as file:
        file.write(begin + json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n")


def _last_line_is_cut(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read() not in (b"", b"\n")


def table(metrics: Mapping[str, float], rollouts: int) -> str:
    """The outcome for people, a line each."""
    lines = [
        ("prompts", f"{metrics['eval/prompts']:.0f} x {rollouts} rollouts"),
        ("reward", f"{metrics['eval/reward_mean']:.4f} ±{metrics['eval/reward_std']:.2f}"),
        *((f"  of {name.split('/')[2]}", f"{value:.4f}") for name, value in metrics.items() if "/by_source/" in name),
        *((name.removeprefix("eval/"), f"{value:.4f}") for name, value in metrics.items() if "/pass@" in name),
        ("response length", f"{metrics['eval/length_mean']:.1f} tokens"),
        ("truncated", f"{100 * metrics['eval/truncated_fraction']:.1f} %"),
        ("without reward", f"{metrics['eval/excluded']:.0f} rollouts"),
        ("time", f"{metrics['eval/seconds']:.1f} s"),
    ]
    return "".join(f"  {name:<16} {value}\n" for name, value in lines)


def say(kind: str, what: str) -> None:
    """A line that says what is evaluated, or what is waited for."""
    sys.stdout.write(f"  {kind:<16} {what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    leave(main())
