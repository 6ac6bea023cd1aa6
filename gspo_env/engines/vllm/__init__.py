"""vLLM, in this process and served."""
