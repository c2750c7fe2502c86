"""Priority and tenant of a request, from HTTP to its record."""

from tests.integration.gateway.conftest import OpenScene


def test_priority_and_tenant_are_in_the_record(open_scene: OpenScene) -> None:
    scene = open_scene(tenant_header="X-Tenant")
    body = {"prompt": "hi", "priority": -7}
    answer = scene.gateway.http.post("/v1/completions", json=body, headers={"x-tenant": "acme"})
    assert answer.status_code == 200
    submission = scene.pool.submissions[answer.json()["id"]]
    assert (submission.priority, submission.tenant) == (-7, "acme")


def test_a_wrong_priority_or_tenant_is_refused_by_name_and_not_queued(open_scene: OpenScene) -> None:
    scene = open_scene(tenant_header="X-Tenant")
    for priority in (1001, -1001, 0.5, "1", True):
        answer = scene.post("/v1/completions", prompt="hi", priority=priority)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority"), priority
    twice = [("x-tenant", "acme"), ("x-tenant", "other")]
    answer = scene.gateway.http.post("/v1/completions", json={"prompt": "hi"}, headers=twice)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Tenant")
    assert not scene.pool.submissions


def test_without_a_trusted_proxy_a_header_names_no_tenant(open_scene: OpenScene) -> None:
    scene = open_scene()
    answer = scene.gateway.http.post("/v1/completions", json={"prompt": "hi"}, headers={"x-tenant": "acme"})
    assert scene.pool.submissions[answer.json()["id"]].tenant == ""
