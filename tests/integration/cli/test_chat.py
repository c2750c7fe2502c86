"""`pagewire chat` as a user runs it, against a server with known words."""

import signal
import subprocess
import sys
import time

from services.cli.ports import free_port
from tests.harness.fake_openai import FakeOpenAI, fake_openai


def chat(fake: FakeOpenAI, *arguments: str, typed: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.cli", "chat", "--url", f"{fake.url}/v1/", *arguments]
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=30, check=False)


def test_one_question() -> None:
    with fake_openai() as fake:
        done = chat(fake, "What?", "--system", "Be brief.", "--temperature", "0", "--max-tokens", "9")
    assert (done.returncode, done.stdout) == (0, "Hello wörld!\n"), done.stderr
    body = fake.requests[0]
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
    assert (body["model"], body["temperature"], body["max_tokens"], body["stream"]) == ("tiny", 0, 9, True)


def test_a_conversation_remembers_and_forgets() -> None:
    with fake_openai(words=("a", "b")) as fake:
        done = chat(fake, typed="one\n\ntwo\n/clear\nthree\n/exit\nfour\n")
    assert done.returncode == 0, done.stderr
    assert [[m["content"] for m in body["messages"]] for body in fake.requests] == [
        ["one"],
        ["one", "ab", "two"],
        ["three"],
    ]


def test_the_end_of_input_ends_it() -> None:
    with fake_openai() as fake:
        assert chat(fake, typed="one").returncode == 0
    assert len(fake.requests) == 1


def test_a_broken_answer_is_one_line() -> None:
    with fake_openai(break_off=True) as fake:
        done = chat(fake, "What?")
    assert done.returncode == 1
    assert done.stderr == "error: the stream broke off\n"


def test_an_error_of_the_server_does_not_end_the_conversation() -> None:
    with fake_openai(fail_every=1) as fake:
        done = chat(fake, typed="one\ntwo\n")
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["error: HTTP 429: queue is full"] * 2
    assert [len(body["messages"]) for body in fake.requests] == [1, 1]


def test_no_server_is_one_line() -> None:
    done = chat(FakeOpenAI(url=f"http://127.0.0.1:{free_port()}"), "What?")
    assert done.returncode == 1
    assert done.stderr.startswith("error: no server at http://127.0.0.1:")
    assert len(done.stderr.splitlines()) == 1


def test_ctrl_c_stops_the_answer_and_not_the_conversation() -> None:
    with fake_openai(words=tuple("abcdefghij"), delay_s=0.2) as fake:
        command = [sys.executable, "-m", "services.cli", "chat", "--url", fake.url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("one\n")
            process.stdin.flush()
            while not fake.requests:
                time.sleep(0.02)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate("two\n", timeout=20)
    assert process.returncode == 0
    assert "[stopped]" in output
    assert "j" not in output.partition("[stopped]")[0].removeprefix("/exit")
    assert fake.requests[1]["messages"][-1] == {"role": "user", "content": "two"}
    assert output.rstrip().endswith("abcdefghij")
