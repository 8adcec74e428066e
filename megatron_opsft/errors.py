"""Errors a user can act on: one line that names what is wrong, where, and how to mend it."""


class UserError(Exception):
    """Bad input (config, data, checkpoint, environment); the command line exits with 2."""


class NonFiniteError(Exception):
    """A loss or gradient was not finite: the step was not applied. Exits with 3."""
