import sys, gc, torch
from torch import distributed
from shardwise.testing import run_on_ranks
def body(case, names):
    from shardwise.train.compare.case import CASES
    from shardwise.train.compare.request import OURS, Entrant, Request
    from shardwise.train.compare.audit import AUDIT_STEPS, audit
    from shardwise.train.compare.workload import Workload
    torch.set_num_threads(1)
    es=[Entrant(OURS, n) if not n.startswith("torch") else Entrant(n, n) for n in names]
    w=Workload(Request(CASES[case], tuple(es), 2, rounds=1), torch.device("cpu"))
    b=[w.batch(s, distributed.get_rank()) for s in range(AUDIT_STEPS)]
    out=[]
    for e in es:
        r=audit(e,w,b); p=r["predicted"]
        out.append((e.strategy, r["peak_tensor_bytes"]/1e6, (sum(p.values())+r["activation_bytes"])/1e6 if p else None)); gc.collect()
    return out
if __name__=="__main__":
    for c in sys.argv[2].split(","):
        for line in run_on_ranks(body,2,c,sys.argv[1].split(","),timeout_s=500)[0]: print(c,line,flush=True)
