"""Our backend inside ExecuTorch's runtime: `register()` once, then every program with our delegates loads and runs.

The C++ half is `shim.cpp`; it calls the three functions at the end of this file. They turn ExecuTorch's values into
numpy arrays and drive a `backend.runtime.delegate.Delegate` for each delegated subgraph. Delegates of one loaded
program share one `StateStore`; two loads of the same file never do.

When a call of ExecuTorch fails because a delegate raised, ExecuTorch itself reports an error number only:
`take_error()` gives the exception, with its message and traceback. `zoo.program` raises it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from backend.graph import BACKEND_ID, BlobError
from backend.native.build import BuildError, ensure_built
from backend.runtime.program import SCALAR_TYPES

__all__ = ["BuildError", "captured_log", "ensure_built", "register", "set_delegate_factory", "take_error"]

_CODES = {dtype: code for code, dtype in SCALAR_TYPES.items()}


class DelegateLike(Protocol):
    """What the shim drives; `backend.runtime.delegate.Delegate` is the real one.

    `len(graph.inputs)` is its number of inputs. Arrays given to `execute` are read-only views of ExecuTorch's memory,
    valid during the call only.
    """

    @property
    def graph(self) -> Any: ...
    def execute(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]: ...
    def close(self) -> None: ...


GetData = Callable[[str], memoryview]
DelegateFactory = Callable[[memoryview, GetData, Any], DelegateLike]


def _default_delegate(blob: memoryview, get_data: GetData, states: Any) -> DelegateLike:
    from backend.runtime.delegate import Delegate

    delegate: DelegateLike = Delegate(blob, get_data, states)
    return delegate


def _default_states() -> Any:
    from backend.runtime.state import StateStore

    return StateStore()


@dataclass
class _Shared:
    """State of one loaded program and how many delegates hold it."""

    states: Any
    holders: int = 0


@dataclass
class _NamedData:
    """The `get_data` of one delegate. `address` of the program's data also names the program; None once destroyed."""

    address: int | None

    def __call__(self, key: str) -> memoryview:
        """The bytes under `key`, mapped, not copied. Raises `BlobError` when the program has none."""
        library = _registry.library
        if not self.address or library is None:
            raise BlobError(f"the program holds no data named {key!r}")
        name = key.encode()
        address, size = ctypes.c_void_p(), ctypes.c_size_t()
        owner = library.zoo_get_data(self.address, name, len(name), ctypes.byref(address), ctypes.byref(size))
        if owner is None:
            raise BlobError(f"the program holds no data named {key!r} (ExecuTorch error 0x{size.value:x})")
        return _owned_view(owner, address.value, size.value)


@dataclass
class _Live:
    """A delegate that ExecuTorch holds a handle of."""

    delegate: DelegateLike
    data: _NamedData


@dataclass
class _Registry:
    lock: threading.RLock = field(default_factory=threading.RLock)
    library: ctypes.CDLL | None = None
    with_gil: ctypes.PyDLL | None = None
    new_delegate: DelegateFactory = _default_delegate
    new_states: Callable[[], Any] = _default_states
    programs: dict[int, _Shared] = field(default_factory=dict)
    keep: tuple[Any, ...] = ()


_registry = _Registry()


def register() -> None:
    """Builds and loads the shim and registers it with ExecuTorch; later calls do nothing. Raises `BuildError`."""
    with _registry.lock:
        if _registry.library is not None:
            return
        path = str(ensure_built())
        try:
            library, with_gil = ctypes.CDLL(path), ctypes.PyDLL(path)
        except OSError as error:
            raise BuildError(f"the native shim does not load: {error}") from error
        library.zoo_get_data.restype = ctypes.c_void_p
        library.zoo_get_data.argtypes = [
            *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t),
            *(ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)),
        ]
        library.zoo_free_buffer.argtypes = [ctypes.c_void_p]
        with_gil.zoo_take_error.restype = with_gil.zoo_log_end.restype = ctypes.py_object
        with_gil.zoo_install.argtypes = [ctypes.c_char_p, *[ctypes.py_object] * 4]
        backend_id = BACKEND_ID.encode()  # ExecuTorch keeps the pointer
        code = with_gil.zoo_install(backend_id, _on_init, _on_execute, _on_destroy, BlobError)
        if code != 0:
            raise BuildError(f"ExecuTorch refuses to register {BACKEND_ID}: error 0x{code:x}")
        atexit.register(library.zoo_shutdown)
        _registry.library, _registry.with_gil, _registry.keep = library, with_gil, (backend_id,)


def take_error() -> BaseException | None:
    """The exception behind the last failure of a delegate on this thread, or None; asking forgets it."""
    if _registry.with_gil is None:
        return None
    error: BaseException | None = _registry.with_gil.zoo_take_error()
    return error


@contextlib.contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collects ExecuTorch's error messages of this thread instead of printing them; the list is filled on exit.

    Before `register()` there is nothing to collect them with: they are printed.
    """
    lines: list[str] = []
    library = _registry.with_gil
    if library is None:
        yield lines
        return
    library.zoo_log_begin()
    try:
        yield lines
    finally:
        lines += library.zoo_log_end().decode(errors="replace").splitlines()


def set_delegate_factory(
    delegate: DelegateFactory = _default_delegate, states: Callable[[], Any] = _default_states
) -> None:
    """Replaces what is made for each delegated subgraph and for each loaded program; without arguments, resets."""
    with _registry.lock:
        _registry.new_delegate, _registry.new_states = delegate, states


# --- called from shim.cpp; what these raise reaches the caller through take_error() ---------------------------------


def _on_init(
    named_data: int | None, method: str, owner: int, address: int | None, size: int, specs: tuple[Any, ...]
) -> tuple[_Live, int]:
    """A delegate for `method`, and how many of a call's values are its inputs.

    `named_data` (null as None) tells loaded programs apart; a program without named data has none to share under, so
    each of its delegates gets its own states. Compile specs, (key, bytes) each, only concern the ahead-of-time half.
    """
    blob = _owned_view(owner, address, size)
    data = _NamedData(named_data)
    states = _acquire(named_data)
    try:
        delegate = _registry.new_delegate(blob, data, states)
        return _Live(delegate, data), len(delegate.graph.inputs)
    except BaseException:
        data.address = None
        _release(named_data)
        raise


def _on_execute(live: _Live, values: tuple[Any, ...]) -> tuple[tuple[int, int, int, tuple[int, ...], np.ndarray], ...]:
    """Runs a delegate. `values`: (scalar type, sizes, memory) or a number each; returns what shim.cpp copies out."""
    outputs = []
    for array in live.delegate.execute([_to_array(value) for value in values]):
        # Not ascontiguousarray: it would make a scalar one-dimensional.
        whole = np.asarray(array, order="C")
        code = _CODES.get(whole.dtype)
        if code is None:
            raise TypeError(f"the delegate returned {whole.dtype}, which ExecuTorch has no type for")
        outputs.append((whole.ctypes.data, whole.nbytes, code, whole.shape, whole))
    return tuple(outputs)


def _on_destroy(live: _Live) -> None:
    """Frees a delegate, and its program's states with the program's last one. Safe to call again."""
    with _registry.lock:
        program, live.data.address = live.data.address, None
        _release(program)
    live.delegate.close()


def _acquire(program: int | None) -> Any:
    with _registry.lock:
        if not program:
            return _registry.new_states()
        shared = _registry.programs.get(program)
        if shared is None:
            shared = _registry.programs[program] = _Shared(_registry.new_states())
        shared.holders += 1
        return shared.states


def _release(program: int | None) -> None:
    """Drops the states with their last holder: a later load may get the same address and must not see them."""
    with _registry.lock:
        shared = _registry.programs.get(program) if program else None
        if program and shared is not None:
            shared.holders -= 1
            if shared.holders == 0:
                del _registry.programs[program]


def _to_array(value: Any) -> np.ndarray:
    if not isinstance(value, tuple):
        return np.asarray(value)
    code, sizes, memory = value
    dtype = SCALAR_TYPES.get(code)
    if dtype is None:
        raise TypeError(f"numpy has no type for ExecuTorch's scalar type {code}")
    if not memory.nbytes:
        return np.empty(sizes, dtype)
    return np.frombuffer(memory, dtype).reshape(sizes)


def _owned_view(owner: int, address: int | None, size: int) -> memoryview:
    """A read-only view of ExecuTorch's bytes without a copy; they are unmapped when the last view is gone."""
    library = _registry.library
    assert library is not None
    # With size 0 there is no address; any array will do.
    array = (ctypes.c_ubyte * size).from_address(address) if address and size else (ctypes.c_ubyte * 0)()
    # Not at exit: by then other views may still be read.
    weakref.finalize(array, library.zoo_free_buffer, owner).atexit = False
    return memoryview(array).cast("B").toreadonly()
