"""What the parts of a block between its products read and write, and what autograd keeps of them, by arithmetic.

One row for each kind of part, in bytes for one element of its width; ``e`` is the size of an element of an activation,
4 in fp32 and 2 else. "Kept" counts a tensor where it is made, once, also where several operations keep it: the output
of a norm is kept as the input of the next product. Where a model is compiled, one kernel does a whole part, and keeps
what Korthikanti et al. (arXiv 2205.05198, section 4.1) count.

==============  =====================  ==========================================  =============================
part            forward, eager         kept, eager                                 kept, compiled or fused
==============  =====================  ==========================================  =============================
layer norm      2e                     2e: input, output                           2e
RMS norm        6e + 24; fp32 28       2e + 4; fp32 12: input (fp32), scaled       2e: input, output
                                       input, output
rotary          10e                    nothing; its output is attention's          nothing
attention       its own kernel         e of queries, keys, values, output; 4 for   the same
                                       each row of a head; 5as²b where scores are
                                       kept (Korthikanti)
gated           5e                     4e: gate, its activation, up, product       3e: gate, up, product
gelu, silu      2e                     2e: input, output                           2e
gelu_new        18e                    5e: input, tanh, two factors, output        2e
relu            2e                     e: output                                   e
dropout         2e + 1                 1: the mask                                 1
residual        3e                     nothing                                     nothing
==============  =====================  ==========================================  =============================

The rows for eager execution are those of transformers' own modules and of our GPT; a test compares them with what
autograd saves of real blocks on meta tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Operations of a unit that are no matrix products: what they move and leave behind, for one microbatch.

    Attributes:
        name: What it is.
        forward_bytes: Bytes that its forward reads and writes.
        backward_bytes: The same of its backward.
        saved_bytes: Bytes that autograd keeps of it from forward to backward.
        num_kernels: Kernels that its forward launches.
    """

    name: str
    forward_bytes: float
    backward_bytes: float
    saved_bytes: float
    num_kernels: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How parts are computed.

    Attributes:
        item: Bytes of an element of an activation.
        is_fused: Each part is one kernel, as in a compiled model.
        trains: Weights of norms are trained, so that backward needs what they scale.
    """

    item: int
    is_fused: bool = False
    trains: bool = True

    def norm(self, kind: str, numel: float, width: int) -> Part:
        """A norm of ``numel`` elements in rows of ``width``; ``kind`` is ``"layer"``, ``"rms"`` or ``"t5"``."""
        e, rows = self.item, numel / width
        if kind == "layer" or self.is_fused:
            return Part("norm", 2 * e * numel, 3 * e * numel, 2 * e * numel + (8 if kind == "layer" else 4) * rows, 1)
        is_wide, scaled = e == 4, e * self.trains
        if kind == "t5" and not is_wide:  # the input itself is multiplied, not its fp32 copy
            saved, forward, backward = 4 + 2 * e + scaled, 7 * e + 20, 9 * e + 80
        else:
            saved = 4 + e + scaled
            forward, backward = (28, 92) if is_wide else (6 * e + 24, 8 * e + 76)
        return Part(
            "norm",
            forward * numel,
            (backward - (0 if self.trains else 4 * e)) * numel,
            saved * numel + 4 * rows,
            6 if is_wide else 8,
        )

    def rotary(self, numel: float) -> Part:
        """Rotation of queries and keys by their positions."""
        e = self.item
        if self.is_fused:
            return Part("rotary", 2 * e * numel, 2 * e * numel, 0.0, 1)
        return Part("rotary", 10 * e * numel, 16 * e * numel, 0.0, 10)

    def activation(self, kind: str, numel: float) -> Part:
        """What lies between the projections of a feed-forward of ``numel`` inner elements, not gated."""
        e = self.item
        if kind == "relu":
            return Part(kind, 2 * e * numel, 3 * e * numel, e * numel, 1)
        if kind == "gelu_new" and not self.is_fused:
            return Part(kind, 18 * e * numel, 28 * e * numel, 5 * e * numel, 8)
        return Part(kind, 2 * e * numel, 3 * e * numel, 2 * e * numel, 1)

    def gated(self, kind: str, numel: float) -> Part:
        """The same where the activation of one projection is multiplied by another one."""
        e = self.item
        if self.is_fused:
            return Part("gated", 3 * e * numel, 5 * e * numel, 3 * e * numel, 1)
        inner = self.activation(kind, numel)
        return Part(
            "gated",
            inner.forward_bytes + 3 * e * numel,
            inner.backward_bytes + 6 * e * numel,
            inner.saved_bytes + 2 * e * numel,
            inner.num_kernels + 1,
        )

    def dropout(self, numel: float, *, keeps_output: bool = False) -> Part:
        """Dropout, whose mask is kept, and its output where a product reads it beside what it dropped from."""
        step = (2 * self.item + 1) * numel
        return Part("dropout", step, step, (1 + self.item * keeps_output) * numel, 1)

    def residual(self, numel: float) -> Part:
        """The addition to the residual stream; in backward two gradients are added."""
        moved = (1 if self.is_fused else 3) * self.item * numel
        return Part("residual", moved, moved, 0.0, 0 if self.is_fused else 1)

    def gradient_sums(self, numel: float, *, num_products: int) -> Part:
        """The gradients of an input that several products read are added."""
        return Part("sums of gradients", 0.0, 3 * self.item * (num_products - 1) * numel, 0.0, 0)

    def biases(self, numel: float) -> Part:
        """The gradients of biases, of products with ``numel`` outputs."""
        return Part("biases", 0.0, self.item * numel, 0.0, 0)

    def split(self, numel: float) -> Part:
        """The gradients of parts of one output are put together."""
        return Part("split", 0.0, 2 * self.item * numel, 0.0, 0)

    def attention(self, q_numel: float, kv_numel: float, rows: float) -> Part:
        """What the kernel of attention keeps: queries, keys, values, output, and one number for each row of a head.

        Args:
            q_numel: Elements of the queries, and of the output.
            kv_numel: Elements of the keys, and of the values.
            rows: Queries times heads.
        """
        return Part("attention", 0.0, 0.0, self.item * (2 * q_numel + 2 * kv_numel) + 4 * rows, 1)

    def scores(self, pairs: float, *, drops: bool) -> float:
        """Bytes kept besides where no kernel computes attention at once: Korthikanti's ``5 a s² b`` with dropout."""
        return pairs * (self.item + (1 + self.item if drops else 0))
