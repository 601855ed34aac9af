"""vLLM's gRPC interface, `vllm.grpc.engine.VllmEngine`: gateways that speak it route to us.

Needs the package smg-grpc-proto (extra "gateway"). What the interface has and we have not is
UNIMPLEMENTED with the reason. Knows calls; what requests mean stands in vllm_convert.py and behind
the service.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
import zipfile
from dataclasses import asdict
from typing import Any, NoReturn, Protocol, runtime_checkable

import grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from spec_serve.api import messages as m
from spec_serve.api.convert import GREEDY, Prepared
from spec_serve.api.grpc_call import Calls, Said, abort, bad, generate
from spec_serve.api.grpc_guard import caller
from spec_serve.api.kv_feed import Feed
from spec_serve.api.ops import Rate
from spec_serve.api.service import Service, shown_name
from spec_serve.api.version import __version__
from spec_serve.api.vllm_convert import Answers, renamed
from spec_serve.api.vllm_convert import generate as to_generate
from spec_serve.api.vllm_events import messages
from spec_serve.spec.request import RequestError

SERVICE = vllm.DESCRIPTOR.services_by_name["VllmEngine"]
CHUNK = 1 << 20  # bytes of a tokenizer's archive in one message
ZIP_TIME = (1980, 1, 1, 0, 0, 0)  # the same files make the same bytes


@runtime_checkable
class HasFiles(Protocol):
    """A tokenizer that can be handed out; target/tokenizer.py's can."""

    def files(self) -> dict[str, bytes]: ...


class VllmEngine(vllm_grpc.VllmEngineServicer):  # type: ignore[misc]
    """The methods of vLLM's proto, for one service."""

    def __init__(self, service: Service, calls: Calls, feed: Feed | None = None) -> None:
        self._service, self._calls, self._feed = service, calls, feed
        self._rate = Rate()
        self._last = 0.0
        self._archive: bytes | None = None

    async def Generate(self, request: vllm.GenerateRequest, context: Any) -> None:
        """Stream one generation; a whole response for each choice is its last."""
        service = self._service
        self._last = time.time()
        kind = request.sampling_params.WhichOneof("constraint")

        def rename(error: m.Error) -> m.Error:
            return renamed(error, kind)

        try:
            wire = to_generate(request)
        except m.BadMessage as error:
            await abort(context, rename(bad(error)))
        eos = frozenset(service.tokenizer.eos_ids)
        answers = Answers(request.stream, eos, wire.sampling.n)
        write = context.write

        def known(prepared: Prepared) -> None:
            answers.prompt = prepared.request.prompt

        async def say(message: Said) -> None:
            for response in answers.of(message):
                await write(response)

        identity = request.request_id
        await generate(service, self._calls, context, wire, identity, say, rename, known)

    async def Abort(self, request: vllm.AbortRequest, context: Any) -> vllm.AbortResponse:
        """Cancel by id what this key has started; a request may just have ended by itself."""
        self._service.abort(request.request_ids, caller.get())
        return vllm.AbortResponse()

    async def HealthCheck(
        self, request: vllm.HealthCheckRequest, context: Any
    ) -> vllm.HealthCheckResponse:
        """Whether new requests are taken."""
        service = self._service
        said = "ready" if service.ready else "draining" if service.draining else "not ready"
        return vllm.HealthCheckResponse(healthy=service.ready, message=said)

    async def FlushCache(
        self, request: common.FlushCacheRequest, context: Any
    ) -> common.FlushCacheResponse:
        """Drop what no running request stands on; what runs goes on."""
        try:
            freed = await self._service.link.flush()
        except RequestError as error:
            return common.FlushCacheResponse(success=False, message=str(error))
        return common.FlushCacheResponse(success=True, message=f"{freed} tokens dropped")

    async def GetModelInfo(
        self, request: vllm.GetModelInfoRequest, context: Any
    ) -> vllm.GetModelInfoResponse:
        """What is served, without saying where its files lie."""
        service = self._service
        info, tokenizer = service.link.info, service.tokenizer
        usual, said = asdict(GREEDY), asdict(service.defaults)
        defaults = {name: value for name, value in said.items() if value != usual[name]}
        eos = sorted(tokenizer.eos_ids)
        bos = getattr(tokenizer, "bos_id", None)
        return vllm.GetModelInfoResponse(
            model_path=shown_name(info.model),
            is_generation=True,
            max_context_length=info.max_context,
            vocab_size=info.vocab_size,
            served_model_name=service.model,
            tokenizer_path=shown_name(info.model),
            eos_token_ids=eos,
            pad_token_id=eos[0] if eos else 0,
            bos_token_id=0 if bos is None else bos,
            max_req_input_len=info.max_context - 1,
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )

    async def GetServerInfo(
        self, request: vllm.GetServerInfoRequest, context: Any
    ) -> vllm.GetServerInfoResponse:
        """Of this process."""
        service = self._service
        info, stats = service.link.info, service.link.stats()
        return vllm.GetServerInfoResponse(
            active_requests=stats.running + stats.waiting,
            last_receive_timestamp=self._last,
            uptime_seconds=time.monotonic() - service.started,
            server_type="vllm-grpc",
            data_parallel_size=1,
            kv_cache_dtype=info.dtype,
            block_size=1 if self._feed is None else self._feed.block_tokens,
            model_dtype=info.dtype,
            max_num_seqs=info.max_rows,
        )

    async def GetLoads(
        self, request: vllm.GetLoadsRequest, context: Any
    ) -> vllm.GetLoadsResponse:
        """How busy the engine is; there is one rank, 0."""
        info, stats = self._service.link.info, self._service.link.stats()
        used = stats.kv_used / stats.kv_total if stats.kv_total else 0.0
        hits = stats.prefix_hit_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
        load = vllm.SchedulerLoad(
            num_running_reqs=stats.running,
            num_waiting_reqs=stats.waiting,
            num_total_reqs=stats.running + stats.waiting,
            num_used_tokens=stats.kv_used,
            max_total_num_tokens=stats.kv_total,
            token_usage=used,
            gen_throughput=self._rate.of(stats.tokens_out),
            cache_hit_rate=hits,
            utilization=min(stats.running / max(info.max_rows, 1), 1.0),
            max_running_requests=info.max_rows,
            num_waiting_uncached_tokens=self._service.admission.waiting_tokens,
        )
        return vllm.GetLoadsResponse(
            timestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            version=__version__,
            dp_rank_count=1,
            loads=[] if request.dp_rank else [load],
        )

    async def GetTokenizer(self, request: common.GetTokenizerRequest, context: Any) -> None:
        """The tokenizer's files as a zip archive in pieces; the last carries its sha256."""
        tokenizer = self._service.tokenizer
        if not isinstance(tokenizer, HasFiles):
            await _unimplemented(context, "this tokenizer has no files to hand out")
        if self._archive is None:
            self._archive = await self._service.aside(lambda: archive(tokenizer.files()))
        data = self._archive
        digest = hashlib.sha256(data).hexdigest()
        for at in range(0, len(data), CHUNK):
            last = at + CHUNK >= len(data)
            piece = data[at : at + CHUNK]
            await context.write(common.GetTokenizerChunk(data=piece, sha256=digest if last else ""))

    async def Embed(self, request: vllm.EmbedRequest, context: Any) -> NoReturn:
        """Not served."""
        await _unimplemented(context, "embeddings are not served")

    async def StartProfile(self, request: common.StartProfileRequest, context: Any) -> NoReturn:
        """Not served."""
        await _unimplemented(context, "there is no profiler to be started from outside")

    async def StopProfile(self, request: common.StopProfileRequest, context: Any) -> NoReturn:
        """Not served."""
        await _unimplemented(context, "there is no profiler to be stopped from outside")

    async def SubscribeKvEvents(
        self, request: common.SubscribeKvEventsRequest, context: Any
    ) -> None:
        """What is stored in the prefix cache and what leaves it, the present state first."""
        feed = self._feed
        if feed is None:
            await _unimplemented(context, "cache events are off (setting kv-events)")
        async for batch in feed.subscribe(request.start_sequence_number):
            for message in messages(batch, feed.block_tokens):
                await context.write(message)


def archive(files: dict[str, bytes]) -> bytes:
    """A zip archive; the same for the same files."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in sorted(files.items()):
            made.writestr(zipfile.ZipInfo(name, ZIP_TIME), data, zipfile.ZIP_DEFLATED, 6)
    return out.getvalue()


async def _unimplemented(context: Any, said: str) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, said)
    raise AssertionError("abort raises")


def register(
    service: Service, calls: Calls, server: grpc.aio.Server, feed: Feed | None = None
) -> None:
    """Offer the interface on a server. feed: cache events; None = off."""
    vllm_grpc.add_VllmEngineServicer_to_server(VllmEngine(service, calls, feed), server)
