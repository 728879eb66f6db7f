"""Translate llama.cpp's syntax of grammars (GBNF) into Lark's, with llguidance's translator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter

from llguidance.gbnf_to_lark import ASTNode, GrammarParser, RuleNode, RuleRefNode, resolve


def gbnf_to_lark(text: str) -> str:
    """Return a GBNF grammar in Lark's syntax. Raises ValueError for an invalid one."""
    try:
        rules = _definitions_first(GrammarParser().parse(text))
        resolve(rules)
        return "\n".join(map(str, rules.values()))
    except (RecursionError, MemoryError):
        raise
    except IndexError:  # raised where it ends with a backslash
        raise ValueError("ends within an escape sequence") from None
    except Exception as error:  # the translator raises bare exceptions
        raise ValueError(str(error)) from None


def _definitions_first(rules: dict[str, RuleNode]) -> dict[str, RuleNode]:
    """Return the rules with each behind those that it refers to, unless they are recursive.

    `resolve` passes over all rules until nothing changes: in this order twice, in others up to once
    per rule.
    """
    order = TopologicalSorter({name: set(_references(rule)) for name, rule in rules.items()})
    with suppress(CycleError):  # what does not depend on a cycle is ordered nevertheless
        order.prepare()
    ordered: dict[str, RuleNode] = {}
    while ready := order.get_ready():
        ordered |= {name: rules[name] for name in ready if name in rules}
        order.done(*ready)
    return ordered | rules


def _references(node: ASTNode) -> Iterator[str]:
    """Yield the names of the rules that a node refers to."""
    if isinstance(node, RuleRefNode):
        yield node.name
    for child in node.children():
        yield from _references(child)
