"""Library work that a built extension asks for, from its ELF symbols (System V ABI, chapter 4).

Read by the parent. Does not see static libraries or calls through pointers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

from kernels_eval.config import MOST_SYMBOL_LETTERS, MOST_SYMBOLS

NO_COMPUTE = frozenset(
    """empty empty_like empty_strided new_empty zeros zeros_like ones ones_like full full_like view
    reshape _unsafe_view t transpose permute expand as_strided slice select unsqueeze squeeze detach
    alias clone copy_ _to_copy contiguous split split_with_sizes chunk unbind lift_fresh
    scalar_tensor arange fill_ zero_ _local_scalar_dense is_same_size unfold resize_ set_ narrow
    diagonal new_zeros new_ones new_full _reshape_alias detach_ _conj _neg_view view_as_real
    view_as_complex""".split()
)
"""aten operators that make, move or view tensors."""
DYNAMIC_SYMBOLS = 11  # SHT_DYNSYM
UNDEFINED = 0  # SHN_UNDEF
LIBRARY = re.compile(
    r"(?i:(?:scipy_)?(?:[sdcz]|[sd]s)"
    r"(?:gemm|gemv|ger|symm|symv|syrk|syr2k|trsm|trsv|trmm|trmv|dot|axpy|scal"
    r"|nrm2|asum|gemmt|gels[dsy]?|gesv|getr[fis]|potr[fis]|(?:sy|he)tr[fis]|geqrf|geev|gesdd|gesvd"
    r"|syevd?|heevd?|dotu|dotc)"
    r"(?:_batch(?:_strided)?|_(?:un)?pack|_compute)?(?:_?64)?_?"
    r"|gemm_(?:bf16bf16f32|f16f16f32|[su]8[su]8s32)\w*"
    r"|(?:(?:scipy_)?(?:cblas|LAPACKE)|mklg?|dnnl|nnp|pytorch_qnnp|xnn|bli|armpl|fftwf?)_\w+)"
    r"|(?:cublas|cudnn|cusparse|cusolver|cufft|curand|cutensor|nccl|npp|Dfti|vm[sd]|v[sd])[A-Z]\w*"
    r"|(?:vm?[sd][a-z0-9]+|VM?[SD][A-Z0-9]+)(?:_64)?_"
)
"""Functions of BLAS, LAPACK, MKL, oneDNN and NVIDIA's libraries, in C or Fortran (mangled C++
begins with _Z).
"""
SHIM = re.compile(r"aoti_torch_(?:cpu|cuda)?_(\w+?)(?:_out)?")
"""C operators of torch for inductor's code: they bypass the dispatcher."""
FOREIGN_NAMESPACES = ("dnnl", "oneapi", "fbgemm")
STUB = re.compile(r"NS0_\d+(\w+?)(?:_DECLARE_DISPATCH_type)?EE\d")
"""The operator of a kernel table, last among its template arguments."""
TENSOR_EXPRESSIONS = "nnc_"
"""Prefixes of torch operators that torch::jit::tensorexpr code calls."""
DEVICES = (
    "cpu",
    "cuda",
    "native",
    "meta",
    "compositeexplicitautograd",
    "compositeexplicitautogradnonfunctional",
    "compositeimplicitautograd",
)
NO_OPERATOR = re.compile(
    r"(?!structured_|NestedTensor_|lapack|hash_|is(?:in|posinf|neginf|close|finite|inf|nan|real))"
    r"(?:(?:get|set|is|has|can|check|warp|current|device|detail|philox)_?|.*[A-Z])"
)
"""What at::cuda and at::native hold besides operators."""
UNTRACED = (
    *("at::enableRecordFunction", "at::get_record_function_tls_", "at::set_record_function_tls_"),
    *("at::clearCallbacks", "at::clearGlobalCallbacks", "at::clearThreadLocalCallbacks"),
    *("at::removeCallback", "at::disableCallback", "at::ThreadLocalState::setThreadLocalState"),
    *("c10::Dispatcher::registerImpl", "c10::Dispatcher::registerFallback"),
    *("torch::Library::_fallback", "at::hasCallbacks", "at::hasGlobalCallbacks"),
    *("at::hasThreadLocalCallbacks", "at::getStepCallbacks", "at::getStepCallbacksUnlessEmpty"),
    *("at::RecordFunction", "at::addGlobalCallback", "at::addThreadLocalCallback"),
    *("torch::profiler::impl::disableExecutionTraceObserver",),
    *("torch::profiler::impl::removeExecutionTraceObserver",),
    *("torch::profiler::impl::addExecutionTraceObserver",),
)
"""With these a library can hide dispatcher calls from the record, or notice it."""
FINDS_OPERATORS = (
    *("c10::Dispatcher::findSchema", "c10::Dispatcher::findSchemaOrThrow"),
    *("c10::Dispatcher::findOp", "c10::Dispatcher::getAllOpNames"),
)
"""What finds an operator by name: it may then be called unrecorded."""
REACHES_ELEMENTS = re.compile(r"data_ptr|concur4data|6Tensor4item|TensorIterator|[sS]torage")
"""Part of any mangled name by which a library comes to the memory of a tensor."""
FORBIDDEN = re.compile(
    r"PyRun_\w+|Py_CompileString\w*|PyEval_Eval\w*|PyMarshal_Read\w+"
    r"|PyImport_\w+|PySys_Get\w+|PyEval_Get(?:Globals|Locals|Frame\w*)"
    r"|dlm?open|dlv?sym|dlinfo|dl_iterate_phdr|_dl_find_object|_r_debug|getauxval"
    r"|at::DynamicLibrary"
    r"|timerfd_\w+|timer_(?:create|settime)|setitimer|u?alarm"
)
"""What runs Python, reaches its modules, finds functions by name or tables of loaded libraries, or
works in the turns of others (timers go on in a process that is stopped), whatever a source calls
it. No header of torch or CUDA needs it.
"""
OPERATOR_NAME = re.compile(rb"\baten::([a-zA-Z]\w{0,80})")


class Unreadable(ValueError):
    """The file is no ELF file with symbols that this module can read."""


def library_work(paths: Iterable[str]) -> tuple[set[str], set[str]]:
    """What these libraries ask others to compute, and flags for what hides such work. Recorded
    dispatcher calls are omitted, unless a library can hide them.
    """
    work: set[str] = set()
    flags: set[str] = set()
    for path in paths:
        try:
            data = Path(path).read_bytes()
            symbols = set(map(_demangled, _undefined(data)))
        except (OSError, Unreadable):
            flags.add("symbols_unreadable")
            continue
        untraced = not symbols.isdisjoint(UNTRACED)
        work.update(chain.from_iterable(_named(name, untraced) for name in symbols))
        if symbols.intersection(FINDS_OPERATORS):
            named = {match[1].decode() for match in OPERATOR_NAME.finditer(data)}
            work.update(f"aten.{name}" for name in named - NO_COMPUTE)
        hiding = (*UNTRACED, *FINDS_OPERATORS)
        flags.update(f"links:{name}" for name in hiding if name in symbols)
    return work, flags


def forbidden_link(path: str) -> str:
    """The first name of `FORBIDDEN` that this library links; "" where there is none."""
    with suppress(OSError, Unreadable):
        names = map(_demangled, _undefined(Path(path).read_bytes()))
        return min(filter(FORBIDDEN.fullmatch, names), default="")
    return ""


def reaches_elements(path: str) -> bool:
    """Whether a library can come to the elements of a tensor by itself; True where unknown."""
    with suppress(OSError, Unreadable):
        return any(map(REACHES_ELEMENTS.search, _undefined(Path(path).read_bytes())))
    return True


def _named(symbol: str, untraced: bool) -> Iterator[str]:
    parts = symbol.split("::")
    if len(parts) == 1:
        shim = SHIM.fullmatch(symbol)
        if LIBRARY.fullmatch(symbol) or (shim and shim[1] not in NO_COMPUTE):
            yield symbol
    elif parts[0] in FOREIGN_NAMESPACES or parts[:3] == ["at", "cuda", "blas"]:
        yield symbol
    elif parts[:2] == ["at", "_ops"] and len(parts) > 3:
        operator = parts[2]
        if operator not in NO_COMPUTE and (untraced or parts[3].startswith("redispatch")):
            yield f"aten.{operator}"
    elif parts[0] == "at" and len(parts) >= 3 and parts[1] in DEVICES:
        # a function, or one of a structured kernel or of a namespace such as cpublas
        if parts[2] not in NO_COMPUTE and not NO_OPERATOR.match(parts[2]):
            yield symbol
    elif parts[:3] == ["torch", "jit", "tensorexpr"] and parts[-1].startswith(TENSOR_EXPRESSIONS):
        yield symbol


def _demangled(symbol: str) -> str:
    """A C++ function's qualified name (Itanium C++ ABI, 5.1.2); other names unchanged."""
    match = re.match(r"_ZN?(?:[rVKRO]*)(?=\d)", symbol)
    if match is None:
        return symbol
    names, rest = [], symbol[match.end() :]
    while (digits := re.match(r"\d{1,4}", rest)) is not None:
        length = int(digits[0])
        names.append(rest[digits.end() : digits.end() + length])
        rest = rest[digits.end() + length :]
    if names[:2] == ["at", "DynamicLibrary"]:
        names = names[:2]
    if names == ["at", "native", "DispatchStub"] and (stub := STUB.search(rest)):
        names[2] = stub[1]
    return "::".join(names)


def _undefined(data: bytes) -> list[str]:
    if data[:6] != b"\x7fELF\x02\x01":
        raise Unreadable("not a 64-bit little-endian ELF file")
    try:
        (start,) = struct.unpack_from("<Q", data, 0x28)
        size, count = struct.unpack_from("<HH", data, 0x3A)
        headers = [
            struct.unpack_from("<IIQQQQIIQQ", data, start + size * index) for index in range(count)
        ]
        for _, kind, _, _, offset, length, link, *_ in headers:
            if kind == DYNAMIC_SYMBOLS:
                names = headers[link][4]
                entries = struct.iter_unpack("<IBBHQQ", data[offset : offset + length])
                undefined = (names + name for name, _, _, at, *_ in entries if at == UNDEFINED)
                found = list(islice(undefined, MOST_SYMBOLS + 1))
                if len(found) > MOST_SYMBOLS:
                    raise Unreadable(f"more than {MOST_SYMBOLS} undefined symbols")
                return [_text(data, start) for start in found]
    except (struct.error, IndexError, OverflowError) as error:
        raise Unreadable(str(error)) from error
    raise Unreadable("no dynamic symbols")


def _text(data: bytes, start: int) -> str:
    return data[start : start + MOST_SYMBOL_LETTERS].partition(b"\0")[0].decode("ascii", "replace")
