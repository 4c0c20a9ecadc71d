"""Kernels of EESD: tensors and ints in, tensors out.

The source folder `kernels/` is installed as `vllm_eesd.kernels`. It holds no kernel yet: drafting and verification run
on plain PyTorch and on vLLM's own kernels.
"""
