"""Rules by which all commands read whole numbers and others."""

from collections.abc import Callable
from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from fedjaxsim.runs.numbers import number, whole

REGISTRY = ConstructorRegistry()
"""Rules for the parser."""
_KINDS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("INT", whole),
    float: ("FLOAT", number),
}
_NONE = "None"


@REGISTRY.primitive_rule
def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Return the rule of a number or an optional number; None for other types."""
    for kind, (metavar, read) in _KINDS.items():
        if info.type in (kind, kind | None):
            optional = info.type != kind
            return PrimitiveConstructorSpec(
                nargs=1,
                metavar=metavar,
                instance_from_str=lambda words, read=read, optional=optional: (
                    None if optional and words[0] == _NONE else read(words[0])
                ),
                is_instance=lambda value, kind=kind, optional=optional: (
                    (optional and value is None)
                    or (isinstance(value, (int, kind)) and not isinstance(value, bool))
                ),
                str_from_instance=lambda value: [str(value)],
            )
    return None
