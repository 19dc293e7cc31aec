"""Registration with vLLM: the ``vllm.general_plugins`` entry point, run by vLLM in every process it starts.

Nothing heavy is imported here: vLLM runs plug-ins in processes that never touch weights too.
"""

from generator.orphan import end_with_parent

_registered = False


def register() -> None:
    """Make our transfer engines known to vLLM's factories, and end this process with its engine. Repeatable.

    The engines are registered by module path, so that they are imported only where one is built.
    """
    global _registered
    if _registered:
        return
    end_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    WeightTransferEngineFactory.register_engine("gloo", "weight_sync.gloo", "GlooWeightTransferEngine")
    WeightTransferTrainerFactory.register_engine("gloo", "weight_sync.gloo_trainer", "GlooTrainerWeightTransferEngine")
    _registered = True
