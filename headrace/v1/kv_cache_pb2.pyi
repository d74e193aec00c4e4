from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_DTYPE_UNSPECIFIED: _ClassVar[KvDtype]
    KV_DTYPE_BF16: _ClassVar[KvDtype]
    KV_DTYPE_FP32: _ClassVar[KvDtype]

class KvOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_ORDER_UNSPECIFIED: _ClassVar[KvOrder]
    KV_ORDER_TOKEN_HEAD_DIM: _ClassVar[KvOrder]
KV_DTYPE_UNSPECIFIED: KvDtype
KV_DTYPE_BF16: KvDtype
KV_DTYPE_FP32: KvDtype
KV_ORDER_UNSPECIFIED: KvOrder
KV_ORDER_TOKEN_HEAD_DIM: KvOrder

class KvLayout(_message.Message):
    __slots__ = ("dtype", "order", "layers", "kv_heads", "head_dim")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    dtype: KvDtype
    order: KvOrder
    layers: int
    kv_heads: int
    head_dim: int
    def __init__(self, dtype: _Optional[_Union[KvDtype, str]] = ..., order: _Optional[_Union[KvOrder, str]] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ...) -> None: ...

class KvFrame(_message.Message):
    __slots__ = ("sequence_number", "layer", "first_token", "token_count", "keys", "values", "crc32")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    layer: int
    first_token: int
    token_count: int
    keys: bytes
    values: bytes
    crc32: int
    def __init__(self, sequence_number: _Optional[int] = ..., layer: _Optional[int] = ..., first_token: _Optional[int] = ..., token_count: _Optional[int] = ..., keys: _Optional[bytes] = ..., values: _Optional[bytes] = ..., crc32: _Optional[int] = ...) -> None: ...
