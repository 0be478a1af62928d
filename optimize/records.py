"""What a run records of its passes and layers, as data for its report, which is read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import core_schema

_Kept = TypeVar("_Kept", bound=BaseModel)
#: A kernel whose largest weight is this many standard deviations long loses accuracy with one scale a tensor.
WIDE_SPREAD = 20.0
Remedy = Literal["none", "equalize", "leave_unmerged"]


#: What is read no further than its first mistake, as far as this pydantic can.
_STOPPING = ("tuple", "list", *(("dict",) if "fail_fast" in core_schema.DictSchema.__annotations__ else ()))


class FrozenRecord(BaseModel):
    """What is saved and read again, by whoever wrote the file: each mistake takes memory, and the first is told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Return what is asked of each field, where many values stop at the first that is wrong."""
        found = handler(source)
        waiting: list[Any] = [found]
        while waiting:
            part = waiting.pop()
            waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
            if isinstance(part, dict) and part.get("type") in _STOPPING:
                part["fail_fast"] = True
        return found


@dataclass(frozen=True)
class Rewrite:
    """One place that was changed.

    Attributes:
        where: Module path or node name.
        what: What was done there, as a short phrase.
    """

    where: str
    what: str


@dataclass(frozen=True)
class Skip:
    """One place that matched the idea and was left alone.

    Attributes:
        where: Module path or node name.
        op: The operator left alone.
        reason: Why, as a sentence without a full stop.
    """

    where: str
    op: str
    reason: str


@dataclass(frozen=True)
class Stats:
    """Size and work of a program.

    Attributes:
        ops: How often each ATen operator is called.
        parameters: Scalars in the weights that are learned: no integers, nor the running statistics of BatchNorm.
        weight_bytes: Bytes of the weights.
        macs: Multiply-accumulates of one sample.
        moved_bytes: Bytes that one sample moves when every operator runs on its own: each call reads its tensors and
            writes its results, weights included, as often as they are read. Views (reshape, transpose, slice, expand
            and whatever else only looks at the same bytes) are free. Fusion inside a runtime makes it less.
    """

    ops: Mapping[str, int]
    parameters: int
    weight_bytes: int
    macs: int
    moved_bytes: int


@dataclass(frozen=True)
class WeightOutlook:
    """One kernel before quantization.

    Attributes:
        spread: ``max |w| / std(w)`` of the whole tensor.
        channel_spread: The same of each output channel, the largest of them.
        tensor_db: Predicted signal-to-noise ratio with one scale for the tensor, dB.
        channel_db: The same with one scale an output channel, dB.
    """

    spread: float
    channel_spread: float
    tensor_db: float
    channel_db: float


@dataclass(frozen=True)
class MergeOutlook:
    """What a merge did to the INT8 prospects of one weight.

    Attributes:
        where: Module path of the block.
        weight: Path of the merged weight in the program.
        before: The branches, each with its BatchNorm folded, rounded apart and added.
        after: The merged kernel.
        remedy: What brings back what the merge lost: ``none`` is needed; ``equalize``: its channels have different
            ranges, so use one scale a channel, or equalize them with the next layer where the target has one a tensor
            (M. Nagel et al., "Data-Free Quantization", 2019, arXiv 1906.04721); ``leave_unmerged``: the tails lie
            inside the channels (``Reparameterize(leave=(where,))``).
    """

    where: str
    weight: str
    before: WeightOutlook
    after: WeightOutlook
    remedy: Remedy

    @property
    def is_wide(self) -> bool:
        """Whether its largest weight is so many standard deviations long that one scale a tensor loses accuracy."""
        return self.after.spread > WIDE_SPREAD


@dataclass(frozen=True)
class LayerCost:
    """One weighted layer in float and in INT8; None where nobody had to find out.

    Attributes:
        layer: Path of its module.
        op: Short name of its operator.
        float_s: Seconds of it in the float file.
        int8_s: Seconds of it in the INT8 file, before layers were given back.
        sqnr_db: Of the outputs with this layer alone in INT8.
        stays: Why it is in INT8 although it took longer there; empty where it did not, or went back to float.
    """

    layer: str
    op: str
    float_s: float | None = None
    int8_s: float | None = None
    sqnr_db: float | None = None
    stays: str = ""

    @property
    def saved_s(self) -> float | None:
        """Seconds that INT8 saves; negative where it costs some."""
        return None if self.float_s is None or self.int8_s is None else self.float_s - self.int8_s


def gather(kind: type[_Kept], *parts: object, **more: object) -> _Kept:
    """Return the record that says what these say, under the names they have for it, and what else is given."""
    told = {name: value for part in parts for name, value in vars(part).items()} | more
    return kind.model_validate({name: told[name] for name in kind.model_fields if name in told})


def first_mistake(error: ValidationError) -> tuple[str, str]:
    """Return where the first thing is that a record cannot be, in dots and empty for the whole, and why."""
    first = error.errors(include_url=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")


def now() -> str:
    """Return the present UTC time, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
