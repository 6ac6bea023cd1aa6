"""A pretend GPU: the CPU's numbers behind tensors that say they are on cuda:0.

    with pretend_gpu() as gpu:
        model.to("cuda")                 # parameters and buffers become pretend tensors
        Learner(model, ...).update(...)
    gpu.waits                            # where the host waited for the device

A call that meets pretend and plain tensors raises, as a call with tensors of two devices does. What
it cannot show: kernels that exist on a GPU only, the numerics of a GPU, and speed.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing

from gspo_env.engines.embedded import graphs
from support import flash_reference

CUDA = torch.device("cuda:0")
FREE_MEMORY = (20 * 2**30, 24 * 2**30)

_WAITS = (
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "unique", "_unique2"),
    "repeat_interleave.Tensor",
)
"""Names of the operators whose kernels on a GPU wait for the device."""
_OWN = Path(__file__).parents[2]


@dataclass
class Device:
    """What happened on the pretend device since it was last cleared."""

    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(operator, place) of each call in which the host waits for the device."""
    uploads: Counter[str] = field(default_factory=Counter)
    """Place of each copy from pinned memory, which does not wait."""
    kernels: Counter[str] = field(default_factory=Counter)
    replays: list[int] = field(default_factory=list)
    """How often each CUDA graph ran."""

    def clear(self) -> None:
        """Forgets everything."""
        for each in (self.waits, self.uploads, self.kernels, self.replays):
            each.clear()

    def capture(self, compute: Callable[[], torch.Tensor], pool: Any) -> Any:
        """Stands in for a CUDA graph: computes anew whenever it runs."""
        self.replays.append(0)
        graph = len(self.replays) - 1

        def replay() -> torch.Tensor:
            self.replays[graph] += 1
            return compute()

        return replay, pool


class PretendTensor(torch.Tensor):
    """A CPU tensor for C++, a tensor on cuda:0 for Python."""

    gpu = Device()
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device="cpu",
            requires_grad=False,
        )

    def __init__(self, inner):
        self.inner = inner

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __repr__(self, *args, **kwargs):
        return f"PretendTensor({self.inner})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        special = _special(func, args, kwargs)
        if special is not None:
            return special()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name, device = _NAMES.get(func) or _name(func), kwargs.get("device")
        plain: list[torch.Tensor] = []
        inner_args = _unwrapped(args, plain)
        inner_kwargs = {key: _unwrapped(value, plain) for key, value in kwargs.items()}
        if plain and name.startswith("copy_"):
            _waits(name)
        elif plain and name.startswith(("index.", "index_put")):
            _waits(f"{name} with an index of the CPU")
        elif plain:
            shapes = [tuple(t.shape) for t in plain]
            raise RuntimeError(
                f"{name}: expected all tensors to be on one device, but found cuda:0 and cpu: "
                f"plain tensors of shapes {shapes}"
            )
        cls.gpu.kernels[name] += 1
        if name.startswith(_WAITS) or _by_mask(name, args):
            _waits(name)
        if device is not None:  # C++ means the device of its tensors by "cpu"
            inner_kwargs["device"] = torch.device("cpu")
        if name.startswith("histc"):  # of integers on a GPU only
            counts = func(args[0].inner.double(), *inner_args[1:], **inner_kwargs)
            return PretendTensor(counts.to(args[0].dtype))
        out = func(*inner_args, **inner_kwargs)
        if func._schema.is_mutable and args and out is inner_args[0]:
            if torch.Tag.inplace_view in func.tags:
                return_and_correct_aliasing(func, args, kwargs, args[0])  # the new shape
            return args[0]
        # a view in inference mode is an inference tensor only if its base is one
        view = any(r.alias_info is not None for r in func._schema.returns) and args
        with torch.inference_mode(args[0].is_inference()) if view else nullcontext():
            return _wrapped(out)


_NAMES: dict[Any, str] = {}


def _name(func: Any) -> str:
    return _NAMES.setdefault(func, str(func).removeprefix("aten."))


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, PretendTensor)


def _unwrapped(value: Any, plain: list[torch.Tensor]) -> Any:
    """The value with the CPU tensors behind pretend ones; lists plain tensors but scalars."""
    if isinstance(value, PretendTensor):
        return value.inner
    if isinstance(value, torch.Tensor):
        if value.dim():
            plain.append(value)
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_unwrapped(each, plain) for each in value)
    return value


def _wrapped(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_wrapped, value))
    return PretendTensor(value) if _is_plain(value) else value


def _by_mask(name: str, args: Any) -> bool:
    """Whether a call indexes by a mask, whose true entries have to be counted."""
    if not name.startswith(("index.", "index_put")):
        return False
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _waits(name: str) -> None:
    PretendTensor.gpu.waits[name, _place()] += 1


def _place() -> str:
    """The innermost line of this project, and what it called, if that is neither it nor torch."""
    frame, foreign = sys._getframe(1), ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        packaged = "site-packages" in path.parts  # also of an environment in this folder
        if path != Path(__file__) and path.is_relative_to(_OWN) and not packaged:
            line = f"{path.relative_to(_OWN)}:{frame.f_lineno} {frame.f_code.co_name}"
            return f"{line} <- {foreign}" if foreign else line
        if not foreign and "torch" not in path.parts and "site-packages" in path.parts:
            start = path.parts.index("site-packages") + 1
            foreign = f"{'/'.join(path.parts[start:])}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return foreign or "?"


def _names_cuda(device: Any) -> bool:
    if device is None:
        return False
    return torch.device(f"cuda:{device}" if isinstance(device, int) else device).type == "cuda"


class _Mode(TorchFunctionMode):
    """Calls that name cuda make pretend tensors; `cpu()`, `tolist()` and `item()` lead back."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        special = _special(func, args, kwargs)
        if special is not None:
            return special()
        if func is torch.Tensor.pin_memory:
            pinned = args[0].clone()
            pinned.is_pinned_here = True
            return pinned
        if _names_cuda(kwargs.get("device")):
            if func in (torch.tensor, torch.as_tensor):
                _waits(func.__name__)
            kwargs["device"] = "cpu"
            kwargs = {key: _unwrapped(value, []) for key, value in kwargs.items()}
            return _wrapped(func(*_unwrapped(args, []), **kwargs))
        return func(*args, **kwargs)


def _special(func: Any, args: Any, kwargs: Any) -> Any:
    """What a call does that leads to the device or away from it; None for any other call."""
    if func in (torch.Tensor.to, torch.Tensor.cuda):
        target = _target(func, args, kwargs)
        if _names_cuda(target):
            return lambda: _uploaded(args, kwargs)
        if target is not None and isinstance(args[0], PretendTensor):
            return lambda: _Download.apply(args[0]).to(*args[1:], **kwargs)
    if func in _LEAVE and isinstance(args[0], PretendTensor):
        return lambda: _LEAVE[func](*args)
    return None


def _target(func: Any, args: Any, kwargs: Any) -> Any:
    """The device that a call of `to` or `cuda` names."""
    named = [getattr(a, "device", a) for a in args[1:] if not isinstance(a, (bool, torch.dtype))]
    given = kwargs.get("device") or (named[0] if named else None)
    return "cuda" if func is torch.Tensor.cuda and given is None else given


def _uploaded(args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    named = [a if isinstance(a, torch.dtype) else getattr(a, "dtype", None) for a in args[1:]]
    dtype = kwargs.get("dtype") or next((d for d in named if d is not None), None)
    waits = not kwargs.get("non_blocking") or not getattr(tensor, "is_pinned_here", False)
    if isinstance(tensor, PretendTensor):
        return tensor if dtype is None else torch.Tensor.to(tensor, dtype)
    if waits:
        _waits("upload from memory that is not pinned")
    else:
        PretendTensor.gpu.uploads[_place()] += 1
    return _Upload.apply(tensor if dtype is None else tensor.to(dtype))


class _Upload(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return PretendTensor(tensor.detach().clone())

    @staticmethod
    def backward(ctx, gradient):
        return gradient.inner


class _Download(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        _waits("download")
        return tensor.inner.detach().clone()

    @staticmethod
    def backward(ctx, gradient):
        return PretendTensor(gradient)


def _list(tensor: PretendTensor) -> Any:
    _waits("tolist")
    return tensor.inner.tolist()


def _refused(tensor: PretendTensor, *_: Any) -> Any:
    raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")


def _replace_data(tensor: PretendTensor, value: Any) -> None:
    if not isinstance(value, PretendTensor):
        raise RuntimeError("data of a tensor on cuda:0 was set to a tensor on the CPU")
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(tensor, value)
    tensor.inner = value.inner


_LEAVE: dict[Any, Any] = {
    torch.Tensor.cpu: _Download.apply,
    torch.Tensor.tolist: _list,
    torch.Tensor.numpy: _refused,
    torch.Tensor.__array__: _refused,
    torch.Tensor.untyped_storage: lambda t: t.inner.untyped_storage(),
    torch.Tensor.data_ptr: lambda t: t.inner.data_ptr(),
    torch.Tensor.data.__set__: _replace_data,
}


def move(model: torch.nn.Module) -> torch.nn.Module:
    """Makes parameters and buffers pretend tensors, in place; tied ones stay tied."""
    moved: dict[torch.Tensor, PretendTensor] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if not _is_plain(tensor):
                    continue
                if tensor not in moved:
                    moved[tensor] = PretendTensor(tensor.data)
                    if isinstance(tensor, torch.nn.Parameter):
                        moved[tensor] = torch.nn.Parameter(moved[tensor], tensor.requires_grad)
                own[name] = moved[tensor]
    return model


def _moved(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    target = kwargs.pop("device", None)
    named = [a for a in args if isinstance(a, (str, int, torch.device))]
    if not _names_cuda(target or (named[0] if named else None)):
        return _MODULE_TO(self, *args, **({"device": target} if target else {}), **kwargs)
    rest = [a for a in args if a not in named]
    move(self)
    return _MODULE_TO(self, *rest, **kwargs) if rest or kwargs.get("dtype") else self


_MODULE_TO = torch.nn.Module.to


def _by_device_and_dtype(lists: Any, *args: Any, **kwargs: Any) -> Any:
    groups = _GROUPS(lists, *args, **kwargs)
    return {(lists[0][0].device, dtype): group for (_, dtype), group in groups.items()}


_GROUPS = torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype


def _backward(*args: Any, **kwargs: Any) -> Any:
    """Runs the backward pass; the mode is off inside `Tensor.backward`, recomputation needs it."""
    with _Mode():
        return _ENGINE(*args, **kwargs)


_ENGINE = torch.autograd._engine_run_backward


@contextmanager
def pretend_gpu() -> Iterator[Device]:
    """A context in which cuda:0 is there; yields what happens on it."""
    flash_reference.register()
    gpu = PretendTensor.gpu = Device()
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.nn.Module, "to", _moved),
            (torch.autograd, "_engine_run_backward", _backward),
            (torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype", _by_device_and_dtype),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: 1),
            # a CUDA build has the optimiser ask the driver whether a graph is being captured
            (torch.accelerator, "current_accelerator", lambda *_, **__: None),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "get_device_name", lambda *_: "Pretend 9000"),
            (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
            (graphs, "captured", gpu.capture),
            (torch.cuda, "mem_get_info", lambda *_: FREE_MEMORY),
            (torch.cuda, "synchronize", lambda *_: None),
            (torch.cuda, "reset_peak_memory_stats", lambda *_: None),
            (torch.cuda, "memory_allocated", lambda *_: 0),
            (torch.cuda, "max_memory_allocated", lambda *_: 0),
            (torch.backends.cuda, "is_flash_attention_available", lambda: True),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(_Mode())
        yield gpu
