"""Commands of `concur`, one module each; flows.cli registers them."""
