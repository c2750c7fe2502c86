"""Whose request this is.

An API key of the key file has a tenant. Otherwise a trusted proxy in front of the gateway may say so, in a header that
it sets itself, whatever the client sent. Without either all requests are of one tenant: a header from a client would
let it choose a tenant whose cached prompts it may hit, and whose share of a `fair` pool it may use up.
"""

from starlette.datastructures import Headers
from starlette.requests import Request

from services.gateway.access import Caller
from services.gateway.settings import Settings
from shared.errors import InvalidRequest

MAX_TENANT = 128
"""Characters of a tenant's name."""


def tenant_of_request(request: Request, settings: Settings) -> str:
    """The tenant of the caller's key, else what a trusted proxy says.

    Raises:
        InvalidRequest: as `tenant_of`.
    """
    caller: Caller = request.state.caller
    return caller.tenant if caller.tenant is not None else tenant_of(request.headers, settings.tenant_header)


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
