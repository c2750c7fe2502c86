"""API keys: which are found, which files are refused, and that no message shows a key."""

import hmac
from hashlib import sha256
from pathlib import Path

import pytest

from services.cli.keys import new_key
from services.gateway.access import check_callers, is_loopback, load_keys
from shared.errors import ConfigError
from shared.scripts.quotas import Quota

KEY = "pw-0123456789abcdef"
DIGEST = sha256(KEY.encode()).hexdigest()


def write(folder: Path, text: str) -> Path:
    file = folder / "keys.toml"
    file.write_text(text)
    return file


def test_a_key_of_the_file_has_tenant_and_quota(tmp_path: Path) -> None:
    text = f'[[keys]]\nname = "alice"\nsha256 = "{DIGEST}"\nmax_concurrent = 3\ntokens_per_minute = 120\n'
    keys = load_keys("", write(tmp_path, text))
    caller = keys.find(KEY)
    assert caller is not None
    assert (caller.name, caller.tenant, caller.quota) == ("alice", "alice", Quota("alice", 3, 2.0))
    for wrong in ("", KEY + "x", KEY[:-1], KEY.upper(), DIGEST, "\udcff", "ä" * 9):
        assert keys.find(wrong) is None


def test_every_key_is_compared_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 127: neither where a wrong key differs, nor which of the keys is the right one, takes less time."""
    blocks = [new_key(name, None)[1] for name in ("alice", "bob")]
    keys, compared = load_keys(KEY, write(tmp_path, "\n".join(blocks))), list[int]()

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert keys.find(KEY) is not None and compared == [32] * 3
    assert keys.find("x") is None and compared == [32] * 6


def test_a_key_in_the_open_is_of_the_default_tenant() -> None:
    keys = load_keys("open-sesame", None)
    caller = keys.find("open-sesame")
    assert caller is not None and caller.tenant is None and caller.quota is None


def test_the_command_makes_a_key_and_its_block(tmp_path: Path) -> None:
    made = [new_key("alice", None), new_key("bob", 'a"c\\me')]
    keys = load_keys("", write(tmp_path, "\n".join(block for _, block in made)))
    callers = [keys.find(key) for key, _ in made]
    assert [(c.name, c.tenant) for c in callers if c] == [("alice", "alice"), ("bob", 'a"c\\me')]
    assert all(key not in block for key, block in made) and made[0][0] != new_key("alice", None)[0]
    with pytest.raises(ConfigError):
        new_key("no spaces", None)


@pytest.mark.parametrize(
    "text",
    [
        "keys = 1",
        "",
        "[[keys]]\nname = 'a'",
        f"[[keys]]\nname = 'a'\nsha256 = '{DIGEST.upper()}'",
        f"[[keys]]\nname = 'a b'\nsha256 = '{DIGEST}'",
        f"[[keys]]\nname = 'a'\nsha256 = '{DIGEST}'\nkey = '{KEY}'",
        f"[[keys]]\nname = 'a'\nsha256 = '{DIGEST}'\nmax_concurrent = -1",
        f"[[keys]]\nname = 'a'\nsha256 = '{DIGEST}'\n[[keys]]\nname = 'b'\nsha256 = '{DIGEST}'",
        f"[[keys]]\nname = 'a'\nsha256 = '{KEY}'",
        "][",
    ],
)
def test_a_wrong_file_is_refused_without_showing_keys(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_keys("", write(tmp_path, text))
    assert KEY not in str(refused.value)


def test_wrong_keys_are_refused_without_showing_them(tmp_path: Path) -> None:
    for wrong in ("short", "with space in it", "ümlaut-key"):
        with pytest.raises(ConfigError) as refused:
            load_keys(wrong, None)
        assert wrong not in str(refused.value)
    with pytest.raises(ConfigError):
        load_keys("", tmp_path / "none.toml")


def test_nobody_serves_others_without_a_key_by_mistake() -> None:
    """Case 136."""
    keys, none = load_keys("open-sesame", None), load_keys("", None)
    for host in ("0.0.0.0", "::", "", "192.0.2.1"):
        assert not is_loopback(host)
        with pytest.raises(ConfigError, match="insecure"):
            check_callers(none, host, insecure=False)
        check_callers(none, host, insecure=True)
        check_callers(keys, host, insecure=False)
    for host in ("127.0.0.1", "::1", "localhost"):
        check_callers(none, host, insecure=False)
