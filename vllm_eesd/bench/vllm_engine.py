"""One vLLM engine as the measurements see it: prompts, streams and the drafter's numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

#: Tokens to generate: as many for every prompt, or each prompt's own number.
Limits = int | Sequence[int]


def each_limit(limits: Limits, num_prompts: int) -> list[int]:
    """Return how many tokens to generate for each prompt."""
    return [limits] * num_prompts if isinstance(limits, int) else list(limits)


class VllmEngine:
    """A `vllm.LLM` as what is measured: generation of exactly `max_tokens` tokens per prompt, or to the natural end.

    Args:
        llm: the engine.
        drafts: whether EESD runs in it, so that it can be asked for its numbers.
        temperature: of every request, 0 to 2; 0 is greedy.
        top_p: share of the probability that is sampled from, in (0, 1].
        sampling: further parameters of every request, of `vllm.SamplingParams`.
    """

    def __init__(self, llm: Any, drafts: bool, temperature: float = 0.0, top_p: float = 1.0, **sampling: Any) -> None:
        self._llm = llm
        self._drafts = drafts
        self._temperature = temperature
        self._top_p = top_p
        self._sampling = sampling

    def at(self, temperature: float, top_p: float = 1.0, **sampling: Any) -> VllmEngine:
        """Return the same engine, asked to sample otherwise; with `ignore_eos=False` answers end where they end."""
        return VllmEngine(self._llm, self._drafts, temperature, top_p, **sampling)

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: Limits,
        at_once: int | None = None,
        ignore_eos: bool | None = None,
        **params: Any,
    ) -> list[list[int]]:
        """Return each prompt's new tokens. This call is what the clock sees.

        Args:
            max_tokens: of every prompt, or each one's own.
            at_once: requests that run at a time, the next prompt in line begins when one ends; None: all.
            ignore_eos: whether texts go on after their end, to exactly `max_tokens` tokens; None: as `at` says, or so.
            params: further ones of `vllm.SamplingParams`.
        """
        from vllm.sampling_params import RequestOutputKind

        generated: list[list[int]] = [[] for _ in prompts]
        params |= {"output_kind": RequestOutputKind.FINAL_ONLY} | _ends(ignore_eos)
        for step in self._steps(prompts, max_tokens, at_once, **params):
            for index, tokens in step:
                generated[index] = tokens
        return generated

    def stream(
        self, prompts: list[list[int]], max_tokens: Limits, at_once: int | None = None, ignore_eos: bool | None = None
    ) -> Iterator[list[tuple[int, list[int]]]]:
        """Yield (prompt index, new tokens) of every engine step; arguments as `generate`'s."""
        from vllm.sampling_params import RequestOutputKind

        given = {"output_kind": RequestOutputKind.DELTA} | _ends(ignore_eos)
        return self._steps(prompts, max_tokens, at_once, **given)

    def top_two_margins(self, texts: list[list[int]]) -> list[float]:
        """Return by how much, in log probability, the likeliest next token of each text is ahead of the second."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2)
        outputs = self._llm.generate([tokens_input(text) for text in texts], params, use_tqdm=False)
        first_tokens = (output.outputs[0].logprobs[0].values() for output in outputs)
        found = (sorted((token.logprob for token in tokens), reverse=True) for tokens in first_tokens)
        return [best - second for best, second, *_ in found]

    def _steps(
        self, prompts: list[list[int]], max_tokens: Limits, at_once: int | None, **params: Any
    ) -> Iterator[list[tuple[int, list[int]]]]:
        """Yield (prompt index, tokens) of every engine step, `at_once` requests at a time."""
        from vllm.inputs import tokens_input

        engine = self._llm.llm_engine
        waiting = enumerate(zip(prompts, each_limit(max_tokens, len(prompts)), strict=True))

        def begin(count: int | None) -> None:
            for index, (tokens, limit) in itertools.islice(waiting, count):
                engine.add_request(str(index), tokens_input(tokens), self._params(limit, **params))

        begin(at_once)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            begin(sum(output.finished for output in outputs))
            yield [(int(output.request_id), list(output.outputs[0].token_ids)) for output in outputs]

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, so that no prompt is free because it ran before."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied: a request still holds blocks of it")

    def reset_statistics(self) -> None:
        if self._drafts:
            self.ask("eesd_reset_stats")

    def statistics(self) -> Mapping[str, Any] | None:
        """Return the drafter's counters since the reset, None if it keeps none."""
        return self.ask("eesd_stats") if self._drafts else None

    def take_rounds(self, last: bool = False) -> list[Mapping[str, Any]]:
        """Return the drafter's rounds since the last call; the first call starts the recording, the `last` ends it."""
        return self.ask("eesd_take_rounds", last) if self._drafts else []

    def ask(self, method: str, *args: Any) -> Any:
        """Return what the first worker answers to a method of `vllm_eesd.host.worker.WorkerExtension`."""
        return self._llm.collective_rpc(method, args=args)[0]

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _params(self, max_tokens: int, **others: Any) -> Any:
        from vllm import SamplingParams

        # By default exactly max_tokens tokens, whatever the method: an early end would shorten the work.
        given = {"temperature": self._temperature, "max_tokens": max_tokens, "ignore_eos": True}
        # Greedy requests take no top_p: vLLM would sort the vocabulary for nothing.
        given |= {"top_p": self._top_p} if self._temperature else {}
        return SamplingParams(**given | self._sampling | others)


def _ends(ignore_eos: bool | None) -> dict[str, bool]:
    return {} if ignore_eos is None else {"ignore_eos": ignore_eos}
