"""Tiny models and a toy task, for tests and smoke runs. The models are in `forge.testing.tiny_model`."""

from forge.testing.toy_task import toy_reward

__all__ = ["toy_reward"]
