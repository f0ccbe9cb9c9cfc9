"""Optimizers that engines follow, a file each: its states, its hyperparameters and its arithmetic. See rule.py."""
