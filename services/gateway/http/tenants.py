"""Whose request this is.

A trusted proxy in front of the gateway says so in a header that it sets itself, whatever the client sent. Without such
a proxy the option stays off and all requests are of one tenant: a header from a client would let it choose a tenant
whose cached prompts it may hit, and whose share of a `fair` pool it may use up.
"""

from starlette.datastructures import Headers

from shared.errors import InvalidRequest

MAX_TENANT = 128
"""Characters of a tenant's name."""


def tenant_of(headers: Headers, name: str) -> str:
    """The value of header `name`; empty if `name` is, or if the request has no such header.

    Raises:
        InvalidRequest: the header comes twice (a proxy that adds to what a client sent), or is no short printable text.
    """
    values = headers.getlist(name) if name else []
    if not values:
        return ""
    if len(values) > 1:
        raise InvalidRequest(f"header {name}: given {len(values)} times", param=name)
    tenant = values[0].strip()
    if len(tenant) > MAX_TENANT or not (tenant.isascii() and tenant.isprintable()):
        raise InvalidRequest(f"header {name}: at most {MAX_TENANT} printable ASCII characters", param=name)
    return tenant
