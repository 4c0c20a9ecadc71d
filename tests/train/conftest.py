"""Real training runs, some of them in several processes: `make test` has them, `make check` does not."""

from tiny_target import eos_token_id, model_dir, one_thread, text  # noqa: F401
