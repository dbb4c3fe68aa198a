"""Triton's interpreter without the work that it does over and over.

It makes triton.language interpretable at every launch, and again at every call of a function from a kernel, where it
finds everything done already: half of the time that small kernels take. Here such a call is looked up instead. So are
the types of NumPy and of blocks, and what a tensor says of its shape, which it would make anew for every operation.
"""

import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

DONE: set[int] = set()
"""Modules that are interpretable now."""
_patch = interpreter._patch_lang
_modules: dict[int, set[int]] = {}
_numpy_type, _numpy = interpreter._get_np_dtype, {}
_block, _blocks = tl.block_type.__init__, {}
_tensor, _tensors = tl.tensor.__init__, {}


class Scope:
    """What a launch undoes at its end."""

    def __init__(self, scope: Any | None) -> None:
        self.scope = scope

    def restore(self) -> None:
        if self.scope is not None:
            self.scope.restore()
            DONE.clear()


def quick(function: Any) -> Scope:
    """Make what a function sees interpretable, where it is not."""
    given = function.__globals__
    if id(given) not in _modules:
        _modules[id(given)] = {id(x) for x in given.values() if inspect.ismodule(x) and x in (tl, tl.core)}
    wanted = _modules[id(given)]
    if wanted <= DONE:
        return Scope(None)
    scope = _patch(function)
    DONE.update(wanted)
    return Scope(scope)


def numpy_type(kind: Any) -> Any:
    item = kind.element_ty if isinstance(kind, tl.block_type) else kind
    if (found := _numpy.get(item.name)) is None:
        found = _numpy[item.name] = _numpy_type(kind)
    return found


def block(self: tl.block_type, element_ty: Any, shape: Any) -> None:
    sizes = tuple([getattr(size, "value", size) for size in shape])
    if (known := _blocks.get((element_ty.name, sizes))) is None:
        _block(self, element_ty, shape)
        _blocks[element_ty.name, sizes] = vars(self).copy()
    else:
        vars(self).update(known)


def tensor(self: tl.tensor, handle: Any, type: Any) -> None:
    if (known := _tensors.get(type.name)) is None:
        _tensor(self, handle, type)
        _tensors[type.name] = self.shape, self.numel, self.dtype
    else:
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = known


def install() -> None:
    interpreter._patch_lang = quick
    interpreter._get_np_dtype = numpy_type
    tl.block_type.__init__ = block
    tl.tensor.__init__ = tensor
