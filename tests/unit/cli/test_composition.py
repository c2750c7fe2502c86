"""What each service is told."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from services.cli import composition
from services.cli.settings import Settings, load_settings
from services.gateway.settings import Settings as GatewaySettings
from services.gpu_worker.settings import Settings as WorkerSettings
from services.scheduler.settings import Settings as SchedulerSettings
from shared.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return tmp_path


def environment(settings: Settings, model: Path) -> dict[str, str]:
    return composition.shared_environment(
        settings, {"PATH": "/bin"}, redis_url="unix://:secret@/run/redis.sock?db=0", model=model, served_name="tiny"
    )


def load(kind: type, values: Mapping[str, str], monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as context:
        for name, value in values.items():
            context.setenv(name, value)
        return kind()


def test_workers_are_told_to_quantize(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, expected in (({"quantization": "int8"}, "int8"), ({}, "none")):
        base = environment(load_settings(flags), model)
        told = load(WorkerSettings, composition.worker_spec(base, 0, 1).environment, monkeypatch)
        assert told.quantization == expected


def test_workers_are_told_what_their_cache_holds(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, expected in (({"kv_cache_dtype": "int8"}, "int8"), ({"kv_cache_dtype": "fp8"}, "fp8"), ({}, "auto")):
        base = environment(load_settings(flags), model)
        told = load(WorkerSettings, composition.worker_spec(base, 0, 1).environment, monkeypatch)
        assert told.kv_cache_dtype == expected


def test_scheduler_and_worker_agree(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"block_size": 32, "max_num_seqs": 7, "max_num_batched_tokens": 96, "plan_ahead": 1, "log_level": "debug"}
    base = environment(load_settings(flags), model)
    scheduler = load(SchedulerSettings, composition.scheduler_spec(base).environment, monkeypatch)
    worker = load(WorkerSettings, composition.worker_spec(base, 1, 2).environment, monkeypatch)
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "redis_url", "pool"):
        assert getattr(scheduler, name) == getattr(worker, name), name
    assert (worker.name, worker.worker_index, worker.num_workers) == ("worker-1", 1, 2)
    assert (scheduler.block_size, scheduler.max_model_len, scheduler.plan_ahead) == (32, 4096, 1)


def test_the_scheduler_is_told_how_to_keep_blocks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {
        "enable_prefix_caching": False,
        "eviction": "lfu",
        "reclaim": "immediate",
        "fit": "worst",
        "preemption": "swap",
        "demotion": False,
    }
    bases = [environment(load_settings(options), model) for options in (flags, {})]
    given, default = (load(SchedulerSettings, composition.scheduler_spec(b).environment, monkeypatch) for b in bases)
    assert {name: getattr(given, name) for name in flags} == flags
    assert {name: getattr(default, name) for name in flags} == {
        "enable_prefix_caching": True,
        "eviction": "lru",
        "reclaim": "lazy",
        "fit": "first",
        "preemption": "auto",
        "demotion": True,
    }


def test_the_scheduler_is_told_who_goes_first(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"policy": "fair", "priority_ageing_s": 5.0, "tenant_weights": "a=2,b=1", "max_bypasses": 3}
    bases = [environment(load_settings(options), model) for options in (flags, {})]
    given, default = (load(SchedulerSettings, composition.scheduler_spec(b).environment, monkeypatch) for b in bases)
    assert {name: getattr(given, name) for name in flags} == flags
    assert [getattr(default, name) for name in flags] == ["fcfs", 60.0, "", 16]


def test_workers_are_told_of_their_host_pool(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = {"num_cpu_blocks": 0, "swap_space": 0.0, "cpu_cache_dtype": "auto"}
    for flags in ({"num_cpu_blocks": 64, "cpu_cache_dtype": "int8"}, {"num_cpu_blocks": 0, "swap_space": 1.5}, {}):
        base = environment(load_settings(flags), model)
        told = load(WorkerSettings, composition.worker_spec(base, 0, 1).environment, monkeypatch)
        assert {name: getattr(told, name) for name in default} == default | flags


def test_scheduler_and_worker_agree_on_what_was_not_given(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = environment(load_settings({}), model)
    scheduler = load(SchedulerSettings, composition.scheduler_spec(base).environment, monkeypatch)
    worker = load(WorkerSettings, composition.worker_spec(base, 0, 1).environment, monkeypatch)
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        assert getattr(scheduler, name) == getattr(worker, name), name


def test_the_gateway_understands_its_environment(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(
        {"cors_origin": ["http://a", "http://b"], "port": 8123, "max_model_len": 512, "tenant_header": "X-T"}
    )
    base = environment(settings, model)
    spec = composition.gateway_spec(settings, base, 8123)
    gateway = load(GatewaySettings, spec.environment, monkeypatch)
    assert gateway.model_names == ("tiny",)
    assert gateway.cors_origins == ("http://a", "http://b")
    assert gateway.tenant_header == "X-T"
    assert (gateway.port, gateway.model, gateway.max_model_len) == (8123, model, 512)
    assert gateway.shutdown_grace_s < spec.stop_timeout_s


def test_no_secret_on_a_command_line(model: Path) -> None:
    settings = load_settings({})
    base = environment(settings, model)
    specs = [composition.gateway_spec(settings, base, 1), composition.scheduler_spec(base)]
    specs.append(composition.worker_spec(base, 0, 1))
    assert not any("secret" in part for spec in specs for part in spec.command)


def test_a_model_without_context_length_leaves_it_to_the_worker(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "PAGEWIRE_MAX_MODEL_LEN" not in environment(load_settings({}), tmp_path)
    assert environment(load_settings({"max_model_len": 64}), tmp_path)["PAGEWIRE_MAX_MODEL_LEN"] == "64"


def test_a_model_without_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        environment(load_settings({}), tmp_path)
