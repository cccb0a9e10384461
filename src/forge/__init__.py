"""forge: reinforcement learning of language models, with the algorithm kept apart from the infrastructure.

Importing this package imports nothing else and has no effect. Import what you need from its modules, for example
``from forge.losses import GRPOLoss`` (needs torch alone) or ``from forge.config import load_config`` (not even that).
"""

__version__ = "0.1.0"
