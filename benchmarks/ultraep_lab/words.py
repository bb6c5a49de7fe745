"""Lists of words, as the lab's flags take them."""

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field


def words_of(given: object) -> object:
    """Texts, as one flag or several give them, as the words that commas separate in them.

    Whatever else is given stays as it is.
    """
    if isinstance(given, list) and all(isinstance(text, str) for text in given):
        given = ",".join(given)
    if not isinstance(given, str):
        return given
    return tuple(word.strip() for word in given.split(",") if word.strip())


Listed = BeforeValidator(words_of)  # of a tuple, which a flag gives as N,N,...
Each = AfterValidator(lambda given: tuple(dict.fromkeys(given)))  # counted once
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600, json_schema_extra={"metavar": "SECONDS"})]
