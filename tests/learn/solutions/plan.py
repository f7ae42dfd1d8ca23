def plan() -> str:
    return "tp=4 dp=4 pp=4 micro=1 schedule=interleaved chunks=5 zero=1 sp=true"
