"""Chat templates: messages to token ids, without letting text give orders.

A template mixes control tokens with what people wrote. Encoding its output in
one go would let a message that contains `<|im_end|>` end its own turn. So every
control token inside a message is set aside before rendering, the rendered text
is cut at the control tokens that the template itself wrote, and what lies
between is encoded as plain text, with the messages' own words put back.
"""

import datetime
import functools
import json
import re
import warnings
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

# Templates may ask for today's date. A fixed one keeps training data and
# evaluations the same tomorrow (it is the default inside Llama 3's template).
_TODAY = datetime.datetime(2024, 7, 26)


class _Generation(jinja2.ext.Extension):
  """Accepts `{% generation %}`, with which some templates mark replies."""

  tags = {"generation"}

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message):
  raise jinja2.TemplateError(message)


def compile_template(source: str) -> jinja2.Template:
  """Compiles a chat template in a sandbox.

  Raises:
    ValueError: it is not a valid Jinja template.
  """
  env = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.loopcontrols", _Generation],
  )
  env.globals["raise_exception"] = _refuse
  env.globals["strftime_now"] = _TODAY.strftime
  env.filters["tojson"] = lambda value, indent=None: json.dumps(
    value, ensure_ascii=False, indent=indent
  )
  try:
    return env.from_string(source)
  except jinja2.TemplateError as e:
    raise ValueError(f"the chat template cannot be read: {e}") from e


class ChatEncoder:
  """Encodes conversations with one tokenizer and one template."""

  def __init__(
    self,
    core: tokenizers.Tokenizer,
    template: str,
    *,
    special: Mapping[str, int],
    bos_id: int | None,
    add_bos: bool,
    eos_ids: Sequence[int],
    tokens: Mapping[str, str],
  ):
    self._core = core
    self._template = compile_template(template)
    self._special = dict(special)
    self._bos_id, self._add_bos = bos_id, add_bos
    self._tokens = dict(tokens)
    longest_first = sorted(special, key=lambda t: (-len(t), t))
    pattern = "|".join(map(re.escape, longest_first))
    self._control = re.compile(pattern or r"(?!)")
    # A message must not begin a control token that the template completes.
    self._openings = {t[:n] for t in special for n in range(1, len(t))}
    self._eos_texts = [t for t, i in special.items() if i in set(eos_ids)]

  # --- public ----------------------------------------------------------------

  def encode(self, messages, add_generation_prompt: bool) -> list[int]:
    """See `Tokenizer.apply_chat`."""
    protected, held = self._protect(messages)
    text = self._render(protected, add_generation_prompt)
    if messages and messages[-1].get("role") != "assistant":
      if self._render(protected, not add_generation_prompt) == text:
        self._warn_about_prompt(protected, text, add_generation_prompt)
    ids, _ = self._encode_spans(text, [], held)
    return ids

  def encode_targets(self, messages) -> tuple[list[int], list[bool]]:
    """See `Tokenizer.chat_targets`."""
    protected, held = self._protect(messages)
    full = self._render(protected, False)
    spans = []
    for i, message in enumerate(protected):
      if message.get("role") == "assistant":
        spans.append(self._reply_span(protected, i, full))
    spans = [s for s in spans if s[1] > s[0]]
    if not spans:
      raise ValueError("no assistant reply")
    return self._encode_spans(full, spans, held)

  # --- rendering -------------------------------------------------------------

  def _render(self, messages, add_generation_prompt: bool) -> str:
    try:
      return self._template.render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        **self._tokens,
      )
    except jinja2.TemplateError as e:
      raise ValueError(f"the chat template refuses the messages: {e}") from e
    except (TypeError, KeyError, AttributeError) as e:
      raise ValueError(f"the chat template fails on the messages: {e}") from e

  def _warn_about_prompt(self, messages, text: str, wanted: bool) -> None:
    """Warns where a template that ignores the flag does harm by it.

    Some formats have no header for a reply: it follows the question at once,
    and there a wish for the header changes nothing.
    """
    if wanted:
      answered = [*messages, {"role": "assistant", "content": "x"}]
      full = self._render(answered, False)
      if full.startswith(text) and full[len(text) :].lstrip().startswith("x"):
        return
    warnings.warn(
      f"the chat template ignores add_generation_prompt={wanted}.", stacklevel=4
    )

  def _protect(self, messages):
    """Replaces control tokens in the messages by numbered marks.

    Returns the messages and `(mark, texts)`; the mark is a private-use
    character that no message contains.
    """
    dump = json.dumps(list(messages), ensure_ascii=False, default=str)
    mark = next(chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in dump)
    texts = []

    def hold(text: str) -> str:
      texts.append(text)
      return f"{mark}{len(texts) - 1}{mark}"

    def walk(value):
      if isinstance(value, Mapping):
        return {k: walk(v) for k, v in value.items()}
      if isinstance(value, (list, tuple)):
        return [walk(v) for v in value]
      if not isinstance(value, str):
        return value
      tail = next(
        (
          n
          for n in range(min(len(value), self._longest - 1), 0, -1)
          if value[-n:] in self._openings
        ),
        0,
      )
      head, rest = value[: len(value) - tail], value[len(value) - tail :]
      head = self._control.sub(lambda m: hold(m.group()), head)
      return head + (hold(rest) if rest else "")

    return walk(list(messages)), (mark, texts)

  @functools.cached_property
  def _longest(self) -> int:
    return max(map(len, self._special), default=1)

  # --- replies ---------------------------------------------------------------

  def _reply_span(self, messages, i: int, full: str) -> tuple[int, int]:
    """Where in `full` the i-th message's reply stands, end token included."""
    start_text = self._render(messages[:i], True)
    ignores = start_text == self._render(messages[:i], False)
    if not full.startswith(start_text):
      raise ValueError("the chat template rewrites what came before a reply")
    start = len(start_text)
    opening = self._control.match(full, start)
    if ignores and opening and opening.group() not in self._eos_texts:
      raise ValueError(
        "the chat template ignores add_generation_prompt and so does not begin"
        " a reply"
      )
    until = self._render(messages[: i + 1], False)
    if full.startswith(until) and not ignores:
      # Blanks after the end token are the template's, not the model's.
      ends = [m.end() for m in self._control.finditer(full, start, len(until))]
      return start, max(ends, default=len(until))
    # Some templates shorten earlier replies, some write the header of the next
    # reply unasked; then the turn's own end tells.
    ends = [
      found + len(text)
      for text in self._eos_texts
      if (found := full.find(text, start)) >= 0
    ]
    if not ends:
      raise ValueError("the chat template does not end a reply")
    return start, min(ends)

  # --- encoding --------------------------------------------------------------

  def _encode_spans(self, text, spans, held):
    """Ids of a rendered text, and which lie in one of `spans`.

    A span's tokens are made apart from what stands before it, just as a model
    that continues a prompt makes them.
    """
    cuts = sorted({0, len(text), *(edge for span in spans for edge in span)})
    ids, inside = [], []
    state = "start"
    for low, high in zip(cuts[:-1], cuts[1:], strict=True):
      target = any(a <= low < b for a, b in spans)
      piece, state = self._encode_piece(text[low:high], state, held)
      ids += piece
      inside += [target] * len(piece)
    return self._one_bos(ids, inside)

  def _encode_piece(self, text: str, state: str, held):
    mark, texts = held
    numbered = re.compile(f"{mark}(\\d+){mark}")
    ids, at = [], 0
    for m in [*self._control.finditer(text), None]:
      plain = text[at : m.start() if m else len(text)]
      plain = numbered.sub(lambda n: texts[int(n.group(1))], plain)
      if plain:
        core = self._variant(state)
        ids += core.encode(plain, add_special_tokens=False).ids
        state = "inside"
      if m:
        ids.append(self._special[m.group()])
        state, at = "after control", m.end()
    return ids, state

  def _one_bos(self, ids, inside):
    if self._bos_id is None:
      return ids, inside
    doubled = 0
    while ids[doubled : doubled + 2] == [self._bos_id] * 2:
      doubled += 1
    ids, inside = ids[doubled:], inside[doubled:]
    if self._add_bos and ids[:1] != [self._bos_id]:
      ids, inside = [self._bos_id, *ids], [False, *inside]
    return ids, inside

  @functools.lru_cache(maxsize=3)  # noqa: B019  (lives as long as its encoder)
  def _variant(self, state: str) -> tokenizers.Tokenizer:
    """The tokenizer for text at the start, after a control token, or inside.

    They differ only where a tokenizer writes a blank before a text.
    """
    before = json.loads(self._core.to_str())
    after = _without_prefix(before, state)
    if after == before:
      return self._core
    core = tokenizers.Tokenizer.from_str(json.dumps(after))
    core.encode_special_tokens = True
    return core


def _without_prefix(state, where: str):
  """A tokenizer's JSON that writes no blank where the text goes on.

  `Metaspace` with scheme `first` and everything else that adds one differ:
  the former only at the very start, the latter after control tokens too.
  """
  if where == "start":
    return state
  inside = where == "inside"
  out = dict(state)
  norm = state["normalizer"]
  if inside and norm is not None:
    parts = norm["normalizers"] if norm["type"] == "Sequence" else [norm]
    parts = [p for p in parts if p["type"] != "Prepend"]
    out["normalizer"] = {"type": "Sequence", "normalizers": parts}
    if parts == norm.get("normalizers"):
      out["normalizer"] = norm
  pre = state["pre_tokenizer"]
  if pre is not None:
    single = pre["type"] != "Sequence"
    parts = [dict(p) for p in ([pre] if single else pre["pretokenizers"])]
    for p in parts:
      if p["type"] == "Metaspace":
        if inside or p.get("prepend_scheme") == "first":
          p["prepend_scheme"] = "never"
      elif inside and p.get("add_prefix_space"):
        p["add_prefix_space"] = False
    out["pre_tokenizer"] = (
      parts[0] if single else {**pre, "pretokenizers": parts}
    )
  return out
