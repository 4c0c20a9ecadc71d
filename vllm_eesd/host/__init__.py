"""Everything that touches vLLM. Nothing outside this package imports vLLM's private modules."""
