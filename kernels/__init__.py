"""Kernels of EESD: tensors and ints in, tensors out. The folder `kernels/` is installed as `vllm_eesd.kernels`.

Two shelves hold the same functions in files of the same names: `cpu` in plain torch, which is also the reference, and
`gpu` in Triton. `vllm_eesd.kernels.rejection` is the one for the device of this machine, likewise the others of
`FILE_OF`. The runners name their shelf: V1 takes `cpu`, V2 takes `gpu`, which a CPU's tests run interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

# Function -> file, on either shelf.
FILE_OF = {
    "advance_draft_inputs": "draft_inputs", "choose_tokens": "exit_head", "exit_head": "exit_head",
    "find_ngrams": "ngram", "keep_equal": "keep_equal", "kv_fill": "kv_fill", "prepare_draft_inputs": "draft_inputs",
    "put_ngrams": "ngram", "rejection": "rejection", "shared_draw": "shared_draw",
}  # fmt: skip


def __getattr__(name: str) -> Callable:
    """Return the function for this machine's device; called once a name, and nothing is imported before."""
    if name not in FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    shelf = "gpu" if torch.cuda.is_available() else "cpu"
    function = globals()[name] = getattr(import_module(f"{__name__}.{shelf}.{FILE_OF[name]}"), name)
    return function
