"""Kernels of EESD: tensors and ints in, tensors out.

The source folder `kernels/` is installed as `vllm_eesd.kernels`. `for_device` gives the plain torch functions of
`reference` on a CPU and Triton's on a GPU; names and signatures are the same.
"""

from __future__ import annotations

from types import SimpleNamespace

__all__ = ["for_device"]

NAMES = ("choose_tokens", "exit_head", "exit_head_partials", "kv_fill", "merge_partials", "rejection")


def for_device(device_type: str) -> SimpleNamespace:
    """Return the kernels for a device, an object with the functions of `NAMES` as attributes.

    Args:
        device_type: `tensor.device.type`; "cuda" means Triton.
    """
    if device_type != "cuda":
        from . import reference

        return SimpleNamespace(**{name: getattr(reference, name) for name in NAMES})
    from . import exit_head, kv_fill, rejection

    return SimpleNamespace(
        choose_tokens=exit_head.choose_tokens,
        exit_head=exit_head.exit_head,
        exit_head_partials=exit_head.exit_head_partials,
        kv_fill=kv_fill.kv_fill,
        merge_partials=exit_head.merge_partials,
        rejection=rejection.rejection,
    )
