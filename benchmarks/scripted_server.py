"""The real server over the scripted engine; started by `http_path`: FOLDER PORT SECONDS_PER_STEP [--in-process]."""

from __future__ import annotations

import argparse
from pathlib import Path

import uvicorn

from benchmarks.scripted_engine import load
from jaxpaged.config import EngineConfig
from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.core_client import EngineCoreClient
from jaxpaged.engine.garbage import collect_seldom
from jaxpaged.engine.in_process_client import InProcessClient
from jaxpaged.engine.process_client import ProcessClient
from jaxpaged.text.tokenizer import Tokenizer
from server.app import create_app
from server.config import ServerConfig
from server.connection import uvicorn_options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("seconds_per_step", type=float)
    parser.add_argument("--in-process", action="store_true")
    args = parser.parse_args()
    config = EngineConfig(
        str(args.seconds_per_step),
        tokenizer=str(args.folder),
        max_model_len=4096,
        max_num_seqs=1024,
        num_kv_blocks=10**6,
    )
    client: EngineCoreClient
    if args.in_process:
        engine, tokenizer = load(config, None)
        client = InProcessClient(engine, tokenizer)
    else:
        tokenizer = Tokenizer.from_folder(args.folder)
        client = ProcessClient(config, engine="benchmarks.scripted_engine:load")
        client.wait_until_ready()
    options = ServerConfig(port=args.port)
    app = create_app(AsyncLLM(client, tokenizer), options)
    collect_seldom()
    uvicorn.run(app, port=args.port, log_level="warning", access_log=False, **uvicorn_options(options))


if __name__ == "__main__":
    main()
