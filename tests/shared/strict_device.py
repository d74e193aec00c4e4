"""A device that is none: its tensors lie in host memory, compute there, and refuse to be mixed with the CPU's.

Torch believes in it, as it does in a device that an extension brings, so what runs on it is the code that would run on
a GPU: all of an operation's tensors must lie on the device, results stay there, and only a copy leads in or out. Values
are real and can be compared. It says nothing of CUDA's kernels, memory, streams or speed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

NAME = "strict"
aten = torch.ops.aten
COPIES = (aten.copy_.default, aten._to_copy.default)
"""The only operations between the device and the host."""


class MixedDevicesError(RuntimeError):
    """An operation on tensors of the device and of the host: on a GPU it would fail."""


class StrictTensor(torch.Tensor):
    """A tensor of the device."""

    held: Tensor
    """The same in host memory."""

    @staticmethod
    def __new__(cls, held: Tensor) -> StrictTensor:
        with torch.inference_mode(False):  # so that views of tensors that were made outside can be made inside
            made: StrictTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=f"{NAME}:0",
            )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function not in COPIES:
            _require_one_device(function, args, kwargs)
        to_host = "device" in kwargs and kwargs["device"] is not None and torch.device(kwargs["device"]).type == "cpu"
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        host_args, host_kwargs = pytree.tree_map_only(StrictTensor, lambda tensor: tensor.held, (args, kwargs))
        result = function(*host_args, **host_kwargs)
        for index, argument in enumerate(function._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:  # it returns what it has written
                return args[index] if index < len(args) else kwargs[argument.name]
        return result if to_host else pytree.tree_map_only(Tensor, StrictTensor, result)


def _require_one_device(function: Any, args: Any, kwargs: Any) -> None:
    """As CUDA has it: numbers may lie anywhere, and so may the indices of a look-up."""
    if function is aten.index.Tensor:
        args = args[:1]
    tensors = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
    if any(not isinstance(tensor, StrictTensor) and tensor.dim() for tensor in tensors):
        places = ", ".join(f"{tensor.device} {tuple(tensor.shape)}" for tensor in tensors)
        raise MixedDevicesError(f"{function} on {places}")


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """The device exists for those who name it: nobody else is to find an accelerator."""

    def is_available(self) -> bool:
        return False

    def has_primary_context(self, dev_id: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


@cache
def strict_device() -> torch.device:
    """The device, made known to torch once in a process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, hook=_Hooks())
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "PrivateUse1")
    _libraries.append(library)
    return torch.device(NAME, 0)


_libraries: list[torch.library.Library] = []
"""Kept, because its kernels are forgotten with it."""


def _empty(size: Any, dtype: Any = None, **_: Any) -> Tensor:
    return StrictTensor(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
    return StrictTensor(torch.empty_strided(size, stride, dtype=dtype))


def _arange(start: Any, end: Any, step: Any = 1, dtype: Any = None, **_: Any) -> Tensor:
    return StrictTensor(torch.arange(start, end, step, dtype=dtype))


def _arange_to(end: Any, dtype: Any = None, **_: Any) -> Tensor:
    return StrictTensor(torch.arange(end, dtype=dtype))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    into = target.held if isinstance(target, StrictTensor) else target
    into.copy_(source.held if isinstance(source, StrictTensor) else source)
    return target


_KERNELS = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "arange": _arange_to,
    "arange.start": _arange,
    "arange.start_step": _arange,
    "_copy_from": _copy_from,
}
"""How tensors come to be on the device; the last is torch's own copy of indices that are written out as a list."""
