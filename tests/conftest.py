"""What every test can count on: JAX on the CPU, no hub, caches of the test session's own."""

import os
import tempfile

# Before anything imports jax or transformers. Caches go to a folder of the session's own: tests neither read what an
# earlier version compiled nor leave files in the user's home.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("XDG_CACHE_HOME", tempfile.mkdtemp(prefix="jaxpaged-tests-"))
