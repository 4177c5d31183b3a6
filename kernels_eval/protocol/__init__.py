"""Every message between the judge and the processes it starts: a request beside its answer, as
JSON, with file descriptors. No torch: the judge never imports it. Malformed messages are refused; a
candidate's answers (`Report`) are strictly typed and bounded, and never trusted."""

from kernels_eval.protocol.candidate import *
from kernels_eval.protocol.compiled import *
from kernels_eval.protocol.device import *
from kernels_eval.protocol.message import *
from kernels_eval.protocol.model import *
from kernels_eval.protocol.reference import *
from kernels_eval.protocol.replay import *
from kernels_eval.protocol.task import *
