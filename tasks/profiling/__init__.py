"""The profiling stage: what limits correct kernels. No part of any verdict."""
