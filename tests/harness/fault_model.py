"""The models of the fault tests: a tiny random Llama of byte tokens, quick on two cores, or the default one."""

import random
from dataclasses import dataclass
from pathlib import Path

from services.cli.settings import load_settings
from shared.model_store import DEFAULT_MODEL, resolve
from tests.fakes.byte_model import write_byte_model
from tests.harness.reference_text import OUTPUT_TOKENS, greedy_references, make_prompts

TINY, DEFAULT = "tiny", "default"
TINY_PROMPTS = 24
TINY_CHECKED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class FaultModel:
    """A model folder, prompts for it and what Transformers says greedily to some of them."""

    model: str
    """For `--model`."""
    prompts: list[list[int]]
    greedy: dict[int, list[int]]
    """Index of a prompt → the first tokens of its greedy continuation, EOS ignored."""
    num_tokens: int
    """Output of a stream."""


def prepare_model(name: str, folder: Path) -> FaultModel:
    """The model of that name; the tiny one is written to `folder`."""
    return _tiny(folder) if name == TINY else _default()


def _tiny(folder: Path) -> FaultModel:
    from tests.fakes.tiny_llama import EOS, VOCAB_SIZE, generate, write_tiny_llama  # imports torch

    folder.mkdir(parents=True, exist_ok=True)
    write_byte_model(folder)
    peer = write_tiny_llama(folder)
    rng = random.Random(0)
    lengths = [rng.choice((3, 15, 16, 17, 31, 48, 64, 90)) for _ in range(TINY_PROMPTS)]
    prompts = [[rng.choice([t for t in range(32, 127) if t != EOS]) for _ in range(length)] for length in lengths]
    greedy = {index: generate(peer, prompts[index], TINY_CHECKED_TOKENS) for index in range(0, TINY_PROMPTS, 2)}
    assert all(0 <= token < VOCAB_SIZE for tokens in greedy.values() for token in tokens)
    return FaultModel(str(folder), prompts, greedy, num_tokens=320)


def _default() -> FaultModel:
    folder = resolve(DEFAULT_MODEL, load_settings({}).home).require_folder()
    prompts = [prompt for prompt in make_prompts(folder) if len(prompt) <= 129]
    checked = range(0, len(prompts), 2)
    greedy = dict(zip(checked, greedy_references(folder, [prompts[index] for index in checked]), strict=True))
    assert all(len(tokens) == OUTPUT_TOKENS for tokens in greedy.values())
    return FaultModel(DEFAULT_MODEL, prompts, greedy, num_tokens=96)
