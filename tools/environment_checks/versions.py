"""Comparing versions where the package `packaging` may be missing: the part of its rules that setup.py needs."""

from __future__ import annotations

import re

_CLAUSE = re.compile(r"(==|!=|>=|<=|<)\s*([\w.+]+)")


def fits(version: str, wanted: str) -> bool:
    """Whether a version is in a range such as ">=2.9,<2.12", by pip's rules.

    A pre-release such as NVIDIA's 2.11.0a0+145a3a7 is older than 2.11, and yet not in "<2.11".
    """
    return all(_clause_holds(version, operator, bound) for operator, bound in _CLAUSE.findall(wanted))


def _clause_holds(version: str, operator: str, bound: str) -> bool:
    here, there = _release(version), _release(bound)
    if operator == "<":
        return here < there
    if operator in ("==", "!="):
        return (here == there and _is_final(version)) is (operator == "==")
    if operator == "<=":
        return here <= there
    return here > there or (here == there and _is_final(version))


def _release(version: str) -> tuple[int, ...]:
    """The numbers at the front, four of them, so that 2.11 and 2.11.0 are the same."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    numbers = [int(part) for part in match.group(1).split(".")] if match else []
    return tuple((numbers + [0] * 4)[:4])


def _is_final(version: str) -> bool:
    public = version.split("+")[0]
    return re.search(r"(a|b|rc|dev)\d*", public) is None
