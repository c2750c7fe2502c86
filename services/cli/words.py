"""Random but repeatable prompts for load tests."""

import random

_TEXT = """
time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea body information
back parent face others level office door health person art war history party result change morning reason
research girl guy moment air teacher force education river mountain summer winter letter answer
"""
_WORDS = _TEXT.split()

TOKEN_ID_RANGE = (256, 8192)
"""Ordinary entries of every vocabulary in use: past control tokens and bytes, below the smallest vocabulary's size."""


def random_prompt(rng: random.Random, num_words: int) -> str:
    """`num_words` English nouns: about as many tokens."""
    return " ".join(rng.choices(_WORDS, k=num_words))


def random_token_ids(rng: random.Random, num_tokens: int) -> list[int]:
    """Exactly `num_tokens` token ids."""
    return [rng.randrange(*TOKEN_ID_RANGE) for _ in range(num_tokens)]
