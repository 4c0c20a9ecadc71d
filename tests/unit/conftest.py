"""What needs neither an engine nor minutes of training."""

from tiny_target import eos_token_id, model_dir, one_thread, text  # noqa: F401
