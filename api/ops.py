"""What operators and routers ask a server: metrics, load, model and server facts, flush.

Routes only; the shapes of /server_info, /model_info and /v1/loads are those that gateways in front
of SGLang and vLLM read. Paths of this machine are never told.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from spec_serve.api.calls import Call, HttpError, Route
from spec_serve.api.metrics import Meter, families, vllm_families
from spec_serve.api.service import Service, shown_name
from spec_serve.api.version import __version__


class Operations:
    """The handlers, for one service. compat: "vllm" tells metrics under those names too."""

    def __init__(self, service: Service, meter: Meter, compat: str = "none") -> None:
        self._service, self._meter, self._compat = service, meter, compat
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Families(self))
        self._rate = Rate()

    def routes(self) -> list[Route]:
        """All of them; flushing is for administrators."""
        return [
            Route("GET", "/metrics", self._metrics),
            Route("GET", "/v1/loads", self._loads),
            Route("GET", "/server_info", self._server),
            Route("GET", "/get_server_info", self._server),
            Route("GET", "/model_info", self._model),
            Route("GET", "/get_model_info", self._model),
            Route("POST", "/flush_cache", self._flush, "admin"),
        ]

    def metrics(self) -> Iterable[Metric]:
        """All families at this moment."""
        service = self._service
        stats = service.link.stats()
        yield from families(self._meter, stats, time.monotonic() - service.started)
        if self._compat == "vllm":
            kv_tokens = service.link.info.kv_tokens
            yield from vllm_families(self._meter, stats, service.model, kv_tokens)

    async def _metrics(self, call: Call) -> None:
        encode, kind = choose_encoder(call.header("accept") or "")
        await call.answer(200, encode(self._registry), kind)

    async def _loads(self, call: Call) -> None:
        info, stats = self._service.link.info, self._service.link.stats()
        used = stats.kv_used / stats.kv_total if stats.kv_total else 0.0
        hits = stats.prefix_hit_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
        accept = stats.accepted / stats.drafted if stats.drafted else 0.0
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        load = {
            "dp_rank": 0,
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
            "num_total_reqs": stats.running + stats.waiting,
            "num_used_tokens": stats.kv_used,
            "max_total_num_tokens": stats.kv_total,
            "token_usage": round(used, 4),
            "gen_throughput": round(self._rate.of(stats.tokens_out), 2),
            "cache_hit_rate": round(hits, 4),
            "utilization": round(min(stats.running / max(info.max_rows, 1), 1.0), 4),
            "max_running_requests": info.max_rows,
            "speculative": {"accept_rate": round(accept, 4)},
        }
        head = {"timestamp": stamp, "version": __version__, "dp_rank_count": 1}
        total = {
            name: load[name]
            for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "token_usage")
        }
        await call.say({**head, "loads": [load], "aggregate": total})

    async def _server(self, call: Call) -> None:
        service = self._service
        info, stats = service.link.info, service.link.stats()
        await call.say(
            {
                "version": __version__,
                "server": "spec-serve",
                "status": "ready" if service.ready else "not ready",
                "uptime_s": round(time.monotonic() - service.started, 3),
                **self._names(),
                "dtype": info.dtype,
                "device": info.device,
                "speculation": {
                    "max_nodes": info.max_nodes,
                    "sources": list(info.sources),
                    "head": info.draft_told or None,
                },
                "max_running_requests": info.max_rows,
                "max_total_num_tokens": info.kv_tokens,
                "context_length": info.max_context,
                "page_size": 1,
                "tp_size": 1,
                "dp_size": 1,
                "stats": {name: getattr(stats, name) for name in stats.__slots__},
            }
        )

    async def _model(self, call: Call) -> None:
        info = self._service.link.info
        template = self._service.tokenizer.chat_template is not None
        await call.say(
            {
                **self._names(),
                "is_generation": True,
                "vocab_size": info.vocab_size,
                "max_context_length": info.max_context,
                "max_model_len": info.max_context,
                "has_chat_template": template,
            }
        )

    def _names(self) -> dict[str, str]:
        info, model = self._service.link.info, self._service.model
        shown, draft = shown_name(info.model), shown_name(info.draft)
        return {
            "model_path": shown, "served_model_name": model, "tokenizer_path": shown,
            "draft_model": draft,
        }  # fmt: skip

    async def _flush(self, call: Call) -> None:
        if not self._service.ready:
            raise HttpError("overloaded", "the engine is not taking requests", retry_after_s=5)
        freed = await self._service.link.flush()
        await call.say({"status": "flushed", "freed_tokens": freed})


class _Families(Collector):
    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def collect(self) -> Iterable[Metric]:
        """At this moment."""
        return self._operations.metrics()


class Rate:
    """How fast a counter has grown lately."""

    def __init__(self) -> None:
        self._at, self._count, self._last = time.monotonic(), 0, 0.0

    def of(self, count: int) -> float:
        """Per second since the last question, or as then if that was less than a second ago."""
        now = time.monotonic()
        if now - self._at >= 1.0:
            self._last = (count - self._count) / (now - self._at)
            self._at, self._count = now, count
        return self._last
