"""Refusals of bad values: one sentence, the value, what is allowed."""

from typing import Any


def check(ok: bool, message: str) -> None:
  if not ok:
    raise ValueError(message)


def one_of(name: str, value: Any, allowed) -> None:
  check(value in allowed, f"{name}={value!r} must be one of {tuple(allowed)}.")


def at_least(name: str, value: float, low: float) -> None:
  check(value >= low, f"{name}={value} must be at least {low}.")


def within(name: str, value: float, low: float, high: float) -> None:
  check(low <= value <= high, f"{name}={value} must lie in [{low}, {high}].")
