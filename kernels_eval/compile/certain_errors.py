"""Which first errors of a compiler hold with torch's own headers as with lite's: such a build has
failed, and needs no second one that takes a minute."""

from __future__ import annotations

import re

from kernels_eval.compile.torch_names import TorchNames

# A first error of these kinds is the candidate's own where the name in it, if any, occurs nowhere
# in torch's headers: both tiers read the same text with the same macros (a source that names a
# macro only torch has never comes here), so no header of torch could fix it.
_ERROR = re.compile(
    r"^(\S+?)(?::(\d+)(?::\d+)?: (?:fatal )?error: |\((\d+)\): error: )(.*)$", re.MULTILINE
)
_UNDECLARED = re.compile(
    r"^'(\w+)' was not declared in this scope|^identifier \"(\w+)\" is undefined"
)
_UNKNOWN = re.compile(
    r"^'(?:[^']*::)?(\w+)' (?:is not a member of '[\w:]+'|has not been declared|does not name a"
    r" type)"
    r"|has no member named '(\w+)'|has no member \"(\w+)\"|^'(\w+)' in namespace '[\w:]+' does not"
    r" name a"
)
_NO_METHOD = re.compile(
    r"^'(?:class |const class )?(?:at|torch)::Tensor' has no member named '(\w+)'"
    r"|^class \"at::Tensor\" has no member \"(\w+)\""
)
# Errors about names of the candidate's own function, about std, or about a method that is named and
# not called: no header of torch plays a part in them.
_LOCAL = re.compile(
    r"^declaration of '[^']*' shadows a parameter"
    r"|^cannot resolve overloaded function '\w+' based on conversion to type"
    r" '(const )?(float|double|int|int64_t|bool)\*?'"
)
_STD_CALL = re.compile(r"^no matching function for call to '(min|max)\(")
_DISPATCHED_TYPE = re.compile(
    r"DeprecatedTypeProperties\W.* to \W?(const )?(c10::|at::)?ScalarType\b"
)
# nvcc's words for the same: about the candidate's own names and text.
_NVCC_LOCAL = re.compile(
    r"^a variable length array cannot have static storage duration"
    r"|^declaration is incompatible with previous \"\w+\" \(declared at line \d+\)"
    r"|^\"\w+\" has already been declared in the current scope|^expected an identifier|^macro"
    r" \"assert\" passed \d"
    r"|^an enclosing-function local variable cannot be referenced in a lambda body"
)
_NVCC_NO_STREAM = re.compile(r"^namespace \"(at|c10|torch)::cuda\" has no member \"(\w+)\"")
_NVCC_UNDEFINED = re.compile(r"^identifier \"(\w+)\" is undefined")
# Two conversions in one, to a string and to a device: never implicit.
_NVCC_NO_DEVICE = re.compile(
    r"^no suitable constructor exists to convert from \"const char \[\d+\]\" to \"c10::Device\""
)
_INCLUDED = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"]([^>\"\n]+)[>\"]", re.MULTILINE)
_BRINGS_STREAMS = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"][^>\"\n]*(cuda/|CUDA)", re.MULTILINE)
_SYNTAX = re.compile(
    r"expected '[;)}]'|expected ',' or ';'|expected a \"[;)}]\"|expected '}' at end of input"
)
# The candidate's own flags: what torch's headers ask for first of all (lite asks for the same), and
# what the compilers do not know.
_OLD_STANDARD = re.compile(
    r"#error C\+\+\d\d or later compatible compiler is required to use PyTorch"
)
_FLAG = re.compile(
    r"nvcc fatal +: (Unsupported gpu architecture|Unknown option|Value '[^'\n]*' is not defined for"
    r" option)"
    r"|\S*(g\+\+|gcc|cc1plus|clang)\S*: error: unrecognized (command-line option|debug output"
    r" level|argument)"
)
# A kernel is the same machine code with both tiers.
_SHARED_MEMORY = re.compile(r"ptxas error +: Entry function '\w+' uses too much shared data")
_CONDITIONAL = re.compile(
    r"^[ \t]*#[ \t]*(if|ifdef|ifndef|el\w+)\b(?!.*\b(__CUDA_ARCH__|__CUDACC__)\b)",
    re.MULTILINE,
)


def certain_error(log: str, source: str, known: TorchNames) -> bool:
    """Whether the first error in `log`, or an independent one, holds for torch's headers too."""
    if _OLD_STANDARD.search(log) or _FLAG.match(log.lstrip()):
        return True
    if _SHARED_MEMORY.match(log):
        return not _CONDITIONAL.search(source)
    errors = [*_ERROR.finditer(log)]
    if any(_stands_alone(error[1], error[4], source, known) for error in errors):
        return True
    return bool(errors) and _certain_first(errors[0], source, known)


def _stands_alone(file: str, message: str, source: str, known: TorchNames) -> bool:
    """Whether an error is certain wherever it stands: it names torch alone."""
    if _DISPATCHED_TYPE.search(message):
        return not known.dispatch_takes_types
    if file != "cuda.cu" or _CONDITIONAL.search(source):
        return False
    if missing := _NVCC_NO_STREAM.search(message):
        return missing.group(2) in known.not_brought and not _BRINGS_STREAMS.search(source)
    # Where a source makes a Device itself, it may be another fault.
    return bool(_NVCC_NO_DEVICE.search(message) and not re.search(r"\bDevice\b|\busing\b", source))


def _certain_first(error: re.Match[str], source: str, known: TorchNames) -> bool:
    file, line, _, message = error.groups()
    if file not in ("main.cpp", "cuda.cu") or _CONDITIONAL.search(source):
        return False
    if (missing := _NO_METHOD.search(message)) and known.methods:
        return known.methods.isdisjoint(missing.groups())
    if file == "cuda.cu":
        return _certain_nvcc_error(message, source, known)
    if unqualified := _UNDECLARED.search(message):
        name = next(filter(None, unqualified.groups()))
        # A call may find what its arguments' namespaces have; anything else only what is at file
        # scope, or is brought there.
        called = re.search(rf"\b{name}\s*(<[^;<>]*>\s*)?\(|\busing\s", source)
        return name not in (known.words if called else known.file_scope)
    if (call := _STD_CALL.search(message)) and line:
        return not re.search(rf"(?<!std::)\b{call.group(1)}\s*\(", source)
    if unknown := _UNKNOWN.search(message):
        return next(filter(None, unknown.groups())) not in known.words
    return bool(_SYNTAX.search(message) or _LOCAL.search(message))


def _certain_nvcc_error(message: str, source: str, known: TorchNames) -> bool:
    """Whether an nvcc error is certain: there torch's headers bring more than `known.words`."""
    if (undefined := _NVCC_UNDEFINED.search(message)) and known.nvcc_words:
        # Nothing may be from a header whose words are not known.
        included = all(
            any(path.endswith(f"/{name}") for path in known.nvcc_files)
            for name in _INCLUDED.findall(source)
        )
        return included and undefined.group(1) not in known.nvcc_words
    return bool(_SYNTAX.search(message) or _NVCC_LOCAL.search(message))
