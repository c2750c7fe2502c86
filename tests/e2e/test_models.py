"""`pagewire up --model <folder>` with models that are not of the default's kind: text equals Transformers' `generate`.

The models have 300 rows of vocabulary, their tokenizer 259 entries, as models do whose vocabulary is padded: a token
without an entry has no text and does no harm.
"""

import json
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from services.gpu_worker.cache.kv_cache import KVCache, cache_dtype
from services.gpu_worker.engine import Engine, EngineConfig
from services.gpu_worker.models.loading import load_model
from services.gpu_worker.models.model import Model
from shared.model_store import resolve
from shared.sampling import SamplingParams
from tests.fakes.byte_model import EOS, VOCAB_SIZE, write_byte_model
from tests.fakes.engine_driver import EngineDriver
from tests.fakes.tiny_gguf import write_gguf
from tests.fakes.tiny_llama import generate
from tests.fakes.tiny_models import FALLBACK, NATIVE, Tiny, write_tiny
from tests.harness.fixtures import StartStack

pytestmark = [pytest.mark.model]

NUM_TOKENS = 40
PROMPT = "One two three."
PROMPTS = [PROMPT, "A prompt that is longer than the window of the layers that have one.", "x"]


def write_folder(folder: Path, tiny: Tiny) -> PreTrainedModel:
    write_byte_model(folder)
    peer = write_tiny(folder, tiny, eos_token_id=EOS)
    assert peer.config.vocab_size > VOCAB_SIZE
    return peer


def expected_text(folder: Path, peer: PreTrainedModel, prompt: str) -> str:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.decode(generate(peer, tokenizer.encode(prompt).ids, NUM_TOKENS))


@pytest.mark.parametrize("tiny", [NATIVE["gemma2"], FALLBACK["mixtral"]], ids=["gemma2", "mixtral"])
def test_completions_and_chat_equal_transformers(tiny: Tiny, tmp_path: Path, start_stack: StartStack) -> None:
    folder = tmp_path / tiny.model_type
    folder.mkdir()
    peer = write_folder(folder, tiny)
    with start_stack(model=folder, dtype="float32", num_blocks=200) as stack:
        options = {"model": stack.model, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        for prompt in PROMPTS:
            answer = httpx.post(f"{stack.url}/v1/completions", json={**options, "prompt": prompt}, timeout=60).json()
            assert answer["choices"][0]["text"] == expected_text(folder, peer, prompt)
            assert answer["usage"]["completion_tokens"] == NUM_TOKENS
        messages = [{"role": "user", "content": "Hello!"}]
        answer = httpx.post(f"{stack.url}/v1/chat/completions", json={**options, "messages": messages}, timeout=60)
        text = expected_text(folder, peer, "<|start|>user\nHello!<|end|>\n<|start|>assistant\n")
        assert answer.json()["choices"][0]["message"]["content"] == text
        beyond = {**options, "prompt": [VOCAB_SIZE, 299], "logit_bias": {"280": 100}, "max_tokens": 3}
        answer = httpx.post(f"{stack.url}/v1/completions", json=beyond, timeout=60).json()
        assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("", 3)
        outside = httpx.post(f"{stack.url}/v1/completions", json={**options, "prompt": [300]}, timeout=60)
        assert outside.status_code == 400


def test_a_gguf_file_is_served_in_its_blocks(tmp_path: Path, start_stack: StartStack) -> None:
    """The text is that of the engine alone over the same blocks, and the worker's log tells of them."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tied=True)
    with start_stack(model=file, quantization="gguf", home=tmp_path / "home", num_blocks=200) as stack:
        options = {"model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "prompt": PROMPT}
        answer = httpx.post(f"{stack.url}/v1/completions", json=options, timeout=60).json()
        log = "".join(path.read_text() for path in (stack.state_dir / "logs").glob("worker*"))
    folder = resolve(str(file), tmp_path / "home").require_folder()
    model = load_model(folder, dtype="auto", device="cpu", quantization="gguf")
    assert answer["choices"][0]["text"] == greedy_text(model, folder)
    assert "tiny.gguf: matrices of {'Q8_0': " in log


def greedy_text(model: Model, folder: Path) -> str:
    """What an engine without a stack makes of PROMPT."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    kinds = model.stored_dtype, model.dtype
    cache = KVCache.allocate(model.config, 20, 16, cache_dtype(*kinds, model.config, 16, model.device), model.device)
    driver = EngineDriver(Engine(model, cache, EngineConfig(1, 128)))
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=0, temperature=0.0, ignore_eos=True)
    driver.add("a", tokenizer.encode(PROMPT).ids, params)
    return str(tokenizer.decode(driver.run()["a"]))


def test_a_model_that_cannot_be_served_is_named_at_once(tmp_path: Path, start_stack: StartStack) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    write_folder(folder, NATIVE["mistral"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(RuntimeError, match="hidden_act 'relu'"), start_stack(model=folder):
        pass
