"""Machine code in another order (SIP, CuAsmRL): a build transform and a search operator."""
