"""Streams one answer from running services: python examples/stream.py 127.0.0.1:50051 "What is a headrace?" """

import sys

from headrace import CallError, Client

target, question = sys.argv[1:]

with Client(target, timeout_s=300) as client:
    try:
        with client.generate(messages=[{"role": "user", "content": question}], max_tokens=128) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
    except CallError as error:
        sys.exit(f"{error.status} from {target}: {error}")

print()
if stream.result is not None:
    usage = stream.result.usage
    print(f"{usage.completion_tokens} tokens in {usage.passes} passes; {usage.accepted_tokens} came from the draft")
