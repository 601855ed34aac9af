"""langchain-openai, as an agent would use it: `python try_langchain.py URL`; one JSON line."""

import json
import sys


def main(url: str) -> None:
    from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI

    @tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"rain in {city}"

    model = ChatOpenAI(model="echo", base_url=url, api_key="none", max_retries=0)
    whole = model.invoke("hello 😀 world")
    pieces = list(model.stream("hello 😀 world", stream_usage=True))
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    able = model.bind_tools([weather])
    asked = able.invoke(call)
    streamed: AIMessageChunk | None = None
    for piece in able.stream(call):
        streamed = piece if streamed is None else streamed + piece
    assert streamed is not None
    result = weather.invoke(asked.tool_calls[0])
    assert isinstance(result, ToolMessage)
    after = able.invoke([HumanMessage("and?"), asked, result])
    text = OpenAI(model="echo", base_url=url, api_key="none", max_retries=0).invoke("abc")
    told = {
        "whole": whole.content,
        "tokens": whole.usage_metadata["output_tokens"],
        "streamed": "".join(str(piece.content) for piece in pieces),
        "usage": sum((p.usage_metadata or {}).get("output_tokens", 0) for p in pieces),
        "call": [asked.tool_calls[0]["name"], asked.tool_calls[0]["args"]],
        "streamed_call": [streamed.tool_calls[0]["name"], streamed.tool_calls[0]["args"]],
        "after": after.content,
        "text": text,
    }
    sys.stdout.write(json.dumps(told) + "\n")


main(sys.argv[1])
