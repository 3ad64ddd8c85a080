"""One optimiser step and one evaluation step, pure and jit-ready.

The variable tree is split before `grad`: what is frozen is an argument, never
differentiated, never in the optimiser. Noise, temperature and dropout are
functions of (seed, step) alone, so rematerialisation and resume change nothing.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from wide_jax import loss as losses
from wide_jax import modules, routing
from wide_jax.axes import Tree
from wide_jax.config import (
  Method,
  Phase,
  RouteConfig,
  RunConfig,
  StageConfig,
)
from wide_jax.modules import Decoder
from wide_jax.routing import Gate


def trainable_collections(
  phase: Phase, route: RouteConfig, stage: StageConfig
) -> tuple[str, ...]:
  """Which collections a phase trains; () where a method has nothing to train.

  Random masks have no router; scores measured on activations stay as measured.
  """
  learned = route.method not in (Method.RANDOM, Method.DENSE) and not (
    route.method is Method.STATIC_WIDTH and route.static_scores == "activation"
  )
  routers = ("router",) if learned else ()
  if phase is Phase.ROUTERS:
    return routers
  if phase is Phase.DENSE_LORA:
    return ("lora",)
  return (*routers, "lora") if stage.train_routers else ("lora",)


def split(variables: Tree, names: tuple[str, ...]) -> tuple[dict, dict]:
  """(trainable, frozen) collections of a variable tree.

  Raises:
    ValueError: a collection to train is missing or has no leaf.
  """
  for name in names:
    if not jax.tree.leaves(variables.get(name, {})):
      raise ValueError(
        f"nothing to train in {name!r}; the tree holds {sorted(variables)}."
      )
  own = {k: v for k, v in variables.items() if k in names}
  return own, {k: v for k, v in variables.items() if k not in names}


def schedule(stage: StageConfig):
  """Learning rate at an optimiser step: linear warm-up, then cosine.

  With a warm-up the rate is 0 at step 0 and `lr` at step round(warmup *
  steps); it is `end_lr` at step `steps`. Warm-up 0 starts at `lr`; warm-up 1
  only rises.
  """
  warm = round(stage.warmup * stage.steps)
  rest = stage.steps - warm

  def rate(step):
    step = jnp.asarray(step, jnp.float32)
    rising = stage.lr * step / max(warm, 1)
    share = jnp.clip((step - warm) / max(rest, 1), 0.0, 1.0)
    cosine = 0.5 * (1.0 + jnp.cos(math.pi * share))
    falling = stage.end_lr + (stage.lr - stage.end_lr) * cosine
    return jnp.where(step < warm, rising, falling)

  return rate


def optimizer(stage: StageConfig) -> optax.GradientTransformation:
  """AdamW's direction over the trainables, clipped by their global norm.

  The rate is applied by `train_step`, from the step and not from a count of
  updates, so that a step left out does not shift the schedule.
  Decay differs by collection: routers have their own (0 by default, since
  users report that decayed gates never reach their target).
  """

  def only(name):
    return lambda tree: {
      k: jax.tree.map(lambda _, own=(k == name): own, v)
      for k, v in tree.items()
    }

  return optax.chain(
    optax.clip_by_global_norm(stage.clip),
    optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-8),
    optax.add_decayed_weights(stage.weight_decay, only("lora")),
    optax.add_decayed_weights(stage.router_weight_decay, only("router")),
  )


@dataclasses.dataclass(frozen=True)
class StepSpec:
  """Everything static about one stage's step."""

  decoder: Decoder
  run: RunConfig
  phase: Phase
  macs: Any  # flops.LayerMacs at data.seq_len
  gate_mode: str  # `train`, or `threshold` where no router learns

  @property
  def stage(self) -> StageConfig:
    return self.run.stage(self.phase)


def init_state(trainable: Tree, stage: StageConfig) -> dict:
  """Training state: trainables and Adam moments float32, counts int32.

  `step` counts optimiser steps, `skipped` those that changed nothing.
  """
  trainable = jax.tree.map(lambda a: a.astype(jnp.float32), dict(trainable))
  opt_state = optimizer(stage).init(trainable)
  return {
    "trainable": trainable,
    "opt_state": opt_state,
    "step": jnp.zeros((), jnp.int32),
    "skipped": jnp.zeros((), jnp.int32),
  }


def _loss(
  spec: StepSpec, trainable, frozen, batch, total, key, step, thresholds
):
  """Loss of one micro-batch, and (its sums, captured masks or None).

  See `train_step` for the weights.
  """
  gate_key, drop_key = jax.random.split(key)
  if spec.gate_mode == "train":
    tau = routing.temperature(step, spec.stage.steps, spec.stage.tau)
    masks = batch.get("masks")
    gate = Gate(mode="train", key=gate_key, tau=tau, masks=masks)
  elif spec.gate_mode == "threshold":
    gate = Gate(mode="threshold", thresholds=thresholds)
  else:
    gate = Gate()
  if "lora" not in trainable:
    drop_key = None
  inputs = (batch["ids"], batch["positions"], batch["segments"])
  hidden, aux = spec.decoder.apply(
    {**frozen, **trainable}, *inputs, gate, drop_key
  )
  table = modules.head_table(frozen["params"])
  weights = batch["weights"]
  nll = losses.next_token_loss(hidden, table, batch["targets"], weights)
  skips = routing.skip_rates(aux["kept"], aux["tokens"])
  rates = routing.sparsity(skips, spec.macs)
  share = weights.sum() / total
  value = nll / total
  sums = {"nll": nll, "tokens": weights.sum()}
  if "router" in trainable:
    budget = routing.budget_loss(rates, spec.run.budget)
    value = value + share * budget
    sums["budget"] = share * budget
  if spec.stage.kl > 0:
    dense = spec.decoder.copy(route=None, lora=None)
    teacher, _ = dense.apply({"params": frozen["params"]}, *inputs)
    kl = losses.kl_to_dense(hidden, teacher, table, weights)
    value = value + spec.stage.kl * kl / total
    sums["kl"] = kl / total
  sums["rates"] = {k: share * v for k, v in rates.items()}
  sums["skips"] = {k: share * v for k, v in skips.items()}
  return value, (sums, aux.get("masks"))


def train_step(
  spec: StepSpec, state: dict, frozen: Tree, batches: Tree, thresholds
):
  """One optimiser step over A micro-batches.

  Micro-batches are weighted by their target tokens: the language-model loss is
  the mean over all target tokens of the step. A step without a target, or with
  a gradient that is not finite, leaves trainables and moments as they are.

  Args:
    state: see `init_state`.
    frozen: the other collections.
    batches: {"ids", "targets", "segments", "positions": int32 [A,B,T],
      "weights": float32 [A,B,T]}. With "masks" {"attn": bool[A,L,B,T,Ga],
      "ffn": bool[A,L,B,T,Gf]}, noisy gates take these decisions and not their
      own, so that a step can be replayed where roundings tipped one.
    thresholds: {"attn": f32[L], "ffn": f32[L]} for gate_mode `threshold`.

  Returns:
    (new state, metrics: scalars, "sparsity" by kind of rate,
    "skip_by_layer" {"attn": f32[L], "ffn": f32[L]}, and "masks", laid out as in
    `batches`, where the decoder captures them).
  """
  step = state["step"]
  key = jax.random.fold_in(jax.random.key(spec.run.seed), step)
  key = jax.random.fold_in(key, list(Phase).index(spec.phase))
  total = jnp.maximum(batches["weights"].sum(), 1.0)
  grad_fn = jax.value_and_grad(lambda *args: _loss(spec, *args), has_aux=True)

  def micro(index_and_batch):
    index, batch = index_and_batch
    (value, (sums, masks)), grads = grad_fn(
      state["trainable"],
      frozen,
      batch,
      total,
      jax.random.fold_in(key, index),
      step,
      thresholds,
    )
    return ({"loss": value, **sums}, grads), masks

  count = batches["ids"].shape[0]
  if count == 1:
    first = jax.tree.map(lambda a: a[0], batches)
    (sums, grads), masks = micro((jnp.int32(0), first))
    masks = jax.tree.map(lambda a: a[None], masks)
  else:

    def add(carry, xs):
      own, masks = micro(xs)
      return jax.tree.map(jnp.add, carry, own), masks

    xs = (jnp.arange(count, dtype=jnp.int32), batches)
    zero = jax.tree.map(
      lambda s: jnp.zeros(s.shape, s.dtype),
      jax.eval_shape(micro, jax.tree.map(lambda a: a[0], xs))[0],
    )
    (sums, grads), masks = jax.lax.scan(add, zero, xs)

  norm = optax.tree.norm(grads)
  sound = jnp.isfinite(norm) & jnp.isfinite(sums["loss"]) & (sums["tokens"] > 0)
  updates, opt_state = optimizer(spec.stage).update(
    grads, state["opt_state"], state["trainable"]
  )
  rate = schedule(spec.stage)(step)
  updates = jax.tree.map(lambda u: -rate * u, updates)
  trainable = optax.apply_updates(state["trainable"], updates)

  def keep_if_sound(new, old):
    return jax.tree.map(lambda n, o: jnp.where(sound, n, o), new, old)

  new_state = {
    "trainable": keep_if_sound(trainable, state["trainable"]),
    "opt_state": keep_if_sound(opt_state, state["opt_state"]),
    "step": step + 1,
    "skipped": state["skipped"] + jnp.where(sound, 0, 1),
  }
  metrics = {
    "loss": sums["loss"],
    "lm_loss": sums["nll"] / total,
    "tokens": sums["tokens"],
    "grad_norm": norm,
    "lr": rate,
    "skipped": new_state["skipped"],
    "sparsity": sums["rates"],
    "skip_by_layer": sums["skips"],
  }
  for name in ("budget", "kl"):
    if name in sums:
      metrics[name] = sums[name]
  if masks is not None:
    metrics["masks"] = masks
  if spec.gate_mode == "train":
    metrics["tau"] = routing.temperature(step, spec.stage.steps, spec.stage.tau)
  return new_state, metrics


def eval_step(
  decoder: Decoder, variables: Tree, batch: Tree, thresholds
) -> dict:
  """Sums over one batch of windows at fixed thresholds.

  Returns:
    {"nll": nats summed over targets, "targets": their number, "tokens": tokens
    that routers saw, "kept": {kind: f32[L,G]}, and "curves": {kind: f32[L,O]}
    where the decoder captures them}.
  """
  gate = Gate()
  if thresholds is not None:
    gate = Gate(mode="threshold", thresholds=thresholds)
  hidden, aux = decoder.apply(
    variables, batch["ids"], batch["positions"], batch["segments"], gate
  )
  out = {
    "tokens": aux["tokens"],
    "kept": aux["kept"],
    "targets": batch["weights"].sum(),
  }
  if "curves" in aux:
    out["curves"] = aux["curves"]
  table = modules.head_table(variables["params"])
  out["nll"] = losses.next_token_loss(
    hidden, table, batch["targets"], batch["weights"]
  )
  return out
