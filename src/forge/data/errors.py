"""What a user's data set or its settings can get wrong."""

from forge.types import UserError


class DataError(UserError):
    """The data set cannot be used as configured: the user's error, told in one message before anything starts."""


def check_characters(text: str) -> None:
    r"""JSON may hold half of a character ("\ud800"), which no tokenizer takes.

    Raises:
        DataError: `text` does.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.end + 20]
        raise DataError(f"The text has half of a character, in {around!r}. Mend the text, or remove the row.") from None
