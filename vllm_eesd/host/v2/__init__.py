"""The adapter for vLLM's Model Runner V2, which runs on GPUs, and on a CPU under Triton's interpreter."""
