"""Ray Serve: each replica is an engine on a GPU of its own, behind the whole OpenAI API.

pip install 'ray[serve]' '.[cuda12]'    # from the checkout's root
MODEL=Qwen/Qwen3-0.6B serve run serve_app:app
"""

from __future__ import annotations

import os

from fastapi import FastAPI
from ray import serve  # pyright: ignore[reportMissingImports]

REPLICAS = int(os.environ.get("REPLICAS", "1"))
GPUS_PER_REPLICA = float(os.environ.get("GPUS_PER_REPLICA", "1"))


def build() -> FastAPI:
    """Called in each replica: loads the model there. The application ends the engine when the replica ends."""
    from jaxpaged.config import EngineConfig
    from jaxpaged.engine.async_llm import AsyncLLM
    from jaxpaged.engine.in_process_client import InProcessClient
    from jaxpaged.engine.load import load_engine
    from server.app import create_app
    from server.config import ServerConfig

    model = os.environ.get("MODEL", "Qwen/Qwen3-0.6B")
    keys = tuple(key for key in [os.environ.get("JAXPAGED_API_KEY")] if key)
    engine, tokenizer = load_engine(EngineConfig(model=model))
    llm = AsyncLLM(InProcessClient(engine, tokenizer), tokenizer)
    return create_app(llm, ServerConfig(served_model_name=(model,), api_key=keys))


class Replica:
    """One replica. Ray's wrapper around it has the application as `app`."""

    app: FastAPI

    def check_health(self) -> None:
        """Ray asks now and then, and replaces a replica that raises."""
        if not self.app.state.serving.llm.is_healthy:
            raise RuntimeError("the engine has failed or is shutting down")


deployment = serve.deployment(
    name="jaxpaged",
    num_replicas=REPLICAS,
    max_ongoing_requests=256,
    graceful_shutdown_timeout_s=60,
    ray_actor_options={"num_gpus": GPUS_PER_REPLICA},
)(serve.ingress(build)(Replica))
app = deployment.bind()
