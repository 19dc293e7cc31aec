"""What a learner writes and continues from. Every function is a collective: all ranks call it with the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.adapter_record import AdapterRecord
from trainer.learner_setup import LearnerSpec, save_tokenizer
from trainer.resharding import load_on_other_ranks, shard_files
from trainer.zero_files import CHECKPOINT_TAG, check_stage
from weight_sync.source import DeepSpeedSource

_EXPORT_BUCKET_BYTES = 256 << 20


def save_learner(engine: Any, record: AdapterRecord, folder: str | Path, steps_done: int) -> None:
    """Weights, optimizer state and the number of steps of a DeepSpeed engine; of a model with adapters those alone."""
    if dist.get_rank() == 0:
        record.write(folder, parts=dist.get_world_size() if engine.zero_optimization_stage() > 0 else 0)
    engine.save_checkpoint(
        str(folder),
        tag=CHECKPOINT_TAG,
        client_state={"steps_done": steps_done},
        save_latest=False,
        exclude_frozen_parameters=record.settings.rank > 0,
    )


def load_learner(engine: Any, record: AdapterRecord, folder: str | Path) -> int:
    """Continue from what :func:`save_learner` wrote at the same ZeRO stage, on any number of ranks; the steps done.

    Raises ``FileNotFoundError`` when the folder holds no learner checkpoint, and ``ValueError`` for one of another
    stage, of other adapters, or of an adapter to another model.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    files = Path(folder) / CHECKPOINT_TAG
    if not files.is_dir():
        raise FileNotFoundError(f"{folder} holds no learner checkpoint (no folder {CHECKPOINT_TAG!r} in it)")
    record.check(folder, world_size)
    check_stage(files, int(engine.zero_optimization_stage()))
    saved_by = len(shard_files(files))
    if saved_by in (0, world_size):
        whole = record.settings.rank == 0
        loaded, state = engine.load_checkpoint(str(folder), tag=CHECKPOINT_TAG, load_module_strict=whole)
        if loaded is None:
            raise FileNotFoundError(f"the learner checkpoint in {folder} is incomplete; DeepSpeed cannot read it")
    else:
        state = load_on_other_ranks(engine, files, rank, world_size)
    # Checkpoints from before a step could be several updates do not hold the number.
    return int(state.get("steps_done", engine.global_steps - engine.skipped_steps))


def export_model(engine: Any, spec: LearnerSpec, folder: str | Path) -> None:
    """A folder that transformers and vLLM load: configuration, safetensors weights with adapters merged, tokenizer."""
    source = DeepSpeedSource(engine, prefix="model.", bucket_bytes=_EXPORT_BUCKET_BYTES)
    if dist.get_rank() == 0:
        state = {name: tensor.cpu() for name, tensor in source}
        engine.module.model.save_pretrained(str(folder), state_dict=state)
        save_tokenizer(spec.model_path, spec.trust_remote_code, folder)
    else:
        source.begin_pass()
        source.finish_pass()
    dist.barrier()
