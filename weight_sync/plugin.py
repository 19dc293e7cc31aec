"""Registration with vLLM: the ``vllm.general_plugins`` entry point, run by vLLM in every process it starts."""


def register() -> None:
    """Make our transfer engines known to vLLM's factories. Safe to call more than once."""
