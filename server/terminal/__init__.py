"""`jaxpaged chat`: a model in the terminal."""
