"""Ray Serve's prefix router in front of spec-serve servers; run by a Python that has `ray[serve]`.

    python try_ray.py URL URL < prompts.json

A replica per server; the prompts are asked one after another through the router. Prints for each
its server, its prompt tokens and how many of them were cached.
"""

import asyncio
import json
import sys
import urllib.request
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

ROUTER = (
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:"
    "PrefixCacheAffinityRouter"
)


@dataclass
class Asked:
    prompt: str  # where the router looks


@ray.remote
class Servers:
    """Hands each replica a server of its own."""

    def __init__(self, urls: list[str]) -> None:
        self.left = list(urls)

    def take(self) -> str:
        return self.left.pop()


@serve.deployment(
    num_replicas=len(sys.argv) - 1,
    ray_actor_options={"num_cpus": 0},
    request_router_config=RequestRouterConfig(request_router_class=ROUTER),
)
class Worker:
    def __init__(self, servers: Any) -> None:
        self.url = ray.get(servers.take.remote())

    async def __call__(self, asked: Asked) -> tuple[str, int, int]:
        body = {"prompt": asked.prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}

        def fetched() -> Any:
            request = urllib.request.Request(
                f"{self.url}/v1/completions",
                json.dumps(body).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)["usage"]

        usage = await asyncio.to_thread(fetched)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return self.url, usage["prompt_tokens"], cached


def main() -> None:
    prompts = json.load(sys.stdin)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options=serve.HTTPOptions(location="NoServer"))
    try:
        servers = Servers.options(num_cpus=0).remote(sys.argv[1:])
        handle = serve.run(Worker.bind(servers))
        print(json.dumps([handle.remote(Asked(prompt)).result() for prompt in prompts]))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
