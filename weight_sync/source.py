"""What a push sends: the parameters of a DeepSpeed engine or a plain module, in one order, gathered bucket by bucket.

:class:`DeepSpeedSource` has the methods of vLLM's ``WeightSource`` (metadata and iteration) without importing vLLM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from weight_sync.lora import LoraPart, adapters_of, peft_config
from weight_sync.manifest import Manifest, abridged
from weight_sync.scratch import scratch, trim_heap
from weight_sync.snapshot import Share


class NonFiniteWeightError(ValueError):
    """A weight is NaN or infinite, or will be once cast for the engines. Names the tensors; nothing was sent.

    One such push poisons an engine's cache memory for good, so it must never leave the learner.
    """


class TensorMeta(NamedTuple):
    """Name, dtype on the wire and full shape of one tensor, as vLLM's ``ParamMeta``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class DeepSpeedSource:
    """A re-iterable stream of ``(name, tensor)`` over a learner's weights.

    ``engine`` is a DeepSpeed engine with any ZeRO stage, or a plain module. ``prefix`` is taken off every name once: a
    learner that keeps the model in an attribute ``model`` passes ``"model."``. Floating-point tensors are cast to
    ``dtype`` (``None``: as they are). Parameters and persistent buffers are sent, which is what a checkpoint holds; a
    tied tensor is sent once, under its first name.

    Of a model with low-rank adapters ``lora`` says what is read: the weights with the adapters ``merged`` into them,
    under the names and in the order of the model without any; its ``base`` alone; or the ``adapter`` alone, under the
    names that peft gives its tensors in a file, but for the prefix there.

    With ZeRO-3 every rank takes part in a pass: gathers are collectives. A pass, once begun on one rank, is to be
    completed on all, with :meth:`finish_pass` where a failure cut it short.
    """

    def __init__(
        self,
        engine: torch.nn.Module,
        *,
        prefix: str = "",
        dtype: torch.dtype | None = None,
        bucket_bytes: int,
        lora: LoraPart = "merged",
    ) -> None:
        learner: Any = engine
        self._module: torch.nn.Module = learner.module if hasattr(learner, "zero_optimization_stage") else learner
        self._prefix = prefix
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._part = lora
        self._adapters = adapters_of(self._module)
        self._remaining: deque[list[tuple[str, torch.Tensor]]] = deque()

    def metadata(self) -> list[TensorMeta]:
        """What iteration yields, in its order, without gathering anything."""
        return [TensorMeta(name, self._wire_dtype(tensor), _full_shape(tensor)) for name, tensor in self._tensors()]

    def manifest(self) -> Manifest:
        """The manifest of a push of these weights."""
        return Manifest.from_metadata(self.metadata())

    def peft_config(self) -> dict[str, Any]:
        """What peft's ``adapter_config.json`` says of the adapters. Raises ``ValueError`` where there are none."""
        return peft_config(self._adapters.values())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A fresh pass: full tensors on their device, cast for the wire. Of ZeRO-3 weights at most a bucket exists."""
        self.begin_pass()
        while self._remaining:
            # Gathered weights are copied out before the first is handed on: a consumer that stops half-way must not
            # leave this rank inside a gather that its peers have left.
            yield from self._gathered(self._remaining.popleft())

    def begin_pass(self) -> None:
        """Plan a whole pass. What of it is not iterated over, :meth:`finish_pass` takes part in."""
        self._remaining = deque(self._buckets())

    def finish_pass(self) -> None:
        """Take part in what is left of the pass, throwing the tensors away. Ranks that send nothing do only this."""
        while self._remaining:
            with self._whole(self._remaining.popleft()):
                pass

    def check_finite(self) -> None:
        """Raise :class:`NonFiniteWeightError` if a weight this rank holds would reach the engines as NaN or infinity.

        With ZeRO-3 each rank checks its own partitions, so the learner must ask every rank. A collective where sharded
        adapters are merged.
        """
        named, peaks, limits = [], [], []
        for name, tensor, held in self._held():
            if tensor.is_floating_point() and held.elements.numel():
                named.append(name)
                # The largest magnitude is NaN if any element is.
                peaks.append(torch.linalg.vector_norm(held.elements, float("inf")).float())
                limits.append(torch.finfo(self._wire_dtype(tensor)).max)
        if not named:
            return
        # One transfer from the device answers for all tensors.
        magnitudes = torch.stack(peaks).tolist()
        bad = [
            f"{name} (largest magnitude {peak})"
            for name, peak, limit in zip(named, magnitudes, limits, strict=True)
            if not peak <= limit
        ]
        if bad:
            raise NonFiniteWeightError(f"{len(bad)} of {len(named)} weights are not finite: {abridged(bad)}")

    def shares(self, rank: int, ranks: int) -> Iterator[Share]:
        """What of each weight this one of ``ranks`` compares, in the order of the metadata.

        With ZeRO-3 its own partition, else an equal slice of the weight, which every rank holds whole. A collective
        where sharded adapters are merged.
        """
        for _, tensor, held in self._held():
            if _is_partitioned(tensor):
                yield held
            else:
                flat = held.elements.flatten()
                start, end = (len(flat) * edge // ranks for edge in (rank, rank + 1))
                yield Share(start, flat[start:end])

    def _held(self) -> Iterator[tuple[str, torch.Tensor, Share]]:
        """Every tensor with its wire name and the elements of it that this rank holds, adapters merged."""
        for bucket in self._buckets():
            with _gather([factor for _, tensor in bucket for factor in self._factors(tensor)]):
                held = [self._merged(tensor, _own_elements(tensor)) for _, tensor in bucket]
            yield from ((name, tensor, share) for (name, tensor), share in zip(bucket, held, strict=True))

    def _factors(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What is to be merged into the tensor."""
        adapter = self._adapters.get(id(tensor)) if self._part == "merged" else None
        return () if adapter is None else adapter.factors

    def _merged(self, tensor: torch.Tensor, share: Share) -> Share:
        if not self._factors(tensor):
            return share
        return Share(share.start, self._adapters[id(tensor)].merge(share.elements.flatten(), share.start))

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Every tensor with its wire name: the one order that metadata and iteration share."""
        module = self._module
        named: list[tuple[str, torch.Tensor]] = list(module.named_parameters(remove_duplicate=True))
        seen = {id(tensor) for _, tensor in named}
        for owner_name, owner in module.named_modules():
            for name, buffer in owner.named_buffers(recurse=False):
                if name not in owner._non_persistent_buffers_set and id(buffer) not in seen:
                    seen.add(id(buffer))
                    named.append((f"{owner_name}.{name}" if owner_name else name, buffer))
        return [(self._wire_name(name), tensor) for name, tensor in self._read(named)]

    def _read(self, named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        """Of a model with adapters, the tensors that are asked for, under the names that they go by elsewhere."""
        factors = {id(factor) for adapter in self._adapters.values() for factor in adapter.factors}
        if self._part == "adapter":
            return [(_without_adapter_name(name), tensor) for name, tensor in named if id(tensor) in factors]
        if not self._adapters:
            return named
        return [(name.replace(".base_layer.", "."), tensor) for name, tensor in named if id(tensor) not in factors]

    def _wire_name(self, name: str) -> str:
        if not name.startswith(self._prefix):
            raise ValueError(
                f"weight {name!r} does not begin with the prefix {self._prefix!r} that is to be stripped; "
                "the source must be given the prefix under which the learner keeps the model"
            )
        return name.removeprefix(self._prefix)

    def _wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype

    def _buckets(self) -> list[list[tuple[str, torch.Tensor]]]:
        """The tensors in runs of at least ``bucket_bytes``, the unit of a ZeRO-3 gather. The same on every rank."""
        buckets: list[list[tuple[str, torch.Tensor]]] = [[]]
        size = 0
        for name, tensor in self._tensors():
            if size > self._bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append((name, tensor))
            size += _full_shape(tensor).numel() * self._wire_dtype(tensor).itemsize
        return buckets

    def _gathered(self, bucket: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        with self._whole(bucket):
            return [(name, self._for_the_wire(tensor)) for name, tensor in bucket]

    def _whole(self, bucket: list[tuple[str, torch.Tensor]]) -> AbstractContextManager[None]:
        """A context in which the bucket's tensors have their full data, and so does what is to be merged into them."""
        tensors = [tensor for _, tensor in bucket]
        return _gather(tensors + [factor for tensor in tensors for factor in self._factors(tensor)])

    def _for_the_wire(self, tensor: torch.Tensor) -> torch.Tensor:
        full, dtype = tensor.detach(), self._wire_dtype(tensor)
        if self._factors(tensor):  # a tensor of its own
            return self._adapters[id(tensor)].merge(full.flatten()).view(full.shape).to(dtype)
        if not _is_partitioned(tensor):
            return full.to(dtype).contiguous()
        # A partitioned parameter loses its full data when the gather ends, so it is copied even without a cast.
        if full.device.type != "cpu":
            return full.to(dtype, copy=True).contiguous()
        return scratch(full.numel() * dtype.itemsize).view(dtype).view(full.shape).copy_(full)


def _is_partitioned(tensor: torch.Tensor) -> bool:
    """Whether ZeRO-3 manages the tensor: DeepSpeed marks its parameters with an id."""
    return hasattr(tensor, "ds_id")


def _full_shape(tensor: torch.Tensor) -> torch.Size:
    return torch.Size(getattr(tensor, "ds_shape", tensor.shape))


def _own_elements(tensor: torch.Tensor) -> Share:
    """The elements of a weight that this rank holds."""
    return _partition(tensor) if _is_partitioned(tensor) else Share(0, tensor.detach())


def _partition(tensor: torch.Tensor) -> Share:
    """This rank's ZeRO-3 partition of a weight, without its uninitialised padding."""
    import deepspeed

    parameter: Any = tensor
    partition = parameter.ds_tensor.detach().flatten()
    start = deepspeed.comm.get_rank(group=parameter.ds_process_group) * partition.numel()
    return Share(start, partition[: max(0, min(partition.numel(), parameter.ds_numel - start))])


@contextmanager
def _gather(tensors: list[torch.Tensor]) -> Iterator[None]:
    """A context in which the tensors have their full data; a collective with ZeRO-3, else nothing."""
    partitioned = [tensor for tensor in tensors if _is_partitioned(tensor)]
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned):
        yield
    if partitioned[0].device.type == "cpu":
        trim_heap()


def _without_adapter_name(name: str) -> str:
    """peft's files leave out what an adapter is called: ``lora_A.default.weight`` is ``lora_A.weight`` there."""
    layer, factor, _, kind = name.rsplit(".", 3)
    return f"{layer}.{factor}.{kind}"
