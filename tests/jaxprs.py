"""What is in a traced program."""

import jax


def equations(jaxpr):
    """Every equation of a jaxpr, those of inner ones (loops, calls) included."""
    for equation in jaxpr.eqns:
        yield equation
        for part in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(part, "eqns"):
                yield from equations(part)
