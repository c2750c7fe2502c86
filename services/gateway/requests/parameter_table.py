"""The documentation of numeric parameters, from the table that validates them."""

from shared.sampling import NUMERIC_PARAMS, ParamSpec


def parameter_table() -> str:
    """A Markdown table: one line per parameter."""
    lines = ["| parameter | type | default | range | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_line, NUMERIC_PARAMS)]) + "\n"


def _line(spec: ParamSpec) -> str:
    default = "none" if spec.default is None else f"{spec.default:g}"
    kind = {int: "integer", float: "number"}[spec.type]
    return f"| `{spec.name}` | {kind} | {default} | {spec.range} | {spec.doc} |"
