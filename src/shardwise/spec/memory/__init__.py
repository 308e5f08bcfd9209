"""The bytes that a rank holds, in closed form: what the engine keeps, and what backward adds."""
