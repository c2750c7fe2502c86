"""Which tenant a request is of: what a trusted proxy says, and never two things at once."""

import pytest
from starlette.datastructures import Headers

from services.gateway.http.tenants import MAX_TENANT, tenant_of
from shared.errors import InvalidRequest


def headers(*values: bytes) -> Headers:
    return Headers(raw=[(b"x-tenant", value) for value in values])


def test_the_tenant_is_what_the_header_says() -> None:
    assert tenant_of(headers(b" acme "), "X-Tenant") == "acme"
    assert tenant_of(headers(), "X-Tenant") == ""


def test_without_the_option_no_header_counts() -> None:
    assert tenant_of(headers(b"acme"), "") == ""


@pytest.mark.parametrize(
    "values", [(b"acme", b"other"), (b"a" * (MAX_TENANT + 1),), ("tést".encode("latin-1"),), (b"a\x07",)]
)
def test_a_header_that_a_client_may_have_had_a_hand_in_is_refused(values: tuple[bytes, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tenant_of(headers(*values), "X-Tenant")
    assert caught.value.param == "X-Tenant"
