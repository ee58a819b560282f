"""jaxpaged: LLM serving in pure JAX and Pallas."""
