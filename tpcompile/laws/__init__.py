"""The laws of a rank's program, one module each; `tpcompile.verify` says when they are held against what the passes made.

places       where a fault is: the value, the call, the user's line
slices       collectives run over the program's axis, and cut or join what the layouts say, on all ranks alike
wiring       every operation reads pieces of what it reads in the whole program, in layouts that make its own
shapes       every operation makes, of its rank's pieces, a piece of the shape that its layout says
stages       stages are parts of the program, hold all of its parameters, and agree on what passes between them
pipeline     what every stage sends meets a receive of the same value, in an order in which no stage waits forever
ranks        a rank's graph is its stage's, and its parameters are the pieces of the layouts
"""
