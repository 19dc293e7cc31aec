"""Registration with vLLM: the ``vllm.general_plugins`` entry point, run by vLLM in every process it starts.

Nothing heavy is imported here: vLLM runs plug-ins in processes that never touch weights too.
"""

from generator.orphan import end_with_parent

_registered = False


def register() -> None:
    """Make our transfer engines known to vLLM's factory, and end this process with its engine. Repeatable.

    They are registered by module path, so that one is imported only where it is built.
    """
    global _registered
    if _registered:
        return
    end_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine("gloo", "weight_sync.gloo", "GlooWeightTransferEngine")
    WeightTransferEngineFactory.register_engine("nccl_delta", "weight_sync.nccl", "NcclDeltaWeightTransferEngine")
    _registered = True
