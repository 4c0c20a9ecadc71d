"""What needs neither an engine nor minutes of training."""

from tiny_target import (  # noqa: F401
    eos_token_id,
    in_bfloat16,
    model_dir,
    one_thread,
    same_on_every_cpu,
    text,
)
