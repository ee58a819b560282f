"""Chat completions: what a request asks for, and how its answer is taken apart."""
