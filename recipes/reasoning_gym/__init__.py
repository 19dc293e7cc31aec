"""Any task of the library reasoning-gym, by name, with its own configuration and its own scorer."""

from recipes.reasoning_gym.task import ReasoningGym

__all__ = ["ReasoningGym"]
