"""Checkpoints of one training stage, on Orbax.

A checkpoint is a directory named by its step that holds two items: `state`, a
flat mapping from leaf path to array, and `meta`, a JSON object. Flat, because
names then mean the same under every optax and Orbax version, containers are
rebuilt from the tree to restore into, and a mismatch can be told path by path.

Orbax writes under a temporary name and renames last, so a directory with a
plain number is complete; what a killed process or a full disk leaves behind is
never listed, and is removed when the directory is next opened for writing.
"""

import json
import logging
import pathlib
import shutil
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from wide_jax.sharding import leaf_name

_TMP = ".orbax-checkpoint-tmp"
_LISTED = 12  # paths of one kind named in an error
_log = logging.getLogger(__name__)


class _RaisedAnyway(logging.Filter):
  """Leaves out the traces that Orbax logs of errors which `wait` raises."""

  def filter(self, record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


logging.getLogger("absl").addFilter(_RaisedAnyway())


class Checkpoints:
  """Saves, lists and restores the checkpoints in one directory.

  Saving is asynchronous: arrays are copied to the host before `save` returns
  (the caller may donate them to the next step), files are written behind it.
  An error of that writing is raised by the next `wait`, `save` or `close`.

  All methods but `latest`, `steps`, `metadata` and `contents` are called by
  every process of a run.
  """

  def __init__(
    self,
    directory,
    keep: int = 2,
    every: int = 1,
    read_only: bool = False,
  ):
    """Opens a directory, made if needed; removes half-written steps.

    Args:
      directory: a local or network file system path.
      keep: how many of the newest checkpoints stay.
      every: `save` without `force` writes steps that divide by it.
      read_only: touch nothing; for readers beside a running training.

    Raises:
      ValueError: keep or every below 1, or a bucket URL.

    Warns: once, with the names of all half-written steps removed.
    """
    for name, value in (("keep", keep), ("every", every)):
      if value < 1:
        raise ValueError(f"checkpoint.{name}={value} must be at least 1.")
    if "://" in str(directory):
      raise ValueError(
        f"checkpoint directory {str(directory)!r} must be a file system path;"
        " buckets are not supported."
      )
    self.directory = pathlib.Path(directory).absolute()
    self.keep, self.every, self.read_only = keep, every, read_only
    self._writing: int | None = None
    if not read_only:
      self.directory.mkdir(parents=True, exist_ok=True)
      removed = self._remove_half_written()
      if removed:
        warnings.warn(
          f"removed half-written checkpoints {removed} from {self.directory};"
          f" the newest complete one is {self.latest()}.",
          stacklevel=2,
        )
    self._lazy: ocp.CheckpointManager | None = None

  def __enter__(self):
    return self

  def __exit__(self, kind, value, trace):
    if kind is None:
      self.close()
      return
    try:  # an error is on its way already; that one is to be seen
      self.close()
    except OSError as e:
      _log.error("%s", e)

  # --- what there is ---------------------------------------------------------

  def steps(self) -> list[int]:
    """Steps of complete checkpoints, ascending."""
    if not self.directory.is_dir():
      return []
    return sorted(
      int(p.name) for p in self.directory.iterdir() if _is_complete(p)
    )

  def latest(self) -> int | None:
    """The newest complete step, or None."""
    steps = self.steps()
    return steps[-1] if steps else None

  def metadata(self, step: int) -> dict[str, Any]:
    """The JSON object saved with a step."""
    self._check(step)
    args = ocp.args.Composite(meta=ocp.args.JsonRestore())
    return dict(self._manager.restore(step, args=args)["meta"])

  def contents(self, step: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes by leaf path; loads no array, wants no device."""
    self._check(step)
    found = self._manager.item_metadata(step)["state"]
    tree = getattr(found, "tree", found)
    return {
      name: jax.ShapeDtypeStruct(tuple(leaf.shape), np.dtype(leaf.dtype))
      for name, leaf in sorted(tree.items())
    }

  # --- writing ---------------------------------------------------------------

  def should_save(self, step: int) -> bool:
    """Whether `save` without `force` would write this step."""
    return step % self.every == 0

  def save(
    self, step: int, state, meta: Mapping[str, Any], force: bool = False
  ) -> bool:
    """Starts writing a checkpoint.

    Args:
      step: optimiser steps done.
      state: any tree of arrays (numbers become 0-d arrays).
      meta: what JSON holds.
      force: write although the step does not divide by `every`.

    Returns:
      False where nothing was written: not this step's turn, or the step is
      there already (nothing is ever overwritten).

    Raises:
      ValueError: `meta` is not JSON, or two leaves have one path.
      OSError: this or the previous checkpoint could not be written; complete
        ones are intact and the step can be saved again.
    """
    if self.read_only:
      raise ValueError(f"{self.directory} was opened for reading only.")
    if not force and not self.should_save(step):
      return False
    flat = {
      name: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
      for name, leaf in _flatten(state)[0].items()
    }
    try:
      meta = json.loads(json.dumps(dict(meta)))
    except TypeError as e:
      raise ValueError(
        f"checkpoint meta of step {step} is not JSON: {e}"
      ) from e
    self.wait()
    if step in self.steps():
      return False
    self._writing = step
    args = ocp.args.Composite(
      state=ocp.args.PyTreeSave(flat), meta=ocp.args.JsonSave(meta)
    )
    try:
      self._manager.save(step, args=args, force=True)
    except Exception as e:
      self._recover(e)
    return True

  def wait(self) -> None:
    """Blocks until the checkpoint being written is complete.

    Raises:
      OSError: it could not be written (see `save`).
    """
    if self._writing is None:
      return
    try:
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
    except Exception as e:
      self._recover(e)
    step, self._writing = self._writing, None
    if step not in self.steps():
      raise OSError(
        f"checkpoint of step {step} in {self.directory} is not complete after"
        " being written."
      )

  def close(self) -> None:
    """Waits, then gives up threads and files; raises as `wait` does."""
    try:
      self.wait()
    finally:
      if self._lazy is not None:
        self._lazy.close()

  # --- reading ---------------------------------------------------------------

  def restore(self, step: int, like, subset: bool = False):
    """Loads a checkpoint into the structure and the placement of `like`.

    Args:
      step: a complete step.
      like: a tree of arrays or ShapeDtypeStructs with the shardings of the
        present mesh, whatever mesh it was saved from (without one: the first
        device).
      subset: leaves of the checkpoint that `like` lacks are left out;
        otherwise they are an error.

    Returns:
      A tree of jax Arrays with `like`'s containers, bit-equal to what was
      saved.

    Raises:
      ValueError: no such step, or paths that are missing, extra, or of another
        shape or dtype.
    """
    self._check(step)
    flat, treedef = _flatten(like)
    saved = self.contents(step)
    _compare(saved, flat, subset, f"{self.directory / str(step)}")
    flat = {name: _placed(leaf) for name, leaf in flat.items()}
    if not flat:
      return jax.tree_util.tree_unflatten(treedef, [])
    partial: dict[str, Any] = (
      {"partial_restore": True} if len(flat) < len(saved) else {}
    )
    args = ocp.args.PyTreeRestore(
      item=flat,
      restore_args=ocp.checkpoint_utils.construct_restore_args(flat),
      **partial,
    )
    loaded = self._manager.restore(step, args=ocp.args.Composite(state=args))
    leaves = [loaded["state"][name] for name in flat]
    return jax.tree_util.tree_unflatten(treedef, leaves)

  # --- inside ----------------------------------------------------------------

  @property
  def _manager(self) -> ocp.CheckpointManager:
    """Opened at first use: a reader may find no directory yet."""
    if self._lazy is None:
      self._lazy = ocp.CheckpointManager(
        self.directory,
        options=ocp.CheckpointManagerOptions(
          max_to_keep=None if self.read_only else self.keep, create=False
        ),
        item_handlers={
          "state": ocp.PyTreeCheckpointHandler(),
          "meta": ocp.JsonCheckpointHandler(),
        },
      )
    return self._lazy

  def _check(self, step: int) -> None:
    steps = self.steps()
    if step not in steps:
      raise ValueError(
        f"no complete checkpoint of step {step} in {self.directory}; there are"
        f" {steps}."
      )

  def _recover(self, cause: Exception) -> None:
    """Forgets the failed step, on disk and in Orbax, and raises."""
    step, self._writing = self._writing, None
    try:
      self._manager.close()
    except Exception as e:  # it repeats the error that brought us here
      _log.debug("closing after a failed save: %s", e)
    self._lazy = None
    self._remove_half_written()
    reason = str(cause).strip().splitlines() or [type(cause).__name__]
    raise OSError(
      f"checkpoint of step {step} could not be written to {self.directory}:"
      f" {reason[0]} (newest complete checkpoint: {self.latest()})"
    ) from cause

  def _remove_half_written(self) -> list[str]:
    removed = []
    if jax.process_index() == 0:
      for path in sorted(self.directory.iterdir()):
        ours = path.is_dir() and (path.name.isdigit() or _TMP in path.name)
        if ours and not _is_complete(path):
          shutil.rmtree(path, ignore_errors=True)
          removed.append(path.name)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices(f"clean {self.directory}")
    return removed


def _is_complete(path: pathlib.Path) -> bool:
  """A directory under its final name, with both items in it."""
  if not path.name.isdigit() or str(int(path.name)) != path.name:
    return False
  parts = [path / "state", path / "meta"]
  return (
    all(p.is_dir() and any(p.iterdir()) for p in parts)
    and (path / "_CHECKPOINT_METADATA").is_file()
  )


def _flatten(tree) -> tuple[dict[str, Any], Any]:
  """Leaves by path, and the structure to put them back into."""
  leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
  flat = {leaf_name(path): leaf for path, leaf in leaves}
  if len(flat) != len(leaves):
    raise ValueError(
      f"{len(leaves)} leaves have {len(flat)} different paths; rename the keys"
      " that look alike."
    )
  return flat, treedef


def _placed(leaf) -> jax.ShapeDtypeStruct:
  place = getattr(leaf, "sharding", None)
  if place is None:
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


def _compare(saved, wanted, subset: bool, where: str) -> None:
  """Raises ValueError with every path that does not fit."""

  def kind(leaf):
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"

  differ = [
    f"{name} (saved {kind(saved[name])}, want {kind(leaf)})"
    for name, leaf in wanted.items()
    if name in saved and kind(saved[name]) != kind(leaf)
  ]
  problems = {
    "missing": sorted(set(wanted) - set(saved)),
    "extra": [] if subset else sorted(set(saved) - set(wanted)),
    "shape or dtype": sorted(differ),
  }
  told = []
  for name, paths in problems.items():
    if paths:
      rest = len(paths) - _LISTED
      more = f", and {rest} more" if rest > 0 else ""
      told.append(f"{name}: {', '.join(paths[:_LISTED])}{more}")
  if told:
    raise ValueError(f"checkpoint {where} does not fit; {'; '.join(told)}.")
