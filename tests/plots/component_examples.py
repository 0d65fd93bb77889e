"""A small circuit and a hostile text, which the tests of the component diagram share."""

ATTACK = "</script><img src=x onerror=alert(1)>"

EDGES = {
    "a2.h1->logits": -1.0,
    "input->a0.h0<v>": -0.81,
    "a0.h0->m1": 0.49,
    "m1->a2.h1<q>": -0.25,
    "input->a1.h1<k>": 0.09,
    "m0->logits": -0.04,
}
"""Four edges make a path; the last but one leads nowhere, the last comes from nowhere."""
