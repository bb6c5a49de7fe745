"""Prompts of an exact token length that no prefix cache has seen.

Text comes from a ``PromptSource``; an opening of words never used to open before goes in front, so
that two prompts differ from their first token on. The text behind it may be the same: that is how
the policies of one round are compared on the same load.
"""

import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ultraep_lab.errors import BenchError
from ultraep_serve.errors import ConfigError
from ultraep_serve.system.files import read_text

FILLER = " a"  # one token in the vocabularies of practically every tokenizer
MAX_FILLERS = 8  # a longer gap is filled with text of the source
MAX_ROUNDS = 12  # of fitting; three are usual
OPENING_WORDS = 4  # enough that prompts differ once all first words were used
MAX_WORD_CHARACTERS = 16  # scripts without spaces have "words" of any length
CHARACTERS_PER_TOKEN = 5  # of running text; fitting corrects it

COMMON_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had
an they which one you were all her she there would their we him been has when who will no more if
out so said what up its about into than them can only other new some could time these two may then
do first any my now such like our over man me even most made after also did many before must through
years where much your way well down should because each just those people how too little state good
very make world still own see men work long get here between both life being under never day same
another know while last might us great old year off come since against go came right used take three
system water house place small number part high light country school city story river letter market
morning window table music question answer reason history science energy paper field village engine
"""


class PromptSource(Protocol):
    """Text to prefill; the same for the same arguments."""

    def __call__(self, num_tokens: int, seed: int) -> str:
        """Text of about ``num_tokens`` tokens; another ``seed`` gives other text."""
        ...


class CommonWords:
    """Sentences of common English words in random order: works with any model.

    Random words spread over experts more evenly than real text does; ``FileText`` shows the load
    that a given text makes.
    """

    def __call__(self, num_tokens: int, seed: int) -> str:
        """``num_tokens`` words in sentences of 6 to 18."""
        chooser, words, sentences = random.Random(seed), COMMON_WORDS.split(), []
        left = num_tokens
        while left > 0:
            sentence = chooser.choices(words, k=min(left, chooser.randint(6, 18)))
            left -= len(sentence)
            sentences.append(" ".join(sentence).capitalize() + ".")
        return " ".join(sentences)


class FileText:
    """Stretches of one text file, from random places, wrapping around at its end."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be read as text or is empty."""
        self._text = read_text(path, "--text-file").strip()
        if not self._text:
            raise ConfigError(f"--text-file {path} is empty; give a file with some text")

    def __call__(self, num_tokens: int, seed: int) -> str:
        """About ``num_tokens`` tokens of running text."""
        start = random.Random(seed).randrange(len(self._text))
        length = CHARACTERS_PER_TOKEN * num_tokens
        repeats = (start + length) // len(self._text) + 1
        return "\n".join([self._text] * repeats)[start : start + length]


class Openings:
    """Starts of prompts, each with a first word that no prompt of this run began with.

    The words are the text's own: a small vocabulary turns all foreign ones into the same token.
    """

    def __init__(self, chooser: random.Random | None = None) -> None:
        """``chooser`` None: unpredictable, so that no two runs send the same prompt."""
        self._chooser = chooser or random.SystemRandom()
        self._used: set[str] = set()

    def next(self, text: str) -> str:
        """``OPENING_WORDS`` words of ``text``; the first repeats only when all were used."""
        words = [_bare(word)[:MAX_WORD_CHARACTERS] for word in text.split()]
        fresh = [word for word in words if word not in self._used]
        first = self._chooser.choice(fresh or words)
        self._used.add(first)
        return " ".join([first, *self._chooser.choices(words, k=OPENING_WORDS - 1)])


def fitted_prompt(
    openings: Openings, source: PromptSource, tokens: int, seed: int, count: Callable[[str], int]
) -> str:
    """An opening and text of ``source``, cut and filled until ``count`` finds ``tokens``.

    Where no text gives exactly that number, the longest found below it. Draws from the seeds
    ``seed`` to ``seed + MAX_ROUNDS``. Raises BenchError when the source cannot fill nine tenths.
    """
    body = source(tokens, seed)
    if not body.split():
        raise BenchError("the text is empty; use another source of prompts")
    text = f"{openings.next(body)} {body}"
    best, most = "", 0
    for attempt in range(1, MAX_ROUNDS + 1):
        found = count(text)
        if most < found <= tokens:
            best, most = text, found
        if found == tokens:
            break
        if found > tokens:
            text = _shortened(text, len(text) * tokens // found)
        elif tokens - found <= MAX_FILLERS:
            text += FILLER * (tokens - found)
        else:
            text = f"{text} {source(tokens - found, seed + attempt)}"
    if most < 0.9 * tokens:
        raise BenchError(f"the text gives prompts of {most} tokens, not {tokens}; use another")
    return best


def _bare(word: str) -> str:
    """Without punctuation, which could be the first token of two openings."""
    return word.strip(string.punctuation) or word


def _shortened(text: str, length: int) -> str:
    """At most ``length`` characters, fewer than before, cut behind a word where one is near."""
    kept = text[: min(length, len(text) - 1)]
    word_end = max(kept.rfind(" "), kept.rfind("\n"))
    return kept[:word_end] if word_end > len(kept) - 40 and word_end > 0 else kept
