"""Kernels of EESD: tensors and ints in, tensors out. The folder `kernels/` is installed as `vllm_eesd.kernels`.

Two folders hold the same functions in files of the same names: `gpu` in Triton, which Model Runner V2 runs (a CPU's
tests run it interpreted), and `reference` in plain torch, which the other is tested against.
"""
