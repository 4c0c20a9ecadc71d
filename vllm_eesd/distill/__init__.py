"""Distillation: an exit head trained to say what the frozen target would say."""
