"""Files that appear whole or not at all."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Generator


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Generator[pathlib.Path]:
  """A temporary name beside `path` that takes its place when all went well.

  On the disk before it is renamed, with the rights of a file newly made.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  handle, name = tempfile.mkstemp(
    dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix
  )
  os.close(handle)
  try:
    yield pathlib.Path(name)
    with open(name, "rb") as f:
      os.fsync(f.fileno())
    umask = os.umask(0)  # mkstemp makes files that only the owner reads
    os.umask(umask)
    os.chmod(name, 0o666 & ~umask)
    os.replace(name, path)
  finally:
    pathlib.Path(name).unlink(missing_ok=True)
