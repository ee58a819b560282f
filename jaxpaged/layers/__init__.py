"""Flax modules and pure functions that the models are made of. Knows no model and no engine."""
