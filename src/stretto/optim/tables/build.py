"""Rules of tables by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from stretto.errors import StrettoError
from stretto.optim.tables.rule import TableRule
from stretto.optim.tables.rules import Adagrad, LazyAdam, RowwiseAdagrad, Sgd, SplitSgd

RULES: Mapping[str, Callable[..., TableRule]] = {
    rule.name: rule for rule in (Sgd, Adagrad, RowwiseAdagrad, LazyAdam, SplitSgd)
}


def options_of(name: str) -> tuple[str, ...]:
    """What can be set of a rule, beside the rate: `eps`, or `beta1`, `beta2`, `eps`, or nothing.

    Raises:
        StrettoError: no rule has that name.
    """
    return tuple(field.name for field in fields(_rule(name)))


def build_rule(name: str, **options: float) -> TableRule:
    """The rule `sgd`, `adagrad`, `rowwise_adagrad`, `lazy_adam` or `split_sgd`.

    Args:
        options: as `options_of` names them. `eps`: added to the root, above 0 (Adagrad 1e-10, others 1e-8).
            `beta1`, `beta2`: of lazy Adam, at least 0 and below 1 (0.9, 0.999).

    Raises:
        StrettoError: no such rule, an option that it does not have, or a value out of range.
    """
    rule, known = _rule(name), options_of(name)
    for option, value in options.items():
        if option not in known:
            raise StrettoError(
                f"rule {name} has no option {option}",
                hint=f"its options: {', '.join(known)}" if known else "it has none",
            )
        if option == "eps" and not value > 0:
            raise StrettoError(f"rule {name}: eps is {value}", hint="above 0, as 1e-8")
        if option.startswith("beta") and not 0 <= value < 1:
            raise StrettoError(f"rule {name}: {option} is {value}", hint="at least 0 and below 1")
    return rule(**options)


def _rule(name: str) -> Any:
    if name not in RULES:
        near = get_close_matches(name, RULES, 1)
        raise StrettoError(
            f"no rule for tables is called {name!r}",
            hint=(f"perhaps {near[0]}; " if near else "") + f"known: {', '.join(RULES)}",
        )
    return RULES[name]
