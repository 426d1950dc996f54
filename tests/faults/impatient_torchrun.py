"""`torchrun`, whose agent kills a rank that does not end within one second of its SIGTERM, instead of 30."""

from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.run import main

if __name__ == "__main__":
    close = PContext.close
    PContext.close = lambda context, death_sig=None, timeout=30: close(context, death_sig, 1)
    main()
