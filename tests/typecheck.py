"""The check that jaxtyping puts around every annotated function of the package while tests run."""

from collections.abc import Callable
from typing import Any

import beartype

_CHECK: Callable[[Any], Any] = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check arguments and result against the annotations; an int passes as a float.

    Constructors are left alone: settings arrive there, and a test of a wrong one wants the package's own
    ValueError.
    """
    return function if function.__name__ == "__init__" else _CHECK(function)
