"""Every kernel in plain torch, which `gpu` is tested against. Nothing here imports Triton.

Model Runner V1 runs code of its own, in torch and numba (`vllm_eesd/host/v1`): it verifies by
`host/v1/block_verification.py` and looks n-grams up in `round/ngram.py`. What serving takes from here is `row_argmax`
(V1), the types that kernels take and return (`Verified`, `DraftTokens`, `DraftInputs`, `TargetOutputs`, `Drafts`), and
how V2's noise is counted (`draw_counters`, `MAX_POSITION`).
"""
