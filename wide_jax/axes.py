"""The axis legend, and the jaxtyping names built on it.

  B batch          T query position   S key position    D model width
  N query heads    K kv heads         H head dim        F FFN channels
  G width groups   C channels a group R router rank     L layers
  V vocabulary     A micro-batches    W windows

Array names end in their axes (`x_BTD`); collections of arrays do not.
"""

from collections.abc import Mapping
from typing import Any

from jax import Array
from jaxtyping import Float, Int

Ids = Int[Array, "B T"]
Positions = Int[Array, "B T"]
Segments = Int[Array, "B T"]
Hidden = Float[Array, "B T D"]
Queries = Float[Array, "B T N H"]
Keys = Float[Array, "B S K H"]
Scalar = Float[Array, ""]
Tree = Mapping[str, Any]
