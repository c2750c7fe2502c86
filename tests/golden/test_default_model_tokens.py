"""The default model in float32 says what Transformers says, token for token."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.gpu_worker.cache.kv_cache import KVCache
from services.gpu_worker.engine import Engine, EngineConfig
from services.gpu_worker.models.loading import load_model
from shared.model_store import DEFAULT_HOME, DEFAULT_MODEL, resolve
from shared.sampling import SamplingParams
from tests.fakes.engine_driver import EngineDriver
from tests.fakes.tiny_llama import generate

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a village by the sea, there lived"]
NUM_TOKENS = 48


@pytest.fixture(autouse=True)
def _one_thread():
    """Barriers between two threads wait for whatever else runs on the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_three_prompts_together_equal_each_alone_in_transformers() -> None:
    folder = resolve(DEFAULT_MODEL, DEFAULT_HOME).require_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    model = load_model(folder, dtype="float32", device="cpu")
    cache = KVCache.allocate(model.config, 32, 16, model.dtype, model.device)
    driver = EngineDriver(Engine(model, cache, EngineConfig(max_num_seqs=4, max_model_len=256)))
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        driver.add(str(number), prompt, params)
        driver.step(chunk_size=4)
    outputs = driver.run(chunk_size=4)
    del model, cache, driver
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for number, prompt in enumerate(prompts):
        assert outputs[str(number)] == generate(peer, prompt, NUM_TOKENS), PROMPTS[number]
