"""Full tensors in and out (``state``), and initialization (``init``)."""
