"""Every message between the judge and the processes that it starts: a request beside its answer.

Messages are JSON; file descriptors (shared memory, archives) travel beside them. No torch here, for
the judge never imports it.

Guarantees: a request or an answer of another form is refused where it arrives; `routes_of`
refuses a handler that promises another answer than its request. Answers of a candidate are
`Report`s: types are strict and everything has bounds. Their content is never trusted.
"""

from kernels_eval.protocol.candidate import *
from kernels_eval.protocol.compiled import *
from kernels_eval.protocol.device import *
from kernels_eval.protocol.message import *
from kernels_eval.protocol.model import *
from kernels_eval.protocol.reference import *
from kernels_eval.protocol.replay import *
from kernels_eval.protocol.task import *
