"""Real training runs, some of them in several processes: `make test` has them, `make check` does not."""

from tiny_target import (  # noqa: F401
    eos_token_id,
    in_bfloat16,
    model_dir,
    one_thread,
    same_on_every_cpu,
    text,
)
