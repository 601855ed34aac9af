"""Side by side with other engines: the same file and prompts, alternating, on this machine.

spec-serve with speculation off and auto, llama.cpp, transformers, OpenVINO GenAI and vLLM's CPU
build, each in a Python of its own (`--install NAME` makes one); what is not there is left out. The
README's table is made from the JSON files that this bench writes.
"""


def main(argv: list[str]) -> int:
    """Command line of the bench."""
    from spec_serve.bench.peers.command import main as run

    return run(argv)
