"""``python -m trainer recipe=NAME [overrides]``: compose the configuration, check it, run, return the exit code.

Exit codes: 0 done, 1 failed, 2 configuration error, 130 interrupted after writing a checkpoint.
"""

from __future__ import annotations

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from trainer import completion
from trainer.checks import ConfigError
from trainer.compose import CONFIG_MODULE, command_configs, prepared, typed
from trainer.leave import EXIT_CONFIG, EXIT_INTERRUPTED, leave
from trainer.ray_session import RaySession
from trainer.signals import end_at_once
from trainer.wording import one_line


def main() -> int:
    """Run the command line in ``sys.argv`` and return its exit code."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        from trainer.help import help_page

        sys.stdout.write(help_page())
        return 0
    if completing := completion.wanted(sys.argv[1:]):
        if script := completion.prepare(sys.argv[1:]):
            sys.stdout.write(script)
            return 0
    else:
        sys.argv[1:] = prepared(sys.argv[1:])
    exit_codes: list[int] = []

    @hydra.main(config_path=f"pkg://{CONFIG_MODULE}", config_name="config", version_base="1.3")
    def job(composed: DictConfig) -> None:
        try:
            config = typed(composed)
            sweep = HydraConfig.get().mode is RunMode.MULTIRUN
            if sweep:
                # Jobs of a sweep start within the same second; in one folder, each would continue the one before.
                config.run_dir = f"{config.run_dir}/{HydraConfig.get().job.num}"
            with RaySession(config) as ray_session:
                from trainer.run import run  # takes seconds: while Ray starts

                try:
                    exit_codes.append(run(config, ray_session))
                except ConfigError as error:
                    if sweep:  # its other jobs are still to come
                        raise
                    # Ray, in the middle of its start, would take seconds to finish that and to end in order.
                    end_at_once(_complain(error))
        except ConfigError as error:
            exit_codes.append(_complain(error))
        except KeyboardInterrupt:  # before the run could keep anything
            exit_codes.append(EXIT_INTERRUPTED)
        if exit_codes[-1] == EXIT_INTERRUPTED:
            sys.exit(EXIT_INTERRUPTED)  # ends a --multirun too

    try:
        # Before Hydra: its own errors are neither readable nor told apart by the exit code.
        if not completing:
            command_configs(sys.argv[1:])
    except ConfigError as error:
        return _complain(error)
    try:
        job()
    except SystemExit as ending:  # Hydra's own, after `--help` and the like, or ours
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    return max(exit_codes, default=0)


def _complain(error: Exception) -> int:
    sys.stderr.write(f"Configuration error: {one_line(str(error))}\n")
    return EXIT_CONFIG


if __name__ == "__main__":
    leave(main())
