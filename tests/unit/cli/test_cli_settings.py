"""Where options come from, and which layer wins."""

from pathlib import Path

import pytest

from services.cli.settings import load_settings
from shared.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGEWIRE_PORT", "PAGEWIRE_REDIS_URL", "REDIS_URL", "PAGEWIRE_STATE", "PAGEWIRE_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(tmp_path / "c.toml", "port = 1001\nworkers = 3\nblock-size = 32\n")
    assert load_settings({}).port == 8000
    assert load_settings({"port": None}, config).port == 1001
    monkeypatch.setenv("PAGEWIRE_PORT", "1002")
    assert load_settings({"port": None}, config).port == 1002
    settings = load_settings({"port": 1003}, config)
    assert (settings.port, settings.workers, settings.block_size) == (1003, 3, 32)


def test_yaml_and_toml_give_the_same(tmp_path: Path) -> None:
    toml = write(tmp_path / "c.toml", 'model = "m"\nmax_num_seqs = 5\ncors_origin = ["http://a", "http://b"]\n')
    yaml = write(tmp_path / "c.yaml", "model: m\nmax-num-seqs: 5\ncors-origin: [http://a, http://b]\n")
    assert load_settings({}, toml).model_dump() == load_settings({}, yaml).model_dump()
    assert load_settings({}, yaml).cors_origin == ["http://a", "http://b"]


def test_redis_url_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = write(tmp_path / "c.toml", 'redis_url = "redis://file"\n')
    assert load_settings({}, config).redis_url == "redis://file"
    monkeypatch.setenv("REDIS_URL", "redis://plain")
    assert load_settings({}, config).redis_url == "redis://plain"
    monkeypatch.setenv("PAGEWIRE_REDIS_URL", "redis://own")
    assert load_settings({}, config).redis_url == "redis://own"
    assert load_settings({"redis_url": "redis://flag"}, config).redis_url == "redis://flag"


def test_state_directory_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_STATE", "/somewhere")
    assert load_settings({}).state_dir == Path("/somewhere")
    assert load_settings({"state_dir": Path("/else")}).state_dir == Path("/else")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": 70000}, "option port"),
        ({"workers": 0}, "option workers"),
        ({"dtype": "int3"}, "option dtype"),
        ({"eviction": "random"}, "option eviction"),
        ({"policy": "lifo"}, "option policy"),
        ({"priority_ageing_s": 0}, "option priority-ageing-s"),
        ({"tenant_weights": "a:2"}, "option tenant-weights"),
        ({"tenant_weights": "a=0"}, "option tenant-weights: .*'a=0' is not a tenant and its weight"),
        ({"tenant_weights": "a=-1"}, "option tenant-weights: .*'a=-1' is not a tenant and its weight"),
        ({"tenant_weights": "a=1,a=2"}, "option tenant-weights: .*'a=2' is not a tenant and its weight"),
        ({"itl_target_s": float("inf")}, "option itl-target-s: .*finite"),
        ({"num_blocks": 99999999999}, "option num-blocks"),
        ({"num_cpu_blocks": 99999999999}, "option num-cpu-blocks"),
        ({"swap_space": 1.0, "num_cpu_blocks": 8}, "option swap-space: .*num-cpu-blocks gives 8 blocks already"),
        ({"max_bypasses": -1}, "option max-bypasses"),
        ({"fit": "tight"}, "option fit"),
        ({"max_num_seqs": 0}, "option max-num-seqs"),
    ],
)
def test_a_wrong_value_names_its_option(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(flags)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.toml", "prot = 1\n", "unknown option prot"),
        ("c.toml", "port = \n", "c.toml"),
        ("c.yaml", "a: [1\n", "c.yaml"),
        ("c.yaml", "- 1\n", "a table of options"),
    ],
)
def test_a_wrong_config_file_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings({}, write(tmp_path / name, text))


def test_a_missing_config_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_settings({}, tmp_path / "none.toml")
