"""Word problems in GSM8K's format: the real data set, a file in its schema, or embedded generated problems."""

from recipes.gsm8k.task import GSM8K

__all__ = ["GSM8K"]
