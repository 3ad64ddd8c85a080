"""The one exception of dispatch."""


class Unsupported(Exception):
  """A backend cannot run a case; the message says why.

  Raised for dispatch only: `auto` goes on to the next backend, a backend asked
  for by name lets it through. Wrong input is a ValueError.
  """
