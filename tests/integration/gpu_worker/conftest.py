"""A tiny Llama, worker processes around it, and a test that acts as the scheduler's leader."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
import torch
from safetensors.torch import save_file

from services.gpu_worker.service.loading import load_worker
from services.gpu_worker.service.partition import Partition
from services.gpu_worker.service.worker import LoadedWorker, ResettableEngine, Worker
from services.gpu_worker.settings import Settings
from shared.channel import Channel
from shared.keys import Keys
from shared.leases import read_members
from shared.messages import (
    Decoder,
    Lease,
    LogMessage,
    NewRow,
    StepPlan,
    StepResult,
    Tick,
    WorkerFenced,
    WorkerState,
    encode,
)
from shared.model_store import resolve
from shared.packing import pack_int32
from shared.sampling import SamplingParams
from shared.scripts import AppendStatus, TickCommit, XAdd, acquire, commit_ticks, fence_worker, read_fence
from shared.streams import scan

ROOT = Path(__file__).parents[3]
WORKER = "worker-0"
_log_decoder: Decoder[LogMessage] = Decoder(LogMessage)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def wait_until(condition: Callable[[], object], *, timeout_s: float = 30.0, what: str = "condition") -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"timed out: {what}")
        time.sleep(0.01)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random two-layer Llama."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    random = torch.Generator().manual_seed(5)
    shapes = {"model.embed_tokens.weight": (96, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (32,),
            f"{prefix}post_attention_layernorm.weight": (32,),
            f"{prefix}self_attn.q_proj.weight": (32, 32),
            f"{prefix}self_attn.k_proj.weight": (16, 32),
            f"{prefix}self_attn.v_proj.weight": (16, 32),
            f"{prefix}self_attn.o_proj.weight": (32, 32),
            f"{prefix}mlp.gate_proj.weight": (64, 32),
            f"{prefix}mlp.up_proj.weight": (64, 32),
            f"{prefix}mlp.down_proj.weight": (32, 64),
        }
    tensors = {name: torch.randn(shape, generator=random) * 0.3 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass
class Leader:
    """The scheduler's side of the protocol, driven by hand. Ticks and plan ids are counted here."""

    client: redis.Redis
    keys: Keys
    epoch: int = 0
    tick: int = 0
    plan_ids: dict[int, int] = field(default_factory=dict)
    """Incarnation → last plan id."""

    def __post_init__(self) -> None:
        self.channel = Channel(self.client)

    def lead(self) -> "Leader":
        lease = Lease("scheduler", "test", "leader", 0, WorkerState.READY)
        self.epoch = acquire(self.client, self.keys, instance="leader", ttl_ms=600_000, lease=lease)
        assert self.epoch > 0
        return self

    # ------------------------------------------------------------ membership

    def workers(self) -> list[Lease]:
        """Leases of live workers."""
        return [
            lease for lease in read_members(self.client, self.keys).values() if lease and lease.service == "gpu_worker"
        ]

    def ready_worker(self, instance: str = "", timeout_s: float = 60.0) -> Lease:
        """Wait for a ready worker (that registered as `instance`)."""

        def ready() -> list[Lease]:
            return [w for w in self.workers() if w.state is WorkerState.READY and instance in ("", w.instance)]

        wait_until(ready, timeout_s=timeout_s, what=f"worker {instance} ready")
        return ready()[0]

    def fence(self, new_holder: str, worker: str = WORKER) -> int:
        """End the present incarnation and hand the next one to `new_holder`."""
        now = read_fence(self.client, self.keys).workers.get(worker)
        incarnation = fence_worker(
            self.client,
            self.keys,
            epoch=self.epoch,
            worker=worker,
            expected=now.incarnation if now else 0,
            new_holder=new_holder,
            reason="test",
        )
        assert incarnation > 0
        return incarnation

    def admit(self, instance: str = "") -> int:
        """Wait for a ready worker and give it the seat; answers the incarnation."""
        return self.fence(self.ready_worker(instance).instance)

    # ------------------------------------------------------------ plans and results

    def plan(
        self,
        incarnation: int,
        *,
        added: Sequence[NewRow] = (),
        blocks: Sequence[tuple[int, int]] = (),
        chunks: Sequence[tuple[int, int]] = (),
        dropped: Sequence[int] = (),
    ) -> StepPlan:
        """The next plan of `incarnation`, not yet sent."""
        self.tick += 1
        plan_id = self.plan_ids[incarnation] = self.plan_ids.get(incarnation, 0) + 1
        return StepPlan(
            plan_id=plan_id,
            tick=Tick(number=self.tick, intake_id="0-0", log_id="0-0", now=0.0),
            dropped=tuple(dropped),
            added=tuple(added),
            blocks=pack_int32(number for pair in blocks for number in pair),
            chunks=tuple(chunks),
        )

    def send(self, incarnation: int, *plans: StepPlan) -> None:
        """Commit plans in one pipeline, as a leader that plans ahead does."""
        commits = [
            TickCommit(
                self.epoch,
                plan.tick.number,
                (XAdd(self.keys.plans(WORKER, incarnation), encode(plan), f"{plan.plan_id}-0"),),
            )
            for plan in plans
        ]
        assert commit_ticks(self.channel, self.keys, commits) == [AppendStatus.OK] * len(plans)

    def start_request(
        self, incarnation: int, request_id: str = "r", *, row: int = 0, max_tokens: int = 100, num_prompt: int = 5
    ) -> None:
        """Send the plan that prefills a prompt at once; blocks for 59 more tokens come with it."""
        prompt = [5 + i % 89 for i in range(num_prompt)]
        params = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0, ignore_eos=True)
        new = NewRow(row, request_id, pack_int32(prompt), len(prompt), 0, params)
        blocks = [(row, 4 * row + i) for i in range(-(-(num_prompt + 59) // 16))]
        self.send(incarnation, self.plan(incarnation, added=[new], blocks=blocks, chunks=[(row, len(prompt))]))

    def skip_plan(self, incarnation: int) -> None:
        """Leave one plan id out."""
        self.plan_ids[incarnation] += 1

    def decode(self, incarnation: int, steps: int) -> None:
        """Send `steps` plans that only decode."""
        self.send(incarnation, *[self.plan(incarnation) for _ in range(steps)])

    def log(self) -> list[LogMessage]:
        """The whole step log."""
        return [_log_decoder.decode(entry.payload) for entry in scan(self.client, self.keys.steps)]

    def results(self, incarnation: int) -> list[StepResult]:
        return [m for m in self.log() if isinstance(m, StepResult) and m.incarnation == incarnation]

    def fenced(self) -> list[WorkerFenced]:
        return [message for message in self.log() if isinstance(message, WorkerFenced)]

    def await_results(self, incarnation: int, count: int, timeout_s: float = 30.0) -> list[StepResult]:
        wait_until(lambda: len(self.results(incarnation)) >= count, timeout_s=timeout_s, what=f"{count} results")
        return self.results(incarnation)


@pytest.fixture
def leader(redis_client: redis.Redis, keys: Keys) -> Leader:
    return Leader(redis_client, keys).lead()


@pytest.fixture(scope="session")
def loaded_worker(tiny_llama: Path) -> LoadedWorker:
    """A warm engine around the tiny model, for workers inside the test process."""
    settings = Settings(
        device="cpu",
        dtype="float32",
        num_blocks=256,
        num_cpu_blocks=16,
        max_num_seqs=8,
        max_num_batched_tokens=4096,
    )
    partition = Partition(cores=(), num_threads=torch.get_num_threads())
    return load_worker(settings, resolve(str(tiny_llama), tiny_llama), partition, lambda share: None)


class WorkerThread:
    """The worker without its process: everything but signals and exit codes. Starts in a fraction of a second."""

    def __init__(self, url: str, keys: Keys, loaded: LoadedWorker, drain_grace_s: float) -> None:
        self.worker = Worker(url, keys, name=WORKER, instance="first", drain_grace_s=drain_grace_s)
        self.error: Exception | None = None
        self.loaded = loaded
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.worker.register()
        self._thread.start()

    def _run(self) -> None:
        try:
            self.worker.run(lambda report: self.loaded)
        except Exception as error:
            self.error = error

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float = 10.0) -> None:
        """Wait for the end."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        """Drain and give the lease back."""
        self.worker.drain()
        self.join()
        self.worker.release()


@pytest.fixture
def run_worker(
    redis_url: str, redis_client: redis.Redis, keys: Keys, loaded_worker: LoadedWorker
) -> Iterator[Callable[..., WorkerThread]]:
    """Starts a worker inside the test process (at `url`, by default the Redis of the test)."""
    started: list[WorkerThread] = []

    def run(
        url: str = redis_url,
        drain_grace_s: float = 5.0,
        wrap: Callable[[ResettableEngine], ResettableEngine] = lambda engine: engine,
    ) -> WorkerThread:
        loaded = LoadedWorker(wrap(loaded_worker.engine), loaded_worker.capacity)
        started.append(WorkerThread(url, keys, loaded, drain_grace_s))
        return started[-1]

    yield run
    redis_client.delete(keys.leader_lease)  # nobody leads any more: draining workers need not wait to be let go
    for worker in started:
        worker.stop()


class WorkerProcess:
    """`python -m services.gpu_worker` on the tiny model."""

    def __init__(self, log: Path, **settings: object) -> None:
        self.log = log
        given = {
            "name": WORKER,
            "instance": "first",
            "device": "cpu",
            "dtype": "float32",
            "num_blocks": 64,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
        } | settings
        environment = os.environ | {f"PAGEWIRE_{name.upper()}": str(value) for name, value in given.items()}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.gpu_worker"], cwd=ROOT, env=environment, stderr=output, stdout=output
            )

    @property
    def text(self) -> str:
        return self.log.read_text()


@pytest.fixture
def start_worker(
    redis_url: str, keys: Keys, tiny_llama: Path, tmp_path: Path
) -> Iterator[Callable[..., WorkerProcess]]:
    """Starts worker processes; whatever still runs at the end of the test is killed."""
    started: list[WorkerProcess] = []
    common: dict[str, object] = {"redis_url": redis_url, "pool": keys.pool, "model": tiny_llama}

    def start(**settings: object) -> WorkerProcess:
        worker = WorkerProcess(tmp_path / f"worker-{len(started)}.log", **(common | settings))
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.process.kill()
        worker.process.wait()
        print(worker.text)  # shown if the test failed
