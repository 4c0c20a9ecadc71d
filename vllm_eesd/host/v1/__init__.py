"""The adapter for vLLM's Model Runner V1, which runs on CPUs."""
