from headrace.v1 import kv_cache_pb2 as _kv_cache_pb2
from headrace.v1 import logprobs_pb2 as _logprobs_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("token_ids", "model_digest", "kv_layout", "request_id", "held_tokens", "priority", "cache_salt")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    model_digest: str
    kv_layout: _kv_cache_pb2.KvLayout
    request_id: str
    held_tokens: int
    priority: int
    cache_salt: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., model_digest: _Optional[str] = ..., kv_layout: _Optional[_Union[_kv_cache_pb2.KvLayout, _Mapping]] = ..., request_id: _Optional[str] = ..., held_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("header", "frame", "result")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    header: PrefillHeader
    frame: _kv_cache_pb2.KvFrame
    result: PrefillResult
    def __init__(self, header: _Optional[_Union[PrefillHeader, _Mapping]] = ..., frame: _Optional[_Union[_kv_cache_pb2.KvFrame, _Mapping]] = ..., result: _Optional[_Union[PrefillResult, _Mapping]] = ...) -> None: ...

class PrefillHeader(_message.Message):
    __slots__ = ("request_id", "model_digest", "kv_layout", "prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model_digest: str
    kv_layout: _kv_cache_pb2.KvLayout
    prompt_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., model_digest: _Optional[str] = ..., kv_layout: _Optional[_Union[_kv_cache_pb2.KvLayout, _Mapping]] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class PrefillResult(_message.Message):
    __slots__ = ("last_hidden", "frame_count", "queue_ms", "compute_ms", "batch_prompts", "batch_tokens", "cached_tokens")
    LAST_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    FRAME_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    BATCH_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    last_hidden: bytes
    frame_count: int
    queue_ms: float
    compute_ms: float
    batch_prompts: int
    batch_tokens: int
    cached_tokens: int
    def __init__(self, last_hidden: _Optional[bytes] = ..., frame_count: _Optional[int] = ..., queue_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., batch_prompts: _Optional[int] = ..., batch_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("token_ids", "top_logprobs", "request_id", "priority", "model_digest")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: int
    request_id: str
    priority: int
    model_digest: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[int] = ..., request_id: _Optional[str] = ..., priority: _Optional[int] = ..., model_digest: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("header", "chunk", "result")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    header: _logprobs_pb2.ScoreHeader
    chunk: _logprobs_pb2.ScoreChunk
    result: _logprobs_pb2.ScoreResult
    def __init__(self, header: _Optional[_Union[_logprobs_pb2.ScoreHeader, _Mapping]] = ..., chunk: _Optional[_Union[_logprobs_pb2.ScoreChunk, _Mapping]] = ..., result: _Optional[_Union[_logprobs_pb2.ScoreResult, _Mapping]] = ...) -> None: ...
