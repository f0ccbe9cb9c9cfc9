"""This library under other libraries' training loops. What is here imports those, which `import systems` does not."""

from systems.integrations.trainer import OffloadTrainer

__all__ = ["OffloadTrainer"]
