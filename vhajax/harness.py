"""A run as a model of EleutherAI's lm-evaluation-harness, which asks for text and knows no tokens.

Requests become tokens exactly as in the harness's own `hf` model over the exported run:

- text that spells a special token stands for it;
- every text begins with BOS where the tokenizer has one, if it does not spell that itself: also a
  context that is cut later, and the text of a rolling log-likelihood, whose BOS is scored, too;
- an empty context is BOS, or EOS where there is none;
- spaces at the end of a context belong to its continuation, whose tokens are those that the whole
  text has past as many as the context alone has;
- what is too long is cut on the left: context and continuation to `max_length` tokens besides the
  last, which is only predicted, and a prompt to `max_length` − `max_gen_toks`.

Two things that stop `hf` with an assertion are answered here: an empty continuation has
log-likelihood 0 and is greedy (whatever the context, also where `hf` would score the spaces at its
end), and a context of spaces alone, which leaves no token where there is no BOS, counts as empty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from vhajax.decode import generate
from vhajax.errors import UserError
from vhajax.likelihood import score
from vhajax.sampling import Sampling
from vhajax.tokenizer import StreamDecoder, Tokenizer
from vhajax.transformer import Transformer

MAX_GEN_TOKS = 256
"""New tokens where a task does not say how many; the harness's own number."""

Encoded = tuple[tuple[str, ...] | None, list[int], list[int]]
"""The harness's form of a request: its texts, ids of the context and of the continuation."""


@dataclass(frozen=True)
class Plan:
    """How a request wants its text: stop strings, most new tokens, and how they are drawn."""

    until: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling


def plan_of(gen_kwargs: dict[str, Any], eos_name: str) -> Plan:
    """A task's `generation_kwargs`; by default greedy, and top-k and top-p keep all tokens.

    Raises:
      UserError: an option that vhajax does not have, or a value out of its range.
    """
    try:
        asked: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, MAX_GEN_TOKS))
        until = handle_stop_sequences(asked.pop("until"), eos_name)
        max_new_tokens = asked.pop("max_gen_toks")
        # Sampling without a temperature is at 1, as in transformers.
        do_sample, temperature = asked.pop("do_sample"), float(asked.pop("temperature", 1))
        top_k, top_p = int(asked.pop("top_k", 0)), float(asked.pop("top_p", 1))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"The task's generation_kwargs are {gen_kwargs} ({error}); mend the task's file."
        ) from error
    unknown = {name: x for name, x in asked.items() if (name, x) != ("num_beams", 1)}
    if unknown:
        raise UserError(
            f"The task's generation_kwargs hold {unknown}, which vhajax does not know; take that "
            "out of the task's file."
        )
    sampling = Sampling(temperature if do_sample else 0.0, top_k, top_p)
    return Plan(tuple(until), max_new_tokens, sampling)


class RunModel(TemplateLM):
    """A model for decoding and its tokenizer, as the harness sees them.

    Answers come in the order of the requests and do not depend on it, nor on the size of batches,
    but for rounding; a text that is drawn at random depends on its place.
    """

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, max_length: int, batch_size: int
    ) -> None:
        """max_length: tokens that the model reads at most. batch_size: requests at one time."""
        super().__init__()
        self.model, self.text = model, tokenizer
        self.max_length, self.batch_size = max_length, batch_size

    @property
    def eot_token_id(self) -> int:
        return self.text.eos

    @property
    def prefix_token_id(self) -> int:
        return self.text.eos if self.text.bos is None else self.text.bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text, BOS in front unless it is there, told otherwise or there is none."""
        del kwargs  # of other models
        ids = self.text.encode(string, special=True)
        if self.text.bos is None or add_special_tokens is False:
            return ids
        there = add_special_tokens is None and ids[:1] == [self.text.bos]
        return ids if there else [self.text.bos, *ids]

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """For (context, continuation): log-likelihood in nats, and whether greedy decoding says it.

        Raises:
          UserError: a continuation that is longer than `max_length`.
        """
        pairs = [(request.args, *self._encode(*request.arguments)) for request in requests]
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    def _encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context and continuation:
            return self._encode_pair(context, continuation)
        ids = self.tok_encode(continuation, add_special_tokens=False)
        start = int(ids[:1] == [self.prefix_token_id])  # which is then its own context
        return ids[:start], ids[start:]

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        del kwargs
        pairs = [(context or [self.prefix_token_id], ids) for _, context, ids in requests]
        self._check_lengths(pairs)
        found = score(self.model, pairs, self.max_length, self.batch_size)
        return _in_order(found, len(pairs), "Scoring", disable_tqdm)

    def _check_lengths(self, pairs: Sequence[tuple[list[int], list[int]]]) -> None:
        longest = max((len(continuation) for _, continuation in pairs), default=0)
        if longest > self.max_length:
            raise UserError(
                f"A continuation to score has {longest} tokens, past the maximum length of "
                f"{self.max_length}; raise --max-length."
            )

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """For (text,): log-likelihood in nats of all of it, in windows of `max_length` tokens."""
        windows: list[Encoded] = []
        owners = []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(
                ids, self.prefix_token_id, self.max_length, context_len=1
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(i)
        sums = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for i, (nats, _) in zip(owners, scores, strict=True):
            sums[i] += nats
        return sums

    def plan(self, gen_kwargs: dict[str, Any]) -> Plan:
        """`plan_of`, and that it leaves room for a prompt.

        Raises:
          UserError: it does not, or see `plan_of`.
        """
        plan = plan_of(gen_kwargs, self.text.eos_name)
        if plan.max_new_tokens >= self.max_length:
            raise UserError(
                f"The task asks for {plan.max_new_tokens} new tokens (max_gen_toks), which leaves "
                f"no room for a prompt in a length of {self.max_length}; raise --max-length."
            )
        return plan

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """For (context, generation_kwargs): what follows, up to the first stop string or EOS.

        Raises:
          UserError: see `plan`; before anything compiles.
        """
        groups: dict[Plan, list[tuple[int, list[int]]]] = {}
        for i, request in enumerate(requests):
            context, gen_kwargs = request.arguments
            plan = self.plan(gen_kwargs)
            room = self.max_length - plan.max_new_tokens
            prompt = self.tok_encode(context)[-room:] or [self.prefix_token_id]
            groups.setdefault(plan, []).append((i, prompt))
        texts = self._generate(groups)
        return _in_order(texts, len(requests), "Generating", disable_tqdm)

    def _generate(
        self, groups: dict[Plan, list[tuple[int, list[int]]]]
    ) -> Iterator[tuple[int, str]]:
        for plan, prompts in groups.items():
            longest_first = sorted(prompts, key=lambda numbered: -len(numbered[1]))
            for batch in batched(longest_first, self.batch_size):
                numbers, ids = zip(*batch, strict=True)
                yield from zip(numbers, self._continue(plan, numbers, ids), strict=True)

    def _continue(
        self, plan: Plan, numbers: Sequence[int], prompts: Sequence[list[int]]
    ) -> list[str]:
        """A batch's texts. A prompt's number is its seed, so what is drawn is its own."""
        short = self.batch_size - len(prompts)  # filled up, as another size is another program
        steps = generate(
            self.model,
            [*prompts, *[[self.prefix_token_id]] * short],
            plan.max_new_tokens,
            eos=self.text.eos,
            sampling=plan.sampling,
            seeds=[*numbers, *[0] * short],
        )
        rows = [_Row(StreamDecoder(self.text)) for _ in prompts]
        for step in steps:
            for row, token in zip(rows, step, strict=False):
                row.take(token, plan.until)
            if all(row.done for row in rows):
                break
        return [row.end(plan.until) for row in rows]


@dataclass
class _Row:
    """One text as it grows. A stop string is looked for in the text: it may straddle tokens."""

    decoder: StreamDecoder
    text: str = ""
    done: bool = False

    def take(self, token: int | None, until: Sequence[str]) -> None:
        if not self.done and token is not None:
            self.text += self.decoder.feed(token)
        self.done = self.done or token is None or any(stop in self.text for stop in until if stop)

    def end(self, until: Sequence[str]) -> str:
        return postprocess_generated_text(self.text + self.decoder.flush(), list(until), None)


def _in_order[T](numbered: Iterator[tuple[int, T]], total: int, what: str, quiet: bool) -> list[T]:
    """Results by number, with a bar on stderr where that is a terminal."""
    found = dict(tqdm(numbered, what, total, disable=quiet or None))
    return [found[i] for i in range(total)]
