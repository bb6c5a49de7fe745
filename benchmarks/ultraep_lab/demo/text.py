"""Made-up text with domains: the words, a word-level tokenizer, prompts of an exact length.

One word is one token, so ``sample_text(domain, n, seed)`` tokenises to exactly n tokens. The words
of a domain follow from its name alone; every model made with that domain understands them.
"""

import hashlib
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ultraep_serve.errors import ConfigError

DOMAINS = ("law", "code")
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")  # ids 0 to 3
WORDS_PER_DOMAIN = 512
WORDS_SHARED = 64  # words that occur in the text of every domain
SHARED_FRACTION = 0.08  # of the words of a text
SHARED = "(shared)"  # the shared words are drawn like a domain of this name

_CONSONANTS = "bdfghjklmnprstvz"
_VOWELS = "aeiou"
_SYLLABLES = 4  # 80**4 possible words: those of ``DOMAINS`` are all different


def vocabulary() -> list[str]:
    """All tokens by id: special tokens, shared words, then the words of each domain in turn."""
    words = map(domain_words, (SHARED, *DOMAINS))
    return [*SPECIAL_TOKENS, *chain.from_iterable(words)]


@lru_cache(maxsize=64)
def domain_words(name: str) -> tuple[str, ...]:
    """The ``WORDS_PER_DOMAIN`` words of a domain, or the shared ones, most frequent first."""
    generator = _generator("words", name, 0)
    words: dict[str, None] = {}
    while len(words) < (WORDS_SHARED if name == SHARED else WORDS_PER_DOMAIN):
        consonants = generator.choice(list(_CONSONANTS), size=_SYLLABLES)
        vowels = generator.choice(list(_VOWELS), size=_SYLLABLES)
        words["".join(chain.from_iterable(zip(consonants, vowels, strict=True)))] = None
    return tuple(words)


def sample_text(domain: str, num_tokens: int, seed: int) -> str:
    """Text of exactly ``num_tokens`` words, each one token, words separated by single spaces.

    The first two words spell the seed, so texts of the same domain start with different tokens
    for any two of ``WORDS_PER_DOMAIN`` consecutive seeds, and differ within two tokens for seeds
    below ``WORDS_PER_DOMAIN**2``: a prefix cache never finds one in another. The text that models
    are calibrated on comes from another stream and is never returned here.
    Raises ConfigError unless ``0 <= seed < WORDS_PER_DOMAIN**2``.
    """
    if not 0 <= seed < WORDS_PER_DOMAIN**2:
        raise ConfigError(f"{seed = } must be 0 to {WORDS_PER_DOMAIN**2 - 1}")
    own = domain_words(domain)
    words = draw_words(domain, num_tokens, _generator("prompt", domain, seed))
    words[:2] = [own[seed % len(own)], own[seed // len(own)]][:num_tokens]
    return " ".join(words)


def calibration_words(domain: str, num_tokens: int, seed: int) -> list[str]:
    """``num_tokens`` words of a domain from the stream kept for calibrating models."""
    return draw_words(domain, num_tokens, _generator("calibration", domain, seed))


def draw_words(domain: str, num_tokens: int, generator: np.random.Generator) -> list[str]:
    """``num_tokens`` words: mostly the domain's own, a few shared ones, frequencies by rank."""
    own, shared = domain_words(domain), domain_words(SHARED)
    chance = np.concatenate(
        [
            _frequencies(len(own)) * (1 - SHARED_FRACTION),
            _frequencies(len(shared)) * SHARED_FRACTION,
        ]
    )
    picks = generator.choice(len(chance), size=num_tokens, p=chance)
    words = own + shared
    return [words[pick] for pick in picks]


def save_tokenizer(path: Path, words: list[str], max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json: words split at white space, nothing added.

    ``words`` by id, the special tokens first.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    pad, bos, eos, unk = SPECIAL_TOKENS
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(ids, unk_token=unk))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    # Chat requests then work too, at one token per word.
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(path)


def _frequencies(count: int) -> NDArray[np.float64]:
    """Zipf-like, flattened at the head: no single word may decide a rank's load."""
    weight = 1.0 / (np.arange(count) + 32.0)
    return np.asarray(weight / weight.sum(), dtype=np.float64)


def _generator(stream: str, name: str, seed: int) -> np.random.Generator:
    digest = hashlib.sha256(f"{stream}/{name}/{seed}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))
