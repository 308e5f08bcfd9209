"""Views of a full-size gradient buffer: where each gradient goes, the gaps, and the flags that say which there are."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.engine.pool import GradientPool
from shardwise.engine.view import contiguous_stride
from shardwise.spec.layout import ReduceLayout


class BufferViews:
    """Views of one full-size buffer, made once."""

    def __init__(self, layout: ReduceLayout, pieces: list[list], buffer: Tensor, pool: GradientPool) -> None:
        self.by_param: list[list[Tensor]] = []
        for spec, held in zip(layout.group.params, pieces, strict=True):
            if len(held) == 1:
                stride = spec.stride or contiguous_stride(spec.shape)
                offset = buffer.storage_offset() + held[0].offset
                self.by_param.append([buffer.as_strided(spec.shape, stride, offset)])
            else:
                self.by_param.append([buffer[p.offset : p.offset + p.numel] for p in held])
        # Where every gradient goes to one place: those places.
        self.single = [views[0] for views in self.by_param] if all(len(v) == 1 for v in self.by_param) else None
        self.gaps = [buffer[start:stop] for start, stop in layout.gaps]
        self._headers = self._header_views(layout, buffer)
        count = len(layout.group.params)
        key = count, self._headers[0].shape[-1] if self._headers else 0, buffer.dtype
        self._all_used = pool.constant(key, lambda: self._flags([True] * count))

    @staticmethod
    def _header_views(layout: ReduceLayout, buffer: Tensor) -> list[Tensor]:
        """The headers; of equal slices as rows of one view, so that one copy writes them for any number of ranks."""
        if layout.uneven_cuts is not None:
            return [buffer[start : start + numel] for start, numel in layout.headers()]
        shape = layout.num_slices, layout.header_numel(0)
        first = buffer.storage_offset() + layout.data_numel(0)
        return [buffer.as_strided(shape, (layout.slice_numel(0), 1), first)]

    def set_flags(self, used: list[bool]) -> None:
        """Write the headers: 1 for each parameter that this rank's backward used."""
        flags = self._all_used if all(used) else self._flags(used)
        for header in self._headers:
            assert flags is not None
            header.copy_(flags)

    def _flags(self, used: list[bool]) -> Tensor | None:
        if not self._headers:
            return None  # every slice is empty
        header = self._headers[0]
        flags = [float(is_used) for is_used in used] + [0.0] * (header.shape[-1] - len(used))
        # From pinned memory the copy is enqueued; the host does not wait.
        made = torch.tensor(flags, dtype=header.dtype, pin_memory=header.is_cuda)
        return made.to(header.device, non_blocking=True)
