"""Writes the operator declarations of a candidate's `lite` headers, from torch's own. A named
operator has all of torch's overloads (deleted where lite lacks a type), so overload resolution is
torch's."""

from __future__ import annotations

import os
import re
from functools import cached_property
from pathlib import Path

IDENTIFIER = re.compile(r"[A-Za-z_]\w*")

# What only torch's whole header has, or what lite must not guess: such a source goes straight to
# `full`.
BEYOND = re.compile(
    r"PYBIND11|\bpybind11\b|\bpy\s*::|\btorch\s*::\s*(nn|jit|autograd|optim|data|serialize|indexing|linalg|fft|special|stable)\b|TORCH_LIBRARY"
    r"|\b(intrusive_ptr|IValue|TensorImpl|unsafeGetTensorImpl|TensorBase|TensorIndex|Vectorized|cublas\w+|DispatchKey|SymInt|AutoGradMode|NoGradGuard)\b"
    r"|\bconcur_?\w*|#\s*pragma\s+once|\bfrom_blob\b"
)

# Overloads that mention these are declared and deleted: lite has the names, but not the things.
MISSING = re.compile(
    r"Generator|Dimname|Storage|\bStream\b|QScheme|\bList<|ITensorList|IListRef|TensorIndex|array<bool|Tensor\[\]|IntArrayRef\[\]|complex"
    r"|OptionalTensorRef|OptionalSymIntArrayRef|Quantizer"
)

# Names of std that need no more than core.h includes, or a header of STANDARD. Any other brings
# <vector>, and with it what most standard headers share (std::max, iterators, ranges): a fifth of
# all there is to parse for a source that names nothing of std.
PLAIN_STD = (
    r"sqrtf?|r?cbrtf?|expm?1?f?|exp2f?|log(1p|2|10)?f?|powf?|f?absf?|fma(f|x|xf|in|inf)?|fmodf?|a?(sin|cos|tan)h?f?|atan2f?|erfc?f?|floorf?|ceilf?"
    r"|l?l?round(f)?|truncf?|rintf?|is(nan|inf|finite)|hypotf?|size_t|ptrdiff_t|u?int(8|16|32|64)_t|move|forward|pair|make_pair|optional|nullopt"
    r"|tuple|make_tuple|string|to_string|cout|cerr|endl|runtime_error|invalid_argument|numeric_limits|mem(cpy|set)"
)
# Standard headers that torch's headers bring along, by the names that need them. None is here that
# torch/types.h does not include.
STANDARD = {
    "vector": r"\bvector\b|\bvec\s*\(|\bstd\b(?!\s*::\s*(" + PLAIN_STD + r")\b)",
    "limits": r"\bnumeric_limits\b",
    "algorithm": (
        r"\bstd::(sort|stable_sort|partial_sort|nth_element|fill|fill_n|copy|copy_n|transform|clamp|any_of|all_of|none_of|find"
        r"|find_if|count|count_if|max_element|min_element|minmax|minmax_element|for_each|reverse|rotate|unique|remove|remove_if|generate|shuffle|merge"
        r"|lower_bound|upper_bound|binary_search|swap_ranges|equal|replace|replace_if|is_sorted|(push|pop|make|sort)_heap|copy_if|includes|search)\b"
    ),
    "tuple": r"\btuple\b|\bstd::(get|tie|apply)\b|make_tuple",
    "array": r"\barray\b",
    "iterator": (
        r"\bstd::(back_inserter|inserter|distance|advance|next|prev|(reverse|istream|ostream)_iterator)\b"
    ),
    "functional": (
        r"\bstd::(function|bind|hash|less|greater|plus|minus|multiplies|ref|cref|invoke)\b"
    ),
    "memory": (
        r"\bstd::(unique_ptr|shared_ptr|make_unique|make_shared|weak_ptr|addressof|allocator)\b"
    ),
    "numeric": (
        r"\bstd::(accumulate|iota|inner_product|partial_sum|reduce|gcd|lcm|adjacent_difference|transform_reduce)\b"
    ),
    "iostream": r"\bstd::(cout|cerr|endl|clog|cin)\b",
    "sstream": r"\bstd::\w*stringstream\b",
    "iomanip": r"\bstd::(setw|setprecision|setfill|fixed|hex)\b",
    "stdexcept": (
        r"\bstd::(runtime_error|invalid_argument|out_of_range|logic_error|domain_error|length_error|range_error|overflow_error)\b"
    ),
    "thread": r"\bstd::(thread|this_thread)\b",
    "mutex": r"\bstd::(mutex|lock_guard|unique_lock|once_flag|call_once|scoped_lock)\b",
    "atomic": r"\bstd::atomic",
    "chrono": r"\bstd::chrono\b",
    "map": r"\bstd::(multi)?map\b",
    "set": r"\bstd::(multi)?set\b",
    "unordered_map": r"\bstd::unordered_map\b",
    "unordered_set": r"\bstd::unordered_set\b",
    "deque": r"\bstd::deque\b",
    "list": r"\bstd::list\b",
    "complex": r"\bstd::complex\b",
    "variant": r"\bstd::(variant|visit|get_if|holds_alternative|monostate)\b",
    "bitset": r"\bstd::bitset\b",
    "limits.h": r"\b(INT|UINT|LONG|ULONG|LLONG|SHRT|CHAR|UCHAR|SCHAR)_(MAX|MIN)\b",
    "assert.h": r"\bassert\s*\(",
    "time.h": r"\b(clock_gettime|clock|time)\s*\(",
}
FLOAT_LIMITS = re.compile(r"\b(FLT|DBL|LDBL)_[A-Z0-9_]+\b")
"""Names of <float.h>, which torch/types.h brings along under nvcc only."""
HALF = re.compile(
    r"\b(Half|BFloat16|kHalf|kBFloat16|kFloat16|kF16|AT_DISPATCH\w*HALF\w*|AT_DISPATCH\w*REDUCED\w*)\b"
)
SPECIAL = re.compile(
    r"\b(assoc_(laguerre|legendre)|beta|(comp_)?ellint_[123]|cyl_(bessel_[ijk]|neumann)|expint|hermite|laguerre|legendre|riemann_zeta"
    r"|sph_(bessel|legendre|neumann)|(conf_)?hyperg)[fl]?\b|__gnu_cxx|__STDCPP|_GLIBCXX"
)
"""C++17's special functions, at file scope in some libraries: named ones may clash."""
STRING = re.compile(r"\b(string\w*|\w*stream|to_string|cout|cerr|what|name)\b|std::str|::Device\b")

# Factories that are compiled once, in a library beside the shims; candidates' sources get
# declarations.
COMMON = ("empty", "empty_like", "full", "full_like", "ones", "ones_like", "zeros", "zeros_like")

_FUNCTION = re.compile(
    r"^inline ([^\n;]*?)\b(\w+)\(([^\n]*)\) (\{\n.*?^\})", re.MULTILINE | re.DOTALL
)
_METHOD = re.compile(
    r"^inline ([^\n;]*?) Tensor::(\w+)\(([^\n]*)\) const (\{\n.*?^\})", re.MULTILINE | re.DOTALL
)
_DECLARED = re.compile(r"^  ([^\n;{}=()]*?)\b(\w+)\(([^\n;{}]*)\) const;$", re.MULTILINE)
_STRUCT = re.compile(r"^struct TORCH_API (\w+) \{(.*?)^\};", re.MULTILINE | re.DOTALL)
_CALL = re.compile(r"static ([^\n;]*? call\([^\n;]*\));")
_SYMINT = re.compile(r"^namespace symint \{.*?^\}", re.MULTILINE | re.DOTALL)


def standard_headers(text: str) -> str:
    found = "".join(
        f"#include <{header}>\n" for header, names in STANDARD.items() if re.search(names, text)
    )
    return found + (
        "#ifdef __CUDACC__\n#include <float.h>\n#endif\n" if FLOAT_LIMITS.search(text) else ""
    )


def definitions(text: str) -> list[str]:
    """Macros that switch on the costlier parts of the lite headers."""
    wanted = {
        "STRING": STRING.search(text),
        "HALF": HALF.search(text),
        "ACCESSOR": re.search(r"ccessor|PtrTraits", text),
        "STD_ARRAY": re.search(r"\barray\b", text),
        "SPECIAL": SPECIAL.search(text),
    }
    return [f"-DCONCUR_{name}" for name, found in wanted.items() if found]


# What a text of prototypes does without, once its includes of torch are cut out.
_NO_PROTOTYPE = re.compile(
    r"[{=.#]|->|\b(operator|decltype|sizeof|alignof|noexcept|requires|static_assert|using|typedef|template|concept|asm)\b"
)
_INCLUDE_OF_TORCH = re.compile(
    r"^[ \t]*#[ \t]*include[ \t]*<(torch/(extension|types|torch|all)|ATen/ATen)\.h>", re.MULTILINE
)
_PARAMETERS = re.compile(r"\([^()]*\)")


def only_declares(text: str) -> bool:
    """Whether plain text holds only prototypes, of types that concur_bind.h brings."""
    bare = _INCLUDE_OF_TORCH.sub("", text)
    switches = set(definitions(bare)) - {
        "-DCONCUR_SPECIAL"
    }  # as a parameter's name it clashes with nothing
    headers = set(standard_headers(bare).splitlines()) - {"#include <vector>", "#include <tuple>"}
    return not (
        switches
        or headers
        or _NO_PROTOTYPE.search(bare)
        or SPECIAL.search(_PARAMETERS.sub("", bare))
    )


class Operators:
    """torch's operators, read on demand from one installation's headers."""

    def __init__(self, include: Path) -> None:
        self.include = include
        self._structs: dict[str, dict[str, str]] = {}

    @cached_property
    def _headers(self) -> frozenset[str]:
        return frozenset(os.listdir(self.include / "ATen/ops"))

    @cached_property
    def _methods(self) -> dict[str, list[tuple[str, str]]]:
        """Name -> (head with defaults, body) of each overload of a Tensor method."""
        text = (self.include / "ATen/core/TensorBody.h").read_text()
        inside, _, outside = text.partition("\n};\n")
        heads = {
            (name, _bare(parameters)): f"{result} {name}({parameters}) const"
            for result, name, parameters in _DECLARED.findall(inside)
        }
        found: dict[str, list[tuple[str, str]]] = {}
        for _, name, parameters, body in _METHOD.findall(outside):
            if head := heads.get((name, _bare(parameters))):
                found.setdefault(name, []).append((head, body))
        return found

    @cached_property
    def _factories(self) -> dict[str, list[str]]:
        text = (self.include / "torch/csrc/autograd/generated/variable_factories.h").read_text()
        found: dict[str, list[str]] = {}
        for match in _FUNCTION.finditer(text):
            found.setdefault(match.group(2), []).append(match.group(0))
        return found

    def write(self, text: str, folder: Path, *, common: bool = False) -> None:
        """Write concur_methods.inc, concur_ops.inc, concur_factories.inc and concur_std.inc for a
        source into `folder`; `common`: with the bodies of COMMON.
        """
        names = sorted(set(IDENTIFIER.findall(text)))
        methods: list[str] = []
        functions: list[str] = []
        factories: list[str] = []
        wanted: set[str] = set()
        sources: set[str] = set()

        def once(name: str, head: str, body: str) -> str:
            if name not in COMMON or _is_missing(head):
                return _declared_or_deleted(head, body, wanted)
            if common:
                head = head.replace("inline", '__attribute__((visibility("default")))', 1)
                return _declared_or_deleted(head, body, wanted)
            return head.removeprefix("inline ") + ";"

        for name in names:
            for head, body in self._methods.get(name, ()):
                methods.append(_declared_or_deleted(head, body, wanted))
                sources.add(name)
            for function in self._functions(name):
                functions.append(once(name, *function))
                sources.add(name)
        for name in names:
            for factory in self._factories.get(name, ()):
                if "tensor_data_container" in factory or "from_blob" in factory:
                    continue
                head, _, body = factory.partition(" {\n")
                factories.append(once(name, head, "{\n" + body))
                sources.add(name)
        structs = {key: value for name in sources for key, value in self._structs_of(name).items()}
        calls = [
            f"struct {name} {{ static {structs[name]}; }};"
            for name in sorted(wanted & structs.keys())
        ]
        generated = "\n".join([*methods, *calls, *functions, *factories])
        headers = [name for name in ("tuple", "string_view", "vector") if name in generated]
        needed = "".join(f"#include <{name}>\n" for name in headers)
        if "string_view" in headers:
            needed += "namespace c10 { using std::string_view; }\n"
        folder.mkdir(exist_ok=True)
        for name, content in {
            "methods": "\n".join(methods),
            "calls": "\n".join(calls),
            "ops": "\n".join(["namespace at {", *functions, "}", ""]),
            "factories": "\n".join(factories),
            "std": needed + standard_headers(text),
        }.items():
            (folder / f"concur_{name}.inc").write_text(content)

    def _functions(self, name: str) -> list[tuple[str, str]]:
        base = re.sub(r"_(out|outf)$", "", name)
        file = f"{base}.h"
        if file not in self._headers and base.endswith("_"):
            file = f"{base[:-1]}.h"
        if file not in self._headers:
            return []
        text = _SYMINT.sub("", (self.include / "ATen/ops" / file).read_text())
        return [
            (f"inline {r}{n}({p})", body) for r, n, p, body in _FUNCTION.findall(text) if n == name
        ]

    def _structs_of(self, name: str) -> dict[str, str]:
        """Struct name -> declaration of `call`, for all forms of an operator."""
        base = re.sub(r"_(out|outf)$", "", name)
        for candidate in (base, base.rstrip("_")):
            file = f"{candidate}_ops.h"
            if file in self._headers:
                if candidate not in self._structs:
                    found = _STRUCT.findall((self.include / "ATen/ops" / file).read_text())
                    self._structs[candidate] = {
                        struct: m.group(1) for struct, body in found if (m := _CALL.search(body))
                    }
                return self._structs[candidate]
        return {}


def _declared_or_deleted(head: str, body: str, wanted: set[str]) -> str:
    if _is_missing(head):
        return f"{head} = delete;"
    wanted.update(re.findall(r"at::_ops::(\w+)::call", body))
    return f"{head} {body}"


def _is_missing(head: str) -> bool:
    return bool(MISSING.search(head)) or "symint" in head or "SymInt" in head


def _bare(parameters: str) -> str:
    return re.sub(r"\s", "", re.sub(r"=(\{[^}]*\}|[^,]*)(?=,|$)", "", parameters))
