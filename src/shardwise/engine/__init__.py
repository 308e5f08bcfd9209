"""The engine: when parameters are gathered and released, and when gradients are reduced.

A *unit* is gathered as a whole: one wrapped module, or several small neighbours. Its parameters that share dtype and
trainability are a *group*, which is one flat buffer, one collective each way. A rank stores a slice of the buffer
permanently, the *master*; the parameters that the optimizer sees are views of it, the *shards*. While the unit
computes, its modules hold views of the *gathered buffer*, which the all-gather has filled. The gathered buffer has
memory only during that time: ``Group.allocate`` takes it from torch's allocator, ``Group.release`` gives it back.

One training step of one unit under zero3, in the order of time, with the method that does it:

==============================  =======================================================================================
moment                          what happens
==============================  =======================================================================================
forward reaches the unit        ``hooks`` calls ``Engine.before_forward``: the all-gather is issued, unless a prefetch
                                has done so. The all-gather of the next unit in the agreed order is issued (the
                                prefetch). The first is waited for, and the modules get the full parameters
forward has left the unit       ``Engine.after_forward`` attaches a *ticket*, a hook, to each output. The unit is
                                released when forward enters another one; the root and the last unit of the order are
                                kept for backward, unless the plan says otherwise
backward reaches the unit       the ticket calls ``Engine.pre_backward``: the unit is gathered again, and the next one
                                of the backward's order is prefetched
backward enters another unit    ``Engine.post_backward``: the gradients are copied into a flat buffer
                                (``Gradient.collect``), and the unit is released; the reduce-scatter is issued
                                (``Gradient.reduce``)
a later unit is reduced         ``Engine.wait_for_reductions`` waits for earlier sums, on the stream; they become
                                ``.grad`` (``Gradient.finish``)
the end of backward             ``Engine.end_backward``: the remaining units are reduced, every sum is waited for
==============================  =======================================================================================

Optional features attach from outside. A *form* (``group.Form``, others in ``storage``) says how a group is stored and
moved. ``engine.extras`` keeps the objects that other packages attach to an engine, at most one of each class. The
engine calls an *observer* among them (``attach.Observer``, most in ``extensions``) at the moments above, and a *guard*
before a call of the user uses the parameters' values. ``engine.window`` describes the time between two updates: whether
the next backward is the last one, how gradients of the others are added up, and, for pipelines, how forwards and
backwards follow one another (an ``attach.Step``).

Where to read: ``unit`` and ``group`` (the data), ``gradient`` (a table of its states), ``engine`` (the moments),
``spec.order`` and ``order`` (which unit is next), ``hooks`` (the hooks that torch calls), ``attach`` (optional
features), ``build`` (construction of units and the engine).

[Note: Streams and lifetimes]

On CUDA the engine itself uses one stream, on which the model computes. Each ``Comm`` has a separate stream. A
collective starts after everything that was enqueued on the compute stream when it was issued, and ``Handle.wait`` makes
the compute stream wait for it; the host does not wait. Copies from and to the host use two more streams
(``storage.host``). These are the rules for freeing and overwriting memory:

* A handle keeps the tensors that it moves until it has been waited for. The code that issues a collective keeps the
  handle and waits for it, on every path, also after an exception and when the model is deleted (``Engine.__del__``).
* A gathered buffer belongs to its group alone. Tensors that autograd saved from it in forward have their data again in
  backward. The memory is allocated when the gather is issued, on the compute stream, and freed there when forward or
  backward has left the unit: torch's allocator reuses it on that stream, after the computation that read it.
* A gradient buffer belongs to its group too. It is allocated with the first gradient (``Gradient.collect``) and freed
  by ``Gradient.finish``, that is, after its reduction has been waited for; on a replicate mesh, as soon as the sum has
  been copied out of it. When as many as the plan allows are in use, the oldest reduction is finished first
  (``GradientMemory``).
* ``.grad`` is stored in memory of the group (``gradient.GradientStorage``), from the first reduction to the forward
  after ``zero_grad()``.

[Note: Agreed order]

Ranks must issue the same collectives in the same order on each ``Comm`` (gathers and reductions have one each, and may
interleave differently), though data may lead them along different paths. In the first pass the ranks exchange, before
each unit, which one each of them wants next (``order.RankPeers``); all issue one of these, and the union of their
paths becomes the order in which units are gathered (forward) and entered (backward). Later passes follow it on every
rank. A rank that skips a unit still gathers it, and reduces zeros for it. No rank removes a unit alone. Nothing is
sent to agree once all units are in the order and some rank has run all of it in one pass. Until then, one message per
pass says whether a rank has left the order, so that the ranks negotiate again. Where paths keep changing and the order
has grown to twice its first length, the ranks exchange which units they have used. Each entry into the model (the root,
a unit that is called directly, a stage of a pipeline) has a separate order (``spec.order.ModelOrders``). Evaluations
(``sw.eval_step``) have separate orders. Other forwards without grad gather only the units that they use: ranks that
gather together run the same units in them. ADR 6 says why.

[Note: Missing gradients]

A parameter that no rank used must keep ``.grad`` at ``None``; one that only another rank used must get that rank's
gradient. So gradients are sent with one flag for each parameter of a slice, in the same message (``spec.layout``'s
``ReduceLayout``, ADR 5). For a parameter without a gradient this rank sends -0.0, the one number that changes nothing
when it is added. Only where this rank used less than all parameters are the flags read, once, at the end of backward
(``gradient.read_unused_flags``). Otherwise the host waits for nothing, except for a second reduction of one unit in one
backward and for sums that are copied to the host.
"""
