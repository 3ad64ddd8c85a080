"""Who runs in a row: dense ops, their masked twin, kernels, libraries, auto."""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch, exact, plan, ragged, routed, suite
from pallas_kernels.problem import Problem
from pallas_kernels.router import DECODE_TOKENS

_MOST_LOGITS_BYTES = 8 * 2**30
KERNELS = ("triton", "mosaic_gpu", "mosaic_tpu")


@dataclasses.dataclass(frozen=True)
class Contender:
  """One function of a row.

  Attributes:
    name: in the results.
    role: `dense` (computes everything, masks nothing), `twin` (dense, on the
      arrays that `auto` gets, then the mask), `auto`, `kernel`, `library`,
      `planned` (`auto` with the plan made inside), or `routed` (`auto` with a
      router inside, and the plan if there is one).
    fn: of `inputs(args)`.
    inputs: what it takes of `(*arrays, plan or keep)`.
  """

  name: str
  role: str
  fn: Callable[..., Any]
  inputs: Callable[[tuple], tuple] = tuple


def arrays_only(args: tuple) -> tuple:
  """Without the plan or mask at the end."""
  return args[:-1]


# --- dense -------------------------------------------------------------------


def _dense_matmul(problem: Problem, x, w):
  return _mm(x, w.T if problem.transposed else w)


def _mm(x, w):
  precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  return jnp.matmul(x, w, precision=precision)


def _dense_ffn(problem: Problem, x, *weights):
  *pair, down = weights
  if len(pair) == 1:  # [2, F, D]: one wide matmul
    wide = _mm(x, pair[0].reshape(-1, pair[0].shape[-1]).T)
    a, b = jnp.split(wide, 2, axis=-1)
  else:
    a, b = (_dense_matmul(problem, x, w) for w in pair)
  hidden = jax.nn.silu(a.astype(jnp.float32)) * b.astype(jnp.float32)
  return _mm(hidden.astype(x.dtype), down)


def _separate(args: tuple) -> tuple:
  """Gate and up as two arrays."""
  x, both, down, _ = args
  return (x, both[0], both[1], down)


def _turned(problem: Problem, args: tuple) -> tuple:
  """N-sparse weights as [in, out], for XLA to choose from both layouts."""
  args = _separate(args) if problem.joined else args[:-1]
  number = 2 if problem.op == "gated_ffn" else 1
  turned = [w.T for w in args[1 : 1 + number]]
  return (args[0], *turned, *args[1 + number :])


def _attend(implementation: Any, causal: bool, q, k, v):
  return jax.nn.dot_product_attention(
    q, k, v, is_causal=causal, implementation=implementation
  )


def _decode(implementation: str, q, k, v, lengths):
  del lengths  # full in every row
  return _attend(implementation, False, q[:, None], k, v)[:, 0]


def _decode_packed(implementation: str, q, k, v, lengths):
  """Query heads of one kv head as rows, so that the cache is read once."""
  del lengths
  rows, heads, dim = q.shape
  packed = q.reshape(rows, k.shape[2], -1, dim).swapaxes(1, 2)
  out = _attend(implementation, False, packed, k, v)
  return out.swapaxes(1, 2).reshape(rows, heads, dim)


def _dense(problem: Problem) -> list[Contender]:
  partial = functools.partial

  def one(name, fn, inputs=arrays_only):
    return Contender(name, "dense", fn, inputs)

  if problem.op in ("matmul_n_sparse", "matmul_k_sparse", "gated_ffn"):
    fn = _dense_ffn if problem.op == "gated_ffn" else _dense_matmul
    out = [one("xla", partial(fn, problem))]
    if problem.joined:
      out.append(one("xla_separate", partial(fn, problem), _separate))
    if problem.transposed:
      plain = dataclasses.replace(problem, transposed=False)
      inputs = partial(_turned, problem)
      out.append(one("xla_in_out", partial(fn, plain), inputs))
    return out
  cudnn = any(
    getattr(tiles, "how", "").startswith("cudnn")
    for tiles in dispatch.legal_tiles("dense", problem)
  )
  names = ["cudnn"] if cudnn else []
  if _logits_bytes(problem) <= _MOST_LOGITS_BYTES:
    names.append("xla")
  out = []
  for name in names:
    if problem.op == "attention_decode":
      out.append(one(name, partial(_decode, name)))
      out.append(one(f"{name}_packed", partial(_decode_packed, name)))
    else:
      out.append(one(name, partial(_attend, name, True)))
  return out


def _logits_bytes(problem: Problem) -> float:
  """What XLA's attention holds, in float32."""
  queries = problem.rows * problem.heads * problem.length
  return 4.0 * queries * problem.keys


def _at_density_one(problem: Problem) -> list[Contender]:
  """Our own kernels, everything kept: they may be the best dense op."""
  whole = dataclasses.replace(problem, density=1.0)
  ones = np.ones((problem.rows, problem.length, problem.groups), bool)

  def inputs(args: tuple) -> tuple:
    return (*args[:-1], suite.routed(whole, ones))

  return [
    Contender(f"{name}_at_1", "dense", suite.call(whole, name), inputs)
    for name in KERNELS
    if dispatch.why_not(name, whole) is None
  ]


# --- the others --------------------------------------------------------------


def _register_tokamax() -> bool:
  """Adds tokamax's grouped matmul where it is installed."""
  if importlib.util.find_spec("tokamax") is None:
    return False
  tokamax = importlib.import_module("tokamax")

  def grouped(rows, w_GKN, sizes, out):
    return tokamax.ragged_dot(rows, w_GKN, sizes, preferred_element_type=out)

  ragged.GROUPED["tokamax"] = grouped
  return True


def _libraries(problem: Problem) -> list[Contender]:
  if dispatch.why_not("ragged", problem) is not None:
    return []
  ways = list(dispatch.legal_tiles("ragged", problem))
  room = ragged.memory_bytes(problem, "megablox")  # a list, no copies
  if room <= ragged.MEMORY_BYTES and _register_tokamax():
    ways.append(ragged.Tiles(how="tokamax"))
  return [
    Contender(
      f"ragged_{tiles.how}", "library", suite.call(problem, "ragged", tiles)
    )
    for tiles in ways
  ]


def _twin_name(tiles: Any) -> str:
  if tiles is None:
    return "twin"
  if hasattr(tiles, "rounded"):
    return "twin_rounded" if tiles.rounded else "twin_float32"
  return f"twin_{tiles.how}"


def of(problem: Problem) -> list[Contender]:
  """All that jax runs of a row, dense first."""
  out = [*_dense(problem), *_at_density_one(problem)]
  for tiles in dispatch.legal_tiles("dense", problem):
    name = _twin_name(tiles)
    if name == "twin_auto":
      continue  # one of the others
    if name == "twin_xla" and _logits_bytes(problem) > _MOST_LOGITS_BYTES:
      continue
    out.append(Contender(name, "twin", suite.call(problem, "dense", tiles)))
  out.append(Contender("auto", "auto", suite.call(problem)))
  for name in KERNELS:
    if dispatch.why_not(name, problem) is None:
      out.append(Contender(name, "kernel", suite.call(problem, name)))
  return out + _libraries(problem)


# --- router and plan ---------------------------------------------------------


def router_arrays(
  width: int, groups: int, mask: np.ndarray | None = None, seed: int = 7
) -> tuple:
  """(down, down_bias, up, up_bias, threshold) of a router of rank 32.

  With `mask`, bool [G], its biases make every token keep just these groups.
  """
  problem = suite.route_problem(1, groups, 0.5, d=width)
  _, down, down_bias, up, up_bias = suite.arrays(problem, seed)
  if mask is not None:
    up_bias = jnp.where(jnp.asarray(mask), 1e6, -1e6).astype(jnp.float32)
  return down, down_bias, up, up_bias, jnp.float32(0)


_PLANNED_OPS = (
  "matmul_n_sparse",
  "matmul_k_sparse",
  "gated_ffn",
  "attention_prefill",
)
_NEVER = 1e30  # above any logit


def is_in_line(problem: Problem) -> bool:
  """Whether an op stands behind a plan: beyond decode, see `in_line`."""
  return problem.tokens > DECODE_TOKENS and problem.op in _PLANNED_OPS


def in_line(problem: Problem) -> list[Contender]:
  """`auto` with what a layer does before it, to be measured by difference.

  `planned` makes the plan of the row's mask, `routed` runs a router in front of
  that. Programs of their own would be bound by the host's launches, and would
  make fields of the plan that the op does not read.

  The router computes its logits in full, but keeps nothing of its own: the
  mask is the row's. Like a layer's, it sees another array than the op.

  None at decode, where no op reads more of a plan than the decisions.
  """
  if not is_in_line(problem):
    return []
  op = suite.call(problem)
  make = functools.partial(
    plan.make_plan,
    span=problem.span,
    density=problem.density,
    shared=problem.shared,
  )

  # The barriers: what is done to the masks or weights of one run must wait for
  # it, and must not be shared with another run on the same ones.
  def planned(x, *rest):
    *arrays, mask = rest
    x, mask = jax.lax.optimization_barrier((x, mask))
    return op(x, *arrays, make(mask))

  def with_mask(args: tuple) -> tuple:
    keep = args[-1].keep_MG
    mask = keep.reshape(problem.rows, problem.length, problem.groups)
    return (*args[:-1], mask)

  def routed_too(x, r, router, *rest):
    *arrays, mask = rest
    x, r, router, mask = jax.lax.optimization_barrier((x, r, router, mask))
    mask = mask | exact.route(r, *router, jnp.float32(_NEVER))
    return op(x, *arrays, make(mask))

  width = router_width(problem)
  router = router_arrays(width, problem.groups)[:-1]

  def with_router_and_mask(args: tuple) -> tuple:
    x, *rest = with_mask(args)
    r = 2 * x.reshape(problem.rows, problem.length, -1)[..., :width]
    return (x, r, router, *rest)

  return [
    Contender("planned", "planned", planned, with_mask),
    Contender("routed", "routed", routed_too, with_router_and_mask),
  ]


def router_width(problem: Problem) -> int:
  """Channels of the residual stream, which a router sees."""
  return min(problem.k, problem.n) or problem.heads * problem.dim


def with_router(problem: Problem) -> Problem:
  """A gated FFN's problem with a folded router in front."""
  return dataclasses.replace(problem, op="routed_ffn")


def routed_ffn(problem: Problem) -> Contender:
  """A gated FFN with its router, as a decode step runs it: no plan is left.

  Its router is folded, and sees another array than the FFN, as in a model.
  """
  whole = with_router(problem)
  both_outputs = suite.call(whole)

  def run(*args):
    return both_outputs(*args)[0]

  def inputs(args: tuple) -> tuple:
    x, both, down, made = args
    mask = np.asarray(made.keep_MG)[0]
    *router, _ = router_arrays(problem.k, problem.groups, mask)
    v, c = routed.fold_router(*router)
    return x * 2, v, x, both, down, c

  return Contender("routed", "routed", run, inputs)


def has_routed(problem: Problem) -> bool:
  """Whether it decodes, with masks that a folded router can decide."""
  one_set = problem.tokens == 1 or problem.shared
  decode = problem.op == "gated_ffn" and problem.tokens <= DECODE_TOKENS
  return decode and problem.joined and one_set


def sets_of(contender: Contender, sets: Sequence[tuple]) -> list[tuple]:
  """The contender's own view of each argument set."""
  return [tuple(contender.inputs(args)) for args in sets]
