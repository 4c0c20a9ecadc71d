"""The draft model on vLLM's layers: exit heads, the KV fill, the compiled draft step. For both runners."""
