"""The parts of a block between its products: bytes that they read and write, and bytes that autograd saves.

The table has a row for each kind of part, in bytes for one element of its width. ``e`` is the size of an element of an
activation: 4 in fp32, otherwise 2. "Kept" counts a saved tensor once, in the part that makes it, even if several
operations save it: the output of a norm is saved as the input of the next product. In a compiled model one kernel
computes a part, and autograd saves the tensors that Korthikanti et al. (arXiv 2205.05198, section 4.1) count.

==============  =====================  ==========================================  =============================
part            forward, eager         kept, eager                                 kept, compiled or fused
==============  =====================  ==========================================  =============================
layer norm      2e                     2e: input, output                           2e
RMS norm        6e + 24; fp32 28       2e + 4; fp32 12: input (fp32), scaled       2e: input, output
                                       input, output
wide RMS norm   2e + 32; fp32 28       e + 8: input and scaled input (fp32),       2e
                                       output
T5's norm       7e + 20; fp32 28       3e + 4; fp32 12: input in both dtypes,      2e
                                       scaled input, output
rotary          10e                    nothing; attention saves the output. If     the same
                                       queries, keys and values are one product,
                                       e: the input is saved with the values
attention       one kernel             e of queries, keys, values, output; 4 for   the same
                                       each row of a head; 5as²b if scores are
                                       saved (Korthikanti)
capped scores   12e + 2(4 + e) + 8     2e + 4 per score: tanh, softmax in both     the same
                                       dtypes; e of repeated keys and values
scores, sinks   11e                    e per score                                 the same
gated           5e                     4e: gate, its activation, up, product       3e: gate, up, product
clamped gate    22e                    7e                                          3e
gelu, silu      2e                     2e: input, output                           2e
gelu_new        18e                    5e: input, tanh, two factors, output        2e
relu            2e                     e: output                                   e
mixture         6e + 28 per element    2e per element of a routed token: its       the same
                of a routed token      copy, its expert's output
dropout         2e + 1                 1: the mask                                 1
residual        3e                     nothing                                     nothing
==============  =====================  ==========================================  =============================

The columns for eager execution describe transformers' modules and our GPT. A test compares them with the tensors that
autograd saves in real blocks on meta tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of operations in a unit other than matrix products, for one microbatch.

    Attributes:
        name: Kind of the operations.
        forward_bytes: Bytes that forward reads and writes.
        backward_bytes: Bytes that backward reads and writes.
        saved_bytes: Bytes that autograd saves from forward to backward.
        num_kernels: Kernels that forward launches.
    """

    name: str
    forward_bytes: float
    backward_bytes: float
    saved_bytes: float
    num_kernels: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The form in which parts are computed.

    Attributes:
        itemsize: Bytes of an element of an activation.
        is_fused: Each part is one kernel, as in a compiled model.
        trains: Weights of norms are trained, so that backward needs the tensors that they scale.
    """

    itemsize: int
    is_fused: bool = False
    trains: bool = True

    def norm(self, kind: str, numel: float, width: int, *, keeps_output: bool = True) -> Part:
        """A norm.

        Args:
            kind: Kind of the norm, as in ``spec.shape.Block``.
            numel: Elements that the norm reads.
            width: Elements of a row.
            keeps_output: The output is saved, because a product reads it.
        """
        e, rows, output = self.itemsize, numel / width, self.itemsize * keeps_output
        if kind == "layer" or self.is_fused:
            row = 8 if kind == "layer" else 4
            return Part("norm", 2 * e * numel, 3 * e * numel, (e + output) * numel + row * rows, 1)
        is_fp32 = e == 4
        if is_fp32:
            saved, forward, backward, kernels = 4 + 4 * self.trains + output, 28, 92, 6
        elif kind == "wide":
            saved, forward, backward, kernels = 4 + 4 * self.trains + output, 2 * e + 32, 2 * e + 100, 8
        elif kind == "t5":
            saved, forward, backward, kernels = 4 + e + e * self.trains + output, 7 * e + 20, 9 * e + 80, 8
        else:
            saved, forward, backward, kernels = 4 + e * self.trains + output, 6 * e + 24, 8 * e + 76, 8
        return Part(
            "norm",
            forward * numel,
            (backward - (0 if self.trains else 4 * e)) * numel,
            saved * numel + 4 * rows,
            kernels,
        )

    def rotary(self, numel: float, share: float = 1.0, *, joins: bool = False) -> Part:
        """Rotation of queries and keys with ``numel`` elements; see ``spec.shape.Attention`` for the other two."""
        e = self.itemsize
        if self.is_fused:
            return Part("rotary", 2 * e * numel, 2 * e * numel, 0.0, 1)
        if not joins:
            return Part("rotary", 10 * e * numel, 16 * e * numel, 0.0, 10)
        return Part("rotary", (10 * share + 2) * e * numel, (14 * share + 7) * e * numel, 0.0, 12)

    def activation(self, kind: str, numel: float) -> Part:
        """The activation of a feed-forward that is not gated, with ``numel`` inner elements."""
        e = self.itemsize
        if kind == "relu":
            return Part(kind, 2 * e * numel, 3 * e * numel, e * numel, 1)
        if kind == "gelu_new" and not self.is_fused:
            return Part(kind, 18 * e * numel, 28 * e * numel, 5 * e * numel, 8)
        return Part(kind, 2 * e * numel, 3 * e * numel, 2 * e * numel, 1)

    def gated(self, kind: str, numel: float) -> Part:
        """The activation of a gated feed-forward and its product with the second up projection."""
        e = self.itemsize
        if self.is_fused:
            return Part("gated", 3 * e * numel, 5 * e * numel, 3 * e * numel, 1)
        if kind == "clamped":  # gpt-oss: both halves are clamped, and the sigmoid is a separate operation
            return Part("gated", 22 * e * numel, 30 * e * numel, 7 * e * numel, 9)
        inner = self.activation(kind, numel)
        return Part(
            "gated",
            inner.forward_bytes + 3 * e * numel,
            inner.backward_bytes + 6 * e * numel,
            inner.saved_bytes + 2 * e * numel,
            inner.num_kernels + 1,
        )

    def dropout(self, numel: float, *, keeps_output: bool = False) -> Part:
        """Dropout, whose mask is saved; ``keeps_output``: a product reads the output, which is saved too."""
        step = (2 * self.itemsize + 1) * numel
        return Part("dropout", step, step, (1 + self.itemsize * keeps_output) * numel, 1)

    def residual(self, numel: float) -> Part:
        """The addition to the residual stream, and of two gradients in backward."""
        moved = (1 if self.is_fused else 3) * self.itemsize * numel
        return Part("residual", moved, moved, 0.0, 0 if self.is_fused else 1)

    def gradient_sums(self, numel: float, *, num_products: int) -> Part:
        """The sum, in backward, of the gradients of an input that several products read."""
        return Part("sums of gradients", 0.0, 3 * self.itemsize * (num_products - 1) * numel, 0.0, 0)

    def biases(self, numel: float) -> Part:
        """The gradients of the biases of products with ``numel`` outputs."""
        return Part("biases", 0.0, self.itemsize * numel, 0.0, 0)

    def split(self, numel: float) -> Part:
        """The concatenation, in backward, of the gradients of one output's parts."""
        return Part("split", 0.0, 2 * self.itemsize * numel, 0.0, 0)

    def attention(self, q_numel: float, kv_numel: float, rows: float) -> Part:
        """The tensors that fused attention saves: queries, keys, values, output, and a number for each row of a head.

        Queries and output have ``q_numel`` elements each, keys and values ``kv_numel``; ``rows`` is queries x heads.
        """
        return Part("attention", 0.0, 0.0, self.itemsize * (2 * q_numel + 2 * kv_numel) + 4 * rows, 1)

    def plain_attention(self, kind: str, q_numel: float, kv_numel: float, pairs: float) -> Part:
        """Attention without a fused kernel in transformers, because scores are capped or there are attention sinks.

        Args:
            kind: ``"capped"`` (Gemma 2) or ``"sinks"`` (gpt-oss).
            q_numel: Elements of the queries, of the output, and of keys and values after they are repeated.
            kv_numel: Elements of the keys, and of the values.
            pairs: Number of scores.
        """
        e, copies = self.itemsize, 2 * (q_numel + kv_numel) + 4 * q_numel
        wide = 0 if e == 4 else 2 * (4 + e)
        forward, saved, kernels = (12 * e + wide + 8, 2 * e + 4, 12) if kind == "capped" else (11 * e, e, 10)
        return Part(
            "attention",
            e * copies + forward * pairs,
            e * copies + 1.2 * forward * pairs,
            4 * e * q_numel + saved * pairs,
            kernels,
        )

    def score_gradients(self, kind: str, pairs: float) -> float:
        """Bytes of the gradients of probabilities and scores, where attention is not one kernel.

        ``kind`` is that of :meth:`plain_attention`, whose capped one has freed a copy by then, or ``"grouped"``.
        """
        return pairs * (8 - self.itemsize if kind == "capped" else 2 * self.itemsize)

    def scores(self, pairs: float, *, drops: bool) -> float:
        """Additional saved bytes without a fused kernel: Korthikanti's ``5 a s² b`` with dropout."""
        return pairs * (self.itemsize + (1 + self.itemsize if drops else 0))
