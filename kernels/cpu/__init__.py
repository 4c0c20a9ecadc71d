"""Every kernel in plain torch: the CPU's own path, and the reference of `gpu`. Nothing here imports Triton."""
