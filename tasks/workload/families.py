"""Operator families, by the name of the torch function; spellings (`add_`, `__radd__`,
`torch.Tensor.add`) share one, unlisted names are "other". `families.toml` covers KernelBench's
levels 1 to 3 and the bundled tasks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kernels_eval.tables import table_beside

TABLE: dict[str, str] = table_beside(__file__)
FAMILIES = (*TABLE, "other")
_FAMILY = {name: family for family, names in TABLE.items() for name in names.split()}
_DUNDER = re.compile(r"__(?P<name>\w+)__")


def family_of(operator: str) -> str:
    """The family of an operator ("torch.nn.functional.conv2d", "torch.Tensor.__rsub__")."""
    name = operator.rsplit(".", 1)[-1]
    found = _DUNDER.fullmatch(name)
    plain = found["name"] if found else name.strip("_")
    if found and plain not in _FAMILY and plain[:1] in "ri":
        plain = plain[1:]
    return _FAMILY.get(plain, "other")


def families_of(operators: Sequence[str]) -> tuple[str, ...]:
    found = {family_of(operator) for operator in operators}
    return tuple(family for family in FAMILIES if family in found)
