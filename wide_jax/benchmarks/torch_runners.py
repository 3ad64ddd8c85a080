"""The dense ops in PyTorch, as contenders: CUDA graphs timed by events.

Inputs are jax's own arrays, shared through DLPack. Import this only where
torch is installed.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from pallas_kernels.problem import Problem

_SAMPLE_S = 8e-3
_MOST_REPLAYS = 400


def tensors(args: tuple) -> list[Any]:
  """jax arrays as tensors on the same memory."""
  return [torch.from_dlpack(a) for a in args]


def _matmul_n(x, w):
  return F.linear(x, w)  # w is [out, in]


def _matmul_k(x, w):
  return x @ w


def _ffn(x, both, down):
  gate, up = F.linear(x, both.flatten(0, 1)).chunk(2, -1)
  return (F.silu(gate) * up) @ down


def _ffn_separate(x, both, down):
  return (F.silu(F.linear(x, both[0])) * F.linear(x, both[1])) @ down


def _prefill(q, k, v):
  q, k, v = (a.transpose(1, 2) for a in (q, k, v))
  out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
  return out.transpose(1, 2)


def _decode(q, k, v, lengths):
  del lengths  # full: nothing to mask
  k, v = (a.transpose(1, 2) for a in (k, v))
  out = F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)
  return out[:, :, 0]


def _decode_packed(q, k, v, lengths):
  """Query heads of one kv head as rows, so that the cache is read once."""
  del lengths
  rows, heads, dim = q.shape
  k, v = (a.transpose(1, 2) for a in (k, v))
  q = q.reshape(rows, k.shape[1], -1, dim)
  return F.scaled_dot_product_attention(q, k, v).reshape(rows, heads, dim)


def ops(problem: Problem) -> dict[str, tuple[Callable[..., Any], str]]:
  """name -> (op, attention backend or empty): torch's ways to this."""
  plain = {
    "matmul_n_sparse": _matmul_n,
    "matmul_k_sparse": _matmul_k,
  }
  if problem.op == "gated_ffn":
    return {"torch": (_ffn, ""), "torch_separate": (_ffn_separate, "")}
  if problem.op in plain:
    return {"torch": (plain[problem.op], "")}
  if problem.op == "attention_prefill":
    return {
      "torch_flash": (_prefill, "FLASH_ATTENTION"),
      "torch_cudnn": (_prefill, "CUDNN_ATTENTION"),
    }
  return {
    "torch_flash": (_decode, "FLASH_ATTENTION"),
    "torch_flash_packed": (_decode_packed, "FLASH_ATTENTION"),
    "torch_cudnn": (_decode, "CUDNN_ATTENTION"),
  }


def attention_backend(name: str) -> Any:
  """A context in which attention takes one backend, or refuses."""
  if not name:
    return contextlib.nullcontext()
  from torch.nn import attention

  return attention.sdpa_kernel(getattr(attention.SDPBackend, name))


class TorchRunner:
  """An op captured `unroll` times in a CUDA graph; see timing.Runner."""

  def __init__(
    self,
    name: str,
    fn: Callable[..., Any],
    sets: Sequence[tuple],
    unroll: int,
    attention: str = "",
  ):
    self.name, self.compile_s = name, 0.0
    self.unroll = max(unroll, len(sets))
    self._fn, self._attention = fn, attention
    self._sets = [tensors(args) for args in sets]
    self._graph: Any = None
    self._replays = 0

  def result(self) -> Any:
    """Of the first set."""
    with torch.inference_mode(), attention_backend(self._attention):
      out = self._fn(*self._sets[0])
    if out.is_cuda:
      torch.cuda.synchronize()
    return out

  def compile(self) -> "TorchRunner":
    """Warms up and captures the graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), attention_backend(self._attention):
      with torch.cuda.stream(side):
        for args in self._sets:
          self._fn(*args)
      torch.cuda.current_stream().wait_stream(side)
      torch.cuda.synchronize()
      self._graph = torch.cuda.CUDAGraph()
      with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
        # Kept until the end, so that no repeat reuses another's output.
        self._outputs = [
          self._fn(*self._sets[i % len(self._sets)]) for i in range(self.unroll)
        ]
    torch.cuda.synchronize()
    return self

  def _timed(self, replays: int) -> float:
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(replays):
      self._graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3

  def sample(self) -> float:
    """Seconds of one run of the op: a slope, as timing.Runner takes it."""
    if not self._replays:
      once = min(self._timed(1), self._timed(1))
      most = math.ceil(_SAMPLE_S / max(once, 1e-7))
      self._replays = int(min(max(most, 2), _MOST_REPLAYS))
    one, many = self._timed(1), self._timed(1 + self._replays)
    slope = (many - one) / (self._replays * self.unroll)
    return slope if slope > 0 else many / ((1 + self._replays) * self.unroll)

  def close(self) -> None:
    """Gives the graph's memory back to the device."""
    self._graph = self._outputs = None
    self._sets = []
    torch.cuda.empty_cache()


def runners(
  problem: Problem, sets: Sequence[tuple], unroll: int
) -> list[TorchRunner]:
  """Every way torch has, not yet captured.

  Args:
    problem: the op.
    sets: arrays of each repeat, without plans.
    unroll: repeats in a graph.
  """
  return [
    TorchRunner(name, fn, sets, unroll, backend)
    for name, (fn, backend) in ops(problem).items()
  ]
