"""What a user's data set or its settings can get wrong."""

from forge.types import UserError


class DataError(UserError):
    """The data set cannot be used as configured: the user's error, told in one message before anything starts."""
