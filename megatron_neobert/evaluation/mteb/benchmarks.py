"""Names of mteb's benchmarks, for commands that answer before they import mteb."""

PAPER = "MTEB(eng, v1)"  # its 56 tasks
SUCCESSOR = "MTEB(eng, v2)"  # 41 tasks
BENCHMARKS = (PAPER, SUCCESSOR)
