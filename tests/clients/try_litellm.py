"""litellm, as a user would call it: `python try_litellm.py URL`; prints one line of JSON."""

import json
import sys
from typing import Any


def main(url: str) -> None:
    import litellm

    litellm.telemetry = False
    asked: dict[str, Any] = {
        "model": "openai/echo", "api_base": url, "api_key": "none", "num_retries": 0,
        "messages": [{"role": "user", "content": "hello 😀 world"}],
    }  # fmt: skip
    whole = litellm.completion(**asked, user="me")
    chunks = list(
        litellm.completion(**asked, stream=True, stream_options={"include_usage": True})
    )
    usage = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    try:
        litellm.completion(**asked, temperature=3)
        error = ""
    except litellm.BadRequestError as refused:
        error = str(refused)
    text = litellm.text_completion(
        model="text-completion-openai/echo", prompt="abc", api_base=url, api_key="none"
    )
    told = {
        "whole": whole.choices[0].message.content,
        "tokens": whole.usage.completion_tokens,
        "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
        "reason": [c.choices[0].finish_reason for c in chunks if c.choices][-1],
        "usage": [one.completion_tokens for one in usage],
        "error": error,
        "text": text.choices[0].text,
    }
    sys.stdout.write(json.dumps(told) + "\n")


main(sys.argv[1])
