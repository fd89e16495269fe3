"""From a kernel's Python source to machine code that ctypes can call, kept between runs.

The first run on a machine compiles a file's kernels with Numba and stores the object code. Every later one gives that
object code to llvmlite and calls it by Numba's own convention (status, result pointer, exception pointer, then the
arguments, an array as meminfo, parent, items, item size, data, shape, stride). Whatever fails on the way costs speed
only: then the array form is called.
"""
from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import sys
import types

import numpy as np

from .. import interrupts

# The types of a kernel's parameters, written as its annotations.
U64 = I64 = int
U64s = I64s = I32s = N32s = U8s = np.ndarray

_SCALARS = {"U64": (ctypes.c_uint64, "uint64"), "I64": (ctypes.c_int64, "int64")}
_ARRAYS = {"U64s": np.dtype(np.uint64), "I64s": np.dtype(np.int64), "I32s": np.dtype(np.int32),
           "N32s": np.dtype(np.int32), "U8s": np.dtype(np.uint8)}
_COMPILED = {**_ARRAYS, "N32s": np.dtype(np.uint32)}
_VERSION = "2"


_sources: dict[str, bytes] = {}      # module -> its source, as it was when it was imported


def _remember(function) -> None:
    """Keep the source of a kernel's module: what is compiled is what was imported, whatever the file says by then."""
    if function.__module__ not in _sources:
        with open(sys.modules[function.__module__].__file__, "rb") as stream:
            _sources[function.__module__] = stream.read()


def helper(function):
    """Mark a function that compiled kernels call; it stays a plain function for everybody else."""
    function.is_kernel_helper = True
    _remember(function)
    return function


def kernel(array_form):
    """Make a kernel of the decorated compiled form; `array_form` serves where it cannot be compiled."""
    return lambda function: Kernel(function, array_form)


def in_python(body):
    """The array form of a kernel: the same body over memoryviews, whose items are Python's own integers."""
    def run(*arguments):
        return body(*(argument if not hasattr(argument, "dtype") else memoryview(argument) for argument in arguments))
    run.__doc__ = body.__doc__
    return run


class Kernel:
    """A compiled form and its array form, called as one function.
    `array_form` and `compiled` can be called apart in tests."""

    def __init__(self, function, array_form):
        self.function, self.array_form = function, array_form
        _remember(function)
        self.__doc__, self.__name__ = function.__doc__, function.__name__
        self._call = None

    def __call__(self, *arguments):
        if self._call is None:
            self._call = self.compiled() or self.array_form
        return self._call(*arguments)

    def compiled(self):
        """The compiled form as a callable, or None when there is no compiler and no kept code."""
        if os.environ.get("GDBLEAK_NUMBA") == "0":
            return None
        module = sys.modules[self.function.__module__]
        if "_machine_code" not in vars(module):
            module._machine_code = _machine_code(module)
        entry = module._machine_code.get(self.__name__)
        return entry and _callable(self.function, *entry)


def _kernels(module) -> list[Kernel]:
    return [value for value in vars(module).values()
            if isinstance(value, Kernel) and value.function.__module__ == module.__name__]


def _helper_modules(module) -> set[str]:
    """The modules of the helpers that a module's kernels call, and that those call."""
    found, pending = set(), [module.__name__]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += [value.__module__ for value in vars(sys.modules[name]).values()
                        if getattr(value, "is_kernel_helper", False)]
    return found


def _parameters(function) -> list[str]:
    names = function.__code__.co_varnames[:function.__code__.co_argcount]
    return [function.__annotations__[name] for name in names]


# -- kept code ---------------------------------------------------------------------------------------------------------
def _machine_code(module) -> dict:
    """Kernel name -> (address, result types) of one file's kernels; empty when they cannot be compiled here."""
    try:
        with interrupts.deferred():
            from llvmlite import binding
    except Exception:  # noqa: BLE001  also an llvmlite whose library does not load
        return {}
    try:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        cpu, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
        target = binding.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3,
                                                                            codemodel="jitdefault", jit=True)
        with open(__file__, "rb") as stream:
            source = stream.read() + b"".join(_sources[name] for name in sorted(_helper_modules(module)))
        import llvmlite
        stamp = f"{_VERSION} {llvmlite.__version__} {cpu} {features} {sys.version_info[:2]}"
        digest = hashlib.sha256(source + stamp.encode()).hexdigest()[:24]
        path = os.path.join(_directory(), f"{module.__name__.rpartition('.')[2]}-{digest}.kernels")
        kept = _read(path)
        if kept is None:
            if importlib.util.find_spec("numba") is None:
                return {}
            kept = _compile(module, binding, target)
            _write(path, kept)
        index, code = kept
        return _load(binding, target, index, code)
    except Exception:  # noqa: BLE001  see the module's docstring
        if os.environ.get("GDBLEAK_DEBUG"):
            raise
        return {}


def _directory() -> str:
    from ..environment import cache_directory
    return os.environ.get("NUMBA_CACHE_DIR") or cache_directory()


def _read(path: str):
    """(index, code) of a file that this user, and nobody else, can have written;
    None when there is none that is whole."""
    try:
        with open(path, "rb") as stream:
            owner = os.fstat(stream.fileno())
            if owner.st_uid != os.getuid() or owner.st_mode & 0o022:
                return None
            digest, index, code = stream.readline().strip(), stream.readline(), stream.read()
        if digest.decode() != hashlib.sha256(index + code).hexdigest():
            return None
        return json.loads(index), code
    except (OSError, ValueError):
        return None


def _write(path: str, kept) -> None:
    index, code = json.dumps(kept[0]).encode() + b"\n", kept[1]
    unfinished = f"{path}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
            stream.write(hashlib.sha256(index + code).hexdigest().encode() + b"\n" + index + code)
        os.replace(unfinished, path)
    except OSError:
        pass   # compiled again next time


_engines = []   # machine code lives as long as its engine


def _load(binding, target, index: dict, code: bytes) -> dict:
    binding.add_symbol("NRT_MemInfo_call_dtor", ctypes.cast(_NO_DESTRUCTOR, ctypes.c_void_p).value)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    addresses = {name: engine.get_function_address(symbol) for name, (symbol, _) in index.items()}
    return {name: (addresses[name], results) for name, (_, results) in index.items() if addresses[name]}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _NO_DESTRUCTOR(_info):
    """Nothing is reference counted here; the symbol is only there to be linked."""


# -- compiling ---------------------------------------------------------------------------------------------------------
def _compile(module, binding, target):
    """(index: kernel name -> (symbol, result types), object code) of all kernels of a file."""
    with interrupts.deferred():
        import numba
        from numba.core import compiler, registry

    flags = compiler.Flags()
    flags.nrt, flags.no_cpython_wrapper, flags.no_cfunc_wrapper, flags.error_model = False, True, True, "numpy"
    scopes: dict[str, dict] = {}

    def scope_of(name: str) -> dict:
        """A module's names as compiled code sees them: helpers compiled, those of another module with its names."""
        if name not in scopes:
            known = scopes[name] = dict(vars(sys.modules[name]))
            for key, value in list(known.items()):
                if getattr(value, "is_kernel_helper", False):
                    own = types.FunctionType(value.__code__, scope_of(value.__module__), key)
                    known[key] = numba.njit(_nrt=False, error_model="numpy")(own)
        return scopes[name]

    scope = scope_of(module.__name__)
    form = {**{name: getattr(numba.types, kind) for name, (_, kind) in _SCALARS.items()},
            **{name: numba.types.Array(numba.from_dtype(dtype), 1, "C") for name, dtype in _COMPILED.items()}}
    index, merged = {}, None
    for one in _kernels(module):
        function = types.FunctionType(one.function.__code__, scope, one.__name__)
        result = compiler.compile_extra(registry.cpu_target.typing_context, registry.cpu_target.target_context,
                                        function, tuple(form[name] for name in _parameters(one.function)), None,
                                        flags, {})
        made = result._asdict()
        assembly = binding.parse_assembly(made["library"].get_llvm_str())
        if merged is None:
            merged = assembly
        else:
            merged.link_in(assembly)
        returned = result.signature.return_type
        names = [str(kind) for kind in getattr(returned, "types", [returned])] if returned != numba.types.none else []
        index[one.__name__] = (result.fndesc.llvm_func_name, names)
    return index, target.emit_object(merged)


def _callable(function, address: int, results: list[str]):
    """A Python callable for the native function at `address`."""
    kinds = _parameters(function)
    flat = [ctypes.c_void_p, ctypes.c_void_p]
    for kind in kinds:
        flat += [_SCALARS[kind][0]] if kind in _SCALARS else [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
                                                              ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64,
                                                              ctypes.c_int64]
    native = ctypes.CFUNCTYPE(ctypes.c_int32, *flat)(address)
    result_type = type("Result", (ctypes.Structure,), {"_fields_": [
        (f"r{k}", getattr(ctypes, f"c_{name}")) for k, name in enumerate(results)]})

    def call(*arguments):
        result, problem = result_type(), ctypes.c_void_p()
        values = [ctypes.addressof(result), ctypes.addressof(problem)]
        for kind, argument in zip(kinds, arguments):
            if kind in _SCALARS:
                values.append(int(argument))
            else:
                dtype = _ARRAYS[kind]
                if argument.dtype != dtype or not argument.flags.c_contiguous:
                    raise TypeError(f"{function.__name__}: an array is {argument.dtype}, not a contiguous {dtype}")
                count = argument.size
                values += [None, None, count, dtype.itemsize, argument.__array_interface__["data"][0], count,
                           dtype.itemsize]
        if native(*values):
            raise RuntimeError(f"the compiled kernel {function.__name__} failed")
        found = tuple(getattr(result, name) for name, _ in result_type._fields_)
        return found if len(found) > 1 else found[0] if found else None

    return call
