"""What a user may set: one frozen, validated object."""

from __future__ import annotations

import errno
import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from vllm_eesd.policy_args import POLICIES

#: Longer drafts have never paid off anywhere, and every scheduled draft costs verification work and KV slots.
MAX_SPECULATIVE_TOKENS = 32
#: The longest draft by default: an exit head is rarely right so far ahead, and every token costs a draft step; an
#: n-gram draft costs its verification only.
LONGEST_DRAFT, LONGEST_NGRAM_DRAFT = 8, 16
#: More decoder layers than this are a model of their own.
MAX_HEAD_LAYERS = 8

#: vLLM's own drafters know `auto` as `probabilistic`.
DraftSampleMethod = Annotated[
    Literal["auto", "greedy"], BeforeValidator(lambda given: "auto" if given == "probabilistic" else given)
]
BatchSizes = Annotated[tuple[int, int, int], Field(strict=False)]


class EESDConfig(BaseModel):
    """The fields of `--speculative-config '{"method": "eesd", ...}'`; `method` itself is none of them.

    Source: arXiv 2406.03853, sections 3.1 and 3.3.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = Field(None, description="exit-head directory; None looks for `<target>/eesd/`")
    exit_layer: int | None = Field(
        None, ge=1, description="N, the target layers a draft runs through, 0 < N < L; None takes the head's own"
    )
    num_speculative_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_SPECULATIVE_TOKENS,
        description="the longest draft, in tokens; the policy may stop earlier. None takes "
        "LONGEST_NGRAM_DRAFT where the policy may take n-gram drafts on Model Runner V1, else LONGEST_DRAFT",
    )
    num_speculative_tokens_per_batch_size: list[BatchSizes] | None = Field(
        None,
        description="[first, last, tokens] entries by ascending batch size, the longest draft booked and made there: "
        "large batches keep room for prompts. On Model Runner V2, whose scheduler books a draft before it is made",
    )
    policy: Literal[tuple(POLICIES)] = Field("goodput", description="how the draft length is chosen")
    policy_args: dict[str, Any] = Field(
        default_factory=dict, description="settings of that policy, see `vllm_eesd.policy_args`"
    )
    state_file: str | None = Field(
        None, description="where what the policy learned is kept over restarts; None: nowhere"
    )
    trace_file: str | None = Field(
        None, description="where every round is written, see `vllm_eesd.traces.rounds`; None: nowhere"
    )
    draft_sample_method: DraftSampleMethod = Field(
        "auto",
        description="auto draws drafts at the request's temperature, verified against the distribution they come from, "
        "and drafts the most probable token for greedy requests; greedy does so for all, verified as one-hot",
    )
    unseeded_verification: Literal["ratio", "shared_noise"] = Field(
        "ratio",
        description="how drafts of requests that sample without a seed are verified: ratio weighs the target's "
        "probability of a draft against the draft model's; shared_noise draws both models' tokens with the same noise "
        "and accepts equal ones, as it does for every request with a seed, whose text is plain vLLM's. There a draft's "
        "confidence is the margin by which it was drawn, else the draft model's largest probability",
    )
    seed: int = Field(0, ge=0, description="of the policy's own random generator (independent of sampling)")

    @property
    def draws_drafts(self) -> bool:
        """Whether requests that sample have their drafts drawn."""
        return self.draft_sample_method == "auto"

    @classmethod
    def parse(cls, spec: str | dict[str, Any] | None) -> EESDConfig:
        """Return the config a user's `speculative_config` describes.

        Args:
            spec: "eesd" or a mapping with `method` = "eesd".
        Raises:
            ValueError: one line naming the field, the value and what is allowed.
        """
        given = {} if isinstance(spec, str) or spec is None else spec
        # On a command line dashes are as good as underscores.
        fields = {str(key).replace("-", "_"): value for key, value in given.items() if key != "method"}
        try:
            return cls(**fields)
        except ValidationError as error:
            raise ValueError(_first_error(error)) from None


def _first_error(error: ValidationError) -> str:
    """Return pydantic's first complaint as one line in the user's words."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"eesd: unknown field {field!r:.80}; allowed: method, {', '.join(EESDConfig.model_fields)}"
    allowed = first["msg"][0].lower() + first["msg"][1:]
    return f"eesd: {field}={first['input']!r:.80} is not valid: {allowed}"


def check_state_file(path: str | None) -> None:
    """Refuse a `state_file` that names no file in a directory that is; None is none.

    Raises:
        ValueError: one line.
    """
    names_a_file = path and "\0" not in path and not os.path.isdir(path)
    if path is not None and not (names_a_file and os.path.isdir(os.path.dirname(path) or ".")):
        raise ValueError(f"eesd: state_file={path!r:.200} is not valid: must name a file in a directory that is")


def check_trace_file(path: str | None) -> None:
    """Refuse a `trace_file` that cannot be written; None is none. A file that is not there is not created.

    Raises:
        ValueError: one line: the value, the reason, what is allowed.
    """
    if path is None:
        return
    try:
        # Without waiting: a pipe without a reader is refused.
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))
        return
    except FileNotFoundError:
        folder = os.path.dirname(path) or "."
        if path and os.access(folder, os.W_OK | os.X_OK):
            return
        reason = os.strerror(errno.EACCES if path and os.path.isdir(folder) else errno.ENOENT)
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    raise ValueError(f"eesd: trace_file={path!r:.200} is not valid ({reason}): must name a file that can be written")
