"""Everything that watches a server, put together from its options."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Gauge, GCCollector, PlatformCollector, ProcessCollector

from jaxpaged.engine.async_llm import AsyncLLM
from jaxpaged.engine.metrics import PREFIX, EngineMetrics
from server.config import ServerConfig
from server.watch.http_requests import HttpWatch
from server.watch.request_log import RequestLog
from server.watch.stats_log import StatsLog
from server.watch.tracing import RequestTracer, otlp_exporter


class Telemetry:
    """The metrics, logs and traces of one server.

    Attributes:
      registry: all its metrics.
      http: its HTTP requests.
    """

    def __init__(self, llm: AsyncLLM, config: ServerConfig, model_name: str):
        """Starts to observe the engine."""
        self.registry = CollectorRegistry(auto_describe=True)
        self.http = HttpWatch(self.registry, config.root_path)
        self._tracer: RequestTracer | None = None
        self._stats_log: StatsLog | None = None
        llm.observers.add(EngineMetrics(self.registry, model_name, llm.config, len(llm.stats)))
        llm.observers.add(RequestLog(model_name, enabled=config.enable_log_requests))
        if not config.disable_log_stats:
            self._stats_log = StatsLog()
            llm.observers.add(self._stats_log)
        if config.otlp_traces_endpoint is not None:
            self._tracer = RequestTracer(otlp_exporter(config.otlp_traces_endpoint), model_name)
            llm.observers.add(self._tracer)
        healthy = Gauge(PREFIX + "healthy", "Whether the engine serves requests: 1 or 0.", registry=self.registry)
        healthy.set_function(lambda: llm.is_healthy)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    async def close(self) -> None:
        """Sends the last traces. Call it when the engine has been shut down."""
        if self._stats_log is not None:
            self._stats_log.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
