from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Stage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_UNSPECIFIED: _ClassVar[Stage]
    STAGE_PREFILL: _ClassVar[Stage]
    STAGE_DECODE: _ClassVar[Stage]
STAGE_UNSPECIFIED: Stage
STAGE_PREFILL: Stage
STAGE_DECODE: Stage

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("stage", "model_digest", "scheme", "context_length", "queued", "running", "passes", "streamed_bytes", "prompt_tokens", "generated_tokens", "draft_tokens", "accepted_tokens", "resident_layers", "layers", "budget_bytes", "peak_rss_bytes", "kv_blocks_used", "kv_blocks", "batched_requests", "queued_tokens", "cached_tokens", "kv_blocks_cached", "preemptions", "draining")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    STREAMED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BATCHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    stage: Stage
    model_digest: str
    scheme: str
    context_length: int
    queued: int
    running: int
    passes: int
    streamed_bytes: int
    prompt_tokens: int
    generated_tokens: int
    draft_tokens: int
    accepted_tokens: int
    resident_layers: int
    layers: int
    budget_bytes: int
    peak_rss_bytes: int
    kv_blocks_used: int
    kv_blocks: int
    batched_requests: int
    queued_tokens: int
    cached_tokens: int
    kv_blocks_cached: int
    preemptions: int
    draining: bool
    def __init__(self, stage: _Optional[_Union[Stage, str]] = ..., model_digest: _Optional[str] = ..., scheme: _Optional[str] = ..., context_length: _Optional[int] = ..., queued: _Optional[int] = ..., running: _Optional[int] = ..., passes: _Optional[int] = ..., streamed_bytes: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., resident_layers: _Optional[int] = ..., layers: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., peak_rss_bytes: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., batched_requests: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., kv_blocks_cached: _Optional[int] = ..., preemptions: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...
