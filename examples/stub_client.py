"""Streams one answer with the generated API alone, as any gRPC client could be written:

python examples/stub_client.py 127.0.0.1:50051 "What is a headrace?"

`headrace.Client` adds to this: retries, balancing over replicas, checks before a request travels, typed results.
"""

import sys

import grpc

from headrace.v1 import decode_pb2, decode_pb2_grpc

target, question = sys.argv[1:]

request = decode_pb2.GenerateRequest(
    prompt=decode_pb2.Prompt(
        chat=decode_pb2.ChatPrompt(messages=[decode_pb2.ChatMessage(role="user", content=question)])
    ),
    sampling=decode_pb2.Sampling(temperature=0),
    stopping=decode_pb2.Stopping(max_tokens=128),
)

with grpc.insecure_channel(target) as channel:
    stub = decode_pb2_grpc.DecodeServiceStub(channel)
    try:
        for event in stub.Generate(request, timeout=300):
            match event.WhichOneof("event"):  # a header, chunks, and a result
                case "chunk":
                    print(event.chunk.text, end="", flush=True)
                case "result":
                    usage = event.result.usage
                    reason = decode_pb2.FinishReason.Name(event.result.finish_reason)
                    print(f"\n{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated ({reason})")
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")
