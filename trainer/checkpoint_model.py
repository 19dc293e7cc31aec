"""The weights of a checkpoint as a model folder that transformers and vLLM load, as the export of a run is one.

At ZeRO stage 0 to 2 a checkpoint holds whole weights in the dtype of the forward pass; at stage 3 the file of each rank
holds its part of the float32 master weights, which are put together here. No learner is started, no GPU is needed.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.adapter_record import read_record
from trainer.config import LoRAConfig
from trainer.learner_setup import DTYPES, architecture, save_tokenizer
from trainer.lora import add_adapters, fingerprint
from trainer.model import ResolvedModel
from trainer.zero_files import CHECKPOINT_TAG
from weight_sync.source import DeepSpeedSource

LANGUAGE_MODEL = "model."
"""Where the policy keeps the language model: how the names of its weights begin in a checkpoint."""
WHOLE_WEIGHTS = "mp_rank_00_model_states.pt"
"""DeepSpeed's file of a learner whose ranks hold all weights."""
BUCKET_BYTES = 256 << 20
"""Of merged weights, at a time."""


def write_checkpoint_model(learner: Path, base: ResolvedModel, trust_remote_code: bool, folder: Path) -> None:
    """Write the weights in ``learner``, the learner's folder of a checkpoint, to ``folder`` as a model.

    Configuration and tokenizer are those of ``base``, the model that the run started from; weights get its dtype.
    Adapters are merged into the weights of ``base``, as the export of a run does it. Raises ``FileNotFoundError`` when
    there is no learner checkpoint, ``ValueError`` when its weights are not those of such a model, or its adapters are
    for another.
    """
    from transformers import GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    dtype = DTYPES[base.dtype]
    with _deepspeed_on_cpu():
        found, record = checkpoint_weights(learner), read_record(learner)
        model = architecture(base.path, trust_remote_code, dtype)
        if record is None:
            _check_weights(found, model.state_dict(), learner, base)
        else:
            found = _merged(found, record, learner, base, trust_remote_code)
        weights = {name: tensor.to(dtype) for name, tensor in found.items()}
        if (Path(base.path) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(base.path)
        model.save_pretrained(folder, state_dict=weights)
    save_tokenizer(base.path, trust_remote_code, folder)


def _merged(
    adapters: Mapping[str, Tensor],
    record: Mapping[str, Any],
    learner: Path,
    base: ResolvedModel,
    trust_remote_code: bool,
) -> dict[str, Tensor]:
    """The weights of ``base`` with the adapters of a checkpoint merged into them, in the dtype that the run had."""
    from transformers import AutoModelForCausalLM

    dtype = DTYPES[record["dtype"]]
    model = AutoModelForCausalLM.from_pretrained(base.path, dtype=dtype, trust_remote_code=trust_remote_code)
    if fingerprint(model) != record["base"]:
        raise ValueError(f"the checkpoint in {learner} holds an adapter to another model than {base.source}")
    add_adapters(model, LoRAConfig(record["rank"], record["alpha"], record["targets"]))
    wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    _check_weights(adapters, wanted, learner, base)
    model.load_state_dict({name: adapters[name].to(dtype) for name in wanted}, strict=False)
    return {name: tensor.cpu() for name, tensor in DeepSpeedSource(model, bucket_bytes=BUCKET_BYTES)}


@contextlib.contextmanager
def _deepspeed_on_cpu() -> Iterator[None]:
    """DeepSpeed, which saving a model imports as well, looks for GPUs then, and prints what it found."""
    if "DS_ACCELERATOR" in os.environ:
        yield
        return
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        yield
    finally:
        del os.environ["DS_ACCELERATOR"]


def checkpoint_weights(learner: Path) -> dict[str, Tensor]:
    """All weights of a learner checkpoint by the language model's names, on the CPU; float32 at ZeRO stage 3.

    Unpickles files of the run's own, as continuing the run does. Raises ``FileNotFoundError`` when there are none.
    """
    files = learner / CHECKPOINT_TAG
    if not files.is_dir():
        raise FileNotFoundError(f"{learner} holds no learner checkpoint (no folder {CHECKPOINT_TAG!r} in it)")
    if (files / WHOLE_WEIGHTS).is_file():
        state = torch.load(files / WHOLE_WEIGHTS, map_location="cpu", mmap=True, weights_only=False)["module"]
    else:
        state = _gathered(learner)
    return {
        name.removeprefix(LANGUAGE_MODEL): tensor for name, tensor in state.items() if name.startswith(LANGUAGE_MODEL)
    }


def _gathered(learner: Path) -> Mapping[str, Any]:
    """The float32 weights of a ZeRO stage 3 checkpoint, whole."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():  # it tells a story of its work
        warnings.simplefilter("ignore")
        state: Mapping[str, Any] = get_fp32_state_dict_from_zero_checkpoint(str(learner), tag=CHECKPOINT_TAG)
    return state


def _check_weights(
    weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor], learner: Path, base: ResolvedModel
) -> None:
    """vLLM would load what fits and leave the rest as it was. Raises ``ValueError`` with the first that does not."""
    for name, parameter in wanted.items():
        if name not in weights:
            raise ValueError(f"the checkpoint in {learner} has no weight {name}, which {base.source} has")
        if weights[name].shape != parameter.shape:
            found, expected = (list(tensor.shape) for tensor in (weights[name], parameter))
            raise ValueError(f"{name} is {found} in the checkpoint in {learner}, and {expected} in {base.source}")
