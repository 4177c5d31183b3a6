"""Every message between the judge and the processes it starts: a request beside its answer, as
JSON, with file descriptors (shared memory, archives) beside it. No torch: the judge never
imports it.

Guarantees: malformed messages are refused on arrival; `routes_of` refuses a handler with another
answer than its request's. A candidate's answers are `Report`s, strictly typed and bounded; their
content is never trusted.
"""

from kernels_eval.protocol.candidate import *
from kernels_eval.protocol.compiled import *
from kernels_eval.protocol.device import *
from kernels_eval.protocol.message import *
from kernels_eval.protocol.model import *
from kernels_eval.protocol.reference import *
from kernels_eval.protocol.replay import *
from kernels_eval.protocol.task import *
